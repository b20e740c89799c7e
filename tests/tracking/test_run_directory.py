import os
import re
from pathlib import Path

import pytest

from rllm_lightning import schema
from rllm_lightning.config import ConfigError, load_config
from rllm_lightning.tracking import run_directory
from rllm_lightning.tracking.run_directory import MAX_NAME_BYTES, RunDirectory, WriteError, atomic_write, safe_name, writing

HOSTILE = {
    "../../etc": "etc",
    "/etc/passwd": "etc-passwd",
    "C:\\temp": "C-temp",
    "..": "unnamed",
    ".": "unnamed",
    "": "unnamed",
    "   ": "unnamed",
    ".hidden": "hidden",
    "trailing. ": "trailing",
    "a\0b": "a-b",
    "a\nb": "a-b",
    "CON": "_CON",
    "nul.txt": "_nul.txt",
    "console": "console",
    "lone \ud800 surrogate": "lone-surrogate",
    "実験 1": "実験-1",
    "cafe\u0301": "café",
    "grpo,lr=1e-6@v2": "grpo,lr=1e-6@v2",
}


@pytest.mark.parametrize(("name", "safe"), HOSTILE.items())
def test_a_name_becomes_one_harmless_path_component(name, safe):
    assert safe_name(name) == safe
    assert Path(safe_name(name)).name == safe


