"""Cards are complete for every estimator, and come out for broken ones too."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from rllm_lightning.lab.card import label, make_card
from rllm_lightning.lab.card_html import cards_page
from rllm_lightning.lab.card_json import card_json
from rllm_lightning.lab.card_warnings import warnings_of
from rllm_lightning.lab.exact import PASS_RATES, PROMPTS, SIZES
from rllm_lightning.lab.probes import CANONICAL, CHECKS
from rllm_lightning.registry import ESTIMATORS

FEW = 64  # batches: cards for their form, not for their digits


def complete(data):
    """Whether a card's JSON has every part, and numbers or a reason everywhere."""
    assert [group["name"] for group in data["behaviours"]] == list(CANONICAL)
    assert set(data["checks"]) == set(CHECKS) == set(data["check_meanings"])
    assert {(row["rewards"], row["n"], row["prompt"]) for row in data["gradients"]} == {
        (kind, n, prompt) for kind in ("binary", "graded") for n in SIZES for prompt in (*PROMPTS, "all")
    }
    for row in data["gradients"]:
        assert row["problem"] or None not in (row["bias"], row["scale"], row["variance"])
    assert [curve["n"] for curve in data["weights"]] == list(SIZES)
    assert all(len(curve["weights"]) == len(data["pass_rates"]) == len(PASS_RATES) for curve in data["weights"])
    assert all(isinstance(text, str) for text in data["warnings"])
    return True


@pytest.mark.parametrize("name", [name for name, entry in ESTIMATORS.items() if entry.function.__module__.startswith("rllm_lightning.")])
def test_every_registered_estimator_has_a_complete_card_in_strict_json(name):
    card = make_card(name, max_batches=FEW)
    data = json.loads(json.dumps(card_json(card), allow_nan=False))
    assert complete(data)
    assert data["seconds_per_million"] > 0
    assert card.measured_scope == card.declared_scope or name == "rae"  # rae's role-batch shows in its state alone
    assert not any(check.verdict == "fails" for check in card.checks.values() if name not in ("maxrl", "pass_at_k"))


def blows_up_at_one(rewards):
    """(r - mean) / (1 - mean): a division by zero where all are right."""
    with np.errstate(all="ignore"):
        return [(r - r.mean()) / (1 - r.mean()) for r in rewards], rewards


def wrong_shape(rewards):
    return [np.zeros(len(r) + 1) for r in rewards], rewards


def raises(rewards):
    raise RuntimeError("not today")


def not_a_pair(rewards):
    return None


def only_pairs(rewards):
    return [np.array([r[0] - r[1], r[1] - r[0]]) for r in rewards], rewards


@pytest.mark.parametrize(
    ("function", "warning"),
    [
        (blows_up_at_one, "returns nan (on: all right); a run would stop there"),
        (blows_up_at_one, "no gradient for n=2, binary rewards: some groups of 2 get advantages that are not finite"),
        (wrong_shape, "returns advantages of shape (9,) for a group, expected (8,) (on: 1 of 8 right"),
        (raises, "raises RuntimeError: not today (on: 1 of 8 right, 4 of 8 right"),
        (not_a_pair, "returns NoneType, not a pair (advantages, returns) (on: 1 of 8 right"),
        (only_pairs, "returns advantages of shape (2,) for a group, expected (8,)"),
    ],
)
def test_a_broken_estimator_has_a_card_that_names_what_is_broken(register, function, warning):
    card = make_card(register(function, formula="broken"), max_batches=FEW)
    assert complete(json.loads(json.dumps(card_json(card), allow_nan=False)))
    assert any(warning in text for text in warnings_of(card)), warnings_of(card)
    assert cards_page([card])


def test_too_few_batches_are_refused():
    with pytest.raises(ValueError, match="max_batches: must be at least 64, got 10"):
        make_card("grpo", max_batches=10)


def test_a_card_is_computed_when_it_is_asked_for(register):
    offset = [0.0]

    def movable(rewards):
        return [r + offset[0] for r in rewards], rewards

    name = register(movable)
    before = make_card(name, max_batches=FEW).behaviour("all wrong").advantages[0]
    offset[0] = 2.0
    assert (before, make_card(name, max_batches=FEW).behaviour("all wrong").advantages[0]) == ([0.0], [2.0])


def test_keywords_reach_the_estimator_and_the_label():
    card = make_card("pass_at_k", {"k": 4}, max_batches=FEW)
    assert label(card) == "pass_at_k (k=4)"
    # 4 of 8 right, k = 4: the only right one of a group brings about C(7,3)/C(8,4) = 1/2 of it
    assert card.behaviour("1 of 8 right").advantages[0] == pytest.approx([0.5])


def test_a_page_is_self_contained_and_escapes_what_it_shows(register):
    def plain(rewards):
        return [r - r.mean() for r in rewards], rewards

    page = cards_page([make_card(register(plain, formula="<script>r</script>"), max_batches=FEW), make_card("grpo", max_batches=FEW)])
    assert "<script" not in page
    assert "&lt;script&gt;r&lt;/script&gt;" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert page.count('class="chart"') == 2
    assert page.count('class="bars"') == 2 * len(CANONICAL)


def test_no_card_needs_torch():
    code = (
        "import sys, rllm_lightning.lab.card, rllm_lightning.lab.card_text, rllm_lightning.lab.card_html; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_numbers_of_a_card_that_are_not_finite_are_null_in_json(register):
    data = card_json(make_card(register(blows_up_at_one), max_batches=FEW))
    group = next(group for group in data["behaviours"] if group["name"] == "all right")
    assert group["advantages"] == [[None]] * 8
    assert not any(isinstance(value, float) and math.isnan(value) for value in data["odd_one_out"][0].values())
