"""`openai`: rollouts from a server that speaks OpenAI's HTTP interface: vLLM, SGLang, llama.cpp, `transformers serve`.

Two ways to ask. As text (the default): messages to `/chat/completions`, the server's own template and tokens; any server can
answer, and the answers serve evaluation. As token ids (`tokens: true`): the policy's tokenizer makes the prompt, and
`/completions` gives sampled ids and log-probs, as vLLM's server does with `return_token_ids`; with `weights_folder` the server
loads the policy's weights after each update, and what it samples can be trained on.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from rllm_lightning.registry import register_rollout_engine
from rllm_lightning.rollout.engine import EngineSetup, RolloutEngine, SamplingParams, current_request
from rllm_lightning.rollout.exchange import WeightFolder
from rllm_lightning.rollout.http import JsonClient, ServerError, secret_problems, url_problems
from rllm_lightning.rollout.loops import OfLoop
from rllm_lightning.rollout.tokens import Sample, TokenEngine, seed_from
from rllm_lightning.schema import show
from rllm_lightning.types import ModelOutput, TerminationEvent, TerminationReason

NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@register_rollout_engine("openai")
class OpenAIEngine(RolloutEngine):
    """Asks a server; see the module.

    Every request has a seed from its own random stream; whether a server then repeats itself is its affair. Asked as text,
    `temperature`, `top_p` and `max_tokens` go along, `top_k` where it is set; anything else stands as the server has it: start
    vLLM with `--generation-config vllm`, and give `transformers serve` a `generation_config` in `extra_body`.

    Args:
        base_url: up to `/v1`.
        model: the server's name for it.
        api_key_env: the environment variable that holds the key (null: none is sent). The key itself is written nowhere.
        tokens: exchange token ids and log-probs.
        weights_folder: a folder that server and trainer both see, through which a vLLM server (`VLLM_SERVER_DEV_MODE=1`) gets the
            policy's weights before the first request and after each update. Training needs it.
        extra_body: more fields of every request; they win.
        timeout: seconds for one try.
        max_retries: further tries after a lost connection, a timeout, or a status such as 429 or 503.
        max_open_requests: more wait.

    Raises:
        ValueError: what `check_keys` finds.
        ServerError: at a request: what the server did or said.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        base_url: str,
        model: str,
        api_key_env: str | None = None,
        tokens: bool = False,
        weights_folder: str | None = None,
        extra_body: dict[str, Any] | None = None,
        timeout: float = 600.0,
        max_retries: int = 5,
        max_open_requests: int = 64,
    ):
        super().__init__(setup)
        if problems := self.check_keys(locals(), training=False):
            raise ValueError("\n".join(f"rollout_engine.{problem}" for problem in problems))
        key = None if api_key_env is None else os.environ[api_key_env]
        client = JsonClient(base_url, key, timeout=timeout, max_retries=max_retries, max_open=max_open_requests)
        common = {"model": model, **(extra_body or {})}
        self._client = client
        self.gives_tokens = tokens
        self._asking: RolloutEngine = _TokenServer(setup, client, common, weights_folder) if tokens else _TextServer(setup, client, common)

    @classmethod
    def check_keys(cls, keys: Mapping[str, Any], training: bool) -> list[str]:
        problems = [*url_problems("base_url", keys.get("base_url")), *secret_problems("api_key_env", keys.get("api_key_env"))]
        if importlib.util.find_spec("httpx") is None:
            problems.append("name: openai needs the package httpx: pip install 'rllm-lightning[openai]'")
        for name, least in (("max_retries", 0), ("max_open_requests", 1), ("timeout", 1e-3)):
            if (value := keys.get(name, least)) < least:
                problems.append(f"{name}: must be at least {least:g}, got {value:g}")
        if keys.get("weights_folder") is not None and not keys.get("tokens"):
            problems.append("weights_folder: needs rollout_engine.tokens=true")
        elif training and not keys.get("tokens"):
            problems.append(
                "name: openai asks the server as text, without token ids and log-probs, which training needs; set "
                "rllm.trainer.val_only=true, or rollout_engine.tokens=true where the server gives them (vLLM)"
            )
        elif training and keys.get("weights_folder") is None:
            problems.append("weights_folder: without it the server's weights would stay as they are; set it, or rllm.trainer.val_only=true")
        return problems

    async def get_model_response(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **overrides: Any
    ) -> ModelOutput:
        return await self._asking.get_model_response(messages, tools=tools, **overrides)

    def on_weights_updated(self, weight_version: int) -> None:
        super().on_weights_updated(weight_version)
        self._asking.on_weights_updated(weight_version)

    async def rest(self) -> None:
        await self._asking.rest()

    async def shutdown(self) -> None:
        await self._asking.shutdown()
        await self._client.close()


