"""Bar charts as SVG text: no dependency, the same bytes for the same numbers, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_LABEL, _PLOT, _VALUE, _BAR, _GAP, _TOP, _BOTTOM = 300, 480, 60, 11, 9, 66, 34
_STYLE = """<style>
 text { font: 12px system-ui, sans-serif; fill: #1c2733 }
 .title { font-size: 15px; font-weight: 600 }
 .small { font-size: 10px }
 .back { fill: #ffffff } .grid { stroke: #d4dbe2 } .mark { stroke: #1c2733; stroke-width: 1.5 }
 .band { fill: #e6eef5 }
 .c0 { fill: #9aa7b4 } .c1 { fill: #e0a03c } .c2 { fill: #3c8fd0 } .c3 { fill: #1f9d7a }
 @media (prefers-color-scheme: dark) {
  text { fill: #dfe6ee } .back { fill: #14191f } .grid { stroke: #36414c }
  .mark { stroke: #dfe6ee } .band { fill: #222c36 }
 }
</style>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A chart of horizontal bars in groups.

    ``rows`` are (label, one value per series; None leaves a gap). Bars start at ``origin``; the axis
    runs from ``low`` to ``high`` with lines at ``ticks``; ``band`` is a shaded range. ``unit`` is a
    format for values and ticks.
    """

    title: str
    series: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    origin: float
    low: float
    high: float
    ticks: tuple[float, ...]
    unit: str
    band: tuple[float, float] | None = None

    def x(self, value: float) -> float:
        """Where a value lies, in pixels; what is off the axis is drawn at its end."""
        inside = min(max(value, self.low), self.high)
        return round(_LABEL + _PLOT * (inside - self.low) / (self.high - self.low), 1)

    @property
    def group(self) -> int:
        """Height of one group."""
        return _BAR * len(self.series) + _GAP

    @property
    def height(self) -> int:
        """Height of the chart."""
        return _TOP + self.group * len(self.rows) + _BOTTOM


def svg(chart: Bars) -> str:
    """The chart as an SVG document."""
    width = _LABEL + _PLOT + _VALUE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {chart.height}" '
        f'width="{width}" height="{chart.height}" role="img" aria-label="{escape(chart.title)}">',
        _STYLE,
        f'<rect class="back" width="{width}" height="{chart.height}"/>',
        f'<text class="title" x="12" y="24">{escape(chart.title)}</text>',
        *_legend(chart.series),
        *_axis(chart),
    ]
    for number, (label, values) in enumerate(chart.rows):
        parts += _group(chart, _TOP + number * chart.group, label, values)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(series: Sequence[str]) -> list[str]:
    parts, x = [], 12
    for number, name in enumerate(series):
        parts.append(f'<rect class="c{number}" x="{x}" y="38" width="11" height="11"/>')
        parts.append(f'<text x="{x + 16}" y="48">{escape(name)}</text>')
        x += 34 + 7 * len(name)
    return parts


def _axis(chart: Bars) -> list[str]:
    top, bottom = _TOP - 6, chart.height - _BOTTOM + 4
    parts = []
    if chart.band:
        left, right = map(chart.x, chart.band)
        parts.append(
            f'<rect class="band" x="{left}" y="{top}" width="{right - left:.1f}" height="{bottom - top}"/>'
        )
    for tick in chart.ticks:
        x, kind = chart.x(tick), "mark" if tick == chart.origin else "grid"
        parts.append(f'<line class="{kind}" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>')
        label = chart.unit.format(tick)
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    return parts


def _group(chart: Bars, top: int, label: str, values: Sequence[float | None]) -> list[str]:
    middle = top + _BAR * len(values) / 2 + 4
    parts = [f'<text x="{_LABEL - 10}" y="{middle:.1f}" text-anchor="end">{escape(label)}</text>']
    start = chart.x(chart.origin)
    for number, value in enumerate(values):
        y = top + number * _BAR
        if value is None:
            continue
        end = chart.x(value)
        left, right = min(start, end), max(start, end)
        parts.append(
            f'<rect class="c{number}" x="{left}" y="{y}" width="{right - left:.1f}" height="{_BAR - 2}"/>'
        )
        parts.append(
            f'<text class="small" x="{right + 4:.1f}" y="{y + _BAR - 3}">{chart.unit.format(value)}</text>'
        )
    return parts
