"""Chat messages to token ids and back, and the tokens that end an answer.

The tokenizer's chat template writes the whole prompt, special tokens included; so encoding adds none (no second BOS), and
nothing is ever cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Chat:
    """A tokenizer with a chat template.

    Args:
        template_kwargs: variables of the template, such as `enable_thinking` where it has that.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None):
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("rollout: the tokenizer has no chat template; set tokenizer.chat_template, or use an instruct model")
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})

    def render(self, messages: Sequence[dict[str, Any]], for_answer: bool = True, tools: Sequence[dict[str, Any]] | None = None) -> str:
        """The prompt as text; `for_answer` ends it with the header of the assistant's next message. `tools` are JSON schemas."""
        given = None if tools is None else list(tools)
        return self.tokenizer.apply_chat_template(
            list(messages), tools=given, tokenize=False, add_generation_prompt=for_answer, **self.template_kwargs
        )

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text, without special tokens or with them."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=not special)

    def stop_ids(self, generation_config: Any) -> frozenset[int]:
        """Every token that ends an answer: the tokenizer's EOS, the checkpoint's (nothing else is taken from its generation
        config), and the special token with which the template closes an assistant's message."""
        ids = {self.tokenizer.eos_token_id, self._closing_id()}
        eos = getattr(generation_config, "eos_token_id", None)
        ids |= set(eos) if isinstance(eos, list | tuple) else {eos}
        return frozenset(ids - {None})

    def _closing_id(self) -> int | None:
        answer = "answer"
        text = self.render([{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}], for_answer=False)
        closing = self.encode(text.rpartition(answer)[2])
        added = self.tokenizer.added_tokens_decoder
        return closing[0] if closing and closing[0] in added and added[closing[0]].special else None


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds to what stands before it; `�` for one that is only a part of a character."""
    once, twice = ([tokenizer.decode([i] * times) for i in ids] for times in (1, 2))
    # the second of two keeps the space that some tokenizers take from the beginning of a text
    return [two[len(one) :] if two.startswith(one) else one for one, two in zip(once, twice, strict=True)]
