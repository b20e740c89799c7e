"""experiments/replay.py: exit codes, what it writes, and that nothing from an episode reaches page or terminal as markup."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from experiments import replay as command
from rllm_lightning.lab.replay import print_replay, replay_data, replay_page, replay_run
from tests.lab.html_page import Page
from tests.lab.made_episodes import make_episode, make_log

ROOT = Path(__file__).parents[2]
MIXED = {"a": [1, 0, 0, 0], "b": [1, 1, 0, 0]}
EVIL = '<script>alert("x")</script>[red]:train:\x1b[31m\u202e'


def test_it_runs_as_a_command_and_says_the_most_important_first(tmp_path):
    run = make_log(tmp_path, [MIXED, MIXED])
    argv = [sys.executable, "experiments/replay.py", str(run), "--estimators", "grpo,maxrl,remax"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"{run.name}: 2 batches (steps 1-2), 4 groups, 16 trajectories · trained with grpo, loss ppo"
    assert lines[1].startswith("  - grpo and maxrl are similar: correlation 0.9")
    assert lines[2].startswith("  - effective sample size: grpo ")
    assert lines[3].startswith("! remax is left out: step 1: ")
    data = json.loads((run / "replay.json").read_text(encoding="utf-8"))
    assert [result["label"] for result in data["estimators"]] == ["grpo", "maxrl"]
    assert (run / "replay.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_ones_own_estimators_come_from_plugins(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "from rllm_lightning import register_rllm_adv_estimator\n@register_rllm_adv_estimator('half')\n"
    (tmp_path / "my_half.py").write_text(source + "def half(rewards, **kwargs):\n    return [r / 2 for r in rewards], rewards\n")
    run = make_log(tmp_path, [MIXED])
    argv = [str(run), "plugins=[my_half]", "--estimators", "half,reinforce", "--out", str(tmp_path / "out")]
    assert command.main(argv) == 0
    assert "half is reinforce times 0.500: the same direction" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"replay.json", "replay.html"}
    assert not (run / "replay.json").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["EMPTY", "--estimators", "grpo"], "not a run directory"),
        (["SILENT", "--estimators", "grpo"], "no episodes (train_step_*.jsonl)"),
        (["RUN", "--estimators", "grppo"], "did you mean 'grpo'?"),
        (["RUN", "--estimators", ","], "name at least one"),
        (["RUN", "--estimators", "grpo", "--steps", "5-9"], "the run has episodes of none in 5-9; it has 1 to 1"),
        (["RUN", "--estimators", "grpo", "plugins=[no_such_module_here]"], "no module 'no_such_module_here'"),
        (["RUN", "--estimators", "grpo", "--checkpoint", "RUN/config.yaml"], "is no whole checkpoint"),
        (["RUN", "--estimators", "grpo", "--checkpoint", "RUN/none.ckpt"], "there is no file"),
        (["RUN", "--estimators", "grpo", "--checkpoint", "RUN"], "is a folder"),
    ],
)
def test_a_mistake_exits_with_2_and_one_line(tmp_path, capsys, argv, message):
    (tmp_path / "EMPTY").mkdir()
    places = {"EMPTY": tmp_path / "EMPTY", "SILENT": make_log(tmp_path / "s", []), "RUN": make_log(tmp_path / "r", [MIXED])}
    words = [re.sub(r"^(EMPTY|SILENT|RUN)\b", lambda match: str(places[match[1]]), word) for word in argv]
    assert command.main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_where_every_estimator_is_left_out_the_reasons_are_told_and_nothing_is_written(tmp_path, capsys):
    run = make_log(tmp_path, [MIXED])
    assert command.main([str(run), "--estimators", "gigpo,remax", "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert re.search(r"no estimator is left: gigpo: step 1: .+; remax: step 1: ", captured.err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("argv", [[], ["RUN"], ["RUN", "--estimators", "grpo", "task.name=x"]])
def test_a_command_line_that_lacks_something_exits_with_2(argv):
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2


# --------------------------------------------------------------------------------------------------------------------- output


@pytest.fixture
def evil(tmp_path):
    """Tasks and answers that are markup, an emoji's name, and orders to a terminal."""
    episodes = [make_episode(f"t:{EVIL}", i, r, length=n, text=EVIL) for i, (r, n) in enumerate([(1, 1), (0, 50)])]
    return replay_run(make_log(tmp_path, [episodes]), ["opo", "dr_grpo"])


def test_what_comes_from_episodes_is_text_on_the_page(evil):
    page = replay_page(evil)
    assert not {tag for tag, _ in Page(page).elements} & {"script", "iframe", "link", "img"}
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="', page)


def test_what_comes_from_episodes_is_text_in_the_terminal(evil, capsys):
    print_replay(evil, Console(width=400))
    out = capsys.readouterr().out
    assert "</script>[red]:train:" in out  # no emoji, no colour
    assert "\x1b" not in out
    assert "\u202e" not in out


def test_the_column_of_what_is_weighed_most_differently_names_its_unit(tmp_path, capsys):
    replay = replay_run(make_log(tmp_path, [MIXED]), ["rloo", "maxrl"])
    print_replay(replay, Console(width=400))
    assert "apart, in units of their sizes" in capsys.readouterr().out
    assert "apart, in units of their sizes" in replay_page(replay)


def test_the_page_is_the_same_when_made_again(tmp_path):
    run = make_log(tmp_path, [MIXED, MIXED])
    assert replay_page(replay_run(run, ["grpo", "rloo"])) == replay_page(replay_run(run, ["grpo", "rloo"]))


def test_the_data_hold_every_batch_and_are_strict_json(tmp_path):
    replay = replay_run(make_log(tmp_path, [MIXED, {"a": [1, 1]}]), ["grpo", "rloo"])
    data = json.loads(json.dumps(replay_data(replay), allow_nan=False))
    pair = data["pairs"][0]
    assert (pair["a"], pair["b"], pair["relation"]) == ("grpo", "rloo", "nearly")
    assert pair["pearson"]["by_batch"][1] is None  # equal rewards: no correlation
    assert pair["pearson"]["mean"] == pair["pearson"]["by_batch"][0]
    assert (data["steps"], data["num_trajectories"], data["gradients"]) == ([1, 2], 10, None)


def test_there_is_a_page_where_nothing_is_left(tmp_path):
    replay = replay_run(make_log(tmp_path, [{}]), ["grpo", "rloo"])
    assert "there is nothing to compare" in replay_page(replay)
    print_replay(replay, Console(width=200))
    replay_data(replay)
