"""`Policy`: the trained module. It scores tokens (log-probs, entropies, values), keeps the reference policy, and saves itself.

    rows -> MicroBatch (`layout.py`) -> body (the model's own, or `packed_body.py`) -> hidden states where a response token is predicted
         -> head (`head.py`) -> [B, T] tensors

Dropout is off in the model (`models.load.disable_dropout`), so sampling, log-prob passes and updates see one distribution;
the module is in training mode during updates only (gradient checkpointing needs it) and in eval mode otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rllm_lightning.config import Config
from rllm_lightning.models.llama import Llama, has_hooks
from rllm_lightning.models.load import load_model
from rllm_lightning.models.save import save_model
from rllm_lightning.trainer.adapters import has_adapter, leave_out_frozen_weights, save_adapter
from rllm_lightning.trainer.batch import MicroBatch, Row
from rllm_lightning.trainer.head import logprobs_from_logits, token_logprobs
from rllm_lightning.trainer.layout import LayoutCost, PrefixTree, collate_rows, collate_trees, make_chains, micro_batches
from rllm_lightning.trainer.packed_body import PackedBody
from rllm_lightning.types import Step

logger = logging.getLogger(__name__)


class Scores(NamedTuple):
    """What the policy says of the response tokens of a micro-batch: [B, T] each, 0 in padding, float32.

    `logprobs` under the training temperature; `entropies` of the same distribution; `values` where there is a value head.
    """

    logprobs: Tensor
    entropies: Tensor
    values: Tensor | None = None


class Policy(nn.Module):
    """A causal language model as the policy of token choices.

    Args:
        model: a Hugging Face causal LM (or a PEFT model around one).
        tokenizer: its tokenizer.
        temperature: of the training rollouts; log-probs are those of logits / temperature.
        value_head: add a linear head that estimates the return from each token's state (for estimators that need values).
        tree: compute a prefix that rows share once, where the model allows it, and on a CPU a model like Llama by `PackedBody`.
    """

    def __init__(self, model: Any, tokenizer: Any, temperature: float = 1.0, value_head: bool = False, tree: bool = True):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.value_head: nn.Linear | None = None
        if value_head:
            width = model.get_output_embeddings().weight.shape[1]
            self.value_head = nn.Linear(width, 1, dtype=torch.promote_types(model.dtype, torch.float32))
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        if has_adapter(model):
            leave_out_frozen_weights(self)
        self._reference: list[Any] = []  # in a list, so that it is no submodule: neither trained nor in checkpoints
        self._compiled_body: Callable[..., Any] | None = None
        self.eval()
        self.plain_head = self._has_plain_head()
        self._tree = tree
        self.packed_body: PackedBody | None = None  # the model's own code
        self.tree_cost = LayoutCost.of(self._causal_lm) if tree and self._sees_trees() else None
        self.packed_body = self._find_packed_body() if tree else None
        if value_head and not self.plain_head:
            raise ValueError("model.name: this model's head is more than a matrix product; a value head cannot be put beside it")

    @classmethod
    def from_config(cls, config: Config, value_head: bool = False) -> Policy:
        """The policy that a config names. Raises `ConfigError` where the model cannot be loaded."""
        model, tokenizer = load_model(config.model, config.seed)
        policy = cls(model, tokenizer, config.sampling.train.temperature, value_head, config.training.tree)
        if config.model.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.model.compile:
            # the bound method, not the module: parameter names stay as they are, and sampling stays eager
            policy._compiled_body = torch.compile(policy._causal_lm.base_model.forward, dynamic=True)
        if config.model.gradient_checkpointing or config.model.compile:
            policy.packed_body = None
        return policy

    @property
    def _causal_lm(self) -> Any:
        """The causal LM itself, inside of adapters."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(self, micro: MicroBatch) -> Scores:
        """Score the response tokens of `micro` (see `Scores`)."""
        inputs = {
            "input_ids": micro.input_ids,
            "attention_mask": self._mask(micro.attention_mask),
            "position_ids": micro.position_ids,
            "use_cache": False,
        }
        if not self.plain_head:
            logits_NV = micro.gather(self.model(**inputs).logits)
            logprobs_N, entropies_N = logprobs_from_logits(logits_NV, micro.targets_N, self.temperature)
            return Scores(micro.spread(logprobs_N), micro.spread(entropies_N))
        if self.packed_body is not None and self._takes_packed_body:
            hidden_ND = micro.gather(self.packed_body(micro))
        else:
            body = self._compiled_body or self._causal_lm.base_model
            hidden_ND = micro.gather(body(**inputs).last_hidden_state)
        head = self._causal_lm.get_output_embeddings()
        logprobs_N, entropies_N = token_logprobs(hidden_ND, head.weight, getattr(head, "bias", None), micro.targets_N, self.temperature)
        values_BT = (
            None if self.value_head is None else micro.spread(self.value_head(hidden_ND.to(self.value_head.weight.dtype)).squeeze(-1))
        )
        return Scores(micro.spread(logprobs_N), micro.spread(entropies_N), values_BT)

    def micro_batches(self, rows: Sequence[Row], max_tokens: int) -> Iterator[MicroBatch]:
        """The forward passes of some rows, laid out in the cheapest way that this model allows, on its device."""
        cost = self.tree_cost and replace(self.tree_cost, in_blocks=self._takes_packed_body)
        return micro_batches(rows, max_tokens, self.device, cost)

    @property
    def _takes_packed_body(self) -> bool:
        """Whether the layers are computed by ours now: a model may have moved since, or somebody waits at its own."""
        return self.packed_body is not None and self.device.type == "cpu" and not has_hooks(self._causal_lm)

    def _mask(self, mask: Tensor) -> Tensor:
        """A tree's mask in the form that the model's attention takes: bool for SDPA, numbers to be added for the eager one."""
        if mask.dtype == torch.bool and self._causal_lm.config._attn_implementation == "eager":
            lowest = torch.finfo(self._causal_lm.dtype).min
            return torch.zeros(mask.shape, dtype=self._causal_lm.dtype, device=mask.device).masked_fill(~mask, lowest)
        return mask

    def _sees_trees(self) -> bool:
        """Whether the model takes a mask and positions of ours: tried on two rows with a common prefix. Windowed, recurrent and
        position-free attention give other numbers there, or refuse the mask."""
        rows, tree = self._trial_rows(), PrefixTree()
        for chain in make_chains(rows):
            tree.add(chain)
        try:
            with torch.no_grad():
                plain, shared = (self(layout).logprobs for layout in (collate_rows(rows, self.device), collate_trees([tree], self.device)))
                shifted = self(
                    replace(collate_trees([tree], self.device), position_ids=torch.arange(len(tree), device=self.device)[None])
                ).logprobs
        except Exception as error:  # models refuse a mask in many ways; the padded layout always works
            logger.info("the model takes no tree masks (%s); rows are computed one by one", error)
            return False
        gap, wrong = (plain - shared).abs().max(), (plain - shifted).abs().max()
        return bool(gap < 0.05 * wrong) if wrong > 0 else False

    def _find_packed_body(self) -> PackedBody | None:
        """The layers as `PackedBody` computes them, where the model is built like Llama. The names of its parts only promise that, so
        the hidden states of a few tokens are compared with those of its own code."""
        llama = Llama.of(self._causal_lm) if self.plain_head and self.device.type == "cpu" else None
        if llama is None:
            return None
        layout, body = collate_rows(self._trial_rows(), self.device), PackedBody(llama)
        with torch.no_grad():
            packed = layout.gather(body(layout)).double()
            own = self._causal_lm.base_model(
                input_ids=layout.input_ids, attention_mask=layout.attention_mask, position_ids=layout.position_ids, use_cache=False
            )
            expected = layout.gather(own.last_hidden_state).double()
        tolerance = 2e-4 if self._causal_lm.dtype in (torch.float32, torch.float64) else 0.1  # SmolLM2: 5e-7, .013
        return body if (packed - expected).norm() < tolerance * expected.norm() else None

    def _trial_rows(self) -> list[Row]:
        """Two rows with a common prefix. No token is among the first, which are special ones: on them states may be so large that
        rounding alone tells two computations apart (SmolLM2 in bfloat16: by .4)."""
        vocab_size = self._causal_lm.get_input_embeddings().weight.shape[0]
        a, b, c, d, e, f = ((7 * i + 1) % vocab_size for i in range(1, 7))
        responses = ([d, e], [f, e, d])
        return [Row(Step(prompt_ids=[a, b, c], response_ids=response), index, 0, "", None) for index, response in enumerate(responses)]

    def _has_plain_head(self) -> bool:
        """Whether the logits are the head's matrix product and nothing else (no scaling, no soft cap): tried on two tokens."""
        ids = torch.tensor([[0, 1]], device=self.device)
        with torch.no_grad():
            hidden = self._causal_lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
            direct = self._causal_lm.get_output_embeddings()(hidden).float()
            whole = self._causal_lm(input_ids=ids, use_cache=False).logits.float()
        return direct.shape == whole.shape and torch.allclose(direct, whole, rtol=1e-3, atol=1e-3 * whole.abs().max().item())

    # ------------------------------------------------------------------------------------------------- reference policy

    def keep_reference(self) -> None:
        """Remember the weights of this moment as the reference policy. With adapters nothing is copied: the reference is the
        model without them."""
        if not has_adapter(self.model) and not self._reference:
            frozen = copy.deepcopy(self.model).eval().requires_grad_(False)
            self._reference = [Policy(frozen, self.tokenizer, self.temperature, tree=self._tree)]

    @property
    def reference_weights(self) -> dict[str, Tensor] | None:
        """The reference policy's own weights (for checkpoints), None where it has none."""
        return self._reference[0].model.state_dict() if self._reference else None

    def load_reference(self, weights: dict[str, Tensor]) -> None:
        self.keep_reference()
        self._reference[0].model.load_state_dict(weights)

    @torch.no_grad()
    def reference_logprobs(self, micro: MicroBatch) -> Tensor:
        """Log-probs [B, T] of the response tokens under the reference policy."""
        if has_adapter(self.model):
            with self.model.disable_adapter():
                return self(micro).logprobs
        if not self._reference:
            raise RuntimeError("no reference policy: call keep_reference() before training")
        reference = self._reference[0]
        if reference.device != self.device:
            reference.to(self.device)
        return reference(micro).logprobs

    # ------------------------------------------------------------------------------------------------------------ saving

    @contextlib.contextmanager
    def training_mode(self) -> Iterator[None]:
        """Training mode inside, the former mode after."""
        former = self.training
        self.train()
        try:
            yield
        finally:
            self.train(former)

    def unsharded(self) -> Policy:
        """The policy with all of its weights in this process."""
        return self

    def save(self, folder: Path) -> None:
        """Write model and tokenizer in Hugging Face format (safetensors). Adapters are merged into the weights, and stand beside them
        in `adapter/` (package peft)."""
        self.write(self.model, folder)

    def write(self, model: Any, folder: Path) -> None:
        """`save` of another model of this kind."""
        if has_adapter(model):
            save_adapter(model, folder)
        save_model(model, self.tokenizer, folder)
