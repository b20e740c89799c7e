import json
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rllm_lightning.tracking.episode_logger import EpisodeLogger
from rllm_lightning.tracking.metrics_table import MetricsTable
from rllm_lightning.tracking.report import MAX_EPISODES, panels, sample_episodes, write_report
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.tracking.summary import RunSummary
from rllm_lightning.types import Episode, TerminationReason

HOSTILE = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)


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
    for shown in ("val/*/pass@1", "reward/solver/mean", "answer 19", "reward 0.95", "advantage -0.75", "experiment_name: first", "done"):
        assert shown in page.text, shown
    assert "an early answer" not in page.text  # only the last step of a mode is shown
    assert page.text.index("Rollouts: val, step 2") < page.text.index("Rollouts: train, step 2")


def test_nothing_from_outside_becomes_markup(make_config, make_episode):
    """Prompts, answers, names of tasks, metrics and experiments, and errors are text."""
    run = RunDirectory.create(make_config(**{"rllm.trainer.experiment_name": HOSTILE, "wandb.notes": HOSTILE}))
    MetricsTable(run.metrics_csv).append(1, {f"val/{HOSTILE}/pass@1": 0.5, f"val/{HOSTILE}2/pass@1": 0.5, HOSTILE: 1.0})
    episode = make_episode(task_id=HOSTILE, prompt=HOSTILE, response=HOSTILE)
    episode.trajectories[0].name = HOSTILE
    failed = Episode(id="a:0", termination_reason=TerminationReason.ERROR, info={"error": {"error_message": HOSTILE}})
    EpisodeLogger(run.episodes).log([episode, failed], "val", 1)
    page = Page(write_report(run))
    assert not {"script", "img", "iframe", "link", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("onerror") >= 6
    for figure in run.figures.iterdir():
        assert not list(ElementTree.parse(figure).iter("{http://www.w3.org/2000/svg}script"))


def test_the_page_needs_nothing_else_and_forbids_requests(finished):
    page = Page(write_report(finished))
    assert not [value for name, value in page.attributes if name in ("src", "href")]
    assert "default-src 'none'; style-src 'unsafe-inline'" in [value for name, value in page.attributes if name == "content"]
    assert "@import" not in finished.report_html.read_text()
    assert "url(" not in finished.report_html.read_text()


def test_the_figures_are_the_same_curves_as_files(finished):
    page = write_report(finished).read_text()
    assert sorted(path.name for path in finished.figures.iterdir()) == ["actor.loss.svg", "reward.solver.mean.svg", "val.all.pass@1.svg"]
    for path in finished.figures.iterdir():
        ElementTree.parse(path)
        assert path.read_text() in page


def test_a_run_that_has_nothing_yet_has_a_page(run):
    assert "No metrics yet" in Page(write_report(run)).text


def test_rebuilding_gives_the_same_page(finished):
    first = write_report(finished).read_bytes()
    assert write_report(finished).read_bytes() == first


def test_metrics_that_compare_share_a_chart():
    rows = [{"step": 0, "val/a/pass@1": 0.1}, {"step": 1, "val/b/pass@1": 0.2, "reward/r/mean": 1.0, "time/x/y": 3.0, "val/a/pass@1": 0.3}]
    assert panels(rows) == {
        "reward/r/mean": {"r": [(1, 1.0)]},
        "val/*/pass@1": {"a": [(0, 0.1), (1, 0.3)], "b": [(1, 0.2)]},
        "time/x/y": {"time/x/y": [(1, 3.0)]},
    }


def test_shown_rollouts_are_spread_from_worst_to_best(finished):
    samples = {mode: (step, episodes) for mode, step, episodes in sample_episodes(finished.episodes)}
    step, episodes = samples["train"]
    rewards = [episode.trajectories[0].reward for episode in episodes]
    assert step == 2
    assert len(rewards) == MAX_EPISODES
    assert rewards == sorted(rewards)
    assert (rewards[0], rewards[-1]) == (0.0, 0.95)
    assert len(set(rewards)) == MAX_EPISODES


def test_the_last_step_is_the_largest_number_not_the_last_name(run, make_episode):
    for step in (9, 10):
        EpisodeLogger(run.episodes).log([make_episode()], "train", step)
    assert [step for _, step, _ in sample_episodes(run.episodes)] == [10]


def test_episodes_are_found_where_the_config_put_them(make_config, make_episode, tmp_path):
    run = RunDirectory.create(make_config(**{"rllm.episode_logging.episode_log_dir": str(tmp_path / "elsewhere")}))
    EpisodeLogger(tmp_path / "elsewhere").log([make_episode(response="found")], "val", 0)
    assert "found" in Page(write_report(run)).text


def test_a_corrupt_file_is_named(finished):
    (finished.episodes / "val_step_3.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"val_step_3\.jsonl, line 1"):
        write_report(finished)


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


def test_summary_values_reach_the_page(finished):
    content = json.loads(finished.summary_json.read_text())
    content |= {"tokens_per_s": 1234.5, "wall_time_s": 3661}
    finished.summary_json.write_text(json.dumps(content))
    text = Page(write_report(finished)).text
    assert "1,234" in text
    assert "1:01:01" in text
