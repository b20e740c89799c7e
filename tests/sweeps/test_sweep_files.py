"""The YAMLs in sweeps/: each is a sweep that W&B takes, and each of its trials a run that starts."""

import itertools

import pytest

from experiments import run as run_script
from rllm_lightning.config import Config, load_config
from rllm_lightning.lab.sweep import engine
from rllm_lightning.lab.sweep.definition import read_sweep
from rllm_lightning.lab.sweep.trial import new_trial
from tests.sweeps.helpers import ROOT

FILES = sorted((ROOT / "sweeps").glob("*.yaml"))
NUM_TRIALS = {"advantage_estimators": 5 * 5, "losses": 5 * 3, "group_size": 2 * 4 * 3, "ddp": 2 * 3, "tune_grpo": 20, "mini": 2 * 3}
FEW = 5  # trials of a search that are looked at
SMALL_TASK = ["task.params={min_word_len: 3, max_word_len: 4}", "task.train_size=8", "task.val_size=2"]  # of the default job
QUICK = [
    "warm_start.steps=0",
    "data.train_batch_size=2",
    "data.max_response_length=4",
    "rllm.trainer.total_batches=2",
    "rllm.trainer.logger=[csv]",
    "rllm.episode_logging.log_episodes=false",
]


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    """trials(path): the command lines of a sweep, without `python experiments/run.py`; of a grid all of them."""
    known = {}

    def lines(path):
        if path not in known:
            sweep, folder, issued = read_sweep(path), tmp_path_factory.mktemp(path.stem), []
            for number in itertools.count(1):
                if sweep.method != "grid" and number > FEW:
                    break
                if (values := engine.next_values(sweep, issued)) is None:
                    break
                issued.append(new_trial(folder, number, values))
            commands = [sweep.command_line(trial.values, trial.values_json) for trial in issued]
            assert all(command[:2] == ["python", "experiments/run.py"] for command in commands)
            known[path] = [command[2:] for command in commands]
        return known[path]

    return lines


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def path(request):
    return request.param


def configs_of(lines):
    return [Config.from_config(load_config(line, run_script.CONFIGS, default="default")) for line in lines]


def test_there_is_a_number_of_trials_for_each_file():
    assert {path.stem for path in FILES} == set(NUM_TRIALS)


def test_every_trial_is_a_valid_config_of_its_own(path, trials):
    lines = trials(path)
    assert len(set(map(tuple, lines))) == len(lines)
    sweep = read_sweep(path)
    assert len(lines) == (NUM_TRIALS[path.stem] if sweep.method == "grid" else FEW)
    assert sweep.run_cap == (None if sweep.method == "grid" else NUM_TRIALS[path.stem])
    configs_of(lines)


def test_the_loss_is_the_same_for_all_estimators(path, trials):
    """Left open it would follow the estimator."""
    losses = {config.rllm.algorithm.loss_fn for config in configs_of(trials(path))}
    assert None not in losses
    assert len(losses) == (5 if path.stem == "losses" else 1)


@pytest.mark.parametrize("name", ["group_size", "tune_grpo"])
def test_the_rollouts_of_a_batch_stay_512(name, trials):
    configs = configs_of(trials(ROOT / "sweeps" / f"{name}.yaml"))
    assert {config.data.train_batch_size * config.rllm.rollout.n for config in configs} == {512}
    assert len({config.rllm.rollout.n for config in configs}) > 1


def test_ddp_trials_have_two_processes(trials):
    settings = [config.lightning for config in configs_of(trials(ROOT / "sweeps" / "ddp.yaml"))]
    assert {(each.devices, each.strategy, each.accelerator) for each in settings} == {(2, "ddp", "cpu")}


def test_the_first_trial_runs_two_steps_and_logs_the_metric(path, trials, tmp_path, capfd):
    line = [word for word in trials(path)[0] if not word.startswith("lightning.")]  # in this process
    small = [] if path.stem == "mini" else SMALL_TASK
    code = run_script.main([*line, *small, *QUICK, f"run_root={tmp_path}"])
    assert code == 0, capfd.readouterr().err
    (table,) = tmp_path.glob("*/*/metrics.csv")
    assert read_sweep(path).metric.name in table.read_text().splitlines()[0].split(",")
