"""docs/tasks.md: its tables are complete, its examples run, and so do scorers and curricula through the command."""

import csv
import json
import re
from pathlib import Path

import pytest

from experiments import run as run_script
from rllm_lightning.registry import SCORERS, TASKS
from tests.quick import QUICK

TEXT = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
TWO_STEPS = [
    "warm_start.steps=0",
    "rllm.rollout.n=2",
    "training.num_minibatches=1",
    "data.train_batch_size=2",
    "data.max_response_length=4",
]
TWO_STEPS += [
    "rllm.trainer.total_batches=2",
    "rllm.trainer.test_freq=-1",
    "rllm.trainer.val_before_train=false",
    "rllm.trainer.logger=[csv]",
]


def examples():
    return dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", TEXT, re.DOTALL))


def names_in_table(key):
    """The first column of the table whose head names `key`."""
    rows = TEXT.partition(f"| `{key}` |")[2].partition("\n\n")[0].splitlines()[2:]
    return [row.split("|")[1].strip().strip("`") for row in rows]


def own_names(registry):
    """Those of the library, without what other tests have registered."""
    return [name for name, entry in registry.items() if entry.__module__.startswith("rllm_lightning.")]


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    """Two steps of the command in a folder with the examples and `sums.jsonl`: its metrics rows and its training episodes."""
    for name, code in examples().items():
        (tmp_path / f"my_{'tasks' if name == 'source' else 'scorers'}.py").write_text(code)
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(6)))
    monkeypatch.chdir(tmp_path)

    def call(*argv):
        code = run_script.main([*argv, *TWO_STEPS, f"run_root={tmp_path / 'runs'}"])
        assert code == 0, capfd.readouterr().err
        (folder,) = (tmp_path / "runs" / "rllm-lightning").glob("*")
        with open(folder / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        lines = [line for path in sorted((folder / "episodes").glob("train_*.jsonl")) for line in path.read_text().splitlines()]
        return rows, [json.loads(line) for line in lines]

    return call


def test_the_tables_name_every_source_and_every_scorer():
    assert sorted(names_in_table("task.name")) == own_names(TASKS)
    assert sorted(names_in_table("task.scorer")) == own_names(SCORERS)


def test_the_example_of_a_source_runs(run):
    _, episodes = run("plugins=[my_tasks]", "task.name=larger", "task.digits=3")
    assert {episode["task"]["data_source"] for episode in episodes} == {"larger"}
    assert any(int(episode["task"]["answer"]) > 99 for episode in episodes)


def test_the_example_of_a_scorer_runs(run):
    settings = ["task.name=jsonl", "task.train_file=sums.jsonl", "task.scorer=prefix", "task.scorer_args.length=2"]
    rows, _ = run("plugins=[my_scorers]", *settings)
    assert len(rows) == 2


def test_the_parts_of_a_composite_reach_gdpo(run):
    parts = "[{scorer: numeric, extract: last_number}, {name: short, scorer: regex, weight: 0.2, args: {pattern: '^.{1,20}$'}}]"
    settings = ["task.name=jsonl", "task.train_file=sums.jsonl", "task.scorer=composite", f"task.scorer_args.parts={parts}"]
    rows, episodes = run(*settings, "rllm.algorithm.adv_estimator=gdpo")
    assert all(row["advantage/solver/std"] for row in rows)
    for episode in episodes:
        (trajectory,) = episode["trajectories"]
        rewards = trajectory["info"]["rewards"]
        assert set(rewards) == {"numeric", "short"}
        assert trajectory["reward"] == pytest.approx(rewards["numeric"] + 0.2 * rewards["short"])


def test_a_curriculum_is_chosen_by_keys(run):
    keys = ["task.curriculum={threshold: 0, window: 2}", "task.curriculum.attributes=[num_terms]", "task.curriculum.num_levels=2"]
    settings = ["task.dataset=chain_sum", "task.params=null", "data.max_prompt_length=256", "task.train_size=8", "task.val_size=2"]
    rows, episodes = run(*settings, *keys)
    assert [row["curriculum/level"] for row in rows] == ["0.0", "1.0"]
    assert [episode["task"]["level"] for episode in episodes] == [0] * 4 + [1] * 4


def test_a_wrong_scorer_is_one_message_and_exit_code_2(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text(json.dumps({"question": "?", "answer": "a"}))
    code = run_script.main([*QUICK[-1:], "task.name=jsonl", "task.train_file=t.jsonl", "task.scorer=exat", f"run_root={tmp_path / 'runs'}"])
    err = capfd.readouterr().err.strip().splitlines()
    assert (code, len(err)) == (2, 1)
    assert "task.scorer: unknown scorer 'exat'; did you mean 'exact'?" in err[0]
    assert not (tmp_path / "runs").exists()
