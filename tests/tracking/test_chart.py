import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from rllm_lightning.tracking.chart import HEIGHT, MAX_DOTS, WIDTH, escape, line_chart, stacked_chart, ticks

SVG = "{http://www.w3.org/2000/svg}"


def shapes(svg, tag):
    return list(ElementTree.fromstring(svg).iter(f"{SVG}{tag}"))


def coordinates(polyline):
    return [tuple(map(float, pair.split(","))) for pair in polyline.get("points").split()]


def test_points_lie_in_proportion_between_the_axes():
    """Steps 0, 5, 10 and values 0, 1, 0.5: the middle step is halfway, the value 0.5 is halfway."""
    (line,) = shapes(line_chart("t", {"a": [(0, 0.0), (5, 1.0), (10, 0.5)]}), "polyline")
    (x0, y0), (x1, y1), (x2, y2) = coordinates(line)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y1 < y2 < y0  # up is up
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.11)
    assert 0 < x0 < x2 < WIDTH
    assert 0 < y1 < y0 < HEIGHT


def test_a_value_that_is_not_finite_is_a_gap():
    svg = line_chart("t", {"a": [(0, 1.0), (1, 2.0), (2, math.nan), (3, math.inf), (4, 1.0), (5, 2.0)]})
    assert [len(coordinates(line)) for line in shapes(svg, "polyline")] == [2, 2]
    assert "nan" not in svg
    assert len(shapes(svg, "circle")) == 4


@pytest.mark.parametrize("series", [{}, {"a": []}, {"a": [(0, math.nan)]}])
def test_without_a_finite_value_the_chart_says_so(series):
    assert [text.text for text in shapes(line_chart("t", series), "text")] == ["t", "no finite values"]


def test_single_points_and_constant_lines_are_in_the_middle():
    for points in ([(3, 0.7)], [(0, 0.7), (1, 0.7)], [(0, 0.0)]):
        svg = line_chart("t", {"a": points})
        heights = {float(dot.get("cy")) for dot in shapes(svg, "circle")}
        assert len(heights) == 1
        assert 0.3 * HEIGHT < heights.pop() < 0.7 * HEIGHT


@pytest.mark.parametrize("values", [(-1e308, 1e308), (0.0, 5e-324), (1e15, 1e15 + 0.125), (1e-320, 3e-320), (-2.0, -1.0), (1e-7, 3e-7)])
def test_extreme_values_stay_inside_the_picture(values):
    svg = line_chart("t", {"a": list(enumerate(values))})
    for line in shapes(svg, "polyline"):
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in coordinates(line))


def test_a_legend_names_lines_where_there_are_several():
    assert shapes(line_chart("t", {"a": [(0, 1.0)]}), "tspan") == []
    assert [name.text for name in shapes(line_chart("t", {"a": [(0, 1.0)], "b": [(0, 2.0)]}), "tspan")] == ["● a", "● b"]


def test_many_points_are_a_line_without_dots():
    assert len(shapes(line_chart("t", {"a": [(k, float(k)) for k in range(MAX_DOTS)]}), "circle")) == MAX_DOTS
    assert shapes(line_chart("t", {"a": [(k, float(k)) for k in range(MAX_DOTS + 1)]}), "circle") == []


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.03, 0.97, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3.0, 12.0, [-5.0, 0.0, 5.0, 10.0, 15.0]),
        (1e-6, 3e-6, [1e-6, 1.5e-6, 2e-6, 2.5e-6, 3e-6]),
        (0.5, 0.5, [0.25, 0.5, 0.75]),
        (0.0, 0.0, [-1.0, 0.0, 1.0]),
    ],
)
def test_ticks_are_round_and_cover_the_values(low, high, expected):
    assert ticks(low, high, 5) == pytest.approx(expected)


def test_ticks_of_steps_are_whole_and_inside():
    assert ticks(1, 60, 6, whole=True) == [10, 20, 30, 40, 50, 60]
    assert ticks(0, 3, 6, whole=True) == [0, 1, 2, 3]
    assert ticks(7, 7, 6, whole=True) == [7]


def test_labels_of_neighbouring_ticks_differ():
    svg = line_chart("t", {"a": [(0, 1000.01), (1, 1000.05)]})
    labels = [text.text for text in shapes(svg, "text") if text.get("text-anchor") == "end"]
    assert len(set(labels)) == len(labels) >= 5


def test_names_are_escaped():
    svg = line_chart("<b>&\"'\x00\ud800", {"<i>": [(0, 1.0)], "x\x1b": [(0, 1.0)]})
    assert shapes(svg, "text")[0].text == "<b>&\"'��"
    assert not re.search("<[bi]>", svg)
    assert escape("<\ud800\x00é𝄞>") == "&lt;��é𝄞&gt;"


def test_layers_stand_on_each_other():
    """1 + 2, then 2 + 2: the upper layer lies from 1 to 3 and from 2 to 4; where a layer has no number it has no height."""
    lower, upper = shapes(stacked_chart("t", {"a": [(0, 1.0), (1, 2.0)], "b": [(0, 2.0), (1, 2.0), (2, math.nan)]}), "polygon")
    (_, floor), (_, next_floor) = coordinates(upper)[3], coordinates(upper)[2]
    assert [(y) for _, y in coordinates(lower)[:2]] == [floor, next_floor]
    ground = coordinates(lower)[2][1]
    assert ground - coordinates(upper)[0][1] == pytest.approx(3 * (ground - floor), abs=0.3)
    assert shapes(stacked_chart("t", {}), "polygon") == []


def test_a_band_lies_behind_its_line_and_skips_what_is_not_finite():
    svg = line_chart("t", {"mean": [(0, 1.0), (2, 1.0)]}, bands={"range": [(0, 0.0, 2.0), (1, math.nan, 2.0), (2, 0.0, 2.0)]})
    (band,) = shapes(svg, "polygon")
    (line,) = shapes(svg, "polyline")
    assert len(coordinates(band)) == 4
    middle = coordinates(line)[0][1]
    assert sum(y for _, y in coordinates(band)) / 4 == pytest.approx(middle, abs=0.1)
    assert svg.index("<polygon") < svg.index("<polyline")
    assert "nan" not in svg


def test_a_single_step_has_layers_that_can_be_seen():
    (layer,) = shapes(stacked_chart("t", {"a": [(3, 1.0)]}), "polygon")
    assert max(x for x, _ in coordinates(layer)) - min(x for x, _ in coordinates(layer)) >= 10
