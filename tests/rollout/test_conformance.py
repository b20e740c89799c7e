"""The engine contract: kept by `hf` on both of its paths, and broken engines are told by the check that is meant for them."""

import re
from pathlib import Path

import numpy as np
import pytest

from rllm_lightning.registry import ENGINES, load_plugins
from rllm_lightning.rollout import conformance
from rllm_lightning.rollout.conformance import FAILED, NOT_PROMISED, PASSED, Result, run_checks, table
from rllm_lightning.rollout.conformance_checks import CHECKS, cut
from rllm_lightning.rollout.conformance_subject import Subject
from rllm_lightning.rollout.hf import HFEngine
from rllm_lightning.rollout.tokens import Sample

ROOT = Path(__file__).parents[2]


@pytest.fixture
def subject(model, tokenizer):
    def make(cls=HFEngine, draws=80, **keys):
        return Subject(lambda setup: cls(setup, **keys), model, tokenizer, draws=draws)

    return make


def failed(results):
    return {result.check for result in results if result.outcome == FAILED}


def test_hf_keeps_the_contract(subject, path):
    results = run_checks(subject(fast=path != "plain"))
    assert {result.outcome for result in results} == {PASSED}, table(results)
    assert len(results) == len(CHECKS)


class IgnoresTemperature(HFEngine):
    async def sample(self, prompt, params, stream):
        return await super().sample(prompt, params.with_overrides(temperature=1.0), stream)


class SaysRightDrawsWrong(HFEngine):
    """Log-probs of the temperature, for tokens drawn without it."""

    async def sample(self, prompt, params, stream):
        import torch

        drawn = await super().sample(prompt, params.with_overrides(temperature=1.0), stream)
        with torch.no_grad():
            logits = self.setup.model(input_ids=torch.tensor([prompt + drawn.tokens])).logits[0, len(prompt) - 1 : -1]
        scaled = torch.log_softmax(logits / (params.temperature or 1.0), -1)
        return Sample(drawn.tokens, scaled.gather(-1, torch.tensor(drawn.tokens)[:, None])[:, 0].tolist())


class ShiftedLogprobs(HFEngine):
    async def sample(self, prompt, params, stream):
        drawn = await super().sample(prompt, params, stream)
        return Sample(drawn.tokens, [0.0, *drawn.logprobs[:-1]])


class Retokenises(HFEngine):
    """Goes through text: what the sampled tokens were is lost (here: an answer is encoded as one that begins with `ab`)."""

    async def sample(self, prompt, params, stream):
        drawn = await super().sample(prompt, params, stream)
        ids = self._chat.encode(self._chat.decode(drawn.tokens))
        return Sample((ids + drawn.tokens)[: len(drawn.tokens)], drawn.logprobs)


class DoubledBOS(HFEngine):
    async def sample(self, prompt, params, stream):
        prompt.insert(0, prompt[0])
        return await super().sample(prompt, params, stream)


class ForgetsEnds(HFEngine):
    async def sample(self, prompt, params, stream):
        self._the_sampler().batch._stop_ids = frozenset()
        return await super().sample(prompt, params, stream)


class OneStream(HFEngine):
    async def sample(self, prompt, params, stream):
        return await super().sample(prompt, params, np.random.default_rng(0))


class StreamOfTheMoment(HFEngine):
    async def sample(self, prompt, params, stream):
        self.count = getattr(self, "count", 0) + (1 if not self._the_sampler().batch.num_open else 100)
        return await super().sample(prompt, params, np.random.default_rng(self.count))


class OldWeights(HFEngine):
    def __init__(self, setup):
        super().__init__(setup, dtype="float16")

    def on_weights_updated(self, weight_version):
        self.weight_version = weight_version


class CutsPrompts(HFEngine):
    def _check(self, prompt, params):
        del prompt[self.setup.max_prompt_length :]


class OneTokenMore(HFEngine):
    async def sample(self, prompt, params, stream):
        return await super().sample(prompt, params.with_overrides(max_tokens=params.max_tokens + 1), stream)


class DefaultTopK(HFEngine):
    async def sample(self, prompt, params, stream):
        return await super().sample(prompt, params.with_overrides(top_k=20), stream)


