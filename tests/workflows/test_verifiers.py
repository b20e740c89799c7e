"""Environments of the package verifiers: their own classes, played by a scripted and by a tiny model, and trained on for two steps."""

import asyncio
import csv
import json
import math
import signal
import sys

import pytest

from experiments import run as run_script
from rllm_lightning.config import ModelConfig
from rllm_lightning.models.load import load_model
from rllm_lightning.rollout.engine import EngineSetup, SamplingParams
from rllm_lightning.rollout.hf import HFEngine
from rllm_lightning.tasks.verifiers_environment import verifiers as verifiers_tasks
from rllm_lightning.types import TerminationReason
from rllm_lightning.workflows import verifiers_environment
from rllm_lightning.workflows.engine import UnifiedWorkflowEngine, check_workflow_args
from rllm_lightning.workflows.verifiers_environment import VerifiersWorkflow
from tests.quick import QUICK

ENVIRONMENTS = '''
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"{i}+{i}?", "answer": str(2 * i), "info": {"number": i}} for i in range(4)]


def right(completion, answer):
    return float(completion[-1]["content"] == answer)


async def brief(parser, completion):
    return 1 / len(parser.parse_answer(completion) or "-")


def broken(completion):
    raise KeyError("no such word")


class Countdown(vf.MultiTurnEnv):
    """Counts in its state how often it has answered; ends by a last word, or at its last turn."""

    cleaned = []

    def __init__(self, last=3, fails=False, **kwargs):
        super().__init__(**kwargs)
        self.last, self.fails = last, fails

    async def setup_state(self, state):
        state["answered"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        if self.fails:
            raise ZeroDivisionError("nothing to count")
        state["answered"] += 1
        message = {"role": "user", "content": f"{self.last - state['answered']} left"}
        if state["answered"] == self.last:
            state["final_env_response"] = [message]
        return [message]

    @vf.cleanup
    async def note(self, state):
        self.cleaned.append(state["answered"])


def answered(state):
    return state["answered"]


def load_environment(kind="single", rows=4, fails=False, funcs=None, evaluation=False, **kwargs):
    data = Dataset.from_list(ROWS[:rows])
    if evaluation:
        kwargs["eval_dataset"] = Dataset.from_list([{"question": "9+9?", "answer": "18"}])
    if kind == "single":
        rubric = vf.Rubric(funcs=[globals()[name] for name in funcs or ["right", "brief"]], weights=None if funcs else [1.0, 0.5])
        return vf.SingleTurnEnv(dataset=data, system_prompt="Be brief.", rubric=rubric, **kwargs)
    return Countdown(dataset=data, rubric=vf.Rubric(funcs=[answered]), fails=fails, **kwargs)
'''


