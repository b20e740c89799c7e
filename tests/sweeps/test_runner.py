"""`python experiments/sweep.py`: the loop, on a stand-in for the training script. Values are chosen by W&B's own engine."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from rllm_lightning.lab.sweep import launch
from rllm_lightning.lab.sweep.launch import Machine, state_after
from rllm_lightning.lab.sweep.trial import load_trials
from tests.processes import is_alive
from tests.sweeps.helpers import starts_of, wait_until

LEVELS = {"level": {"values": [0.1, 0.4, 0.3, 0.2]}, "steps": {"value": 2}}


def values_of(trials):
    return [trial.values["level"] for trial in trials]


def states_of(trials):
    return [trial.state for trial in trials]


# ------------------------------------------------------------------------------------------------------------------- search


def test_a_grid_runs_every_point_once_and_knows_the_best(write_sweep, run_sweep):
    code, output, trials = run_sweep(write_sweep(LEVELS))
    assert code == 0, output
    assert sorted(values_of(trials)) == [0.1, 0.2, 0.3, 0.4]
    assert states_of(trials) == ["finished"] * 4
    assert [trial.history("score") for trial in trials] == [[level, 2 * level] for level in values_of(trials)]
    table = [line.split() for line in output[output.index("maximize score") :].splitlines()]
    assert table[2][:2] == ["0002", "0.4"]  # the best comes first: .4 at step 2 gives .8
    assert "0.8" in table[2]
    assert "compare: python experiments/compare.py" in output


def test_runs_that_differ_in_the_seed_alone_are_not_to_be_compared(write_sweep, run_sweep):
    code, output, _ = run_sweep(write_sweep({"seed": {"values": [0, 1]}, "steps": {"value": 1}}))
    assert code == 0
    assert "compare:" not in output


def test_a_restart_repeats_nothing(write_sweep, run_sweep, tmp_path):
    path = write_sweep(LEVELS)
    assert run_sweep(path)[0] == 0
    code, _, trials = run_sweep(path)
    assert (code, len(trials)) == (0, 4)
    assert [len(notes) for notes in starts_of(tmp_path / "out").values()] == [1, 1, 1, 1]


def test_count_is_of_all_times_together_and_no_value_comes_twice(write_sweep, run_sweep, tmp_path):
    path = write_sweep({"level": {"min": 0.0, "max": 1.0}, "steps": {"value": 1}}, method="random")
    assert len(run_sweep(path, "--count", "2")[2]) == 2
    _, _, trials = run_sweep(path, "--count", "5")
    assert [len(notes) for notes in starts_of(tmp_path / "out").values()] == [1] * 5
    assert len(set(values_of(trials))) == 5
    again = run_sweep(path, "--count", "5", folder="elsewhere")[2]
    assert values_of(again) == values_of(trials)  # the same YAML tries the same values


@pytest.mark.parametrize("method", ["random", "bayes"])
def test_a_search_without_end_is_refused(write_sweep, run_sweep, method):
    code, output, trials = run_sweep(write_sweep({"level": {"min": 0.0, "max": 1.0}}, method=method))
    assert (code, trials) == (2, [])
    assert "give --count N, or run_cap in the YAML" in output


def test_run_cap_ends_a_search(write_sweep, run_sweep):
    path = write_sweep({"level": {"min": 0.0, "max": 1.0}, "steps": {"value": 1}}, method="random", run_cap=2)
    assert len(run_sweep(path)[2]) == 2


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_bayes_learns_from_the_metric(write_sweep, run_sweep):
    """The score is the level itself: W&B's engine goes to its upper end. Its values are NumPy's; trials get Python's."""
    path = write_sweep({"level": {"min": 0.0, "max": 1.0}, "steps": {"value": 1}}, method="bayes")
    code, output, trials = run_sweep(path, "--count", "6")
    assert code == 0, output
    assert all(type(level) is float for level in values_of(trials))
    assert max(values_of(trials)[2:]) > max(values_of(trials)[:2])
    assert max(values_of(trials)) > 0.95


