import itertools
import json
import os
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rllm_lightning.tracking.episode_logger import EpisodeLogger
from rllm_lightning.tracking.metrics_table import MetricsTable
from rllm_lightning.tracking.report import MAX_BYTES, write_report
from rllm_lightning.tracking.report_charts import panels, points_of, special_charts, thinned
from rllm_lightning.tracking.report_watch import watch
from rllm_lightning.tracking.run_directory import RunDirectory, atomic_write
from rllm_lightning.tracking.summary import RunSummary
from rllm_lightning.tracking.table import Table, write_tables
from rllm_lightning.types import Episode, TerminationReason

HOSTILE = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Tags, attributes and text of a page, and the data of its trajectory browser."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.words, self.scripts = [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        (self.scripts if self.tags[-1:] == ["script"] and data.strip() else self.words).append(data)

    @property
    def text(self):
        return "".join(self.words)

    @property
    def groups(self):
        return json.loads(self.scripts[0])["groups"]

    @property
    def steps(self):
        return [(group["mode"], group["step"]) for group in self.groups]


@pytest.fixture
def finished(config, run, make_episode):
    """A run of three steps with two sources, two roles, and rollouts."""
    table, summary = MetricsTable(run.metrics_csv), RunSummary(run, config)
    summary.begin()
    for step in range(3):
        metrics = {"val/sums/pass@1": step / 4, "val/words/pass@1": step / 2, "reward/solver/mean": step / 10, "actor/loss": 1.0 - step}
        table.append(step, metrics)
        summary.add(metrics, step)
    logger = EpisodeLogger(run.episodes)
    logger.log([make_episode(response="an early answer")], "train", 1)
    logger.log([make_episode(rollout=k, reward=k / 20, response=f"answer {k}") for k in range(20)], "train", 2)
    logger.log([make_episode(prompt=HOSTILE, response=HOSTILE, advantage=-0.75)], "val", 2)
    summary.finish("done")
    return run


def test_the_page_shows_curves_final_metrics_rollouts_and_config(finished):
    page = Page(write_report(finished))
    assert finished.path.name in page.text
    assert page.tags.count("svg") == 3  # pass@1 of both sources, the reward, the loss
    for shown in ("val/*/pass@1", "reward/solver/mean", "experiment_name: first", "done"):
        assert shown in page.text, shown
    assert page.steps == [("train", 1), ("train", 2), ("val", 2)]
    members = page.groups[1]["members"]
    assert [member["reward"] for member in members] == [k / 20 for k in range(20)]
    assert members[15]["calls"] == [{"prompt": 0, "text": "answer 15", "advantage": 0.5}]
    assert page.groups[2]["members"][0]["advantage"] == -0.75


def test_nothing_from_outside_becomes_markup(make_config, make_episode):
    """Prompts, answers, names of tasks, metrics and experiments, and errors are text."""
    run = RunDirectory.create(make_config(**{"rllm.trainer.experiment_name": HOSTILE, "wandb.notes": HOSTILE}))
    MetricsTable(run.metrics_csv).append(1, {f"val/{HOSTILE}/pass@1": 0.5, f"val/{HOSTILE}2/pass@1": 0.5, HOSTILE: 1.0})
    episode = make_episode(task_id=HOSTILE, prompt=HOSTILE, response=HOSTILE)
    episode.trajectories[0].name = HOSTILE
    failed = Episode(id="a:0", termination_reason=TerminationReason.ERROR, info={"error": {"error_message": HOSTILE}})
    EpisodeLogger(run.episodes).log([episode, failed], "val", 1)
    page = Page(write_report(run))
    assert not {"img", "iframe", "link", "object"} & set(page.tags)
    assert page.tags.count("script") == 2  # the data and the page's own
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("onerror") >= 4
    assert page.scripts[0].isascii()
    assert not set("<>&") & set(page.scripts[0])
    assert {group["task"] for group in page.groups} == {HOSTILE, "a"}
    (prompt,) = page.groups[0]["prompts"] or page.groups[1]["prompts"]
    assert prompt == HOSTILE
    for figure in run.figures.iterdir():
        assert not list(ElementTree.parse(figure).iter("{http://www.w3.org/2000/svg}script"))


def test_the_page_needs_nothing_else_and_forbids_requests(finished):
    page = Page(write_report(finished))
    assert not [value for name, value in page.attributes if name in ("src", "href")]
    (policy,) = [value for name, value in page.attributes if name == "content" and "default-src" in value]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("script-src")[2]
    assert "@import" not in finished.report_html.read_text()
    assert "url(" not in finished.report_html.read_text()


def test_the_figures_are_the_same_curves_as_files(finished):
    page = write_report(finished).read_text()
    assert sorted(path.name for path in finished.figures.iterdir()) == ["actor.loss.svg", "reward.solver.mean.svg", "val.all.pass@1.svg"]
    for path in finished.figures.iterdir():
        ElementTree.parse(path)
        assert path.read_text() in page


