"""`builtin:tiny`: a small Llama-architecture model with a character tokenizer and a chat template, made here.

About 0.9M parameters, random weights: a task is taught to it by `warm_start`. One token a character makes its answers easy
to read and its failures easy to see.
"""

from __future__ import annotations

import string
from typing import Any

import torch

PAD, USER, ASSISTANT, SYSTEM, END, UNK = "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|unk|>"
SPECIAL = [PAD, USER, ASSISTANT, SYSTEM, END, UNK]
CHARACTERS = sorted(set(string.printable) - set("\r\x0b\x0c"))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set role = message['role'] if message['role'] in ['assistant', 'system'] else 'user' %}"
    "{{ '<|' + role + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SIZE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
CONTEXT = 1024  # positions


def tiny_tokenizer() -> Any:
    """A tokenizer with one token for each printable ASCII character; any other character is `<|unk|>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNK,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(seed: int) -> tuple[Any, Any]:
    """`(model, tokenizer)` with float32 weights drawn from `seed`; the global random state stays as it was."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        **SIZE,
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config), tokenizer