def test_hyperband_stops_the_hopeless(write_sweep, run_sweep):
    """Bands at 2, 4, ... scores with eta 2: of three trials the worse than median goes."""
    early = {"type": "hyperband", "min_iter": 2, "eta": 2}
    parameters = {"level": {"values": [0.9, 0.8, 0.1]}, "steps": {"value": 12}, "pause": {"value": 0.25}}
    code, output, trials = run_sweep(write_sweep(parameters, early_terminate=early), "--jobs", "3")
    assert code == 0, output
    states = dict(zip(values_of(trials), states_of(trials), strict=True))
    assert states[0.1] == "stopped"
    assert states[0.9] == "finished"
    stopped = next(trial for trial in trials if trial.values["level"] == 0.1)
    assert stopped.exit_code == 143  # it saved itself, and ended as terminated
    assert stopped.checkpoint() is not None
    assert stopped.step < 12


def test_a_metric_that_nobody_logs_is_named_with_its_neighbour(write_sweep, run_sweep):
    _, output, _ = run_sweep(write_sweep({"level": {"values": [0.1]}}, metric={"name": "scores"}))
    assert "trial 0001 never logged the sweep's metric scores; near it: score" in output


def test_a_score_that_is_no_number_is_left_out(write_sweep, run_sweep):
    """B43: the optimiser gets numbers or nothing."""
    parameters = {"level": {"values": [0.1]}, "behave": {"value": "nan"}}
    code, _, (trial,) = run_sweep(write_sweep(parameters))
    assert (code, trial.state, trial.history("score")) == (0, "finished", [])


# ----------------------------------------------------------------------------------------------------------------- failures


def test_three_early_failures_end_the_sweep_with_the_log(write_sweep, run_sweep, tmp_path):
    """B43: a grid of 6 points does not burn them all."""
    code, output, trials = run_sweep(write_sweep({"level": {"values": [1, 2, 3, 4, 5, 6]}, "behave": {"value": "fail"}}))
    assert code == 1
    assert states_of(trials) == ["failed"] * 3
    assert f"error: 3 trials failed within the first 60 s; {tmp_path}/out/trials/0003/log.txt ends with:" in output
    assert "error: level: must be in [0, 1], got 7" in output


def test_a_trial_that_fails_is_no_end_and_is_tried_again_next_time(write_sweep, run_sweep, tmp_path):
    """B43: out of memory in one trial; the others run, and nothing of it is left."""
    path = write_sweep({"behave": {"values": ["", "late", "silent"]}, "level": {"value": 1}})
    code, output, trials = run_sweep(path)
    assert code == 1
    assert states_of(trials) == ["finished", "failed", "finished"]
    assert "trial 0002 failed with exit code 1" in output
    assert "MemoryError: out of memory" in output
    first = trials[1].run_directory().path
    assert run_sweep(path)[0] == 1
    assert [len(notes) for notes in starts_of(tmp_path / "out").values()] == [1, 2, 1]
    assert not first.exists()  # without a checkpoint there is nothing to go on from, and comparisons would count it as a run


def test_a_command_that_cannot_start_says_so(write_sweep, run_sweep):
    path = write_sweep({"level": {"values": [1]}}, command=["no-such-command", "${args}"])
    code, output, (trial,) = run_sweep(path)
    assert (code, trial.state) == (1, "failed")
    assert "cannot start 'no-such-command': No such file or directory" in output


@pytest.mark.parametrize(
    ("code", "asked", "state"),
    [
        (0, None, "finished"),
        (0, "stopped", "finished"),  # it came to its end in the same moment
        (143, "stopped", "stopped"),
        (137, "stopped", "stopped"),
        (143, "interrupted", "interrupted"),
        (143, None, "interrupted"),  # somebody else's SIGTERM
        (130, None, "interrupted"),
        (137, None, "failed"),  # as the kernel does when memory runs out
        (1, None, "failed"),
        (2, None, "failed"),
    ],
)
def test_the_state_after_an_exit(code, asked, state):
    assert state_after(code, asked) == state


# ------------------------------------------------------------------------------------------------------------- interruption