BROKEN = {
    IgnoresTemperature: {"log-probs are those of the temperature", "tokens are as frequent as the temperature has them"},
    SaysRightDrawsWrong: {"tokens are as frequent as the temperature has them"},
    ShiftedLogprobs: {"log-probs are the model's"},
    Retokenises: {"log-probs are the model's"},
    DoubledBOS: {"token ids go in and out as they are"},
    ForgetsEnds: {"every end token ends an answer, and nothing else"},
    OneStream: {"each request has a random stream of its own"},
    StreamOfTheMoment: {"tokens do not depend on what else is asked"},
    OldWeights: {"after an update answers come from the new weights"},
    CutsPrompts: {"a prompt over the limit ends its episode, and is never cut"},
    OneTokenMore: {"the limit of tokens holds to the token"},
    DefaultTopK: {"no token is cut off"},
}


@pytest.mark.parametrize("path", ["fast"])
@pytest.mark.parametrize("engine", BROKEN, ids=lambda engine: engine.__name__)
def test_a_broken_engine_is_told_by_the_check_meant_for_it(subject, engine, path):
    results = run_checks(subject(engine, draws=200), list(BROKEN[engine]))
    assert failed(results) == BROKEN[engine], table(results)


def test_what_is_not_promised_is_not_asked(subject):
    class Text(HFEngine):
        gives_tokens = repeatable = False

    results = run_checks(subject(Text), ["log-probs are the model's", "tokens do not depend on what else is asked"])
    assert [(result.outcome, result.numbers) for result in results] == [(NOT_PROMISED, "")] * 2


def test_an_exception_of_an_engine_is_a_failure_with_its_name(subject):
    class Raises(HFEngine):
        async def sample(self, prompt, params, stream):
            raise MemoryError("no room")

    (result,) = run_checks(subject(Raises), ["log-probs are the model's"])
    assert (result.outcome, result.numbers) == (FAILED, "MemoryError: no room")


def test_the_distribution_that_sampling_asks_for():
    import torch

    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert cut(logits).tolist() == pytest.approx([0.5, 0.25, 0.125, 0.125])
    assert cut(logits, top_k=2).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert cut(logits, top_p=0.6).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])  # .5 is too little, .75 is enough
    assert cut(logits, temperature=0.5).tolist() == pytest.approx([16 / 22, 4 / 22, 1 / 22, 1 / 22])  # squares


def test_the_command_prints_a_table_and_exits_with_1_on_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(conformance, "run_checks", lambda subject: [Result("a", PASSED, "1"), Result("bcd", FAILED, "2")])
    assert conformance.main(["hf", "builtin:tiny", "fast=false"]) == 1
    assert capsys.readouterr().out == "a    passed  1\nbcd  FAILED  2\n"
    monkeypatch.setattr(conformance, "run_checks", lambda subject: [Result("a", PASSED, "1")])
    assert conformance.main(["hf", "builtin:tiny"]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["hff", "builtin:tiny"], "did you mean 'hf'"),
        (["hf", "builtin:huge"], "no built-in model"),
        (["hf", "builtin:tiny", "fst=1"], "did you mean rollout_engine.fast"),
        (["hf", "builtin:tiny", "--plugins", "no_such_module"], "no_such_module"),
    ],
)
def test_what_cannot_be_asked_is_one_message_and_exit_code_2(argv, message, capsys):
    assert conformance.main(argv) == 2
    assert message in capsys.readouterr().err


def test_the_documented_engine_of_ones_own_keeps_all_but_what_the_document_says(model, tokenizer, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- example: engine -->\n```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_engines.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    load_plugins(["my_engines"])
    names = ["token ids go in", "log-probs are", "top_k", "top_p", "every end", "a later turn", "after an update", "tokens do not depend"]
    checks = [name for name in CHECKS if name.startswith(tuple(names))]
    results = run_checks(Subject(ENGINES.get("plain"), model, tokenizer, draws=60), checks)
    assert failed(results) == {"top_k keeps the k most likely tokens", "top_p keeps the smallest set with that probability"}, table(results)
    assert {result.outcome for result in results} == {PASSED, FAILED}