class _TextServer(RolloutEngine):
    """Messages in, text out."""

    def __init__(self, setup: EngineSetup, client: JsonClient, common: dict[str, Any]):
        super().__init__(setup)
        self._client, self._common = client, common

    async def get_model_response(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **overrides: Any
    ) -> ModelOutput:
        context = current_request()
        params = self.params_for(context, overrides)
        body = {"messages": messages, **_sampling(params, context.next_stream())}
        if params.top_k > 0:
            body["top_k"] = params.top_k
        if tools is not None:
            body["tools"] = tools
        answer = await self._client.post("/chat/completions", {**body, **self._common})
        choice = _first_choice(answer, self._client)
        message, usage = choice.get("message") or {}, answer.get("usage") or {}
        if int(usage.get("prompt_tokens") or 0) > self.setup.max_prompt_length:
            raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED)
        text = message.get("content") or ""
        return ModelOutput(
            text=text,
            content=text,
            reasoning=message.get("reasoning") or message.get("reasoning_content"),
            tool_calls=message.get("tool_calls") or None,
            prompt_length=int(usage.get("prompt_tokens") or 0),
            completion_length=int(usage.get("completion_tokens") or 0),
            finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
            weight_version=self.weight_version,
        )


class _TokenServer(TokenEngine):
    """Token ids in, token ids and log-probs out."""

    def __init__(self, setup: EngineSetup, client: JsonClient, common: dict[str, Any], weights_folder: str | None):
        super().__init__(setup, "openai")
        self._client, self._common = client, common
        self._weights = None if weights_folder is None else WeightFolder(setup.model, setup.tokenizer, weights_folder)
        self._stale = self._weights is not None
        self._loading = OfLoop(asyncio.Lock)

    async def sample(self, prompt: list[int], params: SamplingParams, stream: np.random.Generator) -> Sample:
        await self._hand_over_weights()
        body = {
            "prompt": prompt,
            **_sampling(params, stream),
            **NEUTRAL,
            "stop_token_ids": sorted(self._stop_ids),
            "add_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
        }
        if params.top_k > 0:
            body["top_k"] = params.top_k
        answer = await self._client.post("/completions", {**body, **self._common})
        choice = _first_choice(answer, self._client)
        tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not tokens or not logprobs or len(tokens) != len(logprobs):
            raise ServerError(
                f"{self._client.base_url}/completions: no token_ids with as many token_logprobs in the answer; "
                "rollout_engine.tokens=true needs a server that knows return_token_ids (vLLM)"
            )
        if choice.get("prompt_token_ids", prompt) != prompt:
            raise ServerError(f"{self._client.base_url}/completions: the server answered another prompt than the one it was given")
        return Sample([int(token) for token in tokens], [float(logprob) for logprob in logprobs])

    def on_weights_updated(self, weight_version: int) -> None:
        super().on_weights_updated(weight_version)
        self._stale = self._weights is not None

    async def shutdown(self) -> None:
        if self._weights is not None:
            self._weights.remove()

    async def _hand_over_weights(self) -> None:
        """Before the first request that follows an update, which all others wait for."""
        if not self._stale:
            return
        async with self._loading.get():
            if self._stale and self._weights is not None:
                folder = await self._weights.write()
                root = self._client.base_url.removesuffix("/v1")
                await self._client.post(f"{root}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
                await self._client.post(f"{root}/reset_prefix_cache", {})  # states of the old weights
                self._stale = False


def _sampling(params: SamplingParams, stream: np.random.Generator) -> dict[str, Any]:
    return {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": seed_from(stream),
    }


def _first_choice(answer: Any, client: JsonClient) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise ServerError(f"{client.base_url}: an answer without choices: {show(answer)}")
    return choices[0]