@pytest.fixture
def env_id(tmp_path, monkeypatch):
    """The name under which the environments above are installed."""
    (tmp_path / "counting_env.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(verifiers_environment, "_ENVIRONMENTS", {})
    yield "counting-env"
    sys.modules.pop("counting_env", None)


@pytest.fixture
def first_task(env_id):
    return lambda **env_args: verifiers_tasks(0, env_id=env_id, env_args=env_args).train[1]


# ------------------------------------------------------------------------------------------------------------- one episode


def test_a_single_turn_is_scored_by_the_weighted_functions_of_the_rubric(play, env_id, first_task):
    """1.0 right + 0.5 brief: "2" is right and one letter long; "12" is wrong and two letters long, 0.5 of brief."""
    right = play(VerifiersWorkflow, ["2"], first_task(), env_id=env_id)
    wrong = play(VerifiersWorkflow, ["12"], first_task(), env_id=env_id)
    (trajectory,) = right.trajectories
    assert (trajectory.name, trajectory.reward, trajectory.info["rewards"]) == ("agent", 1.5, {"right": 1.0, "brief": 1.0})
    assert [step.reward for step in trajectory.steps] == [1.5]
    assert [message["content"] for message in trajectory.steps[0].chat_completions] == ["Be brief.", "1+1?", "2"]
    assert right.termination_reason is TerminationReason.ENV_DONE
    assert right.metrics == {"right": 1.0, "brief": 1.0, "num_turns": 1.0, "agent_acc": 1.5}
    assert wrong.trajectories[0].reward == 0.25
    assert wrong.trajectories[0].info["rewards"] == {"right": 0.0, "brief": 0.5}


def test_a_multi_turn_environment_keeps_its_state_and_ends_with_its_last_word(play, env_id, first_task):
    """The last of three answers is final: three replies, reward 3, the number of answers in the state."""
    episode = play(VerifiersWorkflow, ["a", "b", "c"], first_task(kind="multi"), env_id=env_id, env_args={"kind": "multi"})
    (trajectory,) = episode.trajectories
    assert [step.observation for step in trajectory.steps] == ["1+1?", "2 left", "1 left"]
    assert [step.reward for step in trajectory.steps] == [0.0, 0.0, 3.0]
    assert [step.done for step in trajectory.steps] == [False, False, True]
    assert (trajectory.reward, trajectory.info["rewards"]) == (3.0, {"answered": 3.0})
    assert episode.termination_reason is TerminationReason.ENV_DONE
    assert episode.metrics["num_turns"] == 3
    assert trajectory.is_cumulative()
    assert sys.modules["counting_env"].Countdown.cleaned == [3]


def test_limits_have_their_termination_reasons_and_are_scored(play, env_id, first_task):
    task, multi = first_task(kind="multi"), {"kind": "multi"}
    turns = play(VerifiersWorkflow, ["a", "b"], task, env_id=env_id, env_args=multi | {"max_turns": 2})
    assert (turns.termination_reason, turns.trajectories[0].reward) == (TerminationReason.MAX_TURNS_EXCEEDED, 1.0)
    # "user: 1+1?", END and "assistant: " are 22 tokens; with a reply and "user: 2 left" it is more than 30
    prompt = play(VerifiersWorkflow, ["a"], task, max_prompt_length=30, env_id=env_id, env_args=multi)
    assert (prompt.termination_reason, len(prompt.trajectories[0].steps)) == (TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED, 1)
    assert prompt.trajectories[0].reward == 1.0
    at_once = play(VerifiersWorkflow, [], task, max_prompt_length=5, env_id=env_id, env_args=multi)
    assert (at_once.termination_reason, at_once.trajectories) == (TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED, [])
    cut = play(VerifiersWorkflow, ["2000"], first_task(), max_tokens=2, env_id=env_id)
    assert cut.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    assert cut.trajectories[0].steps[0].model_response == "20"


def test_an_empty_reply_is_a_reply(play, env_id, first_task):
    """The package takes one for a failed request; a policy may well say nothing."""
    episode = play(VerifiersWorkflow, [""], first_task(), env_id=env_id)
    assert (episode.termination_reason, episode.trajectories[0].reward) == (TerminationReason.ENV_DONE, 0.5)


def test_an_environment_that_raises_is_an_error_that_says_where(play, env_id, first_task):
    task = first_task(kind="multi")
    episode = play(VerifiersWorkflow, ["a", "b"], task, env_id=env_id, env_args={"kind": "multi", "fails": True})
    assert (episode.termination_reason, episode.trajectories) == (TerminationReason.ERROR, [])
    message = episode.info["error"]["error_message"]
    assert message == "env_response of the verifiers environment raised ZeroDivisionError: nothing to count"
    assert sys.modules["counting_env"].Countdown.cleaned == [0]


def test_a_reward_function_that_raises_is_an_error_and_not_a_reward_of_0(play, env_id, first_task):
    """B05: the package would go on with 0."""
    episode = play(VerifiersWorkflow, ["a"], first_task(), env_id=env_id, env_args={"funcs": ["right", "broken"]})
    assert (episode.termination_reason, episode.trajectories) == (TerminationReason.ERROR, [])
    message = episode.info["error"]["error_message"]
    assert message == "reward function broken of the verifiers environment raised KeyError: 'no such word'"


# ------------------------------------------------------------------------------------------------------------- real tokens


def test_a_later_turn_goes_on_from_the_tokens_that_were_sampled(env_id):
    """B24: prompt and reply of a turn are the beginning of the next turn's prompt, token for token."""
    model, tokenizer = load_model(ModelConfig())
    sampling = SamplingParams(max_tokens=6)
    engine = HFEngine(EngineSetup(model=model, tokenizer=tokenizer, train=sampling, max_prompt_length=512))
    arguments = {"env_id": env_id, "env_args": {"kind": "multi"}}
    workflows = UnifiedWorkflowEngine(VerifiersWorkflow, arguments, engine)
    task = verifiers_tasks(0, **arguments).train[1]
    try:
        episodes = asyncio.run(workflows.execute_tasks([task] * 4))
    finally:
        workflows.shutdown()
    texts = set()
    for episode in episodes:
        first, second, third = episode.trajectories[0].steps
        for earlier, later in ((first, second), (second, third)):
            begun = earlier.prompt_ids + earlier.response_ids
            assert later.prompt_ids[: len(begun)] == begun
            assert len(later.prompt_ids) > len(begun)
        assert all(len(step.logprobs) == len(step.response_ids) > 0 for step in (first, second, third))
        assert all(math.isfinite(logprob) for logprob in third.logprobs)
        texts.add(first.model_response)
    assert len(texts) > 1


@pytest.mark.parametrize("kind", ["single", "multi"])
def test_two_steps_of_training_through_the_command(kind, env_id, tmp_path, capfd):
    quick = [word for word in QUICK if not word.startswith("task.")]
    both = [f"{at}.{key}" for at in ("task", "rllm.workflow.workflow_args") for key in (f"env_id={env_id}", f"env_args.kind={kind}")]
    argv = ["task.name=verifiers", "rllm.workflow.name=verifiers", *both, *quick, "rllm.trainer.total_batches=2"]
    code = run_script.main([*argv, "data.max_prompt_length=256", f"run_root={tmp_path}"])
    assert code == 0, capfd.readouterr().err
    (folder,) = (tmp_path / "rllm-lightning").glob("*")
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert float(rows[0]["batch/num_turns"]) == {"single": 1, "multi": 3}[kind]
    episodes = [json.loads(line) for line in (folder / "episodes" / "train_step_1.jsonl").read_text().splitlines()]
    names = {"single": {"right", "brief"}, "multi": {"answered"}}[kind]
    assert all(set(episode["trajectories"][0]["info"]["rewards"]) == names for episode in episodes)


# --------------------------------------------------------------------------------------------------------- tasks, arguments


def test_tasks_are_the_data_sets_of_the_environment(env_id):
    tasks = verifiers_tasks(0, env_id=env_id, env_args={"evaluation": True}, train_size=2)
    assert [task["id"] for task in tasks.train] == ["counting-env:train:0", "counting-env:train:1"]
    assert [task["answer"] for task in tasks.val] == ["18"]
    task = tasks.train[1]
    assert task["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    assert (task["answer"], task["info"], task["example_id"]) == ("2", {"number": 1}, 1)
    assert json.loads(json.dumps(task)) == task


def test_without_an_evaluation_set_the_last_examples_are_held_back(env_id):
    tasks = verifiers_tasks(0, env_id=env_id, val_size=1)
    assert [task["answer"] for task in tasks.train] == ["0", "2", "4"]
    assert [task["answer"] for task in tasks.val] == ["6"]
    with pytest.raises(ValueError, match=r"task.val_size: 4 of 4 examples leave none"):
        verifiers_tasks(0, env_id=env_id, val_size=4)
    with pytest.raises(ValueError, match=r"task.train_size: 9, but the environment has 4 examples"):
        verifiers_tasks(0, env_id=env_id, train_size=9)


def test_making_an_environment_leaves_ctrl_c_and_sigterm_to_the_run(env_id):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    verifiers_environment.load_environment(env_id, None, "task")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_environment_may_be_given_as_an_object(play, env_id, first_task):
    environment = verifiers_environment.load_environment(env_id, {}, "task")
    assert play(VerifiersWorkflow, ["2"], first_task(), environment=environment).trajectories[0].reward == 1.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "workflow_args.env_id: the workflow verifiers needs the name of an environment"),
        ({"env_id": "no-such-env"}, "env_id: cannot load 'no-such-env'"),
        ({"env_id": "counting-env", "env_args": {"rows": "many"}}, "env_id: cannot load 'counting-env'.*slice"),
        ({"env_id": "counting-env", "env_args": {"kind": "multi", "message_type": "completion"}}, "message_type must be 'chat'"),
        ({"env_id": "counting-env", "env_args": {"oai_tools": [{"type": "function"}]}}, "it offers tools"),
        ({"environment": 3}, "expected a verifiers.MultiTurnEnv or SingleTurnEnv, got int"),
    ],
)
def test_what_cannot_be_run_is_refused_before_a_model_is_loaded(env_id, arguments, message):
    with pytest.raises(ValueError, match=message):
        check_workflow_args(VerifiersWorkflow, arguments)


def test_without_the_package_the_error_names_the_extra(env_id, monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ValueError, match=r"needs the package verifiers: pip install 'rllm-lightning\[verifiers\]'"):
        check_workflow_args(VerifiersWorkflow, {"env_id": env_id})


def test_tasks_of_another_source_are_refused_by_name(play, env_id):
    task = {"id": "t", "question": "2+2?", "answer": "4", "data_source": "sums"}
    error = play(VerifiersWorkflow, ["4"], task, env_id=env_id).info["error"]
    assert "task 't' has no 'prompt'; the workflow verifiers takes the tasks of task.name=verifiers" in error["error_message"]
