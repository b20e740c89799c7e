"""Chat messages to token ids and back, and the tokens that end an answer.

The tokenizer's chat template writes the whole prompt, special tokens included; so encoding adds none (no second BOS), and
nothing is ever cut. What the messages say is text all through: a task, a tool's result or a reply that spells `<|im_end|>` ends no
message, as its characters are encoded one piece apart from the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SEAM = "\ufdd0"  # where encoding begins anew; Unicode has given this character no meaning and leaves it to programs' own use


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
        added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._spelled = _spelled({*tokenizer.all_special_tokens, *added})

    def render(self, messages: Sequence[dict[str, Any]], for_answer: bool = True, tools: Sequence[dict[str, Any]] | None = None) -> str:
        """The prompt as text for `encode`; `for_answer` ends it with the header of the assistant's next message. `tools` are JSON
        schemas. What looks like a special token in the messages is marked as text."""
        given = None if tools is None else list(tools)
        return self.tokenizer.apply_chat_template(
            self.as_text(list(messages)), tools=given, tokenize=False, add_generation_prompt=for_answer, **self.template_kwargs
        )

    def as_text(self, content: Any) -> Any:
        """Text, or nested lists and mappings of it, with a seam inside of each special token that it spells out, or begins to."""
        if isinstance(content, str):
            return self._spelled.sub(rf"\g<0>{SEAM}", content)
        if isinstance(content, Mapping):
            return {key: self.as_text(value) for key, value in content.items()}
        if isinstance(content, list | tuple):
            return [self.as_text(value) for value in content]
        return content

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens are known but for those that `as_text` marked."""
        parts = text.split(SEAM)
        return [token for part in parts for token in self.tokenizer.encode(part, add_special_tokens=False)]

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


def _spelled(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds the first character of each of `tokens` in a text, and of the beginning of one at its end, which what comes after the
    text might complete. Of a token of one character nothing can be told apart; none of them stands between messages."""
    known = {token for token in tokens if len(token) > 1}
    if not known:
        return re.compile(r"(?!)")
    starts = {token[:length] for token in known for length in range(1, len(token))}
    whole, begun = ("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) for texts in (known, starts))
    return re.compile(rf"(?s:(?={whole}|(?:{begun})\Z).)")


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds to what stands before it; `�` for one that is only a part of a character."""
    once, twice = ([tokenizer.decode([i] * times) for i in ids] for times in (1, 2))
    # the second of two keeps the space that some tokenizers take from the beginning of a text
    return [two[len(one) :] if two.startswith(one) else one for one, two in zip(once, twice, strict=True)]
