"""The `vllm` engine's own logic, with a stand-in for the package: arguments, results, ends, the order of weights and sleep. No GPU."""

import asyncio
import copy
import importlib.machinery
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rllm_lightning.config import ConfigError, load_config
from rllm_lightning.registry import ENGINES
from rllm_lightning.rollout.engine import REQUEST, EngineSetup, RequestContext, SamplingParams
from rllm_lightning.rollout.vllm import VLLMEngine

MESSAGES = [{"role": "user", "content": "hi"}]


class FakeLLM:
    """Answers every prompt with tokens 50, 51 and the first stop id; notes the calls."""

    made: list = []  # noqa: RUF012

    def __init__(self, arguments):
        self.arguments, self.calls, self.requests, self.loaded, self.finish = arguments, [], [], [], "stop"
        self._load(arguments["model"])
        FakeLLM.made.append(self)

    @classmethod
    def from_engine_args(cls, arguments):
        return cls(vars(arguments))

    def _load(self, folder):
        assert Path(folder, "tokenizer_config.json").is_file()
        self.loaded.append(AutoModelForCausalLM.from_pretrained(folder).state_dict())

    async def generate(self, prompt, params, request_id):
        self.requests.append((prompt, vars(params), request_id))
        self.calls.append("generate")
        tokens = [50, 51, params.stop_token_ids[0]][: params.max_tokens]
        logprobs = [{token: SimpleNamespace(logprob=-0.5 * i), 7: SimpleNamespace(logprob=0.0)} for i, token in enumerate(tokens)]
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(tokens), logprobs=logprobs, finish_reason=self.finish)])

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.calls.append(method)
        self._load(kwargs["weights_path"])

    async def sleep(self, level):
        self.calls.append(f"sleep {level}")

    async def wake_up(self, tags):
        self.calls.append(f"wake up {' '.join(tags)}")

    async def reset_prefix_cache(self):
        self.calls.append("reset")

    def shutdown(self):
        self.calls.append("shutdown")


@pytest.fixture(autouse=True)
def _vllm(monkeypatch):
    """The package, and a GPU for it."""
    names = {
        "vllm": {},
        "vllm.sampling_params": {"SamplingParams": SimpleNamespace, "RequestOutputKind": SimpleNamespace(FINAL_ONLY="final only")},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": SimpleNamespace},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": FakeLLM},
    }
    for name, content in names.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(FakeLLM, "made", [])


@pytest.fixture
def engine(model, tokenizer):
    def make(policy=None, params=None, **keys):
        params = params or SamplingParams(max_tokens=16)
        return VLLMEngine(EngineSetup(policy or model, tokenizer, params, params, max_prompt_length=100), **keys)

    return make


def run(engine, *steps):
    """Each step: a question, or a coroutine function of the engine. The answers."""

    async def all_of_them():
        answers = []
        for step in steps:
            REQUEST.set(RequestContext(seed=1, task_id="a"))
            if callable(step):
                await step(engine)
            else:
                answers.append(await engine.get_model_response(MESSAGES, **step))
        await engine.shutdown()
        return answers

    return asyncio.run(all_of_them())


def rest(engine):
    return engine.rest()


def test_vllm_is_started_neutral_and_with_room_for_what_is_asked(engine):
    """B20: nothing of the checkpoint's generation config, log-probs of the distribution that is drawn from."""
    run(engine(tensor_parallel_size=2, engine_args={"block_size": 32}), {})
    (llm,) = FakeLLM.made
    assert llm.arguments | {"model": ""} == {
        "model": "",
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.3,
        "max_num_seqs": 256,
        "max_model_len": 116,  # 100 of the prompt and 16
        "enforce_eager": False,
        "enable_sleep_mode": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "block_size": 32,
    }


def test_a_request_is_token_ids_and_explicit_parameters(engine, tokenizer):
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=-1, max_tokens=16)
    run(engine(params=params), {}, {"top_k": 5})
    (prompt, asked, first), (_, other, second) = FakeLLM.made[0].requests
    ids = tokenizer.encode("<|user|>hi<|end|><|assistant|>", add_special_tokens=False)
    assert prompt == {"prompt_token_ids": ids}
    seed = asked.pop("seed")
    assert 0 <= seed < 2**31
    assert asked == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "max_tokens": 16,
        "stop_token_ids": [tokenizer.eos_token_id],
        "logprobs": 0,
        "detokenize": False,
        "output_kind": "final only",
    }
    assert other["top_k"] == 5
    assert first != second


def test_seeds_follow_from_who_asks(engine):
    one = engine()
    seeds = []
    for task in ("a", "b", "a"):

        async def ask(task=task):
            REQUEST.set(RequestContext(seed=1, task_id=task))
            await one.get_model_response(MESSAGES)

        asyncio.run(ask())
        seeds.append(FakeLLM.made[-1].requests[-1][1]["seed"])
    assert seeds[0] == seeds[2] != seeds[1]