SLOW = {"level": {"values": [0.1, 0.2, 0.3]}, "steps": {"value": 40}, "pause": {"value": 0.1}}


def running_since_step(folder, step, count):
    """The trials, once `count` of them have logged `step`."""
    trials = load_trials(folder / "trials") if (folder / "trials").is_dir() else []
    return trials if sum((trial.step or 0) >= step for trial in trials) >= count else None


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)])
def test_an_interrupted_sweep_leaves_no_process_and_goes_on(write_sweep, start_sweep, run_sweep, tmp_path, signum, code):
    """B43: no orphans; the next time each half-done trial goes on from its checkpoint."""
    path, out = write_sweep(SLOW), tmp_path / "out"
    process = start_sweep(path, "--jobs", "2")
    wait_until(lambda: running_since_step(out, 3, 2))
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert "the same command goes on" in output
    notes = starts_of(out)
    assert not any(is_alive(note["pid"]) for trial in notes.values() for note in trial)
    assert states_of(load_trials(out / "trials")) == ["interrupted"] * 2

    assert run_sweep(path, "--jobs", "3")[0] == 0
    trials, notes = load_trials(out / "trials"), starts_of(out)
    assert states_of(trials) == ["finished"] * 3
    assert [len(trial) for trial in notes.values()] == [2, 2, 1]
    for trial in trials[:2]:
        assert f"--rllm.trainer.resume={trial.run_directory().path}" in notes[trial.name][1]["argv"]
        assert [row["step"] for row in trial.rows()] == list(range(1, 41))  # none twice, none missing


def test_a_killed_runner_takes_its_trials_with_it(write_sweep, start_sweep, run_sweep, tmp_path):
    """B43: SIGKILL cannot be handled; the kernel sends the trials SIGTERM, and the next runner finds their checkpoints."""
    path, out = write_sweep(SLOW), tmp_path / "out"
    process = start_sweep(path, "--jobs", "2")
    wait_until(lambda: running_since_step(out, 3, 2))
    process.kill()
    pids = [note["pid"] for trial in starts_of(out).values() for note in trial]
    wait_until(lambda: not any(map(is_alive, pids)))
    assert states_of(load_trials(out / "trials")) == ["running"] * 2  # nobody was there to write
    assert run_sweep(path, "--jobs", "3")[0] == 0
    trials = load_trials(out / "trials")
    assert states_of(trials) == ["finished"] * 3
    assert all([row["step"] for row in trial.rows()] == list(range(1, 41)) for trial in trials)


def test_a_trial_that_ended_while_no_runner_looked_is_done(write_sweep, run_sweep, tmp_path):
    path = write_sweep({"level": {"values": [0.1]}})
    (trial,) = run_sweep(path)[2]
    trial.state = "running"
    trial.save()
    code, _, (trial,) = run_sweep(path)
    assert (code, trial.state) == (0, "finished")
    assert len(starts_of(tmp_path / "out")["0001"]) == 1


def test_a_trial_that_does_not_end_is_killed(write_sweep, run_sweep, monkeypatch):
    """Hyperband wants it gone; SIGTERM is ignored, and after a while (30 s, here one) SIGKILL comes."""
    monkeypatch.setattr(launch, "KILL_DELAY_S", 1.0)
    early = {"type": "hyperband", "min_iter": 2, "eta": 2}
    parameters = {"level": {"values": [0.9, 0.8, 0.1]}, "steps": {"value": 12}, "pause": {"value": 0.25}, "behave": {"value": "stubborn"}}
    code, output, trials = run_sweep(write_sweep(parameters, early_terminate=early), "--jobs", "3")
    assert code == 0, output
    assert {trial.values["level"]: trial.exit_code for trial in trials if trial.state == "stopped"} == {0.1: 137}


def test_the_children_of_a_trial_end_with_it(write_sweep, run_sweep, tmp_path):
    """B43: no orphans."""
    code, _, _ = run_sweep(write_sweep({"level": {"values": [0.1]}, "behave": {"value": "parent"}}))
    (child,) = [int(path.read_text()) for path in (tmp_path / "out").glob("trials/*/child")]
    assert code == 0
    wait_until(lambda: not is_alive(child))


