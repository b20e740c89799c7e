"""The plain decoder over models of every kind: what it samples has the log-probs of a full forward pass."""

import copy

import pytest
import torch
import transformers

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
ARCHITECTURES = {
    "full attention": ("Qwen3", SIZES),
    "sliding window": ("Mistral", {**SIZES, "sliding_window": 8}),
    "sliding and full": ("Gemma3Text", {**SIZES, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "learned positions": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "recurrent": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "hybrid": ("Lfm2", {**SIZES, "layer_types": ["conv", "full_attention"]}),
}


@pytest.fixture(params=ARCHITECTURES)
def any_model(request, tokenizer):
    name, sizes = ARCHITECTURES[request.param]
    config_class = getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(vocab_size=len(tokenizer), **sizes))
    model.get_output_embeddings().weight.data.normal_(0, 1)
    model.generation_config.eos_token_id = [5, 6]
    return model.eval()


def test_any_architecture_is_sampled_exactly(any_model, make_engine, ask, reference, mixed_prompts):
    """B17, B20: prompts of mixed lengths, longer than the sliding window; rows that leave while others of their length go on."""
    for answer in ask(make_engine(any_model, max_tokens=24), mixed_prompts):
        torch.testing.assert_close(torch.tensor(answer.logprobs), reference(any_model, answer), rtol=0, atol=1e-4)


def test_a_row_that_leaves_does_not_disturb_its_cohort(make_engine, model, ask, same_answers):
    """Eight equal prompts end at different lengths; each answer is what it is when asked alone."""
    answers = ask(make_engine(max_tokens=40), ["hello"] * 8)
    assert len({answer.completion_length for answer in answers}) > 2
    same_answers(answers, ask(make_engine(copy.deepcopy(model), max_tokens=40), ["hello"] * 8, together=False))
