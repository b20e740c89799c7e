"""The parts of a model that is built like Llama, for code that computes its layers in an order of its own.

    embedding -> [norm -> q, k, v -> rotary -> attention -> out -> norm -> gate, up -> SiLU(gate)·up -> down] x layers -> norm

Llama, Mistral without a window, Qwen2 and SmolLM2 are built so. The names of the modules are a first sign of it; whoever uses the parts
compares what comes out with the model's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

BASE = ("embed_tokens", "layers", "norm", "rotary_emb")
LAYER = ("input_layernorm", "mlp", "post_attention_layernorm", "self_attn")
ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
MLP = ("act_fn", "down_proj", "gate_proj", "up_proj")
SILU = ("SiLU", "SiLUActivation")  # PyTorch's, and transformers'


class Layer(NamedTuple):
    """The modules of one layer; those of `qkv`, and those of `gate_up`, are linear layers with one input, all with a bias or none."""

    attention_norm: Any
    qkv: tuple[nn.Linear, nn.Linear, nn.Linear]
    out: nn.Linear
    mlp_norm: Any
    gate_up: tuple[nn.Linear, nn.Linear]
    down: nn.Linear


class Llama(NamedTuple):
    """The modules of a model. `rotary(x, position_ids)` gives cosines and sines [1, tokens, head_dim] in the dtype of x, both halves
    alike."""

    embedding: nn.Embedding
    rotary: Any
    layers: list[Layer]
    norm: Any
    head_dim: int
    scaling: float  # of the scores

    @classmethod
    def of(cls, causal_lm: Any) -> Llama | None:
        """The parts of a Hugging Face causal LM, or None where its modules have other names or are no plain linear layers (adapters), or
        where it was asked for another attention than `sdpa`, which it has by itself."""
        base = causal_lm.base_model
        if _names(base) != BASE or type(base.embed_tokens) is not nn.Embedding or not len(base.layers):
            return None
        config = base.config
        kinds, with_rotary = getattr(config, "layer_types", None) or (), getattr(config, "no_rope_layers", None) or ()
        if getattr(config, "sliding_window", None) or not set(kinds) <= {"full_attention"} or not all(with_rotary):
            return None
        if config._attn_implementation != "sdpa":
            return None
        layers = [_layer(module) for module in base.layers]
        attention = base.layers[0].self_attn
        known = [layer for layer in layers if layer is not None]
        if len(known) < len(layers) or not hasattr(attention, "head_dim") or not hasattr(attention, "scaling"):
            return None
        if 2 * len(base.rotary_emb.inv_freq) != attention.head_dim:  # a part of each head is turned
            return None
        return cls(base.embed_tokens, base.rotary_emb, known, base.norm, attention.head_dim, attention.scaling)


def has_hooks(causal_lm: nn.Module) -> bool:
    """Whether someone waits for calls of the model's own modules (FSDP, whoever looks at activations)."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, kind) for module in causal_lm.modules() for kind in kinds)


def _layer(module: Any) -> Layer | None:
    if _names(module) != LAYER:
        return None
    attention, mlp, norms = module.self_attn, module.mlp, (module.input_layernorm, module.post_attention_layernorm)
    if _names(attention) != ATTENTION or _names(mlp) != MLP or type(mlp.act_fn).__name__ not in SILU:
        return None
    linears = [getattr(attention, name) for name in ATTENTION] + [getattr(mlp, name) for name in MLP if name != "act_fn"]
    if any(type(linear) is not nn.Linear for linear in linears) or any(not hasattr(norm, "variance_epsilon") for norm in norms):
        return None
    qkv, gate_up = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
    if any(len({linear.bias is None for linear in joined}) > 1 for joined in (qkv, gate_up)):
        return None
    return Layer(norms[0], qkv, attention.o_proj, norms[1], gate_up, mlp.down_proj)


def _names(module: Any) -> tuple[str, ...]:
    return tuple(sorted(name for name, _ in module.named_children()))
