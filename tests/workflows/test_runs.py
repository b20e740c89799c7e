"""Workflows through the command: the presets, credit for steps, and the examples of docs/workflows.md."""

import csv
import itertools
import json
import re
from pathlib import Path

import pytest

from experiments import run as run_script

ROOT = Path(__file__).parents[2]
QUICK = [
    "warm_start.steps=40",  # enough to end a reply; a cut one would end its episode at the first turn
    "warm_start.batch_size=16",
    "rllm.rollout.n=4",
    "data.train_batch_size=2",
    "data.max_response_length=8",
    "rllm.trainer.total_batches=2",
    "training.num_minibatches=1",
    "rllm.trainer.test_freq=-1",
    "rllm.trainer.val_before_train=false",
    "rllm.trainer.logger=[csv]",
]


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    """Run two steps in this process, with the examples of the documentation importable: metrics rows and the episodes of step 1."""
    for name, code in examples().items():
        (tmp_path / f"my_{name}s.py").write_text(code)
    monkeypatch.chdir(tmp_path)

    def call(*argv):
        code = run_script.main([*QUICK, f"run_root={tmp_path}", *argv])
        _, err = capfd.readouterr()
        assert code == 0, err
        (folder,) = (tmp_path / "rllm-lightning").glob("*")
        with open(folder / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        episodes = [json.loads(line) for line in (folder / "episodes" / "train_step_1.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == ["1", "2"]
        return rows, episodes

    return call


def examples():
    """The marked code of docs/workflows.md by its mark."""
    text = (ROOT / "docs" / "workflows.md").read_text(encoding="utf-8")
    return dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", text, re.DOTALL))


def is_continued(earlier, later):
    begun = earlier["prompt_ids"] + earlier["response_ids"]
    return later["prompt_ids"][: len(begun)] == begun and len(later["prompt_ids"]) > len(begun)


# ------------------------------------------------------------------------------------------------------------------ presets


@pytest.mark.parametrize("estimator", ["gigpo", "turn_level", "grpo"])
def test_the_preset_multi_turn_runs_with_every_way_to_credit_steps(run, estimator):
    """B24: and each turn's prompt begins with the tokens of the turn before, as they were sampled."""
    rows, episodes = run("multi_turn", f"rllm.algorithm.adv_estimator={estimator}", "rllm.workflow.workflow_args.max_turns=3")
    assert float(rows[0]["batch/num_turns"]) > 1
    assert len(episodes) == 8
    for episode in episodes:
        (trajectory,) = episode["trajectories"]
        steps = trajectory["steps"]
        assert all(step["info"]["state_key"] for step in steps)
        assert all(len(step["logprobs"]) == len(step["response_ids"]) > 0 for step in steps)
        assert all(is_continued(*pair) for pair in itertools.pairwise(steps))


@pytest.mark.parametrize("estimator", ["gigpo", "turn_level", "grpo"])
def test_retry_runs_on_a_data_set_of_reasoning_gym(run, estimator):
    settings = ["rllm.workflow.name=multi_turn", f"rllm.algorithm.adv_estimator={estimator}", "data.max_prompt_length=256"]
    rows, _ = run("default", *settings, "task.train_size=4", "task.val_size=1")
    assert rows[0]["batch/first_answer_acc"]
    assert float(rows[0]["batch/num_turns"]) > 1


def test_the_preset_solver_judge_runs_with_metrics_for_each_role(run):
    rows, episodes = run("solver_judge")
    assert [[t["name"] for t in episode["trajectories"]] for episode in episodes] == [["solver", "solver", "judge"]] * 8
    for row in rows:
        for role in ("solver", "judge"):
            assert {f"reward/{role}/mean", f"advantage/{role}/mean", f"batch/{role}/total", f"batch/{role}_acc"} <= set(row)
        assert float(row["batch/solver/total"]) == 2  # groups: one for each task
        assert float(row["optim/grad_norm"]) >= 0


def test_judges_with_their_own_advantages_train_beside_solvers_that_go_through_grpo(run):
    own = ["rllm.workflow.workflow_args.judge_advantage=true", "rllm.algorithm.use_precomputed_advantage=true"]
    rows, _ = run("solver_judge", *own, "rllm.algorithm.estimator_map={}", "rllm.algorithm.loss_fn=importance_sampling")
    assert all(row["advantage/judge/mean"] and row["advantage/solver/mean"] for row in rows)


def test_an_unknown_environment_is_one_message_and_exit_code_2(tmp_path, capfd):
    code = run_script.main([*QUICK, "multi_turn", f"run_root={tmp_path}", "rllm.workflow.workflow_args.environment=gridwrld"])
    err = capfd.readouterr().err
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "did you mean 'gridworld'" in err
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------------- examples


@pytest.fixture
def guessing(tmp_path):
    """The path of a preset: `multi_turn` on two tasks of numbers, in a file."""
    tasks, preset = tmp_path / "numbers.jsonl", tmp_path / "guessing.yaml"
    tasks.write_text("".join(json.dumps({"question": f"a number {i}", "answer": str(i)}) + "\n" for i in (3, 7)))
    preset.write_text(
        f"task: {{name: jsonl, train_file: {tasks}}}\n"
        "rllm: {workflow: {name: multi_turn}, trainer: {experiment_name: guessing}}\n"
        "data: {max_prompt_length: 128}\n"
    )
    return str(preset)


def test_all_three_examples_are_there():
    assert set(examples()) == {"environment", "tool", "workflow"}


def test_the_example_of_an_environment_runs(run, guessing):
    at = "rllm.workflow.workflow_args"
    arguments = [f"{at}.environment=guess", f"{at}.environment_args.nearly=0.1", f"{at}.max_turns=2"]
    _, episodes = run(guessing, "plugins=[my_environments]", *arguments)
    assert episodes[0]["trajectories"][0]["steps"][0]["info"]["state_key"] == "(None, None)"


@pytest.mark.parametrize("source", ["numbers", "reasoning_gym"])  # their rewards are a number, and a `RewardOutput`
def test_the_example_of_a_workflow_runs(run, guessing, source):
    roles = "rllm.algorithm.estimator_map={drafter: rloo, reviser: [grpo, ppo]}"
    preset = [guessing] if source == "numbers" else ["default", "task.train_size=4", "task.val_size=1", "data.max_prompt_length=256"]
    rows, episodes = run(*preset, "plugins=[my_workflows]", "rllm.workflow.name=draft_and_revise", roles)
    assert [t["name"] for t in episodes[0]["trajectories"]] == ["drafter", "reviser"]
    assert {"reward/reviser/mean", "advantage/drafter/std"} <= set(rows[0])


def test_the_example_of_a_tool_can_be_called(run, play, tmp_path):
    from rllm_lightning.workflows.multi_turn import MultiTurnWorkflow

    call = '<tool_call>{"name": "days_between", "arguments": {"first": "2026-11-30", "second": "2026-12-25"}}</tool_call>'
    task = {"id": "d", "question": "How long until Christmas?", "answer": "25", "data_source": "days"}
    right = {"reward_function": lambda task, response: float(response == task["answer"])}
    episode = play(MultiTurnWorkflow, [call, "25"], task, tools=["my_tools:days_between"], **right)
    assert episode.trajectories[0].steps[1].observation == "<tool_response>25</tool_response>"
    assert episode.is_correct
