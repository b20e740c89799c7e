"""Real training runs as trials of the local runner: interrupted, taken up again, and uploaded as one group by the real `wandb sync`."""

import signal

import pytest
import yaml

from rllm_lightning.lab.compare.runs import find_runs
from rllm_lightning.lab.sweep.trial import load_trials
from tests.sweeps.helpers import QUICK, wait_until

STEPS = 40


@pytest.mark.long
def test_a_sweep_survives_its_end_and_is_one_group_in_wandb(cloud, start_sweep, run_sweep, tmp_path):
    """B40, B43: the config that W&B shows is the one that was used; after SIGTERM both trials go on from their checkpoints."""
    path, out = tmp_path / "local.yaml", tmp_path / "out"
    path.write_text(
        yaml.safe_dump(
            {
                "method": "grid",
                "metric": {"name": "optim/learning_rate", "goal": "maximize"},
                "parameters": {"training.learning_rate": {"values": ["1e-3", 0.5]}, "seed": {"value": 3}},
                "command": ["python", "experiments/run.py", "${args}", *QUICK, f"rllm.trainer.total_batches={STEPS}"],
            }
        )
    )
    process = start_sweep(path, "--jobs", "2")
    wait_until(lambda: [(trial.step or 0) >= 3 for trial in load_trials(out / "trials")] == [True, True], timeout=120)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output

    code, output, trials = run_sweep(path, "--jobs", "2")
    assert code == 0, output
    assert [trial.state for trial in trials] == ["finished"] * 2
    assert all([row["step"] for row in trial.rows()] == list(range(1, STEPS + 1)) for trial in trials)
    assert sum("rllm.trainer.resume" in trial.log.read_text() for trial in trials) >= 1
    assert find_runs([out]) == sorted(trial.run_directory().path for trial in trials)  # what compare.py would compare

    cloud.wandb("sync", *sorted(out.glob("trials/*/*/*/wandb/offline-run-*")))
    runs = cloud.server.runs
    assert set(runs) == {trial.run_id for trial in trials}
    assert {run.group for run in runs.values()} == {"out"}
    for trial in trials:
        run, learning_rate = runs[trial.run_id], float(trial.values["training.learning_rate"])
        assert (run.config["training"]["learning_rate"], run.config["seed"]) == (learning_rate, 3)
        assert [row["optim/learning_rate"] for row in run.rows if "optim/learning_rate" in row] == [learning_rate] * STEPS
        assert run.state == "finished"