def test_results_are_the_sampled_tokens_with_their_own_log_probs(engine, tokenizer):
    (whole,) = run(engine(), {})
    assert whole.completion_ids == [50, 51, tokenizer.eos_token_id]
    assert whole.logprobs == [0.0, -0.5, -1.0]
    assert (whole.finish_reason, whole.text) == ("stop", tokenizer.decode([50, 51]))
    (cut,) = run(engine(), {"max_tokens": 2})
    assert (cut.completion_ids, cut.finish_reason) == ([50, 51], "length")


def test_a_request_that_vllm_gave_up_is_an_error(engine):
    one = engine()

    async def give_up(engine):
        FakeLLM.made[0].finish = "abort"

    with pytest.raises(RuntimeError, match="'abort'"):
        run(one, {}, give_up, {})


def test_new_weights_come_before_the_next_request_and_only_once(engine, model):
    """The names are those of a Hugging Face checkpoint, which vLLM reads."""
    policy = copy.deepcopy(model)

    async def update(engine):
        with torch.no_grad():
            policy.lm_head.weight.add_(1.0)
        engine.on_weights_updated(engine.weight_version + 1)

    answers = run(engine(policy), {}, {}, update, {}, {})
    (llm,) = FakeLLM.made
    assert llm.calls == ["generate", "generate", "reload_weights", "reset", "generate", "generate", "shutdown"]
    assert [answer.weight_version for answer in answers] == [0, 0, 1, 1]
    for loaded, expected in zip(llm.loaded, (model, policy), strict=True):
        assert loaded.keys() == expected.state_dict().keys()
        assert all(torch.equal(loaded[name], weight) for name, weight in expected.state_dict().items())


def test_low_rank_adapters_are_merged_into_what_vllm_loads(engine, model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    before = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    run(engine(adapted), {})
    ids = torch.arange(10)[None]
    merged = copy.deepcopy(model)
    merged.load_state_dict(FakeLLM.made[0].loaded[0])
    torch.testing.assert_close(merged(ids).logits, adapted.eval()(ids).logits, rtol=0, atol=1e-4)
    assert all(torch.equal(before[name], weight) for name, weight in adapted.state_dict().items())


def test_between_rollouts_vllm_sleeps_and_wakes_with_the_present_weights(engine):
    run(engine(), {}, rest, rest, {}, rest, {})
    woken = ["wake up weights", "reload_weights", "wake up kv_cache", "reset", "generate"]
    assert FakeLLM.made[0].calls == ["generate", "sleep 2", *woken, "sleep 2", *woken, "shutdown"]
    run(engine(sleep=False), {}, rest, {})
    assert FakeLLM.made[1].calls == ["generate", "generate", "shutdown"]


def test_requests_together_start_one_vllm(engine):
    async def together(engine):
        await asyncio.gather(*[engine.get_model_response(MESSAGES) for _ in range(5)])

    run(engine(), together)
    assert len(FakeLLM.made) == 1
    assert FakeLLM.made[0].calls.count("generate") == 5


def test_weights_leave_nothing_behind(engine):
    one = engine()
    run(one, {})
    assert not Path(FakeLLM.made[0].arguments["model"]).parent.exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dtype": "half"}, "rollout_engine.dtype: must be one of"),
        ({"tensor_parallel_size": 0}, "rollout_engine.tensor_parallel_size: must be at least 1, got 0"),
        ({"max_batch_size": 0}, "rollout_engine.max_batch_size: must be at least 1"),
        ({"gpu_memory_utilization": 1.5}, "rollout_engine.gpu_memory_utilization: must be in (0, 1), got 1.5"),
    ],
)
def test_keys_out_of_range_are_named(engine, keys, message):
    with pytest.raises(ValueError) as error:
        engine(**keys)
    assert message in str(error.value)


def test_without_a_gpu_or_the_package_the_config_is_refused(monkeypatch):
    assert ENGINES.get("vllm") is VLLMEngine
    load_config(["rollout_engine.name=vllm"])
    monkeypatch.delitem(sys.modules, "vllm")
    with pytest.raises(ConfigError, match=r"rollout_engine\.name: vllm needs the package vllm.*rllm-lightning\[vllm\]"):
        load_config(["rollout_engine.name=vllm"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"rollout_engine\.name: vllm needs a CUDA GPU"):
        load_config(["rollout_engine.name=vllm"])


def test_several_training_processes_are_refused(engine, monkeypatch):
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with pytest.raises(ValueError, match="one process"):
        engine()