def test_one_folder_has_one_runner_and_one_sweep(write_sweep, start_sweep, run_sweep, tmp_path):
    path = write_sweep(SLOW)
    first = start_sweep(path)
    wait_until(lambda: running_since_step(tmp_path / "out", 1, 1))
    code, output, _ = run_sweep(path)
    assert (code, f"another runner (process {first.pid}) is at work here" in output) == (2, True)
    first.terminate()
    first.wait(timeout=60)
    other = write_sweep({"level": {"values": [0.5]}}, name="other")
    code, output, _ = run_sweep(other)
    assert (code, "holds trials of another version" in output) == (2, True)


# ------------------------------------------------------------------------------------------------------------ share of the machine


def test_a_trial_sees_what_an_agents_trial_sees_but_for_the_sweep_id(write_sweep, run_sweep, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_SWEEP_ID", "left-behind")
    (trial,) = run_sweep(write_sweep({"level": {"values": [0.1]}}))[2]
    (note,) = starts_of(tmp_path / "out")["0001"]
    assert note["env"] == {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "WANDB_RUN_ID": trial.run_id,
        "WANDB_RUN_GROUP": "out",
        "WANDB_MODE": "offline",
        "WANDB_SWEEP_PARAM_PATH": str(trial.values_yaml),
        "WANDB_SWEEP_ID": None,
    }
    assert note["argv"] == ["level=0.1", f"--run_root={trial.folder}"]
    assert yaml.safe_load(trial.values_yaml.read_text()) == {"wandb_version": 1, "level": {"value": 0.1}}


@pytest.mark.parametrize(
    ("machine", "jobs", "num_processes", "threads", "gpus"),
    [
        (Machine(16, ()), 1, 1, "16", None),
        (Machine(16, ()), 4, 1, "4", None),
        (Machine(16, ()), 4, 2, "2", None),  # data-parallel trials: each process its part
        (Machine(2, ()), 4, 1, "1", None),
        (Machine(16, ("0", "1", "2", "3")), 1, 1, "16", None),  # alone, a trial may have them all
        (Machine(16, ("0", "1", "2", "3")), 2, 1, "8", ["0,2", "1,3"]),
        (Machine(16, ("5", "7")), 2, 1, "8", ["5", "7"]),
        (Machine(16, ("MIG-a",)), 2, 1, "8", ["MIG-a", "MIG-a"]),  # more trials than GPUs
    ],
)
def test_cores_and_gpus_are_shared_out(machine, jobs, num_processes, threads, gpus):
    shares = [machine.share(slot, jobs, num_processes) for slot in range(jobs)]
    assert {share["OMP_NUM_THREADS"] for share in shares} == {threads}
    assert [share.get("CUDA_VISIBLE_DEVICES") for share in shares] == (gpus or [None] * jobs)


def test_the_gpus_are_those_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert Machine.here().gpus == ("3", "GPU-abc")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Machine.here().gpus == ()


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["python", "experiments/run.py", "a=1"], 1),
        (["python", "run.py", "lightning.devices=2"], 2),
        (["python", "run.py", "--lightning.devices", "2", "seed=1"], 2),
        (["python", "run.py", '{"lightning.devices": 4}'], 4),
        (["python", "run.py", "lightning.devices=auto"], 1),
    ],
)
def test_the_processes_of_a_trial(words, number):
    assert launch.num_processes(words) == number


def test_the_command_is_importable_without_torch():
    """The runner's own start is short, and it holds no memory that a trial could use."""
    code = "import sys; import experiments.sweep; print([name for name in ('torch', 'sklearn', 'lightning') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_trials_file_is_json_that_a_person_can_read(write_sweep, run_sweep):
    (trial,) = run_sweep(write_sweep({"level": {"values": [0.1]}}))[2]
    content = json.loads((trial.folder / "trial.json").read_text())
    assert content == {
        "values": {"level": 0.1},
        "state": "finished",
        "run_id": trial.run_id,
        "exit_code": 0,
        "seconds": content["seconds"],
    }
    assert 0 < content["seconds"] < time.monotonic()
