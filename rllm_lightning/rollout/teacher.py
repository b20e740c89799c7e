"""`Teacher`: a frozen model that says how likely it finds tokens that another model has sampled."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from rllm_lightning.config import ConfigError, ModelConfig
from rllm_lightning.models.load import load_model, load_tokenizer
from rllm_lightning.rollout.weights import exact_inference


class Teacher:
    """A model with the vocabulary of the `student`, a tokenizer.

    Raises:
        ConfigError: the model cannot be loaded, or has another vocabulary: its log-probs would be those of other texts. That is found
            before its weights are loaded.
    """

    def __init__(self, config: ModelConfig, student: Any, device: torch.device):
        check_same_vocabulary(load_tokenizer(config), student, config.name)
        model, _ = load_model(config)
        self.model: Any = model.eval().requires_grad_(False).to(device)
        self.name = config.name
        self.device = device
        self.max_positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._chooses_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def logprobs(self, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-prob of each response token, given the prompt and the response tokens before it, under softmax(logits / temperature).

        One sequence a pass: the numbers do not depend, even in rounding, on what else is scored. No response tokens: no numbers.

        Raises:
            ValueError: the prompt is empty, or both together exceed the model's positions.
        """
        ids, length = [*prompt_ids, *response_ids], len(response_ids)
        if not prompt_ids:
            raise ValueError("a teacher scores responses to a prompt; this one is empty")
        if self.max_positions is not None and len(ids) > self.max_positions:
            raise ValueError(
                f"the teacher {self.name} has {self.max_positions} positions, fewer than the {len(ids)} tokens of prompt and response; "
                "lower data.max_prompt_length or data.max_response_length"
            )
        keep = {"logits_to_keep": length + 1} if self._chooses_logits else {}
        with exact_inference(self.device):
            tokens = torch.tensor([ids], device=self.device)
            logits = self.model(input_ids=tokens, use_cache=False, **keep).logits[0, -length - 1 : -1]
            logits = logits if logits.dtype == torch.float64 else logits.float()
            chosen = (logits / temperature).log_softmax(-1).gather(-1, tokens[0, len(prompt_ids) :, None])
        return chosen[:, 0].tolist()


def check_same_vocabulary(teacher: Any, student: Any, name: str) -> None:
    """Whether two tokenizers mean the same by every token id. Raises `ConfigError`; `name` is the teacher's."""
    theirs, ours = teacher.get_vocab(), student.get_vocab()
    if theirs == ours:
        return
    differing = sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token))
    raise ConfigError(
        [
            f"model.name: the teacher {name!r} has another vocabulary than the student: {len(theirs)} and {len(ours)} tokens, of which "
            f"{len(differing)} differ, such as {differing[0]!r}; they are compared token by token, so choose one of the same family"
        ]
    )
