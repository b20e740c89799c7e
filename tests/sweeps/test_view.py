"""The table of a sweep's trials."""

import io

import pytest
from rich.console import Console

from rllm_lightning.lab.sweep.definition import read_sweep
from rllm_lightning.lab.sweep.trial import new_trial
from rllm_lightning.lab.sweep.view import View


@pytest.fixture
def make(write_sweep, tmp_path):
    """make({state: scores}, terminal): a view and its trials."""

    def make(trials, terminal=False, **more):
        sweep = read_sweep(write_sweep({"training.learning_rate": {"min": 0.0, "max": 1.0}, "seed": {"value": 1}}, "random", **more))
        made = []
        for number, (state, scores) in enumerate(trials, 1):
            trial = new_trial(tmp_path / "trials", number, {"training.learning_rate": number / 3, "seed": 1})
            run = trial.folder / "demo" / "x-1"
            run.mkdir(parents=True)
            (run / "config.yaml").touch()
            (run / "metrics.csv").write_text("step,score\n" + "".join(f"{step},{score}\n" for step, score in enumerate(scores, 1)))
            trial.state, trial.seconds = state, 61.0
            made.append(trial)
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100, height=12)
        return View(sweep, console), made

    return make


def printed(view):
    return view.console.file.getvalue()


def test_the_table_shows_what_runs_and_then_the_best(make):
    view, trials = make([("finished", [0.1, 0.3, 0.2]), ("failed", []), ("running", [0.1]), ("stopped", [0.5])])
    view.console.print(view.table(trials))
    title, heading, *rows = [line.split() for line in printed(view).splitlines()]
    assert " ".join(title) == "demo: 1 finished, 1 failed, 1 running, 1 stopped · maximize score"
    assert heading == ["trial", "learning_rate", "state", "step", "last", "best", "time"]
    assert rows == [
        ["0003", "1", "running", "1", "0.1", "0.1", "0:01:01"],
        ["0004", "1.333", "stopped", "1", "0.5", "0.5", "0:01:01"],
        ["0001", "0.3333", "finished", "3", "0.2", "0.3", "0:01:01"],
        ["0002", "0.6667", "failed", "0:01:01"],
    ]


def test_the_lowest_is_best_where_the_goal_is_to_minimize(make):
    view, trials = make([("finished", [0.1, 0.3]), ("finished", [0.05])], metric={"name": "score", "goal": "minimize"})
    assert [trial.number for trial in view.ranked(trials)] == [2, 1]
    assert view.best(trials[0]) == 0.1


def test_without_a_metric_there_are_no_columns_for_it(make):
    view, trials = make([("finished", [0.1])], metric=None)
    view.console.print(view.table(trials))
    assert printed(view).splitlines()[1].split() == ["trial", "learning_rate", "state", "step", "time"]


def test_a_terminal_shows_as_many_rows_as_it_has(make):
    view, trials = make([("finished", [number]) for number in range(30)], terminal=True)
    with view:
        view.update(trials)
    assert "and 26 more" in printed(view)  # 12 lines, 8 of which are no rows
    assert "0030" in printed(view)
    assert "\x1b[?25h" in printed(view)  # the cursor is back


def test_elsewhere_each_change_is_one_line(make):
    view, trials = make([("running", [0.1])])
    with view:
        for _ in range(3):
            view.update(trials)
        trials[0].state = "finished"
        view.update(trials)
    assert printed(view).splitlines() == [
        "trial 0001 running: learning_rate=0.3333",
        "trial 0001 finished: learning_rate=0.3333 · best 0.1",
    ]
