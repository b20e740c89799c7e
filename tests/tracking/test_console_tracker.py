import io

import pytest
from rich.console import Console

from rllm_lightning.tracking import console_tracker
from rllm_lightning.tracking.console_tracker import ConsoleTracker
from rllm_lightning.tracking.metrics_table import MetricsTable
from rllm_lightning.tracking.summary import RunSummary


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console_tracker.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def make_tracker(run):
    def make(terminal=False):
        return ConsoleTracker(run, Console(file=io.StringIO(), force_terminal=terminal, width=120), interval_s=10.0)

    return make


def lines(tracker):
    return [line.rstrip() for line in tracker.console.file.getvalue().splitlines()]


def test_the_line_says_where_the_run_stands(make_tracker, clock):
    tracker = make_tracker()
    tracker.begin(0, total_steps=20)
    tracker.log_metrics({"val/sums/pass@1": 0.25}, 0)
    clock[0] = 90.0
    tracker.log_metrics({"reward/solver/mean": 0.5, "reward/judge/mean": 1.0, "rollout/num_response_tokens": 180_000}, 1)
    # 180,000 tokens in the 90 s since the last step
    assert tracker.line() == "step 1/20 · reward solver 0.5 · reward judge 1 · pass@1 sums 0.25 · 2,000 tokens/s · 0:01:30"


def test_the_last_validation_stays_in_the_line_until_the_next(make_tracker, clock):
    tracker = make_tracker()
    for step, metrics in enumerate([{"val/x/pass@1": 0.1}, {"reward/a/mean": 0.2}, {"reward/a/mean": 0.3}]):
        tracker.log_metrics(metrics, step)
    assert tracker.line() == "step 2 · reward a 0.3 · pass@1 x 0.1 · 0:00:00"


def test_without_a_terminal_lines_come_at_most_every_ten_seconds(make_tracker, clock):
    tracker = make_tracker()
    for step in range(25):
        clock[0] = float(step)
        tracker.log_metrics({"a": 1.0}, step)
    assert [line.split(" · ")[0] for line in lines(tracker)] == ["step 0", "step 10", "step 20"]
    assert "\x1b" not in tracker.console.file.getvalue()


def test_on_a_terminal_one_line_is_live(make_tracker, clock):
    tracker = make_tracker(terminal=True)
    for step in range(3):
        tracker.log_metrics({"a": 1.0}, step)
    tracker.close(0)
    assert "\x1b[2K" in tracker.console.file.getvalue()  # the line is erased and written again
    assert "step 2" in tracker.console.file.getvalue()


def test_the_end_shows_first_last_and_best_once(make_tracker, clock):
    tracker = make_tracker()
    for step, value in enumerate([0.25, 0.75, 0.5]):
        tracker.log_metrics({"val/[x]/pass@1": value, "reward/a/mean": value, "actor/loss": 9.0}, step)
    tracker.close(0)
    tracker.close(1)
    rows = [line.split() for line in lines(tracker)[1:]]
    assert rows[:3] == [
        ["metric", "first", "last", "best", "at", "step"],
        ["val/[x]/pass@1", "0.25", "0.5", "0.75", "1"],
        ["reward/a/mean", "0.25", "0.5", "0.75", "1"],
    ]
    assert rows[3][:4] == ["done", "at", "step", "2:"]
    assert len(rows) == 4


def test_the_table_at_the_end_of_a_resumed_run_is_that_of_the_whole_run(run, make_tracker, clock):
    """Steps 0 to 3 were logged before; the run resumes after step 2, so that .9 of step 3 never was."""
    table = MetricsTable(run.metrics_csv)
    for step, value in enumerate([0.25, 0.75, 0.5, 0.9]):
        table.append(step, {"val/x/pass@1": value})
    tracker = make_tracker()
    tracker.begin(2, total_steps=4)
    tracker.log_metrics({"val/x/pass@1": 0.625}, 3)
    tracker.close(0)
    assert ["val/x/pass@1", "0.25", "0.625", "0.75", "1"] in [line.split() for line in lines(tracker)]


def test_without_the_table_a_resumed_run_goes_by_the_summary(run, config, make_tracker, clock):
    summary = RunSummary(run, config)
    summary.begin()
    for step, value in enumerate([0.25, 0.75, float("nan")]):
        summary.add({"val/x/pass@1": value}, step)
    summary.finish("interrupted")
    tracker = make_tracker()
    tracker.begin(2)
    tracker.log_metrics({"val/x/pass@1": 0.5}, 3)
    tracker.close(0)
    assert ["val/x/pass@1", "0.25", "0.5", "0.75", "1"] in [line.split() for line in lines(tracker)]


@pytest.mark.parametrize("status", ["success", "failed"])
def test_lightnings_own_end_stops_the_live_line_and_no_more(make_tracker, clock, status):
    tracker = make_tracker(terminal=True)
    tracker.log_metrics({"reward/a/mean": 1.0}, 1)
    tracker.finalize(status)
    tracker.finalize(status)
    assert tracker.console.file.getvalue().count("\x1b[?25h") == 1  # the cursor is back
    assert "metric" not in tracker.console.file.getvalue()
    tracker.close(130)
    assert "interrupted at step 1" in tracker.console.file.getvalue()
