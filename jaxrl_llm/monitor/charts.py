# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Curves as SVG text, drawn here so that a report needs no network and no plotting package.

Colours are CSS classes (`c0` … `c4`) and follow the page's light or dark theme. `draw` also returns
the points in pixels, from which the page's script shows values under the pointer.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence
from typing import Any, Literal

Number = int | float

WIDTH, HEIGHT = 420, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 24, 32
_BUCKETS = 180  # about one for two pixels
_BARS = 90


@dataclasses.dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: shown in the legend and under the pointer.
        steps: where it has values, rising.
        values: one a step; NaN and infinities are left out of the curve and marked.
        points: draw a dot at each value (for the few values of an evaluation).
    """

    name: str
    steps: Sequence[int]
    values: Sequence[Number]
    points: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """What to draw in one card of the report.

    Attributes:
        title: the quantity.
        caption: one sentence on how to read it.
        y_label: the quantity's unit, written at the axis.
        series: the curves, at most five.
        kind: "line", or "stack" for bars that add up.
        percent: values are shares of 1; the axis is 0 to 100 %.
        log: logarithmic axis, where every value is positive.
        smooth: draw a moving average over the curve when there are many values.
        band: names of two series between which the area is filled, instead of drawing them.
    """

    title: str
    caption: str
    y_label: str
    series: Sequence[Series]
    kind: Literal["line", "stack"] = "line"
    percent: bool = False
    log: bool = False
    smooth: bool = False
    band: tuple[str, str] | None = None


def draw(chart: Chart) -> tuple[str, dict[str, Any]]:
    """The chart as an `<svg>` element, and its points for the page's script.

    Returns:
        The element, and {"x": pixel positions, "labels": text for each, "series": [{"name",
        "color", "y": pixels or None, "text": values}]}.
    """
    return _draw_stack(chart) if chart.kind == "stack" else _draw_lines(chart)


def number(value: Number, percent: bool = False) -> str:
    """A value for people, in four significant digits: `0.8533`, `85.3%`, `1.2e-5`."""
    if not math.isfinite(value):
        return {"nan": "NaN", "inf": "∞", "-inf": "−∞"}[str(value)]
    if percent:
        return f"{value * 100:.1f}%"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        digits, _, exponent = f"{value:.3e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


# --- lines --------------------------------------------------------------------------------------


def _draw_lines(chart: Chart) -> tuple[str, dict[str, Any]]:
    tables = [dict(zip(s.steps, s.values, strict=True)) for s in chart.series]
    steps = sorted(set().union(*tables)) if tables else []
    finite = [v for table in tables for v in table.values() if math.isfinite(v)]
    log = chart.log and bool(finite) and min(finite) > 0
    if not finite:
        return _empty("no values yet" if not steps else "no finite values"), _no_hover()
    x = _Scale(steps[0], steps[-1], _LEFT, WIDTH - _RIGHT, whole=True)
    low, high = (0.0, 1.0) if chart.percent else (min(finite), max(finite))
    y = _Scale(min(low, *finite), max(high, *finite), HEIGHT - _BOTTOM, _TOP, log=log)
    kept = _thin(steps, tables)
    body = [_axes(x, y, chart.y_label, chart.percent)]
    hidden = set(chart.band or ())
    if chart.band:
        body.append(_band(kept, [tables[_index(chart, name)] for name in chart.band], x, y))
    for color, (series, table) in enumerate(zip(chart.series, tables, strict=True)):
        if series.name not in hidden:
            body += _curve(series, table, kept, x, y, color, chart.smooth)
    broken = sorted({s for table in tables for s, v in table.items() if not math.isfinite(v)})
    body += [_cross(x(step)) for step in broken[:: max(1, len(broken) // _BUCKETS)]]
    hover = {
        "x": [round(x(step), 1) for step in kept],
        "labels": [f"step {step}" for step in kept],
        "series": [
            {
                "name": series.name,
                "color": 0 if series.name in hidden else color,
                "y": [_pixel(table.get(step), y) for step in kept],
                "text": [_text(table.get(step), chart.percent) for step in kept],
            }
            for color, (series, table) in enumerate(zip(chart.series, tables, strict=True))
        ],
    }
    return _svg(chart, body), hover


def _curve(
    series: Series,
    table: dict[int, Number],
    kept: list[int],
    x: Any,
    y: Any,
    color: int,
    smooth: bool,
) -> list[str]:
    """A curve with gaps where it is not finite; faint below its moving average."""
    window = smoothing_window(len(table)) if smooth else 1
    runs = _runs([(step, table[step]) for step in kept if step in table])
    parts = []
    for run in runs:
        if len(run) == 1 or series.points:
            parts += [
                f'<circle class="c{color} dot" cx="{x(s):.1f}" cy="{y(v):.1f}" r="3"/>'
                for s, v in run
            ]
        if len(run) > 1:
            parts.append(_path(run, x, y, f"c{color} line{' raw' if window > 1 else ''}"))
    if window > 1:
        averaged = dict(zip(table, _moving_average(list(table.values()), window), strict=True))
        smoothed = _runs([(step, averaged[step]) for step in kept if step in table])
        parts += [_path(run, x, y, f"c{color} line") for run in smoothed if len(run) > 1]
    return parts


def smoothing_window(count: int) -> int:
    """How many values the moving average of `count` values spans; 1 is no smoothing."""
    return 1 if count < 25 else 2 * (count // 80) + 3


def _moving_average(values: list[Number], window: int) -> list[Number]:
    """Centred mean of the finite values around each; NaN where the value itself is not finite."""
    total, count = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        total.append(total[-1] + (value if finite else 0.0))
        count.append(count[-1] + finite)
    averaged = []
    for i, value in enumerate(values):
        # The same reach on both sides, so that the ends do not lag.
        reach = min(window // 2, i, len(values) - 1 - i)
        a, b = i - reach, i + reach + 1
        inside = count[b] - count[a]
        averaged.append(
            (total[b] - total[a]) / inside if math.isfinite(value) and inside else math.nan
        )
    return averaged


def _runs(points: list[tuple[int, Number]]) -> list[list[tuple[int, Number]]]:
    """Stretches of finite points."""
    runs: list[list[tuple[int, Number]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _thin(steps: list[int], tables: list[dict[int, Number]]) -> list[int]:
    """Steps to draw: all when they are few, else each bucket's extremes: no spike is lost."""
    if len(steps) <= 2 * _BUCKETS:
        return steps
    kept = {steps[0], steps[-1]}
    for bucket in range(_BUCKETS):
        a, b = (len(steps) * edge // _BUCKETS for edge in (bucket, bucket + 1))
        for table in tables:
            have = [step for step in steps[a:b] if math.isfinite(table.get(step, math.nan))]
            if have:
                kept |= {min(have, key=table.__getitem__), max(have, key=table.__getitem__)}
    return sorted(kept)


def _path(points: list[tuple[int, Number]], x: Any, y: Any, css: str) -> str:
    return f'<path class="{css}" d="M{"L".join(f"{x(s):.1f},{y(v):.1f}" for s, v in points)}"/>'


def _band(kept: list[int], tables: list[dict[int, Number]], x: Any, y: Any) -> str:
    lower, upper = tables
    ends = [(step, lower.get(step, math.nan), upper.get(step, math.nan)) for step in kept]
    ends = [end for end in ends if math.isfinite(end[1]) and math.isfinite(end[2])]
    there = [f"{x(step):.1f},{y(top):.1f}" for step, _, top in ends]
    back = [f"{x(step):.1f},{y(bottom):.1f}" for step, bottom, _ in reversed(ends)]
    return f'<polygon class="band" points="{" ".join(there + back)}"/>'


def _index(chart: Chart, name: str) -> int:
    return next(i for i, series in enumerate(chart.series) if series.name == name)


# --- stacked bars -------------------------------------------------------------------------------


def _draw_stack(chart: Chart) -> tuple[str, dict[str, Any]]:
    tables = [dict(zip(s.steps, s.values, strict=True)) for s in chart.series]
    steps = sorted(set().union(*tables)) if tables else []
    if not steps:
        return _empty("no values yet"), _no_hover()
    count = min(len(steps), _BARS)
    groups = [steps[len(steps) * i // count : len(steps) * (i + 1) // count] for i in range(count)]
    means = [[_mean([table.get(step) for step in group]) for group in groups] for table in tables]
    top = max(sum(column) for column in zip(*means, strict=True))
    y = _Scale(0.0, top or 1.0, HEIGHT - _BOTTOM, _TOP)
    x = _Scale(steps[0], steps[-1], _LEFT, WIDTH - _RIGHT, whole=True, pad=0.5)
    slot = (WIDTH - _RIGHT - _LEFT) / count
    gap = 0.06 if count <= 40 else -0.02  # many bars are an area without seams
    body, heights = [_axes(x, y, chart.y_label, False)], [0.0] * count
    hover: dict[str, Any] = _no_hover()
    hover["x"] = [round(_LEFT + slot * (i + 0.5), 1) for i in range(count)]
    hover["labels"] = [
        f"step {group[0]}" if len(group) == 1 else f"steps {group[0]}–{group[-1]}"
        for group in groups
    ]
    for color, (series, row) in enumerate(zip(chart.series, means, strict=True)):
        for i, value in enumerate(row):
            bottom, heights[i] = heights[i], heights[i] + value
            body.append(
                f'<rect class="c{color} bar" x="{_LEFT + slot * (i + gap):.2f}" '
                f'width="{slot * (1 - 2 * gap):.2f}" y="{y(heights[i]):.2f}" '
                f'height="{max(0.0, y(bottom) - y(heights[i])):.2f}"/>'
            )
        text = [number(value) for value in row]
        hover["series"].append(
            {"name": series.name, "color": color, "y": [None] * count, "text": text}
        )
    return _svg(chart, body), hover


def _mean(values: list[Number | None]) -> Number:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return max(0.0, sum(known) / len(known)) if known else 0.0


# --- frame --------------------------------------------------------------------------------------


class _Scale:
    """Values to pixels, with round ticks."""

    def __init__(
        self, low: Number, high: Number, start: Number, end: Number, *,
        log: bool = False, whole: bool = False, pad: Number = 0.0,
    ):  # fmt: skip
        self.log, self.start, self.end = log, start, end
        if whole:
            self.low, self.high = low - pad, max(high + pad, low + pad + 1e-9)
            self.ticks = [t for t in _round_ticks(low, high, 6) if t == int(t)] or [low]
            if low == high:  # one step stands in the middle
                self.low, self.high, self.ticks = low - 1, low + 1, [low]
        elif log:
            self.low, self.high = math.log10(low), math.log10(high)
            first, last = math.floor(self.low), math.ceil(self.high)
            last += first == last
            self.low, self.high = float(first), float(last)
            self.ticks = [10.0**e for e in range(first, last + 1, max(1, (last - first) // 4))]
        else:
            if 0 <= low < 0.5 * high:
                low = 0.0
            if low == high:
                low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
            self.ticks = _round_ticks(low, high, 5)
            self.low, self.high = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def __call__(self, value: Number) -> Number:
        value = math.log10(value) if self.log else value
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def _round_ticks(low: Number, high: Number, most: int) -> list[Number]:
    """Ticks at 1, 2 or 5 times a power of ten that enclose the values where that costs little."""
    span = high - low
    if span <= 0:
        return [low]
    unit = 10.0 ** math.floor(math.log10(span / most))
    step = next(unit * k for k in (1, 2, 5, 10, 20) if span / (unit * k) <= most)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    # Multiples are divided, not added up, so that 0.3 does not become 0.30000000000000004.
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def _axes(x: _Scale, y: _Scale, y_label: str, percent: bool) -> str:
    parts = []
    for tick in y.ticks:
        at = y(tick)
        label = f"{tick * 100:.0f}%" if percent else number(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
        )
    base = HEIGHT - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    for tick in x.ticks:
        if x.low <= tick <= x.high:
            at = x(tick)
            place = f'x="{at:.1f}" y="{base + 15}" text-anchor="middle"'
            parts.append(f'<text class="tick" {place}>{tick:g}</text>')
    parts.append(f'<text class="label" x="2" y="10">{html.escape(y_label)}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">step</text>'
    )
    return "".join(parts)


def _cross(at: Number) -> str:
    base = HEIGHT - _BOTTOM
    return f'<path class="broken" d="M{at - 3:.1f},{base - 3}l6,6m0,-6l-6,6"/>'


def _svg(chart: Chart, body: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{html.escape(chart.title)}">{"".join(body)}<g class="hover"></g></svg>'
    )


def _empty(text: str) -> str:
    place = f'x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle"'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text}">'
        f'<text class="label" {place}>{text}</text></svg>'
    )


def _no_hover() -> dict[str, Any]:
    return {"x": [], "labels": [], "series": []}


def _pixel(value: Number | None, y: _Scale) -> Number | None:
    return round(y(value), 1) if value is not None and math.isfinite(value) else None


def _text(value: Number | None, percent: bool) -> str | None:
    return None if value is None else number(value, percent)
