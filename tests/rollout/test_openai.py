"""Rollouts from a server: a real one, one that speaks vLLM's token ids, and servers that fail."""

import asyncio
import copy
import json
import logging

import pytest
import torch

from experiments import run as run_script
from rllm_lightning.config import ConfigError, load_config
from rllm_lightning.models.save import save_model
from rllm_lightning.models.tiny import tiny_model
from rllm_lightning.registry import ENGINES
from rllm_lightning.rollout.conformance import FAILED, PASSED, run_checks, table
from rllm_lightning.rollout.conformance_checks import CHECKS
from rllm_lightning.rollout.conformance_subject import Subject
from rllm_lightning.rollout.engine import REQUEST, EngineSetup, RequestContext, SamplingParams
from rllm_lightning.rollout.http import ServerError
from rllm_lightning.rollout.openai import OpenAIEngine
from rllm_lightning.types import TerminationEvent, TerminationReason
from tests.quick import QUICK
from tests.rollout.model_server import TokenServer, json_server, transformers_serve

KEY = "a-key-of-the-test-0123456789"
NEUTRAL = json.dumps({"do_sample": True, "top_k": 0})  # what `transformers serve` takes instead of its defaults
TEXT = {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("rllm_lightning.rollout.http.FIRST_PAUSE", 0.001)
    monkeypatch.setenv("TEST_MODEL_KEY", KEY)


@pytest.fixture
def ask_server():
    """ask_server(answer, num=1, **keys) -> answers (or exceptions) of an engine asked as text."""

    def run(answer, num=1, setup=None, **keys):
        async def all_of_them(engine):
            answers = await asyncio.gather(*[asyncio.create_task(one(engine, i)) for i in range(num)], return_exceptions=True)
            await engine.shutdown()
            return answers

        async def one(engine, i):
            REQUEST.set(RequestContext(seed=1, task_id=str(i)))
            return await engine.get_model_response([{"role": "user", "content": f"q{i}"}])

        with json_server(answer) as url:
            return asyncio.run(all_of_them(OpenAIEngine(setup or EngineSetup(), base_url=url, model="m", **keys)))

    return run


def script(*replies):
    """Those replies in turn, the last one for ever; what was asked is in `.asked`."""

    async def answer(path, body, headers):
        answer.asked.append((path, body, headers))
        reply = replies[min(len(answer.asked), len(replies)) - 1]
        return await reply() if callable(reply) else reply

    answer.asked = []
    return answer


def outcomes(results):
    return {result.check: result.outcome for result in results}


# ------------------------------------------------------------------------------------------------------- a real server


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model behind `transformers serve`: (keys of the engine, model, tokenizer)."""
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = tiny_model(seed=0)
    save_model(model, tokenizer, folder / "model")
    with transformers_serve(folder / "model", folder / "log") as url:
        yield {"base_url": url, "model": str(folder / "model")}, model.eval(), tokenizer


def subject(served, draws, **more):
    keys, model, tokenizer = served
    return Subject(lambda setup: OpenAIEngine(setup, **keys, **more), model, tokenizer, draws=draws)


SHORT = [
    "an answer has text, lengths and a finish reason",
    "tokens are as frequent as the temperature has them",
    "a limit of 0 tokens is refused",
]


def test_a_real_server_answers_as_the_contract_says(served):
    results = run_checks(subject(served, 40, extra_body={"generation_config": NEUTRAL}), SHORT)
    assert [result.outcome for result in results] == [PASSED] * 3, table(results)


def test_a_real_server_with_the_checkpoints_own_settings_is_caught(served):
    """B20: these are greedy here, and the frequencies tell."""
    (greedy,) = run_checks(subject(served, 40), ["tokens are as frequent as the model has them"])
    assert greedy.outcome == FAILED, greedy.numbers


@pytest.mark.long
def test_a_real_server_keeps_the_whole_contract_as_far_as_text_goes(served):
    results = run_checks(subject(served, 300, extra_body={"generation_config": NEUTRAL}))
    assert FAILED not in outcomes(results).values(), table(results)
    assert list(outcomes(results).values()).count(PASSED) == 12


# ----------------------------------------------------------------------------------------------------------- token ids


@pytest.mark.long
def test_token_ids_keep_the_whole_contract(make_model, tokenizer, tmp_path):
    """Against a server that speaks as vLLM's does."""
    check_token_server(make_model(), tokenizer, tmp_path, None, 100)


def test_token_ids_log_probs_ends_turns_and_weights_conform(make_model, tokenizer, tmp_path):
    """B24 among them: the server is asked with the tokens that it sampled."""
    names = ["token ids go in", "log-probs are the model's", "every end token", "an end token at", "a later turn", "after an update"]
    check_token_server(make_model(), tokenizer, tmp_path, [name for name in CHECKS if name.startswith(tuple(names))], 20)


def check_token_server(model, tokenizer, tmp_path, names, draws):
    server = TokenServer(copy.deepcopy(model))
    with json_server(server.answer) as url:
        keys = {"base_url": url, "model": "m", "tokens": True, "weights_folder": str(tmp_path)}
        results = run_checks(Subject(lambda setup: OpenAIEngine(setup, **keys), model, tokenizer, draws=draws), names)
    assert FAILED not in outcomes(results).values(), table(results)
    assert list(outcomes(results).values()).count(PASSED) == (len(CHECKS) - 1 if names is None else 6)  # all but "repeatable"
    assert list(tmp_path.iterdir()) == []


def test_training_samples_from_the_server_and_hands_it_every_update(tmp_path):
    stale, _ = tiny_model(seed=5)  # the server begins with other weights than the policy
    server = TokenServer(stale)
    with json_server(server.answer) as url:
        engine = [f"rollout_engine.base_url={url}", "rollout_engine.model=m", "rollout_engine.tokens=true"]
        folder = f"rollout_engine.weights_folder={tmp_path / 'weights'}"
        steps = ["rllm.trainer.total_batches=2", "training.learning_rate=1e-3", f"run_root={tmp_path}"]
        assert run_script.main(["default", *QUICK, "rollout_engine.name=openai", *engine, folder, *steps]) == 0
    assert server.num_reloads == 3  # before each of two batches, and before the validation at the end
    (run,) = (tmp_path / "rllm-lightning").glob("*")
    trained = type(stale).from_pretrained(run / "checkpoints" / "model").state_dict()
    assert all(torch.equal(weight, trained[name]) for name, weight in server.model.state_dict().items())
    for step in (1, 2):
        lines = (run / "episodes" / f"train_step_{step}.jsonl").read_text().splitlines()
        assert all(s["logprobs"] for line in lines for t in json.loads(line)["trajectories"] for s in t["steps"])


def test_a_server_without_token_ids_is_an_error_that_says_so(make_model, tokenizer):
    async def run(url):
        engine = OpenAIEngine(EngineSetup(make_model(), tokenizer), base_url=url, model="m", tokens=True)
        return await engine.get_model_response([{"role": "user", "content": "a"}], max_tokens=4)

    answers = [
        {"text": "x", "finish_reason": "stop"},
        {"token_ids": [9, 9], "logprobs": {"token_logprobs": [0.0]}},
        {"token_ids": [], "logprobs": {"token_logprobs": []}},
    ]
    for choice in answers:
        with json_server(script((200, {"choices": [choice]}))) as url, pytest.raises(ServerError, match="return_token_ids"):
            asyncio.run(run(url))
    other = {"token_ids": [9], "logprobs": {"token_logprobs": [0.0]}, "prompt_token_ids": [1, 2]}
    with json_server(script((200, {"choices": [other]}))) as url, pytest.raises(ServerError, match="another prompt"):
        asyncio.run(run(url))


# ------------------------------------------------------------------------------------------------------------ as text


def test_a_request_says_what_is_asked_and_nothing_else(ask_server):
    answer = script((200, TEXT))
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, max_tokens=11)
    (output,) = ask_server(answer, setup=EngineSetup(train=params), api_key_env="TEST_MODEL_KEY", extra_body={"min_p": 0.1})
    ((path, body, headers),) = answer.asked
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == f"Bearer {KEY}"
    assert 0 <= body.pop("seed") < 2**31
    asked = {"messages": [{"role": "user", "content": "q0"}], "model": "m", "min_p": 0.1}
    assert body == {**asked, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 11}
    assert (output.text, output.finish_reason, output.prompt_length, output.completion_length) == ("hello", "stop", 3, 2)
    assert (output.prompt_ids, output.completion_ids, output.logprobs) == (None, None, None)