def test_a_long_name_is_cut_between_characters():
    assert safe_name("x" * 500) == "x" * MAX_NAME_BYTES
    cut = safe_name("é" * 500)  # two bytes each
    assert cut == "é" * (MAX_NAME_BYTES // 2)
    assert len(safe_name("a" + "é" * 500).encode()) <= MAX_NAME_BYTES


@pytest.mark.parametrize("name", [*HOSTILE, "x" * 5000, "é" * 5000])
def test_no_name_leads_out_of_the_run_root(make_config, tmp_path, name):
    run = RunDirectory.create(make_config(**{"rllm.trainer.project_name": name, "rllm.trainer.experiment_name": name}))
    root = (tmp_path / "runs").resolve()
    assert run.path.resolve().parent.parent == root


def test_the_directory_is_named_by_project_experiment_start_time_and_random_digits(run, tmp_path):
    assert run.path.parent == tmp_path / "runs" / "demo"
    assert re.fullmatch(r"first-\d{8}-\d{6}-[0-9a-f]{6}", run.path.name)
    assert run.path.name == f"first-{run.id}"


def test_an_existing_directory_is_never_taken(config, monkeypatch):
    draws = iter(["aaaaaa", "aaaaaa", "bbbbbb"])
    monkeypatch.setattr(run_directory.secrets, "token_hex", lambda n: next(draws) if n == 3 else "temporary")
    monkeypatch.setattr(run_directory, "datetime", FrozenTime)
    first, second = RunDirectory.create(config), RunDirectory.create(config)
    assert (first.id[-6:], second.id[-6:]) == ("aaaaaa", "bbbbbb")


class FrozenTime:
    @classmethod
    def now(cls):
        from datetime import datetime

        return datetime(2026, 1, 2, 3, 4, 5)


def test_runs_of_one_seed_get_different_ids(config):
    import random

    ids = set()
    for _ in range(3):
        random.seed(config.seed)
        ids.add(RunDirectory.create(config).id)
    assert len(ids) == 3


@pytest.mark.parametrize("obstacle", ["root", "project"])
def test_an_unusable_run_root_is_one_error_that_names_it(config, tmp_path, obstacle):
    blocked = tmp_path / "runs" if obstacle == "root" else tmp_path / "runs" / "demo"
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("a file where a folder belongs")
    with pytest.raises(ConfigError, match=r"^run_root: ") as caught:
        RunDirectory.create(config)
    assert "\n" not in str(caught.value)


def test_the_written_config_loads_to_the_same_values(make_config):
    config = make_config(
        **{
            "rllm.algorithm.estimator_map": {"solver": ["grpo", "ppo"]},
            "rllm.workflow.workflow_args": {"text": "1e-6", "number": 1e-6, "yes": "yes", "time": "12:30", "empty": "", "none": None},
            "rllm.trainer.experiment_name": "007",
            "training.learning_rate": 1e-6,
            "wandb.notes": "two\nlines: # é 𝄞 \u2028 ' \" \\",
            "task.note": "None of it",
            "task.untyped": {"deep": [1, "1", 1.0, "1.0", True, "True"]},
            "lightning.devices": [0, 1],
        }
    )
    config.wandb.tags = ["null", "None", "true", "1.5", "inf", "a, b", "~", "{a: 1}"]
    again = load_config([str(RunDirectory.create(config).config_yaml)])
    assert again == schema.to_plain_tree(config)
    assert [type(value) for value in again.task.untyped.deep] == [int, str, float, str, bool, str]


@pytest.mark.parametrize("text", ["${HOME}", "\\${HOME}", "a\\\\${x} ${seed}", "$ {x} $$ ${", "lone \ud800"])
def test_dollar_signs_and_odd_characters_survive(config, text):
    config.wandb.notes = text  # what an escaped `\\${HOME}` on the command line resolves to
    assert load_config([str(RunDirectory.create(config).config_yaml)]).wandb.notes == text


def test_opening_takes_up_an_existing_directory_only(run, tmp_path):
    assert RunDirectory.open(run.path) == run
    assert RunDirectory.open(str(run.path)).id == run.id
    with pytest.raises(ValueError, match="not a run directory"):
        RunDirectory.open(tmp_path)


def test_files_have_their_places(run):
    names = ("metrics_csv", "summary_json", "episodes", "checkpoints", "wandb", "report_html", "figures", "config_yaml")
    places = {name: getattr(run, name).relative_to(run.path).as_posix() for name in names}
    assert places == {
        "metrics_csv": "metrics.csv",
        "summary_json": "summary.json",
        "episodes": "episodes",
        "checkpoints": "checkpoints",
        "wandb": "wandb",
        "report_html": "report.html",
        "figures": "figures",
        "config_yaml": "config.yaml",
    }


def test_a_failed_atomic_write_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    atomic_write(path, "old")

    def broken(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["file"]


def test_an_atomic_write_takes_text_as_utf8_and_bytes_as_they_are(tmp_path):
    atomic_write(tmp_path / "new" / "text", "é\n")
    atomic_write(tmp_path / "new" / "bytes", b"\xff\0")
    assert (tmp_path / "new" / "text").read_bytes() == "é\n".encode()
    assert (tmp_path / "new" / "bytes").read_bytes() == b"\xff\0"


def test_what_cannot_be_written_is_named_once(tmp_path):
    (tmp_path / "file").write_text("no folder")
    target = tmp_path / "file" / "summary.json"
    with pytest.raises(WriteError, match=r"^cannot write .*file/summary\.json: (File exists|Not a directory)$"):
        atomic_write(target, "{}")
    with pytest.raises(WriteError) as caught, writing(tmp_path / "outer"), writing(target):
        raise OSError(28, "No space left on device")
    assert str(caught.value) == f"cannot write {target}: No space left on device"


def test_the_reason_is_found_behind_an_error_of_the_writing_library(tmp_path):
    """PyTorch's writer raises an error of its own while that of the file is on its way."""

    def save():
        try:
            raise OSError(28, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")

    with pytest.raises(WriteError, match="No space left"), writing(tmp_path):
        save()
    with pytest.raises(RuntimeError, match="a bug"), writing(tmp_path):
        raise RuntimeError("a bug")


def test_scraps_of_a_killed_process_go_and_nothing_else(tmp_path):
    names = ["config.yaml", "episodes/train_step_1.jsonl", "checkpoints/last.ckpt", "wandb/.hidden"]
    scraps = [".writing-0123456789ab", "episodes/.writing-ba9876543210", "checkpoints/.step_2.ckpt.tmp"]
    for name in names + scraps:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    RunDirectory(tmp_path).remove_scraps()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(names)