def test_the_disk_is_waited_for_by_what_cannot_be_made_again_alone(finished, monkeypatch):
    """A page with a hundred figures would wait a hundred times; the file beside it is still there after a loss of power."""
    waits = []
    monkeypatch.setattr(os, "fsync", waits.append)
    write_report(finished)
    assert waits == []
    atomic_write(finished.path / "kept", "text")
    assert len(waits) == 1


def test_a_run_that_has_nothing_yet_has_a_page(run):
    assert "No metrics yet" in Page(write_report(run)).text


def test_rebuilding_gives_the_same_page(finished):
    first = write_report(finished).read_bytes()
    assert write_report(finished).read_bytes() == first


def test_metrics_that_compare_share_a_chart():
    rows = [{"step": 0, "val/a/pass@1": 0.1}, {"step": 1, "val/b/pass@1": 0.2, "reward/r/mean": 1.0, "time/x/y": 3.0, "val/a/pass@1": 0.3}]
    shown = {title: {name: points_of(rows, key) for name, key in keys.items()} for title, keys in panels(rows).items()}
    assert shown == {
        "reward/r/mean": {"r": [(1, 1.0)]},
        "val/*/pass@1": {"a": [(0, 0.1), (1, 0.3)], "b": [(1, 0.2)]},
        "time/x/y": {"time/x/y": [(1, 3.0)]},
    }