def test_every_request_has_a_seed_of_its_own_and_a_rerun_has_the_same(ask_server):
    seeds = []
    for _ in range(2):
        answer = script((200, TEXT))
        ask_server(answer, num=5)
        seeds.append(sorted(body["seed"] for _, body, _ in answer.asked))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 5


def test_reasoning_tool_calls_and_a_cut_answer_come_through(ask_server):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"content": None, "reasoning_content": "hm", "tool_calls": [call]}
    (output,) = ask_server(script((200, {"choices": [{"message": message, "finish_reason": "length"}]})))
    assert (output.text, output.reasoning, output.tool_calls, output.finish_reason) == ("", "hm", [call], "length")


def test_a_prompt_that_the_server_finds_too_long_ends_its_episode(ask_server):
    """B26: the server counts its own tokens."""
    assert ask_server(script((200, TEXT)), setup=EngineSetup(max_prompt_length=3))[0].prompt_length == 3
    (event,) = ask_server(script((200, TEXT)), setup=EngineSetup(max_prompt_length=2))
    assert isinstance(event, TerminationEvent)
    assert event.reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED


# ------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", [None, (429, {"error": "slow down"}), (500, b"oops"), (503, b"")], ids=["cut", "429", "500", "503"])
def test_faults_that_pass_are_tried_again(ask_server, fault):
    answer = script(fault, fault, (200, TEXT))
    (output,) = ask_server(answer)
    assert output.text == "hello"
    assert len(answer.asked) == 3
    assert len({json.dumps(body) for _, body, _ in answer.asked}) == 1  # the same request, seed included


