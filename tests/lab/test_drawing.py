"""Small drawings."""

from rllm_lightning.lab.drawing import BAR_HEIGHT, bars, sparkline


def test_a_sparkline_has_eight_levels_up_to_its_top():
    assert sparkline([0, 0.5, 1, 2], top=1) == "▁▅██"


def test_a_sparkline_shows_gaps_and_negative_values():
    assert sparkline([None, float("nan"), -1, 1], top=1) == "  -█"


def test_a_sparkline_of_zeros_is_flat():
    assert sparkline([0, 0], top=0) == "▁▁"


def test_bars_go_up_and_down_from_the_middle_and_the_largest_fills_its_half():
    drawn = bars([2, -1])
    assert f'class="up" x="0" y="0.0" width="5" height="{BAR_HEIGHT / 2:.1f}"' in drawn
    assert f'class="down" x="6" y="{BAR_HEIGHT / 2}" width="5" height="{BAR_HEIGHT / 4:.1f}"' in drawn


def test_a_value_that_is_not_finite_has_no_bar():
    assert bars([float("inf"), 1]).count("<rect") == 1
    assert "<rect" not in bars([float("nan")])
