"""A curve as SVG: a few points, their axes, nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 20, 50


def line_plot(points: Sequence[tuple[float, float]], *, x: str, y: str) -> str:
    """The points joined by lines, both axes from zero.

    Args:
        x, y: what the axes mean.
    """
    most_x, most_y = max(p[0] for p in points), _nice(max(p[1] for p in points))

    def place(px: float, py: float) -> tuple[float, float]:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * px / most_x,
            HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * py / most_y,
        )

    curve = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(*p) for p in points))
    dots = [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in (place(*p) for p in points)]
    ticks = []
    for value in (p[0] for p in points):
        a, b = place(value, 0)
        ticks.append(f'<text x="{a:.1f}" y="{b + 16:.1f}" text-anchor="middle">{value:g}</text>')
    for part in range(5):
        value = most_y * part / 4
        a, b = place(0, value)
        ticks.append(f'<text x="{a - 6:.1f}" y="{b + 4:.1f}" text-anchor="end">{value:g}</text>')
        ticks.append(f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{WIDTH - RIGHT}" y2="{b:.1f}" stroke="#ddd"/>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="11" fill="#333">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            *ticks,
            f'<polyline points="{curve}" fill="none" stroke="#2a6fb0" stroke-width="2"/>',
            '<g fill="#2a6fb0">',
            *dots,
            "</g>",
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x)}</text>',
            f'<text transform="translate(14,{middle}) rotate(-90)" text-anchor="middle">{escape(y)}</text>',
            "</svg>",
            "",
        ]
    )


def _nice(value: float) -> float:
    """The next of 1, 2, 4, 8 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value)