def test_a_server_that_hangs_is_given_up_after_all_tries(ask_server):
    answer = script(asyncio.Event().wait)
    (error,) = ask_server(answer, timeout=0.5, max_retries=2)  # long enough to connect on a busy machine
    assert isinstance(error, ServerError)
    assert "no answer within 0.5 seconds (rollout_engine.timeout)" in str(error)
    assert len(answer.asked) == 3


def test_no_server_is_an_error_that_names_the_url(ask_server):
    async def run():
        engine = OpenAIEngine(EngineSetup(), base_url="http://127.0.0.1:9/v1", model="m", max_retries=1)
        await engine.get_model_response([{"role": "user", "content": "a"}])

    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9/v1/chat/completions: ConnectError"):
        asyncio.run(run())


def test_a_refusal_is_not_tried_again_and_shows_what_the_server_said(ask_server):
    answer = script((400, {"error": {"message": "context length exceeded " + "x" * 1000}}))
    (error,) = ask_server(answer)
    assert len(answer.asked) == 1
    assert error.status == 400
    assert "/v1/chat/completions: status 400: " in str(error)
    assert "context length exceeded" in str(error)
    assert len(str(error)) < 500


@pytest.mark.parametrize("reply", [b"<html>login</html>", b"[]", b'{"choices": []}', b""], ids=["html", "list", "no choice", "empty"])
def test_an_answer_that_is_none_is_an_error(ask_server, reply):
    answer = script((200, reply))
    (error,) = ask_server(answer)
    assert isinstance(error, ServerError)
    assert len(answer.asked) == 1


