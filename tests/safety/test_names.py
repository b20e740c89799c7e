"""Names that users, tasks and models choose lead nowhere: what a run writes lies in its folder, or the name is refused by its key."""

import csv
import json
import multiprocessing
import os

import pytest

from experiments import run as run_script
from rllm_lightning.config import Config, load_config
from rllm_lightning.tracking.episode_logger import EpisodeLogger, read_episodes
from rllm_lightning.tracking.metrics_table import read_metrics
from rllm_lightning.tracking.report import write_report
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.types import Episode, Step, Trajectory
from tests.quick import QUICK

HOSTILE = {
    "traversal": "../../escaped",
    "windows": "..\\..\\escaped",
    "reserved": "con",
    "long": "x" * 10_000,
    "empty": "",
    "dots": "..",
    "nul": "a\0b",
    "newline": "a\nb",
    "blanks": "name   ",
    "look-alikes": "․․／․․／escaped",  # one-dot leaders and full-width slashes
    "markup": "<script>alert(1)</script>&<img src=x onerror=alert(1)>",
    "combining": "e" + "\u0301" * 3000,
}
EACH = pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
STEP = [*QUICK, "rllm.trainer.total_batches=1"]


def written(folder):
    """What lies below a folder, but for the folders themselves."""
    return {path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory some levels below `tmp_path`, so that what leads out of it is seen."""
    here = tmp_path / "one" / "two" / "three"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    return here


# ------------------------------------------------------------------------------------------------------- projects, experiments


@pytest.mark.parametrize(
    ("project", "experiment"),
    [
        ("traversal", "absolute"),
        ("absolute", "windows"),
        ("long", "empty"),
        ("nul", "newline"),
        ("dots", "reserved"),
        ("look-alikes", "markup"),
        ("blanks", "combining"),
    ],
)
def test_a_run_writes_into_its_own_folder_whatever_it_is_called(place, tmp_path, project, experiment):
    names = HOSTILE | {"absolute": str(tmp_path / "absolute")}
    argv = [f"rllm.trainer.project_name={names[project]}", f"rllm.trainer.experiment_name={names[experiment]}"]
    assert run_script.main([*STEP, *argv]) == 0
    (folder,) = [path.parent for path in place.glob("runs/*/*/config.yaml")]
    assert written(tmp_path) == {folder.relative_to(tmp_path) / path for path in written(folder)}
    assert {"metrics.csv", "summary.json", "report.html", "checkpoints/last.ckpt"} <= {path.as_posix() for path in written(folder)}
    saved = load_config([], default=str(folder / "config.yaml")).rllm.trainer
    assert (saved.project_name, saved.experiment_name) == (names[project], names[experiment])  # the names themselves are kept


@pytest.mark.long
def test_runs_that_start_together_in_one_root_do_not_disturb_each_other(place):
    """Four processes with one name and one seed: four folders, each with the same numbers."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=lambda: os._exit(run_script.main([*STEP, "rllm.episode_logging.log_episodes=false"]))) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    folders = [path.parent for path in place.glob("runs/*/*/config.yaml")]
    rows = [[{key: value for key, value in row.items() if "time/" not in key} for row in read_metrics(f / "metrics.csv")] for f in folders]
    assert rows == [rows[0]] * 4
    assert [written(folder) for folder in folders] == [written(folders[0])] * 4
    assert {json.loads((folder / "summary.json").read_text())["status"] for folder in folders} == {"done"}


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *((key, name) for key in ("preset", "plugins", "model.name", "task.name", "rllm.trainer.logger") for name in HOSTILE.values()),
        *(("wandb.id", name) for key, name in HOSTILE.items() if key not in ("reserved", "empty")),  # con is an id, nothing is null
        *(("wandb.tags", HOSTILE[key]) for key in ("empty", "long", "combining")),  # any other text is a tag
    ],
)
def test_a_name_that_is_none_is_refused_by_its_key(place, tmp_path, monkeypatch, capfd, key, name):
    for planted in ("escaped.py", "escaped.yaml"):
        (tmp_path / "one" / planted).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    before = written(tmp_path)
    value = json.dumps([name]) if key in ("plugins", "wandb.tags", "rllm.trainer.logger") else name
    given = [name, f"{name}.yaml"] if key == "preset" else [f"{key}={value}", "rllm.trainer.logger=[wandb]"]
    if key == "rllm.trainer.logger":
        given.pop()
    assert run_script.main([*STEP, *given]) == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error
    assert "error: " in error
    assert key == "preset" or f"error: {key}: " in error
    assert written(tmp_path) == before


def test_ids_that_wandb_gives_are_taken():
    for name in ("abc123de", "first-20260102-030405-abcdef", "A_b.c=1"):
        assert Config.from_config({"wandb.id": name}).wandb.id == name


def test_an_id_from_the_environment_is_looked_at_as_well(monkeypatch, capfd, place):
    monkeypatch.setenv("WANDB_RUN_ID", "../../escaped")
    assert run_script.main([*STEP, "rllm.trainer.logger=[wandb]"]) == 2
    assert "error: WANDB_RUN_ID: " in capfd.readouterr().err
    assert written(place) == set()


# --------------------------------------------------------------------------------------------------- tasks, episodes, metrics


@pytest.fixture
def run(place):
    return RunDirectory.create(Config.from_config({"run_root": str(place / "runs")}))


def episode(name):
    step = Step(prompt_ids=[1], response_ids=[2], logprobs=[-0.5], model_response="x", advantage=0.5)
    return Episode(id=f"{name}:0", trajectories=[Trajectory(name=name, steps=[step], reward=1.0)])


@EACH
def test_ids_and_roles_stand_in_files_and_name_none(run, tmp_path, name):
    """Ids of tasks and episodes, roles, and columns of metrics.csv made of data sources: the report draws a figure of each column."""
    before = written(tmp_path)
    path = EpisodeLogger(run.episodes).log([episode(name)], "train", 1)
    keys = [f"val/{name}/pass@1", f"reward/{name}/mean", f"{name}/../{name}"]
    table = [["step", *keys], *([str(step), *["0.5"] * len(keys)] for step in (1, 2, 3))]
    with run.metrics_csv.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(table)
    write_report(run)
    folder = run.path.relative_to(tmp_path)
    assert all(path.is_relative_to(folder) for path in written(tmp_path) - before)
    assert read_episodes(path)[0].trajectories[0].name == name
    assert set(keys) <= set(read_metrics(run.metrics_csv)[0])
    assert all(figure.parent == run.figures for figure in run.figures.rglob("*"))
    page = run.report_html.read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "<img src=x" not in page


@EACH
def test_the_mode_of_logged_episodes_is_one_word(tmp_path, name):
    if name in ("con",):
        assert EpisodeLogger(tmp_path).log([], name, 1).parent == tmp_path
        return
    with pytest.raises(ValueError, match="mode of logged episodes"):
        EpisodeLogger(tmp_path).log([], name, 1)
    assert written(tmp_path) == set()
