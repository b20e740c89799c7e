"""Decoders over models of every kind: what they sample has the log-probs of a full forward pass."""

import logging

import pytest
import torch
import transformers

from rllm_lightning.rollout.decoding import PlainDecoder
from rllm_lightning.rollout.kept_states import KeptStates
from rllm_lightning.rollout.packed import PackedDecoder
from rllm_lightning.rollout.weights import SamplingModel, exact_inference

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FAST = {  # handled by the fast path
    "grouped queries": ("Qwen3", SIZES),
    "one key head": ("Llama", {**SIZES, "num_key_value_heads": 1}),
    "a key head for each query head": ("Llama", {**SIZES, "num_key_value_heads": 4}),
    "biases": ("Qwen2", {key: size for key, size in SIZES.items() if key != "head_dim"}),
    "no window": ("Mistral", {**SIZES, "sliding_window": None}),
    "Llama's names, other numbers": ("Granite", {**SIZES, "residual_multiplier": 0.5, "embedding_multiplier": 3.0}),
    "full attention in all layers": ("Gemma3Text", {**SIZES, "layer_types": ["full_attention"] * 2}),
    "learned positions": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "mixture of experts": ("Qwen3Moe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}
PLAIN = {  # the reason why not, as the warning gives it
    "sliding window": ("Mistral", {**SIZES, "sliding_window": 8}, "DynamicSlidingWindowLayer"),
    "sliding and full": (
        "Gemma3Text",
        {**SIZES, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "DynamicSlidingWindowLayer",
    ),
    "soft-capped scores": ("Gemma2", {**SIZES, "layer_types": ["full_attention"] * 2}, "softcap"),
    "attention sinks": ("GptOss", {**SIZES, "num_local_experts": 4, "layer_types": ["full_attention"] * 2}, "s_aux"),
    "position biases": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "attention function"),
    "recurrent": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "attention function"),
    "hybrid": ("Lfm2", {**SIZES, "layer_types": ["conv", "full_attention"]}, "LinearAttentionLayer"),
}


@pytest.fixture
def make_architecture(tokenizer):
    def make(name, sizes):
        config_class = getattr(transformers, f"{name}Config")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config_class(vocab_size=len(tokenizer), **sizes))
            model.get_output_embeddings().weight.data.normal_(0, 1)
        model.generation_config.eos_token_id = [5, 6]
        return model.eval()

    return make


@pytest.mark.parametrize("name", FAST)
def test_architectures_that_either_path_samples_exactly(name, path, make_architecture, make_engine, ask, reference, mixed_prompts):
    """B17, B20: prompts of mixed lengths, rows that leave while others go on."""
    model = make_architecture(*FAST[name])
    engine = make_engine(model, max_tokens=24)
    for answer in ask(engine, mixed_prompts * 2):
        torch.testing.assert_close(torch.tensor(answer.logprobs), reference(model, answer), rtol=0, atol=1e-4)
    assert isinstance(engine._the_sampler().batch._decoder, PlainDecoder if path == "plain" else PackedDecoder)


def test_a_bfloat16_copy_of_a_model_with_biases(make_architecture, make_engine, ask, reference, mixed_prompts, path):
    """Large biases: left out anywhere, log-probs would be off by more than rounding."""
    model = make_architecture(*FAST["biases"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 3)
    answers = ask(make_engine(model, max_tokens=24, dtype="bfloat16"), mixed_prompts)
    errors = torch.cat([torch.tensor(answer.logprobs) - reference(model, answer) for answer in answers])
    assert 1e-5 < errors.abs().mean() < 0.05


@pytest.mark.parametrize("path", ["fast", "own layers"], indirect=True)
def test_a_copy_s_layers_are_kept_once(model, path):
    """What the comparison at the start made of the copy's weights is not held beside what rollouts compute with."""
    sampling = SamplingModel(model, torch.bfloat16)
    with exact_inference(sampling.device):
        decoder = PackedDecoder(sampling, KeptStates(0))
        replaced = [module for module in sampling.module.modules() if "forward" in vars(module)]
        assert (path == "own layers" and sampling.can_prepack) == bool(replaced)
        decoder.advance([], [[1, 2, 3]])
    assert path == "own layers" or not any("forward" in vars(module) for module in sampling.module.modules())


@pytest.mark.parametrize("path", ["fast", "own layers", "plain"], indirect=True)
@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_gets_every_new_weight(tied, path, make_architecture):
    """All weights change, and logits are those of a copy made after that; before the refresh they are the old ones."""
    architecture, sizes = FAST["biases"]
    model, prompt = make_architecture(architecture, {**sizes, "tie_word_embeddings": tied}), [1, 2, 3]
    sampling = SamplingModel(model, torch.bfloat16)
    with exact_inference(sampling.device):
        decoder = PlainDecoder(sampling) if path == "plain" else PackedDecoder(sampling, KeptStates(0))
        before = decoder.advance([], [prompt])
        decoder.clear()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    with exact_inference(sampling.device):
        assert decoder.advance([], [prompt]).equal(before)
        decoder.clear()
        sampling.refresh()
        after = decoder.advance([], [prompt])
        fresh = SamplingModel(model, torch.bfloat16)
        other = PlainDecoder(fresh) if path == "plain" else PackedDecoder(fresh, KeptStates(0))
        assert after.equal(other.advance([], [prompt]))
    assert (after - before).abs().max() > 0.01


@pytest.mark.parametrize("path", ["fast"])
@pytest.mark.parametrize("name", PLAIN)
def test_architectures_that_fall_back_to_the_plain_path(name, path, make_architecture, make_engine, ask, reference, mixed_prompts, caplog):
    """The same exactness, also beyond the sliding window, and one warning that says why it is slower."""
    architecture, sizes, reason = PLAIN[name]
    model = make_architecture(architecture, sizes)
    engine = make_engine(model, max_tokens=24)
    with caplog.at_level(logging.WARNING, logger="rllm_lightning"):
        answers = ask(engine, mixed_prompts)
        ask(engine, ["again"])
    for answer in answers:
        torch.testing.assert_close(torch.tensor(answer.logprobs), reference(model, answer), rtol=0, atol=1e-4)
    warnings = [record.message for record in caplog.records if record.name.startswith("rllm_lightning")]
    assert [reason in message for message in warnings] == [True]


@pytest.mark.parametrize("path", ["fast"])
def test_a_model_with_attention_of_its_own_kind_is_found_out_by_its_logits(path, make_engine, model, ask, reference, monkeypatch, caplog):
    """A Llama whose queries are scaled once more: nothing declares it, the comparison of logits tells."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def rescaled(module, query, key, value, attention_mask, **kwargs):
        return sdpa(module, query * 1.5, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", rescaled)
    with caplog.at_level(logging.WARNING, logger="rllm_lightning"):
        answer = ask(make_engine(), ["hello"])[0]
    assert "other logits" in caplog.records[0].message
    torch.testing.assert_close(torch.tensor(answer.logprobs), reference(model, answer), rtol=0, atol=2e-5)
