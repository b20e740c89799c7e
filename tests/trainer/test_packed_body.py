"""The packed body computes what the model's own code computes: hidden states, log-probs and every gradient."""

import copy

import pytest
import torch
import transformers

from rllm_lightning.config import Config, ModelConfig, load_config
from rllm_lightning.models.llama import Llama
from rllm_lightning.models.load import load_model
from rllm_lightning.models.tiny import tiny_model, tiny_tokenizer
from rllm_lightning.trainer import attention_blocks, packed_body
from rllm_lightning.trainer.layout import LayoutCost, PrefixTree, collate_chains, collate_rows, collate_trees, make_chains
from rllm_lightning.trainer.policy import Policy
from tests.trainer.test_layout import rows_of

SIZE = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BUILT_LIKE_LLAMA = {
    "llama": ("Llama", {}),
    "one key head": ("Llama", {"num_key_value_heads": 1}),
    "as many key heads": ("Llama", {"num_key_value_heads": 4}),
    "wide heads": ("Llama", {"head_dim": 12}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "rotary scaled": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
    "qwen2": ("Qwen2", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
}
OTHERS = {
    "a window": ("Mistral", {"sliding_window": 4}),
    "norms of heads": ("Qwen3", {}),
    "norms around 1": ("Gemma", {"head_dim": 8}),
    "multipliers": ("Granite", {"residual_multiplier": 0.5, "embedding_multiplier": 3.0}),
    "layers without rotary": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "layers with a window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "part of a head turned": ("StableLm", {}),
    "another activation": ("Llama", {"hidden_act": "gelu"}),
}
# a prompt of one token, a response of one, equal responses, a prompt that goes on where another ends
ROWS = (([3, 4, 5], [6, 7, 8, 2]), ([3, 4, 5], [6, 9]), ([3, 4, 5], [6, 9]), ([3], [4]), ([3, 4], [2]), ([7, 7, 7, 7, 7, 7], [7, 0, 7]))


def model_of(name, dtype=torch.float32, **changes):
    """A small model with large weights, so that a wrong mask, position or norm shows."""
    kind, own = {**BUILT_LIKE_LLAMA, **OTHERS}[name]
    config = getattr(transformers, f"{kind}Config")(**(SIZE | own | changes))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return model


def layouts():
    rows = rows_of(*ROWS)
    tree = PrefixTree()
    for chain in make_chains(rows):
        tree.add(chain)
    single = PrefixTree()
    for chain in make_chains(rows[:2]):
        single.add(chain)
    return {"rows": collate_rows(rows), "chains": collate_chains(make_chains(rows[:4])), "trees": collate_trees([single, tree])}


def scored(policy, micro, packed):
    """Log-probs, and the gradients of a loss that weighs each one differently."""
    policy = copy.deepcopy(policy)
    assert policy.packed_body is not None
    if not packed:
        policy.packed_body = None
    scores = policy(micro)
    weights = torch.arange(scores.logprobs.numel()).view(scores.logprobs.shape).sin()
    (weights * (scores.logprobs + 0.3 * scores.entropies)).sum().backward()
    return scores.logprobs.detach(), {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layout", ["rows", "chains", "trees"])
@pytest.mark.parametrize("name", BUILT_LIKE_LLAMA)
def test_log_probs_and_gradients_are_the_model_s_own(name, layout):
    policy, micro = Policy(model_of(name), tiny_tokenizer()), layouts()[layout]
    (own, own_grads), (packed, packed_grads) = (scored(policy, micro, packed) for packed in (False, True))
    torch.testing.assert_close(packed, own, rtol=0, atol=5e-5)
    assert packed_grads.keys() == own_grads.keys()
    whole = torch.cat([grad.flatten() for grad in own_grads.values()]).norm()
    for key, grad in own_grads.items():
        assert (packed_grads[key] - grad).norm() < 1e-5 * max(grad.norm(), 1e-2 * whole), key


@pytest.mark.parametrize("name", ["llama", "one key head", "as many key heads"])
def test_attention_in_small_blocks_is_that_of_the_whole_tree(monkeypatch, name):
    """Two queries a block: several calls, and keys that stand in many blocks."""
    policy, micro = Policy(model_of(name), tiny_tokenizer()), layouts()["trees"]
    own, own_grads = scored(policy, micro, False)
    monkeypatch.setattr(attention_blocks, "BLOCK_QUERIES", 2)
    monkeypatch.setattr(attention_blocks, "MULTIPLE", 1)
    assert len(attention_blocks.attention_blocks(micro)) > 2
    packed, packed_grads = scored(policy, micro, True)
    torch.testing.assert_close(packed, own, rtol=0, atol=5e-5)
    for key, grad in own_grads.items():
        torch.testing.assert_close(packed_grads[key], grad, rtol=1e-4, atol=1e-4 * grad.abs().max().item())


def test_gradients_are_the_same_to_the_last_digit_in_every_run():
    """Two threads, a prompt's key in many blocks: sums in the order in which threads come by would differ."""
    rows = rows_of(*[(range(3, 40), [3 + (7 * i + j) % 40 for j in range(30)]) for i in range(12)])
    tree = PrefixTree()
    for chain in make_chains(rows):
        tree.add(chain)
    policy, micro = Policy(model_of("llama"), tiny_tokenizer()), collate_trees([tree])
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        results = [scored(policy, micro, True)[1] for _ in range(5)]
    finally:
        torch.set_num_threads(num_threads)
    assert all(grad.equal(results[0][name]) for result in results for name, grad in result.items())


def test_steps_in_blocks_are_the_step_at_once(monkeypatch):
    """Blocks of one row at a time."""
    policy, micro = Policy(model_of("llama"), tiny_tokenizer()), layouts()["trees"]
    at_once, grads_at_once = scored(policy, micro, True)
    monkeypatch.setattr(packed_body, "BLOCK_ELEMENTS", 1)
    in_blocks, grads_in_blocks = scored(policy, micro, True)
    torch.testing.assert_close(in_blocks, at_once, rtol=0, atol=1e-5)
    for key, grad in grads_at_once.items():
        torch.testing.assert_close(grads_in_blocks[key], grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["rows", "trees"])
def test_under_autocast_it_is_as_near_to_float32_as_the_model_s_own_code(layout):
    policy, micro = Policy(model_of("llama"), tiny_tokenizer()), layouts()[layout]
    _, exact = scored(policy, micro, False)
    errors = []
    for packed in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            _, grads = scored(policy, micro, packed)
        assert all(grad.dtype == torch.float32 for grad in grads.values())
        errors.append(sum((grads[key] - exact[key]).square().sum() for key in exact) ** 0.5)
    assert 0 < errors[1] < 1.3 * errors[0]


def test_bfloat16_and_float64_weights_are_computed_in_their_own_dtype():
    micro = layouts()["trees"]
    wide, narrow = (Policy(model_of("llama", dtype), tiny_tokenizer()) for dtype in (torch.float64, torch.bfloat16))
    logprobs, grads = scored(wide, micro, True)
    own, _ = scored(wide, micro, False)
    assert {grad.dtype for grad in grads.values()} == {torch.float64}
    torch.testing.assert_close(logprobs, own, rtol=0, atol=1e-5)
    (rounded, grads), (own_rounded, _) = (scored(narrow, micro, packed) for packed in (True, False))
    assert {grad.dtype for grad in grads.values()} == {torch.bfloat16}
    assert 0 < (rounded - own).norm() < 1.3 * (own_rounded - own).norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deep_pretrained_model_is_told_apart_by_no_rounding(dtype):
    """SmolLM2's states of the first tokens are so large that in bfloat16 the comparison would find .4 of difference there."""
    model, tokenizer = load_model(ModelConfig(name="smollm2", dtype=dtype))
    assert Policy(model, tokenizer).packed_body is not None


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_keep_their_own_code(name):
    policy = Policy(model_of(name), tiny_tokenizer())
    assert policy.packed_body is None
    assert torch.isfinite(policy(layouts()["rows"]).logprobs).all()


def test_what_another_model_s_numbers_would_be_is_refused_by_comparison_where_names_are_alike():
    """Granite's modules are named as Llama's; only the numbers tell."""
    model = model_of("multipliers")
    assert Llama.of(model) is not None
    assert Llama.of(model_of("norms around 1")) is None


def test_a_model_that_was_asked_for_another_attention_keeps_it():
    model = model_of("llama")
    model.set_attn_implementation("eager")
    assert Policy(model, tiny_tokenizer()).packed_body is None


def test_one_linear_layer_with_a_bias_among_those_without_is_refused():
    model = model_of("llama")
    model.model.layers[1].self_attn.q_proj = torch.nn.Linear(32, 32, bias=True)
    assert Llama.of(model) is None


def test_adapters_keep_the_model_s_own_code():
    from peft import LoraConfig, get_peft_model

    model, tokenizer = tiny_model(0)
    policy = Policy(get_peft_model(model, LoraConfig(target_modules=["gate_proj"])), tokenizer)
    assert policy.packed_body is None


@pytest.mark.parametrize(
    ("override", "is_packed"),
    [
        ("training.tree=true", True),
        ("training.tree=false", False),
        ("model.gradient_checkpointing=true", False),
        ("model.compile=true", False),
    ],
)
def test_keys_that_ask_for_the_model_s_own_code(override, is_packed):
    policy = Policy.from_config(Config.from_config(load_config([override])))
    assert (policy.packed_body is not None) == is_packed


def test_hooks_on_the_model_s_modules_are_called():
    policy, calls = Policy(model_of("llama"), tiny_tokenizer()), []
    policy(layouts()["rows"])
    handle = policy.model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    policy(layouts()["rows"])
    handle.remove()
    policy(layouts()["rows"])
    assert calls == [1]


def test_trees_are_as_large_as_the_code_that_computes_them_allows():
    """Ten long answers to one prompt are one tree in blocks; through the model's own code, which a hook asks for, they are rows."""
    rows = rows_of(*[(range(40), [i] * 80) for i in range(10)])
    policy = Policy(model_of("llama"), tiny_tokenizer())
    policy.tree_cost = LayoutCost(1.0, 0.1)
    assert [micro.lengths for micro in policy.micro_batches(rows, 1000)] == [[840]]
    policy.model.model.norm.register_forward_hook(lambda *_: None)
    assert [micro.lengths for micro in policy.micro_batches(rows, 1000)] == [[120] * 8, [120] * 2]


def test_frozen_parameters_get_no_gradient():
    policy = Policy(model_of("biases"), tiny_tokenizer())
    frozen = [name for name, _ in policy.model.named_parameters() if "layers.0" in name or "up_proj" in name or "norm" in name]
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    _, all_grads = scored(Policy(model_of("biases"), tiny_tokenizer()), layouts()["trees"], True)
    _, grads = scored(policy, layouts()["trees"], True)
    assert set(grads) == set(all_grads) - set(frozen)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, all_grads[name])


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_each_step_s_gradient_is_its_derivative():
    """By finite differences in float64: sum and norm, joined products, attention, gated product."""
    torch.manual_seed(0)
    bias = torch.tensor([[0.0, -torch.inf, 0.0], [0.0, 0.0, -torch.inf], [-torch.inf, 0.0, 0.0]], dtype=torch.float64)
    attended = (double(3, 2, 2, 4), double(3, 2, 3, 4), double(3, 2, 3, 4), bias[:, None, None].expand(-1, -1, 2, -1), 0.7)
    cases = [
        (packed_body._AddNorm, (double(5, 6), double(5, 6), double(6), 1e-5, torch.float64)),
        (packed_body._AddNorm, (double(5, 6), None, double(6), 1e-5, torch.float64)),
        (packed_body._JoinedLinear, (double(5, 3), 2, double(4, 3), double(2, 3))),
        (packed_body._JoinedLinear, (double(5, 3), 2, double(4, 3), double(2, 3), double(4), double(2))),
        (packed_body._BlockAttention, attended),
        (packed_body._SwiGLU, (double(5, 8),)),
    ]
    for function, inputs in cases:

        def output(*given, function=function):
            """All outputs in one tensor."""
            found = function.apply(*given)
            return torch.cat([x.flatten() for x in found]) if isinstance(found, tuple) else found

        assert torch.autograd.gradcheck(output, inputs, check_undefined_grad=False), function.__name__


def test_gradients_of_what_stands_in_several_blocks_add_up():
    """By finite differences: three tokens of two query heads and a key head in two calls, the first one's key and value in both."""
    torch.manual_seed(0)
    rows = [torch.tensor(part) for part in ([[0, 1, 4, 5]], [[2, 6, -1]], [[3, 7, -1]], [[8, 9, -1]], [[2, 10]], [[3, 11]])]
    counts = torch.cat([part.flatten() >= 0 for part in rows])
    angles = torch.rand(3, 1, 2, dtype=torch.float64)

    def rotated(qkv):
        """What stands in places that count, one below the other."""
        parts = packed_body._RotateToBlocks.apply(qkv, angles.cos(), angles.sin(), 3, packed_body._Places(rows, num_rows=12))
        return torch.cat([part.flatten(end_dim=-2) for part in parts])[counts]

    assert torch.autograd.gradcheck(rotated, (double(3, 16),))
    outputs = packed_body._Places([torch.tensor([[1, -1], [0, 3]]), torch.tensor([[2]])], num_rows=4)
    given = (first, second) = (double(2, 2, 3), double(1, 1, 3))
    assert torch.autograd.gradcheck(lambda *outs: packed_body._FromBlocks.apply(outputs, *outs), given)
    assert packed_body._FromBlocks.apply(outputs, *given).equal(torch.stack([first[1, 0], first[0, 0], second[0, 0], first[1, 1]]))
