"""Under a sweep a run is shown with the values that it uses, or it does not start."""

import pytest
import yaml
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rllm_lightning.config import Config, ConfigError, load_config
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.tracking.sweep_values import check_swept_values
from rllm_lightning.tracking.wandb_tracker import WandbTracker
from tests.tracking import offline


def config_of(run):
    return offline.values(offline.records(run.wandb, "run")[0].config.update)


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    def issue(**values):
        path = tmp_path / "sweep-values.yaml"
        path.write_text(yaml.safe_dump({"wandb_version": 1} | {key: {"value": value} for key, value in values.items()}, sort_keys=False))
        monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(path))
        monkeypatch.setenv("WANDB_SWEEP_ID", "sw33p")

    return issue


def test_a_sweeps_values_are_those_the_run_uses(make_config, sweep, follow):
    """B41: dotted and nested parameters; the config shown is the one in effect."""
    sweep(**{"training.learning_rate": 1e-3, "rllm": {"algorithm": {"adv_estimator": "rloo"}}, "task.level": 4.0, "seed": 7})
    config = make_config(**{"training.learning_rate": "1e-3", "rllm.algorithm.adv_estimator": "rloo", "task.level": 4})
    run = RunDirectory.create(config)
    follow(config, run, {1: {"a": 1.0}})
    shown = config_of(run)
    assert shown["training"]["learning_rate"] == 1e-3
    assert shown["training.learning_rate"] == 1e-3
    assert shown["rllm"]["algorithm"]["adv_estimator"] == "rloo"


def test_a_run_that_would_be_shown_with_other_values_is_refused_with_one_line_a_key(make_config, sweep):
    sweep(**{"training.learning_rate": 1e-3, "rllm": {"algorithm": {"adv_estimator": "rloo"}}, "seed": 7})
    config = make_config(**{"rllm.algorithm.adv_estimator": "grpo", "training.learning_rate": 1e-4})
    with pytest.raises(ConfigError) as caught:
        WandbTracker(config, RunDirectory.create(config))
    assert [line.split(";")[0] for line in str(caught.value).splitlines()] == [
        "rllm.algorithm.adv_estimator: the sweep says 'rloo', this run uses 'grpo'",
        "training.learning_rate: the sweep says 0.001, this run uses 0.0001",
    ]


def test_a_swept_key_that_nothing_reads_is_refused(make_config, sweep):
    sweep(**{"training.learning_rat": 1e-3})
    config = make_config()
    with pytest.raises(ValueError, match=r"training\.learning_rat: unknown key"):
        WandbTracker(config, RunDirectory.create(config))


def test_every_rank_refuses(make_config, sweep, monkeypatch):
    """B44: rank 1 does not train on while rank 0 stops."""
    sweep(seed=8)
    config = make_config()
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with pytest.raises(ValueError, match="seed: the sweep says 8, this run uses 7"):
        WandbTracker(config, RunDirectory.create(config))


@pytest.mark.parametrize(
    ("argument", "swept"),
    [
        ("--task.untyped=None", None),
        ("task.untyped=False", False),
        ("--training.learning_rate=1e-06", 1e-6),
        ("--wandb.tags=['a', 'b']", ["a", "b"]),
        ("task.note=007", "007"),
        ("--task.note=12:30", "12:30"),
        ("task.level=4.0", 4.0),
    ],
)
def test_what_the_agents_macros_make_of_a_value_is_still_that_value(sweep, argument, swept):
    """B40, B50: arguments as `${args}` and `${args_no_hyphens}` write them, beside the values the sweep shows."""
    sweep(**{argument.lstrip("-").partition("=")[0]: swept})
    check_swept_values(Config.from_config(load_config(["task.name=tracking_demo", argument])))


def test_a_value_that_was_changed_on_the_way_is_noticed(sweep):
    """B40: `007` that arrived as the number 7."""
    sweep(**{"task.note": "007"})
    with pytest.raises(ConfigError, match=r"^task\.note: the sweep says '007', this run uses '7'; "):
        check_swept_values(Config.from_config(load_config(["task.name=tracking_demo", "task.note=7"])))
