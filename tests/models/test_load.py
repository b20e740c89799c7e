"""From `model.name` to a model and its tokenizer."""

import json
import sys

import pytest
import torch

from rllm_lightning.config import ConfigError, ModelConfig
from rllm_lightning.models.load import cache_folder, check_model, load_model, load_tokenizer
from rllm_lightning.models.tiny import CHARACTERS, tiny_model, tiny_tokenizer
from rllm_lightning.rollout.chat import Chat


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


@pytest.fixture
def bare(folder):
    """Without a chat template."""
    (folder / "chat_template.jinja").unlink()
    return ModelConfig(name=str(folder))


def test_a_tokenizer_without_a_chat_template_gets_a_plain_one_which_is_said_once(bare, caplog):
    for _ in range(2):
        chat = Chat(load_tokenizer(bare))
    assert [record.message for record in caplog.records if "no chat template" in record.message] == [
        f"the tokenizer of {bare.name} has no chat template; chats are written as plain text (User:, Assistant:)"
    ]
    assert chat.render([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]) == "System:\ns\n\nUser:\nq\n\nAssistant:\n"


def test_an_answer_ends_with_the_end_token_in_the_plain_template_and_the_next_turn_begins_with_it(bare):
    chat = Chat(load_tokenizer(bare))
    asked = [{"role": "user", "content": "q"}]
    prompt, end = chat.render(asked), chat.tokenizer.eos_token
    assert chat.render([*asked, {"role": "assistant", "content": "a"}, *asked]) == f"{prompt}a{end}\n\n{prompt}"
    assert chat.stop_ids(None) == {chat.tokenizer.eos_token_id}


def test_the_plain_template_writes_a_bos_where_the_tokenizer_itself_would(bare):
    """B26: prompts are encoded without special tokens, since a template writes them."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(bare)
    tokenizer.bos_token, tokenizer.chat_template = "<|system|>", None
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|system|> $A", special_tokens=[("<|system|>", bos)])
    tokenizer.save_pretrained(bare.name)
    chat = Chat(load_tokenizer(bare))
    ids = chat.encode(chat.render([{"role": "user", "content": "q"}]))
    assert (ids[0], ids.count(bos)) == (bos, 1)


def test_variables_of_the_chat_template_are_checked(folder):
    thinking = "{% if enable_thinking is defined and not enable_thinking %}(no thinking){% endif %}"
    (folder / "chat_template.jinja").write_text((folder / "chat_template.jinja").read_text() + thinking)
    config = ModelConfig(name=str(folder), chat_template_kwargs={"enable_thinking": False})
    assert Chat(load_tokenizer(config), config.chat_template_kwargs).render([{"role": "user", "content": "q"}]).endswith("(no thinking)")
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.thinking: .* no such variable to be set; there are: enable_thinking"):
        load_tokenizer(ModelConfig(name=str(folder), chat_template_kwargs={"thinking": False}))
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.messages"):
        load_tokenizer(ModelConfig(name=str(folder), chat_template_kwargs={"messages": []}))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_is_the_one_that_is_asked_for_and_changes_nothing_but_rounding(folder, attention):
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        expected = load_model(ModelConfig(name=str(folder)))[0](ids).logits
        for name in (str(folder), "builtin:tiny"):
            model, _ = load_model(ModelConfig(name=name, attn_implementation=attention), seed=3)
            assert model.config._attn_implementation == attention
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_an_attention_that_a_model_does_not_have_is_refused(folder, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "set_attn_implementation", lambda self, name: None)  # code from before it could be chosen
    with pytest.raises(ConfigError, match=r"model\.attn_implementation: .* has 'sdpa' attention alone"):
        load_model(ModelConfig(name=str(folder), attn_implementation="eager"))


def test_code_that_comes_with_a_model_is_not_run_unless_asked_for(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "my_own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(ConfigError, match=r"model\.name: .* Python code of its own; read it, then set model\.trust_remote_code=true"):
        load_model(ModelConfig(name=str(folder)))
    assert not marker.exists()
    with pytest.raises(ConfigError, match=r"model\.name: cannot load"):  # it was run, and defines no model
        load_model(ModelConfig(name=str(folder), trust_remote_code=True))
    assert marker.exists()


def test_adapters_without_the_package_for_them_are_refused_in_a_moment(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"model\.lora_rank: .* pip install 'rllm-lightning\[lora\]'"):
        check_model(ModelConfig(lora_rank=2))


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
