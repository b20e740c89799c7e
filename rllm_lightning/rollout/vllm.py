"""`vllm`: rollouts by vLLM on the GPUs of this machine, beside the trainer.

    sample ──> AsyncLLM (its workers are processes of their own) ──> token ids and log-probs
                  ▲
    after an update, before the next request: the policy as a checkpoint in memory (`WeightFolder`), `reload_weights`

While nobody asks (`rest`), vLLM sleeps and its weights and cache leave the GPU to the trainer.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from rllm_lightning.config_sections import DTYPES
from rllm_lightning.registry import register_rollout_engine
from rllm_lightning.rollout.engine import EngineSetup, SamplingParams
from rllm_lightning.rollout.exchange import WeightFolder
from rllm_lightning.rollout.loops import OfLoop
from rllm_lightning.rollout.tokens import Sample, TokenEngine, positions_of, seed_from


@register_rollout_engine("vllm")
class VLLMEngine(TokenEngine):
    """Samples with vLLM from a copy of the policy.

    Neutral defaults (`generation_config="vllm"`: nothing of the checkpoint's generation config), and log-probs of the distribution
    the tokens were drawn from (`logprobs_mode="processed_logprobs"`). vLLM's kernels and the trainer's round differently, by about
    1e-2 in bfloat16: `rllm.algorithm.rollout_correction` can take care of it. A request's seed is its own, but vLLM's tokens may
    change with what else is in the batch.

    Args:
        dtype: precision to sample in.
        tensor_parallel_size: GPUs that share the model.
        gpu_memory_utilization: share of each GPU's memory for vLLM's weights and cache.
        sleep: give that memory back between rollouts.
        max_batch_size: requests decoded at once; more wait.
        enforce_eager: no CUDA graphs: starts faster, samples slower.
        engine_args: more arguments of vLLM's `AsyncEngineArgs`; they win.

    Raises:
        ValueError: what `check_keys` finds (no vLLM, no CUDA GPU, ...), or several training processes.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        dtype: str = "bfloat16",
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.3,
        sleep: bool = True,
        max_batch_size: int = 256,
        enforce_eager: bool = False,
        engine_args: dict[str, Any] | None = None,
    ):
        super().__init__(setup, "vllm")
        if problems := self.check_keys(locals(), training=True):
            raise ValueError("\n".join(f"rollout_engine.{problem}" for problem in problems))
        self._arguments = {
            "dtype": dtype,
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_num_seqs": max_batch_size,
            "max_model_len": self.max_positions,
            "enforce_eager": enforce_eager,
            "enable_sleep_mode": sleep,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            **(engine_args or {}),
        }
        self._sleeps = sleep
        self._weights = WeightFolder(setup.model, setup.tokenizer)
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the engine
        self._stale = self._asleep = False
        self._changing = OfLoop(asyncio.Lock)
        self._numbers = itertools.count()

    @classmethod
    def check_keys(cls, keys: Mapping[str, Any], training: bool) -> list[str]:
        import torch

        problems = []
        if not torch.cuda.is_available():
            problems.append("name: vllm needs a CUDA GPU, and there is none here; rollout_engine.name=hf runs anywhere")
        elif importlib.util.find_spec("vllm") is None:
            problems.append("name: vllm needs the package vllm: pip install 'rllm-lightning[vllm]'")
        if (dtype := keys.get("dtype", "bfloat16")) not in DTYPES:
            problems.append(f"dtype: must be one of {', '.join(DTYPES)}; got {dtype!r}")
        for name in ("tensor_parallel_size", "max_batch_size"):
            if (count := keys.get(name, 1)) < 1:
                problems.append(f"{name}: must be at least 1, got {count}")
        if not 0 < (share := keys.get("gpu_memory_utilization", 0.3)) < 1:
            problems.append(f"gpu_memory_utilization: must be in (0, 1), got {share}")
        return problems

    @property
    def max_positions(self) -> int:
        """As many as requests need and the model has: vLLM wants room in its cache for a sequence of this length."""
        needed = self.setup.max_prompt_length + max(self.setup.train.max_tokens, self.setup.val.max_tokens)
        return min(needed, positions_of(self.setup.model) or needed)

    async def sample(self, prompt: list[int], params: SamplingParams, stream: np.random.Generator) -> Sample:
        from vllm.sampling_params import RequestOutputKind
        from vllm.sampling_params import SamplingParams as VLLMParams

        request = VLLMParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(0, params.top_k),
            max_tokens=params.max_tokens,
            seed=seed_from(stream),
            stop_token_ids=sorted(self._stop_ids),
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine = await self._up_to_date()
        answers = [answer async for answer in engine.generate({"prompt_token_ids": prompt}, request, str(next(self._numbers)))]
        completion = answers[-1].outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a request with {completion.finish_reason!r}")
        tokens = [int(token) for token in completion.token_ids]
        return Sample(tokens, [float(of_token[token].logprob) for token, of_token in zip(tokens, completion.logprobs, strict=True)])

    def on_weights_updated(self, weight_version: int) -> None:
        super().on_weights_updated(weight_version)
        self._stale = True

    async def rest(self) -> None:
        await super().rest()
        async with self._changing.get():
            if self._sleeps and self._engine is not None and not self._asleep:
                await self._engine.sleep(level=2)  # weights are dropped: what follows mostly changes them, and they are read anew
                self._asleep = self._stale = True

    async def shutdown(self) -> None:
        self._stop()
        self._weights.remove()

    async def _up_to_date(self) -> Any:
        """The engine with the policy's present weights. Whoever comes first waits for them, and all others with it."""
        async with self._changing.get():
            if self._engine is not None and self._loop is not asyncio.get_running_loop():
                self._stop()  # its tasks ended with their loop
            if self._engine is None:
                await self._start()
            elif self._stale:
                await self._reload()
            self._stale = self._asleep = False
            return self._engine

    async def _start(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        folder = await self._weights.write()
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **self._arguments))
        self._loop = asyncio.get_running_loop()

    async def _reload(self) -> None:
        """Weights first, the cache's memory after them, so that both and a copy of the weights never stand side by side."""
        folder = await self._weights.write()
        if self._asleep:
            await self._engine.wake_up(tags=["weights"])
        await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        if self._asleep:
            await self._engine.wake_up(tags=["kv_cache"])
        await self._engine.reset_prefix_cache()  # states of the old weights

    def _stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()
