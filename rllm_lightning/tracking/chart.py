"""Charts as SVG text: `line_chart(title, series)`, also with bands, and `stacked_chart`. No drawing library; readable in a page and as a
file of its own.

Colours follow the reader's light or dark theme by a style sheet inside the picture. Points that are not finite leave a gap.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence

Point = tuple[float, float]  # (step, value)
Span = tuple[float, float, float]  # (step, lowest, highest)

WIDTH, HEIGHT = 480, 260  # of the whole picture
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 46, 30  # margins around the axes
MAX_DOTS = 40  # points of a series that are still marked one by one

# Okabe and Ito's colours, told apart by the colour-blind as well; one set for light ground, one for dark
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#6a3d9a", "#666666")
DARK = ("#56b4e9", "#ff8c42", "#2ec4a0", "#e39ac4", "#e6c229", "#8ecdf5", "#b497e0", "#b0b0b0")

_CONTROL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: object) -> str:
    """Text for a place inside HTML or XML, attributes included; characters that neither allows become `�`."""
    return html.escape(_CONTROL.sub("\ufffd", str(text)))


def line_chart(
    title: str,
    series: Mapping[str, Sequence[Point]],
    x_name: str = "step",
    bands: Mapping[str, Sequence[Span]] | None = None,
) -> str:
    """The chart as one `<svg>` element.

    Args:
        title: written above the axes.
        series: lines by name, each a list of points in ascending steps; without a finite point the chart says so.
        x_name: what is along the x axis, for the hint at a point.
        bands: areas behind the lines by name, in the first line's colour; a span that is not finite is left out.
    """
    shades = {name: [span for span in spans if all(map(math.isfinite, span))] for name, spans in (bands or {}).items()}
    points = [point for line in series.values() for point in line if all(map(math.isfinite, point))]
    points += [(x, y) for spans in shades.values() for x, *ends in spans for y in ends]
    names = [(k, "●", name) for k, name in enumerate(series)] + [(0, "░", name) for name in shades]
    body = []
    if points:
        axes = _Axes([x for x, _ in points], [y for _, y in points])
        body += [
            *axes.draw(),
            *(_draw_band(axes, "band c0", *band) for band in shades.items() if band[1]),
            *(shape for k, line in enumerate(series.items()) for shape in _draw_line(axes, k, *line, x_name)),
            *_legend(names),
        ]
    return _picture(title, body)


def stacked_chart(title: str, layers: Mapping[str, Sequence[Point]]) -> str:
    """Layers on top of each other, the first at the bottom, as one `<svg>` element.

    Args:
        title: written above the axes.
        layers: by name, the thickness of each at its steps; where one has no finite number, or a negative one, it is 0 thick.
    """
    steps = sorted({x for line in layers.values() for x, y in line if math.isfinite(x) and math.isfinite(y)})
    if not steps:
        return _picture(title, [])
    floor = dict.fromkeys(steps, 0.0)
    spans: dict[str, list[Span]] = {}
    for name, line in layers.items():
        thickness = {x: max(y, 0.0) for x, y in line if math.isfinite(y)}
        spans[name] = [(x, floor[x], floor[x] + thickness.get(x, 0.0)) for x in steps]
        floor = {x: high for x, _, high in spans[name]}
    axes = _Axes(steps, [0.0, *floor.values()])
    shapes = [_draw_band(axes, f"layer c{k % len(LIGHT)}", *layer) for k, layer in enumerate(spans.items())]
    return _picture(title, [*axes.draw(), *shapes, *_legend([(k, "■", name) for k, name in enumerate(layers)])])


def _picture(title: str, body: Sequence[str]) -> str:
    nothing = f'<text class="tick" x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no finite values</text>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    name = f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>'
    return "\n".join([head, f"<style>{_STYLE}</style>", name, *(body or [nothing]), "</svg>"])


class _Axes:
    """From data to picture coordinates."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]):
        self.x_ticks = ticks(min(xs), max(xs), 6, whole=True)
        self.y_ticks = ticks(min(ys), max(ys), 5)
        self.x_range = min(*xs, self.x_ticks[0]), max(*xs, self.x_ticks[-1])
        self.y_range = min(*ys, self.y_ticks[0]), max(*ys, self.y_ticks[-1])

    def place(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f},{self.y(y):.1f}"

    def x(self, value: float) -> float:
        return LEFT + _share(value, *self.x_range) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - _share(value, *self.y_range) * (HEIGHT - TOP - BOTTOM)

    def draw(self) -> Iterator[str]:
        digits = _digits(self.y_ticks)
        for tick in self.y_ticks:
            y = f"{self.y(tick):.1f}"
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
            yield f'<text class="tick" x="{LEFT - 6}" y="{y}" dy="0.35em" text-anchor="end">{tick:.{digits}g}</text>'
        for tick in self.x_ticks:
            yield f'<text class="tick" x="{self.x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:.0f}</text>'
        yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'