def test_an_error_reaches_its_request_alone(ask_server):
    async def answer(path, body, headers):
        return (400, b"no") if body["messages"][0]["content"] == "q1" else (200, TEXT)

    results = ask_server(answer, num=3)
    assert [type(result).__name__ for result in results] == ["ModelOutput", "ServerError", "ModelOutput"]


def test_no_more_requests_are_open_than_allowed(ask_server):
    count, most = 0, 0

    async def answer(path, body, headers):
        nonlocal count, most
        count += 1
        most = max(most, count)
        await asyncio.sleep(0.01)
        count -= 1
        return 200, TEXT

    assert len(ask_server(answer, num=12, max_open_requests=3)) == 12
    assert most == 3


# ------------------------------------------------------------------------------------------------------ keys and config


def test_the_key_is_written_nowhere(ask_server, tmp_path, caplog):
    """A server that repeats the key in its error, a run's folder, and the log."""

    async def echo(path, body, headers):
        return 429, {"error": f"Incorrect key provided: {headers['authorization']}"}

    with caplog.at_level(logging.DEBUG, logger="rllm_lightning"):
        (error,) = ask_server(echo, api_key_env="TEST_MODEL_KEY", max_retries=1)
    assert "Incorrect key provided: Bearer ***" in str(error)
    assert KEY not in f"{error!r}{caplog.text}"

    answer = script((200, TEXT))
    with json_server(answer) as url:
        engine = [f"rollout_engine.base_url={url}", "rollout_engine.model=m", "rollout_engine.api_key_env=TEST_MODEL_KEY"]
        argv = ["default", *QUICK, "rollout_engine.name=openai", *engine, "rllm.trainer.val_only=true", f"run_root={tmp_path}"]
        assert run_script.main(argv) == 0
    assert {headers["authorization"] for _, _, headers in answer.asked} == {f"Bearer {KEY}"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "config.yaml" and "TEST_MODEL_KEY" in path.read_text() for path in files)
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], "text, without token ids and log-probs, which training needs"),
        (["tokens=true"], "weights_folder: without it the server's weights would stay as they are"),
        (["tokens=true", "weights_folder=w", "max_retries=-1"], "max_retries: must be at least 0, got -1"),
        (["base_url=https://user:secret-password@host/v1"], "base_url: must hold no user, password or query"),
        (["base_url=127.0.0.1:8000"], "base_url: expected a URL such as http"),
        (["api_key_env=NOT_SET_ANYWHERE"], "api_key_env: the environment variable NOT_SET_ANYWHERE is not set"),
        (["api_key_env=sk-a-real-key-0123"], "api_key_env: expected the name of an environment variable"),
        (["weights_folder=w"], "weights_folder: needs rollout_engine.tokens=true"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(keys, message):
    argv = ["rollout_engine.name=openai", "rollout_engine.base_url=http://h/v1", "rollout_engine.model=m"]
    with pytest.raises(ConfigError) as error:
        load_config([*argv, *(f"rollout_engine.{key}" for key in keys)])
    assert f"rollout_engine.{message}" in str(error.value) or message in str(error.value)
    assert "secret-password" not in str(error.value)
    assert "real-key" not in str(error.value)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"rllm-lightning\[openai\]"):
        OpenAIEngine(EngineSetup(), base_url="http://h/v1", model="m")
    assert ENGINES.get("openai") is OpenAIEngine


def test_weights_are_not_handed_over_by_several_processes(make_model, tokenizer, tmp_path, monkeypatch):
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    keys = {"base_url": "http://h/v1", "model": "m", "tokens": True}
    OpenAIEngine(EngineSetup(make_model(), tokenizer), **keys)
    with pytest.raises(ValueError, match="one process"):
        OpenAIEngine(EngineSetup(make_model(), tokenizer), **keys, weights_folder=str(tmp_path))
