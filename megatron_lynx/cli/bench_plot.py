"""The Pareto plot of a bench as SVG: step time against peak activation bytes."""

from __future__ import annotations

from html import escape
from math import floor, log10

from megatron_lynx.cli.bench_result import Case, Measured, front

WIDTH, HEIGHT = 720, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 55
COLOURS = {"stock": "#c2410c", "lynx": "#1d4ed8", "demand": "#64748b"}
LABELS = {"stock": "Megatron's own", "lynx": "lynx", "demand": "lynx plans, windows off"}


def pareto_svg(case: Case) -> str:
    """The plot of one case, as a file of its own."""
    x = _Axis([row.peak_bytes / 1e6 for row in case.rows], LEFT, WIDTH - RIGHT)
    y = _Axis([row.step_ns / 1e9 for row in case.rows], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 18, f"{case.name}, link {case.link}", size=14),
        *_grid(x, y),
        *_staircase(case, x, y),
        *[line for row in case.rows for line in _point(row, x, y)],
        *_legend(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Axis:
    """Maps values to pixels, with round ticks."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
        self.low, self.high = max(0.0, low - margin), high + margin
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Five to ten round values."""
        rough = (self.high - self.low) / 6
        unit = 10.0 ** floor(log10(rough))
        step = min((unit * m for m in (1, 2, 5, 10)), key=lambda s: abs(s - rough))
        first = floor(self.low / step) + 1
        return [round(i * step, 10) for i in range(first, floor(self.high / step) + 1)]


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", turn: str = "") -> str:
    extra = f' transform="{turn}"' if turn else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _grid(x: _Axis, y: _Axis) -> list[str]:
    parts = []
    for tick in x.ticks():
        at = x.at(tick)
        parts.append(f'<line x1="{at}" y1="{TOP}" x2="{at}" y2="{HEIGHT - BOTTOM}" stroke="#e5e7eb"/>')
        parts.append(_text(at, HEIGHT - BOTTOM + 15, f"{tick:g}", anchor="middle"))
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(f'<line x1="{LEFT}" y1="{at}" x2="{WIDTH - RIGHT}" y2="{at}" stroke="#e5e7eb"/>')
        parts.append(_text(LEFT - 6, at + 4, f"{tick:g}", anchor="end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 20, "peak activation MB", anchor="middle"))
    parts.append(
        _text(16, middle, "step, seconds (median)", anchor="middle", turn=f"rotate(-90 16 {middle})")
    )
    return parts


def _staircase(case: Case, x: _Axis, y: _Axis) -> list[str]:
    """The front of Megatron's own methods and that of lynx, as steps."""
    parts = []
    for kind in ("stock", "lynx"):
        rows = front(row for row in case.rows if row.kind == kind)
        points: list[str] = []
        for i, row in enumerate(rows):
            if i:
                points.append(f"{x.at(row.peak_bytes / 1e6)},{y.at(rows[i - 1].step_ns / 1e9)}")
            points.append(f"{x.at(row.peak_bytes / 1e6)},{y.at(row.step_ns / 1e9)}")
        if points:
            style = f'fill="none" stroke="{COLOURS[kind]}" stroke-opacity="0.5"'
            parts.append(f'<polyline points="{" ".join(points)}" {style}/>')
    return parts


def _point(row: Measured, x: _Axis, y: _Axis) -> list[str]:
    at_x, at_y, colour = x.at(row.peak_bytes / 1e6), y.at(row.step_ns / 1e9), COLOURS[row.kind]
    low, high = y.at(row.low_ns / 1e9), y.at(row.high_ns / 1e9)
    title = f"<title>{escape(row.name)}: {row.step_ns / 1e9:.3f} s, {row.peak_bytes / 1e6:.1f} MB</title>"
    parts = [
        f'<line x1="{at_x}" y1="{low}" x2="{at_x}" y2="{high}" stroke="{colour}"/>',
        f'<circle cx="{at_x}" cy="{at_y}" r="4" fill="{colour}">{title}</circle>',
    ]
    if row.kind != "demand":
        parts.append(_text(at_x + 6, at_y - 5, row.name, size=9))
    return parts


def _legend() -> list[str]:
    parts = []
    for i, (kind, label) in enumerate(LABELS.items()):
        at = LEFT + 300 + i * 110
        parts.append(f'<circle cx="{at}" cy="28" r="4" fill="{COLOURS[kind]}"/>')
        parts.append(_text(at + 8, 32, label))
    return parts
