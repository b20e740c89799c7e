"""Learning-rate schedules, counted in optimizer steps."""

import pytest

from rllm_lightning.config import AlgorithmConfig
from rllm_lightning.trainer.optimization import schedule_factor, warmup_steps_of


def test_warm_up_is_counted_in_optimizer_steps():
    """B32: 8 batches of 2 updates are 16 optimizer steps; a ratio of .25 is 4 of them: factors .25, .5, .75, 1."""
    warmup = warmup_steps_of(AlgorithmConfig(warmup_steps_ratio=0.25), 8 * 2)
    assert warmup == 4
    factor = schedule_factor("constant", warmup, 16)
    assert [factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_goes_from_one_towards_zero_and_stays_at_the_end():
    factor = schedule_factor("linear", 2, 6)  # after 2 warm-up steps x = 0, 1/4, 2/4, 3/4
    assert [factor(step) for step in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert factor(6) == factor(100) == 0.0


def test_cosine_is_half_way_down_in_the_middle():
    factor = schedule_factor("cosine", 0, 10)
    assert factor(0) == 1.0
    assert factor(5) == pytest.approx(0.5)
    assert factor(10) == factor(99) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("config", "expected"), [({}, 0), ({"warmup_steps": 3}, 3), ({"warmup_steps": 99}, 10), ({"warmup_steps_ratio": 1.0}, 10)]
)
def test_warm_up_steps_win_over_the_ratio_and_never_exceed_the_run(config, expected):
    assert warmup_steps_of(AlgorithmConfig(**config), 10) == expected


def test_a_run_without_steps_has_a_factor():
    assert schedule_factor("linear", 0, 0)(0) == 1.0