def test_episodes_are_found_where_the_config_put_them(make_config, make_episode, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = RunDirectory.create(make_config(**{"rllm.episode_logging.episode_log_dir": "~/elsewhere"}))
    EpisodeLogger(tmp_path / "elsewhere").log([make_episode(response="found")], "val", 0)
    assert Page(write_report(run)).groups[0]["members"][0]["calls"][0]["text"] == "found"


def test_a_corrupt_file_is_named(finished):
    (finished.episodes / "val_step_3.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"val_step_3\.jsonl, line 1"):
        write_report(finished)


def test_the_page_stays_small_and_says_that_older_steps_are_thinned(run, make_episode):
    """40 steps of 10 tasks with 4 answers of 4,000 characters are some 6.5 MB: whole groups are left out, most of the old steps."""
    logger = EpisodeLogger(run.episodes)
    for step in range(1, 41):
        episodes = [make_episode(f"t{t}", k, response=chr(97 + k) * 4000) for t in range(10) for k in range(4)]
        logger.log(episodes, "train", step)
    path = write_report(run)
    page = Page(path)
    assert 0.5 * MAX_BYTES < path.stat().st_size <= MAX_BYTES
    assert all(len(group["members"]) == group["num"] == 4 for group in page.groups)
    per_step = {step: len(list(groups)) for step, groups in itertools.groupby(page.groups, key=lambda group: group["step"])}
    assert per_step[40] == 10
    assert max(per_step.pop(step) for step in list(per_step) if step < 40) <= 8
    assert "This is a sample of whole groups, thinner for older steps" in page.text
    assert "19 more files were not read" in page.text  # steps 1, 3, ..., 39, and the newest, were


def test_a_page_has_no_room_for_text_without_end(run, make_episode):
    """A prompt of 100,000 characters, 300 rollouts, a task whose name has 3,000."""
    name = "t" * 3000
    EpisodeLogger(run.episodes).log([make_episode(name, k, prompt="p" * 10**5 if k == 0 else "p") for k in range(300)], "val", 0)
    path = write_report(run)
    (group,) = Page(path).groups
    assert path.stat().st_size < 120_000
    assert len(group["task"]) < 300
    assert "96000 more characters" in group["prompts"][0]
    assert (group["num"], len(group["members"])) == (300, 256)
    assert sum(member["calls"] is not None for member in group["members"]) == 16


def test_a_run_that_was_killed_in_the_middle_of_a_row_has_a_page(finished):
    with finished.metrics_csv.open("a") as file:
        file.write("3,0.75")
    summary = json.loads(finished.summary_json.read_text())
    finished.summary_json.write_text(json.dumps(summary | {"status": "running"}))
    (finished.episodes / ".writing-0123456789ab").write_text('{"id": "half')
    page = Page(write_report(finished))
    assert "running" in page.text
    assert page.tags.count("svg") == 3


def test_the_card_of_the_estimator_is_a_section(run):
    write_tables(run.tables_json, {"estimator_card": Table(["section", "property", "grpo"], [["Warnings", "1", HOSTILE]])})
    page = Page(write_report(run))
    assert "Estimator card" in page.text
    assert "onerror" in page.text
    assert "img" not in page.tags


def test_distributions_difficulty_and_time_have_charts_of_their_own():
    row = {"reward/a/mean": 0.5, "reward/a/std": 0.1, "reward/a/min": 0.0, "reward/a/max": 1.0, "time/generate": 2.0, "time/update": 1.0}
    row |= {f"batch/a/fractions/{name}": 1 / 3 for name in ("effective", "too_easy", "too_hard")}
    row |= {f"rollout/response_length/{stat}": 5.0 for stat in ("mean", "max", "p10", "p50", "p90")}
    rows = [{"step": step, **row} for step in (1, 2)]
    charts = special_charts(rows)
    assert {name: list(section) for name, section in charts.items()} == {
        "Distributions": ["reward of a", "tokens of a response"],
        "Difficulty": ["groups of a"],
        "Time": ["seconds of a step, by stage"],
    }
    assert charts["Difficulty"]["groups of a"].count("<polygon") == 3
    assert special_charts([]) == {}


def test_a_thinned_line_keeps_its_peaks():
    line = [(step, 0.0) for step in range(10_000)]
    line[4321] = (4321, 9.0)
    line[8765] = (8765, -9.0)
    short = thinned(line, 100)
    assert len(short) <= 100
    assert {(4321, 9.0), (8765, -9.0)} <= set(short)
    assert short == sorted(short)
    assert thinned(line[:100], 100) == line[:100]


# -------------------------------------------------------------------------------------------------------------- following


def test_a_watch_writes_anew_when_the_run_grows_and_stops_at_its_end(run, config, make_episode):
    """Five looks: nothing yet, a step, nothing new, another step, the end."""
    table, summary, logger = MetricsTable(run.metrics_csv), RunSummary(run, config), EpisodeLogger(run.episodes)
    seen = []

    def step(number):
        table.append(number, {"reward/solver/mean": number / 10})
        logger.log([make_episode()], "train", number)

    events = [lambda: (summary.begin(), step(1)), lambda: None, lambda: step(2), lambda: summary.finish("failed")]

    def sleep(seconds):
        assert seconds == 7
        page = Page(run.report_html)
        seen.append((len(page.groups), json.loads(page.scripts[0])["reload"], run.report_html.stat().st_ino))
        events[len(seen) - 1]()

    watch(run, 7, sleep)
    assert [groups for groups, _, _ in seen] == [0, 1, 1, 2]
    assert {reload for _, reload, _ in seen} == {7}
    assert seen[1][2] == seen[2][2]  # nothing new, nothing written
    last = Page(run.report_html)
    assert json.loads(last.scripts[0])["reload"] is None
    assert "failed" in last.text
    assert (run.figures / "reward.solver.mean.svg").exists()


def test_a_watch_goes_on_when_a_file_cannot_be_read(run, config, make_episode, caplog):
    summary = RunSummary(run, config)
    summary.begin()
    broken = run.episodes / "train_step_1.jsonl"
    run.episodes.mkdir()
    broken.write_text("{")

    def sleep(seconds):
        broken.unlink()
        EpisodeLogger(run.episodes).log([make_episode()], "train", 1)
        summary.finish("done")

    watch(run, 1, sleep)
    assert "train_step_1.jsonl, line 1" in caplog.text
    assert len(Page(run.report_html).groups) == 1


def test_a_watch_that_is_ended_leaves_a_page_that_stays(run, config):
    RunSummary(run, config).begin()

    def sleep(seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(run, 1, sleep)
    assert json.loads(Page(run.report_html).scripts[0])["reload"] is None


# ------------------------------------------------------------------------------------------------------------ the command


def view(monkeypatch, *argv):
    script = Path(__file__).parents[2] / "experiments" / "view.py"
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, argv)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return ended.value.code


def test_the_command_writes_the_report_and_says_where(finished, monkeypatch, capsys):
    assert view(monkeypatch, finished.path) == 0
    assert capsys.readouterr().out == f"{finished.report_html}\n"
    assert finished.report_html.exists()


def test_the_command_refuses_what_is_no_run_in_one_line(tmp_path, monkeypatch, capsys):
    assert view(monkeypatch, tmp_path) == 2
    assert capsys.readouterr().err == f"{tmp_path}: not a run directory (it has no config.yaml)\n"
    assert view(monkeypatch) == 2
    assert view(monkeypatch, tmp_path, tmp_path, "--watch") == 2
    assert view(monkeypatch, tmp_path, "--watch", "0") == 2


def test_the_command_follows_a_run_to_its_end(finished, monkeypatch, capsys):
    assert view(monkeypatch, finished.path, "--watch", "3") == 0
    assert capsys.readouterr().out == f"{finished.report_html}\n"
    assert finished.report_html.exists()


def test_summary_values_reach_the_page(finished):
    content = json.loads(finished.summary_json.read_text())
    content |= {"tokens_per_s": 1234.5, "wall_time_s": 3661}
    finished.summary_json.write_text(json.dumps(content))
    text = Page(write_report(finished)).text
    assert "1,234" in text
    assert "1:01:01" in text
