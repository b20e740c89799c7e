"""A card as strict JSON data: its fields, its warnings, and what its axes and checks mean."""

from __future__ import annotations

from typing import Any

from rllm_lightning.lab.card import Card
from rllm_lightning.lab.card_warnings import warnings_of
from rllm_lightning.lab.exact import COMPANION, PASS_RATES, PROMPTS
from rllm_lightning.lab.probes import CHECKS
from rllm_lightning.types import to_plain


def card_json(card: Card) -> dict[str, Any]:
    """Every number is finite or null."""
    return {
        **to_plain(card),
        "warnings": warnings_of(card),
        "pass_rates": list(PASS_RATES),
        "prompts": dict(PROMPTS),
        "companion": COMPANION,
        "check_meanings": {name: meaning for name, (meaning, _) in CHECKS.items()},
    }
