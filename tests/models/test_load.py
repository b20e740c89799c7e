"""From `model.name` to a model and its tokenizer."""

import json

import pytest
import torch

from rllm_lightning.config import ConfigError, ModelConfig
from rllm_lightning.models.load import cache_folder, check_model, load_model
from rllm_lightning.models.tiny import CHARACTERS, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    """The builtin model as a local folder."""
    model, tokenizer = tiny_model(3)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# --------------------------------------------------------------------------------------------------------------- builtin:tiny


def test_the_builtin_model_is_drawn_from_its_seed_and_leaves_the_global_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = (load_model(ModelConfig(), seed)[0] for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


def test_every_printable_character_is_one_token_and_comes_back():
    tokenizer = tiny_tokenizer()
    text = "".join(CHARACTERS)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("é", add_special_tokens=False)) == tokenizer.unk_token


def test_the_chat_template_closes_each_message_and_opens_the_answer():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "tool", "content": "t"}]
    text = tiny_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>s<|end|><|user|>u<|end|><|user|>t<|end|><|assistant|>"


# ------------------------------------------------------------------------------------------------------------- local folders


def test_a_local_folder_gives_the_same_model(folder):
    model, tokenizer = load_model(ModelConfig(name=str(folder)))
    for a, b in zip(model.parameters(), tiny_model(3)[0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert tokenizer.chat_template is not None


def test_weights_come_in_the_dtype_that_is_asked_for(folder):
    model, _ = load_model(ModelConfig(name=str(folder), dtype="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_every_dropout_is_off(folder):
    """B23: also those that a checkpoint's config asks for."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    model, _ = load_model(ModelConfig(name=str(folder)))
    model.train()
    ids = torch.arange(10, 20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_tokenizer_without_a_pad_token_pads_with_the_end_token(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("pad_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    _, tokenizer = load_model(ModelConfig(name=str(folder)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_a_tokenizer_without_a_chat_template_is_refused(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"model\.name.*no chat template"):
        load_model(ModelConfig(name=str(folder)))


def test_code_that_comes_with_a_model_is_not_run_unless_asked_for(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "my_own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(ConfigError, match=r"model\.name"):
        load_model(ModelConfig(name=str(folder)))
    assert not marker.exists()


def test_pickled_weights_are_not_read(folder):
    """B56: safetensors only; a pickle could run code."""
    model, _ = tiny_model(3)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.name"):
        load_model(ModelConfig(name=str(folder)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("builtin:huge", "builtin:tiny"),
        ("/nowhere/at/all", "no folder"),
        ("./nothing", "no folder"),
        ("weights.gguf", "no folder"),
        ("two words", "no folder"),
        ("nobody/no-such-model", "cannot be asked"),
    ],
)
def test_a_name_that_cannot_be_loaded_is_refused_in_a_moment(name, words):
    with pytest.raises(ConfigError, match=words) as caught:
        check_model(ModelConfig(name=name))
    assert caught.value.problems[0].startswith("model.name: ")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_model(ModelConfig(name=str(tmp_path)))


# ------------------------------------------------------------------------------------------------------------------- smollm2


def test_smollm2_comes_out_of_its_package_once_and_answers(tmp_path):
    model, tokenizer = load_model(ModelConfig(name="smollm2"))
    assert (cache_folder() / "smollm2-135m-instruct" / "model.safetensors").is_file()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    again, _ = load_model(ModelConfig(name="smollm2"))
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)