def _share(value: float, low: float, high: float) -> float:
    # in halves, as the difference of two huge numbers may be no number
    return (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5


def ticks(low: float, high: float, num: int, whole: bool = False) -> list[float]:
    """About `num` round values that cover [low, high]: steps of 1, 2 or 5 times a power of ten (`whole`: of at least 1, inside)."""
    raw = high / num - low / num
    if raw <= max(1e-300, 1e-10 * max(abs(low), abs(high))):  # one value, as far as a picture can tell
        margin = abs(low) / 2 or 1.0
        return [low] if whole else [low - margin, low, low + margin]
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    if whole:
        step = max(step, 1.0)
        return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [step * k for k in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def _digits(ticks: Sequence[float]) -> int:
    """Significant digits that tell neighbouring ticks apart."""
    largest = max(map(abs, ticks))
    return max(5, math.floor(math.log10(largest)) - math.floor(math.log10(ticks[1] - ticks[0])) + 1)


def _draw_line(axes: _Axes, index: int, name: str, line: Sequence[Point], x_name: str) -> Iterator[str]:
    colour = f"c{index % len(LIGHT)}"
    for run in _finite_runs(line):
        yield f'<polyline class="line {colour}" points="{" ".join(axes.place(x, y) for x, y in run)}"/>'
    finite = [point for point in line if all(map(math.isfinite, point))]
    for x, y in finite if len(finite) <= MAX_DOTS else ():
        hint = escape(f"{name}: {y:.6g} at {x_name} {x:.0f}")
        yield f'<circle class="dot {colour}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="2.5"><title>{hint}</title></circle>'


def _draw_band(axes: _Axes, kind: str, name: str, spans: Sequence[Span]) -> str:
    wide = 6 if len(spans) == 1 else 0  # pixels to either side, for a single step to be seen
    sides = (-wide, wide) if wide else (0,)
    edge = [f"{axes.x(x) + side:.1f},{axes.y(high):.1f}" for x, _, high in spans for side in sides]
    edge += [f"{axes.x(x) - side:.1f},{axes.y(low):.1f}" for x, low, _ in reversed(spans) for side in sides]
    return f'<polygon class="{kind}" points="{" ".join(edge)}"><title>{escape(name)}</title></polygon>'


def _finite_runs(line: Sequence[Point]) -> Iterator[list[Point]]:
    run: list[Point] = []
    for point in line:
        if all(map(math.isfinite, point)):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _legend(names: Sequence[tuple[int, str, str]]) -> Iterator[str]:
    """Of (number of the colour, mark, name)."""
    if len(names) > 1:
        spans = " ".join(f'<tspan class="c{k % len(LIGHT)}">{mark} {escape(name)}</tspan>' for k, mark, name in names)
        yield f'<text class="tick legend" x="{LEFT}" y="34">{spans}</text>'


def _colours(palette: Sequence[str]) -> str:
    return "".join(
        f".chart .line.c{k}{{stroke:{c}}}.chart .dot.c{k},.chart .band.c{k},.chart .layer.c{k},.chart .legend .c{k}{{fill:{c}}}"
        for k, c in enumerate(palette)
    )


_STYLE = (
    ".chart{font:11px system-ui,sans-serif}.chart .title{font-weight:600;font-size:12.5px;fill:#222}.chart .tick{fill:#666}"
    ".chart .band{opacity:.18}.chart .layer{opacity:.8}"
    ".chart .grid{stroke:#ddd;stroke-width:1}.chart .axis{stroke:#888;stroke-width:1}"
    f".chart .line{{fill:none;stroke-width:1.6;stroke-linejoin:round}}{_colours(LIGHT)}"
    "@media (prefers-color-scheme:dark){.chart .title{fill:#eee}.chart .tick{fill:#aaa}.chart .grid{stroke:#333}.chart .axis{stroke:#777}"
    f"{_colours(DARK)}}}"
)
