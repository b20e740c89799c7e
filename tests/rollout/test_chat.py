"""Chat messages to token ids: one BOS, nothing cut, every end token known."""

import copy
from types import SimpleNamespace

import pytest

from rllm_lightning.models.tiny import USER
from rllm_lightning.rollout.chat import Chat, token_texts

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_template_that_writes_the_bos_gets_no_second_one(tokenizer):
    """B26: `<|user|>` as BOS, once from the template, and a tokenizer that would add it by itself."""
    from tokenizers.processors import TemplateProcessing

    chatty = copy.deepcopy(tokenizer)
    bos = chatty.convert_tokens_to_ids(USER)
    chatty.backend_tokenizer.post_processor = TemplateProcessing(single=f"{USER} $A", special_tokens=[(USER, bos)])
    assert chatty.encode("hi")[0] == bos
    ids = Chat(chatty).encode(Chat(chatty).render(MESSAGES))
    assert ids.count(bos) == 1
    assert ids[0] == bos


def test_the_prompt_ends_with_the_header_of_the_answer(tokenizer):
    chat = Chat(tokenizer)
    assert chat.render(MESSAGES) == "<|user|>hi<|end|><|assistant|>"
    assert chat.render(MESSAGES, for_answer=False) == "<|user|>hi<|end|>"


def test_stop_ids_come_from_tokenizer_checkpoint_and_template(tokenizer):
    chat = Chat(tokenizer)
    end = tokenizer.eos_token_id
    assert chat.stop_ids(None) == {end}
    assert chat.stop_ids(SimpleNamespace(eos_token_id=7)) == {7, end}
    assert chat.stop_ids(SimpleNamespace(eos_token_id=[7, 8])) == {7, 8, end}
    assert chat.stop_ids(SimpleNamespace(eos_token_id=None)) == {end}

    other_eos = copy.deepcopy(tokenizer)
    other_eos.eos_token = "<|pad|>"
    assert Chat(other_eos).stop_ids(None) == {other_eos.pad_token_id, end}  # the template still closes with <|end|>


def test_a_template_that_closes_with_plain_text_adds_no_stop_id(tokenizer):
    """A newline after an answer must not end every answer at its first newline."""
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    assert Chat(plain).stop_ids(None) == {plain.eos_token_id}


def test_decoding_leaves_special_tokens_out(tokenizer):
    chat = Chat(tokenizer)
    assert chat.decode([*chat.encode("4 2\n"), tokenizer.eos_token_id]) == "4 2\n"


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        Chat(bare)


def test_the_texts_of_tokens_one_by_one_make_up_the_answer(tokenizer):
    ids = Chat(tokenizer).encode("two words")
    assert "".join(token_texts(tokenizer, ids)) == "two words"


def test_a_token_keeps_the_space_before_its_word():
    """Some tokenizers take the space from the beginning of a text: alone, "▁word" would be "word"."""
    decode = lambda ids: " ".join({1: "word", 2: "other"}[i] for i in ids)  # noqa: E731
    assert token_texts(SimpleNamespace(decode=decode), [1, 2]) == [" word", " other"]
