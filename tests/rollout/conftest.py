"""A small random Llama with the character tokenizer, and helpers that ask an engine over it."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rllm_lightning.models.tiny import tiny_tokenizer
from rllm_lightning.rollout.engine import REQUEST, EngineSetup, RequestContext, SamplingParams
from rllm_lightning.rollout.hf import HFEngine
from rllm_lightning.rollout.packed_llama import PackedLlama


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def make_model(tokenizer):
    """make_model(**config) -> a random two-layer Llama in float32; pad is EOS."""

    def make(spread=4.0, **config):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = LlamaForCausalLM(LlamaConfig(**{**sizes, **ids, "max_position_embeddings": 512, **config}))
            with torch.no_grad():
                model.lm_head.weight.mul_(spread / 0.02 / 32**0.5)  # logits of about this spread, so that it matters what is attended to
        return model.eval()

    return make


@pytest.fixture
def model(make_model):
    return make_model()


@pytest.fixture(params=["fast", "own layers", "plain"])
def path(request, monkeypatch):
    """The decoder that engines use by default: packed tokens through layers of ours, or through the model's own (as for models that
    are not built like Llama, and on a GPU); or the plain one."""
    if request.param == "own layers":
        monkeypatch.setattr(PackedLlama, "of", lambda model: None)
    return request.param


@pytest.fixture
def make_engine(model, tokenizer, path):
    """make_engine(model=None, max_tokens=16, max_prompt_length=256, sampling={}, **keys) -> HFEngine."""

    def make(policy=None, max_tokens=16, max_prompt_length=256, sampling=None, chat=None, **keys):
        params = SamplingParams(max_tokens=max_tokens, **(sampling or {}))
        setup = EngineSetup(policy or model, chat or tokenizer, train=params, val=params, max_prompt_length=max_prompt_length)
        return HFEngine(setup, **{"fast": path != "plain", **keys})

    return make


@pytest.fixture
def ask():
    """ask(engine, contents, together=True, order=None, **context) -> answers in the order of `contents`; the i-th asks as
    task `str(i)`."""

    async def one(engine, index, content, context, overrides):
        REQUEST.set(RequestContext(**{"seed": 1, "task_id": str(index), **context}))
        return await engine.get_model_response([{"role": "user", "content": content}], **overrides)

    def run(engine, contents, together=True, order=None, overrides=None, **context):
        order = list(range(len(contents))) if order is None else order

        async def all_of_them():
            asking = [one(engine, i, contents[i], context, overrides or {}) for i in order]
            if together:
                return await asyncio.gather(*[asyncio.create_task(call) for call in asking])
            return [await asyncio.create_task(call) for call in asking]

        answers = asyncio.run(all_of_them())
        return [answer for _, answer in sorted(zip(order, answers, strict=True), key=lambda pair: pair[0])]

    return run


@pytest.fixture
def reference():
    """reference(model, answer, temperature=1) -> its tokens' log-probs from one plain full forward pass."""

    def logprobs(model, answer, temperature=1.0):
        ids = torch.tensor([answer.prompt_ids + answer.completion_ids])
        with torch.no_grad():
            logits_TV = model(ids).logits[0, answer.prompt_length - 1 : -1].float() / temperature
        tokens_T = torch.tensor(answer.completion_ids)
        return torch.log_softmax(logits_TV, -1).gather(-1, tokens_T[:, None])[:, 0]

    return logprobs


@pytest.fixture
def mixed_prompts():
    """Prompts of lengths 4 to 36 tokens, two of them twice."""
    words = ["", "a", "why?", "count to ten", "what is 17 + 25? think first", "b" * 29]
    return [words[i] for i in (0, 3, 1, 5, 3, 2, 4, 5)]


@pytest.fixture
def same_answers():
    """same_answers(a, b): same tokens, log-probs equal to rounding."""

    def check(some, others):
        for one, other in zip(some, others, strict=True):
            assert one.completion_ids == other.completion_ids
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=2e-5)

    return SimpleNamespace(check=check).check
