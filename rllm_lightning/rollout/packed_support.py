"""Whether a model can be decoded by the fast path: asked of the model itself, not of a list of names.

Its cache must hold keys and values of every token and nothing else, and with `packed_attention` in place of its own attention
it must give the logits it gives without.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rllm_lightning.rollout.decoding import Decoder
from rllm_lightning.rollout.packed_attention import UnsupportedModel
from rllm_lightning.rollout.weights import SamplingModel


def cache_shape(model: SamplingModel) -> tuple[int, int, int, torch.dtype, torch.device]:
    """Layers, key heads, their dimension, dtype and device of a model's cache, as a forward pass of one token shows them.

    Raises:
        UnsupportedModel: the model keeps something else than the keys and values of all tokens, or takes no attention function.
    """
    causal_lm = model.causal_lm
    parameters = inspect.signature(causal_lm.forward).parameters
    if not getattr(causal_lm, "_supports_attention_backend", False) or not {"logits_to_keep", "position_ids"} <= set(parameters):
        raise UnsupportedModel("its code does not take an attention function from outside")
    cache = DynamicCache(config=causal_lm.config)
    name = "cache" if "cache" in parameters else "past_key_values"
    causal_lm(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True, **{name: cache})
    layers: list[Any] = cache.layers
    if kinds := sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}):
        raise UnsupportedModel(f"its layers keep {', '.join(kinds)}")
    states = [state for layer in layers for state in (layer.keys, layer.values)]
    if len({(state.shape, state.dtype, state.device) for state in states}) > 1:
        raise UnsupportedModel("its layers' keys and values differ in shape, dtype or device")
    return len(layers), states[0].shape[1], states[0].shape[3], states[0].dtype, states[0].device


def probe(decoder: Decoder, causal_lm: Any) -> Tensor:
    """Logits that a decoder gives for a few tokens: prompts that come together, equal ones, one that comes later."""
    vocab_size = causal_lm.config.get_text_config(decoder=True).vocab_size
    first, second, third = ([7 * i % vocab_size for i in range(start, start + length)] for start, length in ((1, 6), (4, 3), (2, 4)))
    logits = [decoder.advance([], [first, second, second]), decoder.advance(second, [third]), decoder.advance(third, [])]
    decoder.clear()
    decoder.pop_metrics()
    return torch.cat(logits)


def compare(logits: Tensor, expected: Tensor) -> None:
    """Raises `UnsupportedModel` where logits differ by more than rounding (measured: 2e-6 in float32, .025 in bfloat16, 30 layers)."""
    tolerance = 1e-3 if expected.dtype == torch.float32 else 0.1
    logits, expected = logits.double(), expected.double()
    error = float((logits - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm())
    if not error < tolerance:
        raise UnsupportedModel(f"its own forward pass gives other logits (relative difference {error:.1e})")
