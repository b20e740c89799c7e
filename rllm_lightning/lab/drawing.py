"""Small drawings: a curve as one line of text, and a group's advantages as a few bars in a table cell.

Larger curves are drawn by `tracking.chart`. Values that are None or not finite leave a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
BAR_WIDTH, BAR_HEIGHT = 6, 28  # of one bar with its gap, and of the whole picture

# for a page that holds bars
STYLE = ".bars{vertical-align:middle}.bars .up{fill:#0072b2}.bars .down{fill:#d55e00}.bars line{stroke:#888}"


def sparkline(values: Sequence[float | None], top: float) -> str:
    """One character a value: a block from 0 (lowest) to `top` (full); `-` below 0, a space for no value.

    A factor on a gradient that reaches `top` is a full block, whatever the curve it stands in, so that lines with one `top` compare.
    """

    def block(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return " "
        if value < -1e-9:
            return "-"
        return BLOCKS[min(7, int(8 * value / top))] if top > 0 else BLOCKS[0]

    return "".join(map(block, values))


def bars(values: Sequence[float]) -> str:
    """An `<svg>` of one bar a value, upward or downward from a line at 0, as high as the largest magnitude allows."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0
    middle = BAR_HEIGHT / 2
    shapes = [f'<line x1="0" x2="{BAR_WIDTH * len(values)}" y1="{middle}" y2="{middle}"/>']
    for position, value in enumerate(values):
        if math.isfinite(value):
            height = abs(value) / largest * middle
            top = middle - height if value > 0 else middle
            box = f'x="{BAR_WIDTH * position}" y="{top:.1f}" width="{BAR_WIDTH - 1}" height="{height:.1f}"'
            shapes.append(f'<rect class="{"up" if value > 0 else "down"}" {box}><title>{value:.6g}</title></rect>')
    return f'<svg class="bars" width="{BAR_WIDTH * len(values)}" height="{BAR_HEIGHT}" role="img">{"".join(shapes)}</svg>'
