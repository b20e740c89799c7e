"""`python experiments/run.py`: exit codes, messages, presets, and every estimator and loss through the main job."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from experiments import run as run_script
from rllm_lightning.config import load_config
from rllm_lightning.registry import ESTIMATORS, LOSSES
from tests.quick import QUICK as QUICK_JOB
from tests.tracking.offline import offline_run

ROOT = Path(__file__).parents[2]
QUICK = [*QUICK_JOB, "rllm.trainer.total_batches=2", "rllm.episode_logging.log_episodes=false"]
CONFIGS = sorted(run_script.CONFIGS.glob("*.yaml"))


@pytest.fixture
def run(tmp_path, capfd):
    """Run the command in this process: its exit code, its output, its error output, its run directory."""

    def call(*argv):
        code = run_script.main([*QUICK, f"run_root={tmp_path}", *argv])
        out, err = capfd.readouterr()
        folders = sorted((tmp_path / "rllm-lightning").glob("*")) if (tmp_path / "rllm-lightning").is_dir() else []
        return code, out, err, folders[-1] if folders else None

    return call


def rows_of(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


# ----------------------------------------------------------------------------------------------------------- what can be run

# needs that the main job's workflow does not supply, and the key that the refusal names
UNSUPPLIED = {"gdpo": "reward_components", "gigpo": "state_keys", "distill": "teacher_logprobs"}


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_every_estimator_runs_two_steps_of_the_main_job_or_says_what_it_lacks(run, name):
    code, _, err, folder = run(f"rllm.algorithm.adv_estimator={name}", "rllm.algorithm.loss_fn=importance_sampling")
    if name in UNSUPPLIED:
        assert code == 2
        assert folder is None
        assert UNSUPPLIED[name] in err
        assert name in err
        return
    assert code == 0, err
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["estimator"], summary["loss_fn"], summary["status"], summary["steps"]) == (name, "importance_sampling", "done", 2)
    assert [float(row["optim/grad_norm"]) >= 0 for row in rows_of(folder)] == [True, True]


@pytest.mark.parametrize("name", LOSSES.names())
def test_every_loss_runs_two_steps_of_the_main_job(run, name):
    code, _, err, folder = run(
        f"rllm.algorithm.loss_fn={name}", "rllm.algorithm.adv_estimator=reinforce", "training.num_epochs_per_batch=2"
    )
    assert code == 0, err
    assert json.loads((folder / "summary.json").read_text())["loss_fn"] == name
    assert float(rows_of(folder)[-1]["optim/steps"]) == 4


def test_an_estimator_of_the_users_own_runs(run, tmp_path, monkeypatch):
    """B49: registered in a plugin, chosen by its name, never collapsed to `other`."""
    (tmp_path / "my_estimators.py").write_text(
        "from rllm_lightning import register_rllm_adv_estimator\n"
        "@register_rllm_adv_estimator('my_adv')\n"
        "def my_adv(rewards, scale=2.0, **kwargs):\n"
        "    advantages = [scale * (r - r.max()) for r in rewards]\n"
        "    return advantages, advantages\n"
    )
    monkeypatch.chdir(tmp_path)
    code, _, err, folder = run(
        "plugins=[my_estimators]", "rllm.algorithm.adv_estimator=my_adv", "rllm.algorithm.estimator_kwargs={scale: 3}"
    )
    assert code == 0, err
    assert json.loads((folder / "summary.json").read_text())["estimator"] == "my_adv"
    assert max(float(row["advantage/solver/max"]) for row in rows_of(folder)) <= 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_preset_loads(path):
    config = load_config([path.stem], run_script.CONFIGS)
    assert config.rllm.trainer.experiment_name


def test_help_lists_everything_with_its_formula(capfd):
    assert run_script.main(["--help"]) == 0
    text = capfd.readouterr().out
    for registry in (ESTIMATORS, LOSSES):
        for name, entry in registry.items():
            assert f"  {name} " in text
            assert entry.formula in text
    assert "single_turn" in text
    assert "spell" in text


@pytest.mark.parametrize(("given", "expected"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")])
def test_waiting_threads_leave_their_cores_to_other_runs_unless_told_otherwise(tmp_path, given, expected):
    """OpenMP reads it when torch is imported, which a plugin may do."""
    (tmp_path / "asking.py").write_text(
        "import os, sys\nprint(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules, file=sys.stderr)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | given
    command = [sys.executable, ROOT / "experiments/run.py", "--cfg", "plugins=[asking]"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[0] == f"{expected} False"


def test_cfg_prints_a_config_that_loads_to_the_same(capfd, tmp_path):
    assert run_script.main([*QUICK, "--cfg"]) == 0
    printed = capfd.readouterr().out
    (tmp_path / "again.yaml").write_text(printed)
    assert run_script.main([str(tmp_path / "again.yaml"), "--cfg"]) == 0
    assert capfd.readouterr().out == printed


# ------------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("rllm.algorithm.adv_estimatr=rloo", ["adv_estimatr", "did you mean", "adv_estimator"]),
        ("rllm.algorithm.adv_estimator=grpoo", ["rllm.algorithm.adv_estimator", "grpoo", "rloo", "did you mean"]),
        ("rllm.algorithm.loss_fn=pppo", ["rllm.algorithm.loss_fn", "ppo"]),
        ("training.learning_rate=abc", ["training.learning_rate", "number", "abc"]),
        ("data.train_batch_size=0", ["data.train_batch_size"]),
        ("nosuchpreset", ["nosuchpreset", "default"]),
        ("model.name=builtin:huge", ["model.name", "builtin:tiny"]),
        ("model.name=nobody/no-such-model-here", ["model.name", "nobody/no-such-model-here"]),
        ("model.name=/does/not/exist", ["model.name"]),
        ("task.dataset=spell_backwards", ["task.dataset", "spell_backward"]),
        ("plugins=[no_such_plugin]", ["plugins", "no_such_plugin"]),
        ("rllm.trainer.resume=/nowhere", ["rllm.trainer.resume"]),
        ("rllm.trainer.logger=[csw]", ["rllm.trainer.logger", "csv"]),
        ("lightning.devices=many", ["lightning.devices"]),
        ("rllm.algorithm.adv_estimator=pass_at_k", ["pass_at_k", "rllm.rollout.n"]),
    ],
)
def test_a_mistake_is_one_clear_message_and_exit_code_2(run, argument, words):
    code, out, err, folder = run("rllm.rollout.n=1", argument)
    assert code == 2, (out, err)
    for word in words:
        assert word in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 2
    assert folder is None  # nothing was begun


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [r[:-1] for r in rewards], rewards", "shape"),
        ("return [r * float('nan') for r in rewards], rewards", "broken"),
        ("return None", "broken"),
        ("raise KeyError('lost')", "lost"),
    ],
)
def test_an_estimator_that_cannot_work_is_found_before_anything_expensive(run, tmp_path, monkeypatch, body, words):
    name = f"broken_{abs(hash(body))}"
    decorator = f"@register_rllm_adv_estimator('{name}')"
    lines = ["from rllm_lightning import register_rllm_adv_estimator", decorator, "def f(rewards, **kwargs):", f"    {body}"]
    (tmp_path / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    code, _, err, folder = run(f"plugins=[{name}]", f"rllm.algorithm.adv_estimator={name}", "run_root=elsewhere")
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert folder is None


def test_all_mistakes_are_named_at_once(run):
    code, _, err, _ = run("data.train_batch_size=0", "training.learning_rate=abc", "rllm.algorithm.adv_estimator=grpoo", "colour=red")
    assert code == 2
    for key in ("data.train_batch_size", "training.learning_rate", "rllm.algorithm.adv_estimator", "colour"):
        assert key in err


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), MemoryError()])
@pytest.mark.parametrize(
    ("place", "key"),
    [
        ("rllm_lightning.rollout.hf.HFEngine.get_model_response", "rllm.workflow.n_parallel_tasks"),
        ("rllm_lightning.trainer.backend.LightningBackend.update_policy", "training.micro_batch_tokens"),
    ],
)
def test_running_out_of_memory_is_one_message_with_the_key_to_lower(run, monkeypatch, error, place, key):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(place, fail)
    code, _, err, folder = run()
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "out of memory" in line
    assert key in line
    assert str(error) in line
    assert "begin anew with" in line
    assert "Traceback" not in err
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"


def test_a_tracker_that_fails_at_the_end_does_not_fail_the_run(run, tmp_path, monkeypatch, caplog):
    (tmp_path / "dying.py").write_text(
        "from rllm_lightning.registry import register_tracker\n"
        "from rllm_lightning.tracking.tracker import Tracker\n"
        "class Dying(Tracker):\n"
        "    def log_metrics(self, metrics, step=None): pass\n"
        "    def close(self, exit_code): raise RuntimeError('gone')\n"
        "register_tracker('dying')(lambda config, run: Dying(run))\n"
    )
    monkeypatch.chdir(tmp_path)
    code, _, err, folder = run("plugins=[dying]", "rllm.trainer.logger=[dying,csv]")
    assert code == 0, err
    assert "tracker Dying: its end failed: RuntimeError: gone" in caplog.text
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
    assert (folder / "report.html").exists()


# ----------------------------------------------------------------------------------------------------------------- processes


@pytest.fixture
def start(tmp_path):
    """Begin the command in a process of its own; none outlives its test."""
    processes = []

    def begin(*argv):
        command = [sys.executable, "experiments/run.py", *QUICK, f"run_root={tmp_path}", *argv]
        processes.append(subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_an_interrupted_run_leaves_everything_in_order(start, tmp_path, signum):
    """A loadable checkpoint, a complete metrics.csv, a W&B run that ended with the exit code; and it goes on from there."""
    process = start("rllm.trainer.total_batches=100000", "rllm.trainer.logger=[csv,wandb]")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = list(tmp_path.glob("rllm-lightning/*/metrics.csv"))
        if found and len(found[0].read_text().splitlines()) >= 4:
            break
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    os.kill(process.pid, signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, err
    assert "Traceback" not in err
    folder = found[0].parent
    steps = [int(row["step"]) for row in rows_of(folder)]
    assert steps == list(range(1, steps[-1] + 1))
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["rllm_lightning"]["global_step"] == steps[-1]
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    rows, exit_code = offline_run(folder / "wandb")
    assert [row["train/global_step"] for row in rows if "optim/steps" in row] == steps  # the row of step 0 is the card of the estimator
    assert exit_code == 128 + signum

    resumed = start(f"rllm.trainer.resume={folder}", f"rllm.trainer.total_batches={steps[-1] + 2}")
    _, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    assert [int(row["step"]) for row in rows_of(folder)] == list(range(1, steps[-1] + 3))


def test_a_bad_configuration_makes_nothing(start, tmp_path):
    process = start("data.train_batch_size=-1", "rllm.algorithm.adv_estimator=grpoo")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.count("\n") == 2
    assert not list(tmp_path.iterdir())
