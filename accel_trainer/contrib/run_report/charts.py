"""Charts as inline SVG: line charts with axes, and bars of shares. Colours are classes of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

NUM_COLOURS = 7
"""Classes `c0` to `c6` of the page."""

# The coordinates of an SVG; the page scales it. The left margin has room for labels at the size of a narrow screen.
_WIDTH, _HEIGHT = 480, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 12, 44
_INNER_WIDTH, _INNER_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_TABLE_ROWS = 24

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line: its label, its points by x, and its looks."""

    label: str
    points: Sequence[Point]
    colour: int = 0
    is_dashed: bool = False
    """Dashed, and with a marker on each point: few points, of evaluations for instance."""


@dataclass(frozen=True)
class Chart:
    """A line chart over updates."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    from_zero: bool = False
    note: str = ""


def thin_out(points: Sequence[Point], limit: int = 800) -> list[Point]:
    """Return at most about `limit` of the points: of each bucket the lowest and the highest, in their order."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit // 2))
    kept = []
    for begin in range(0, len(points), size):
        bucket = points[begin : begin + size]
        extremes = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        kept += sorted(extremes)
    return sorted({points[0], *kept, points[-1]})


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return about `count` round numbers, 1, 2 or 5 times a power of ten apart, that reach from `low` to `high`."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    rough = span / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def format_number(value: float, digits: int = 4) -> str:
    """Return a number for a table: thousands separated, about `digits` that count, powers of ten where it is tiny."""
    if not math.isfinite(value):
        return {math.inf: "infinity", -math.inf: "-infinity"}.get(value, "NaN")
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -4 or size > 14:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e+")
    decimals = max(digits - 1 - size, 0)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _axis(values: Sequence[float], from_zero: bool) -> tuple[list[float], int]:
    """Return the ticks of the axis of values, and the power of ten that their labels are divided by."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        margin = abs(high) * 0.1 or 1.0
        low, high = (0.0 if from_zero else low - margin), high + margin
    ticks = nice_ticks(low, high)
    largest = max(abs(tick) for tick in ticks)
    power = math.floor(math.log10(largest)) if largest else 0
    return ticks, power if power <= -3 or power >= 6 else 0


def _tick_labels(ticks: Sequence[float], power: int) -> list[str]:
    scaled = [tick / 10.0**power for tick in ticks]
    step = scaled[1] - scaled[0] if len(scaled) > 1 else scaled[0] or 1.0
    decimals = max(0, -math.floor(math.log10(abs(step)) + 1e-9))
    return [f"{0.0 if abs(tick) < step * 1e-6 else tick:,.{decimals}f}" for tick in scaled]


def draw_chart(chart: Chart, identifier: str) -> str:
    """Return a figure: title, legend, SVG, and a table of some of its values."""
    shown = [each for each in chart.series if each.points]
    if not shown:
        return ""
    values = [y for each in shown for _, y in each.points]
    steps = [x for each in shown for x, _ in each.points]
    ticks, power = _axis(values, chart.from_zero)
    named = [each for each in shown if len(shown) > 1 or each.is_dashed]  # not the line of a training alone
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    plot = _Plot.around(steps, ticks)
    return (
        f'<figure class="chart" id="{identifier}"><figcaption>{escape(chart.title)}{_unit(chart, power)}</figcaption>'
        f"{draw_legend(named)}"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="{identifier}-t {identifier}-d">'
        f'<title id="{identifier}-t">{escape(chart.title)}</title>'
        f'<desc id="{identifier}-d">{escape(_describe(chart, shown))}</desc>'
        f"{_draw_axes(plot, ticks, power)}{_draw_lines(plot, shown)}</svg>"
        f"{note}{_values_table(shown, identifier)}</figure>"
    )


def _unit(chart: Chart, power: int) -> str:
    units = [chart.unit] if chart.unit else []
    units += [f"\u00d710{str(power).translate(_SUPERSCRIPTS)}"] if power else []
    return f' <span class="unit">({escape(", ".join(units))})</span>' if units else ""


def draw_legend(series: Iterable[Series]) -> str:
    """Return a list of the names of lines, each behind a piece of it; nothing of none."""
    entries = []
    for each in series:
        kind, dashed = f"c{each.colour % NUM_COLOURS}", " dashed" if each.is_dashed else ""
        dot = f'<circle class="dot {kind}" cx="12" cy="5" r="3"/>' if each.is_dashed else ""
        line = f'<path class="line {kind}{dashed}" d="M1 5H23"/>'
        swatch = f'<svg class="swatch" viewBox="0 0 24 10" aria-hidden="true">{line}{dot}</svg>'
        entries.append(f"<li>{swatch}{escape(each.label)}</li>")
    return f'<ul class="legend">{"".join(entries)}</ul>' if entries else ""


class _Plot(NamedTuple):
    """The values at the edges of a chart's plane."""

    first: float
    last: float
    bottom: float
    top: float

    @classmethod
    def around(cls, steps: Sequence[float], ticks: Sequence[float]) -> _Plot:
        """Return a plane with all steps, from 0 on unless they begin late."""
        first, last = min(steps), max(steps)
        if first <= 0.1 * last:
            first, last = 0, last or 1  # 0: an evaluation before the first update
        elif first == last:
            first, last = first - 1, last + 1
        return cls(first, last, ticks[0], ticks[-1])

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point is drawn."""
        return (
            round(_LEFT + (x - self.first) / (self.last - self.first) * _INNER_WIDTH, 1),
            round(_TOP + (self.top - y) / (self.top - self.bottom) * _INNER_HEIGHT, 1),
        )


def _draw_axes(plot: _Plot, ticks: Sequence[float], power: int) -> str:
    parts = []
    for tick, label in zip(ticks, _tick_labels(ticks, power), strict=True):
        _, y = plot.place(plot.first, tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="y" x="{_LEFT - 7}" y="{y}">{label}</text>')
    updates = nice_ticks(plot.first, plot.last)
    for tick in (tick for tick in updates if plot.first <= tick <= plot.last and tick == int(tick)):
        x, y = plot.place(tick, plot.bottom)
        parts.append(f'<path class="axis" d="M{x} {y}v4"/><text class="x" x="{x}" y="{y + 19}">{tick:,.0f}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"/>')
    parts.append(f'<text class="x" x="{_LEFT + _INNER_WIDTH / 2}" y="{_HEIGHT - 6}">update</text>')
    return "".join(parts)


def _draw_lines(plot: _Plot, series: Sequence[Series]) -> str:
    parts = []
    for each in series:
        places = [plot.place(x, y) for x, y in each.points]
        kind = f"line c{each.colour % NUM_COLOURS}{' dashed' if each.is_dashed else ''}"
        if len(places) > 1:
            parts.append(f'<path class="{kind}" d="M{"L".join(f"{x} {y}" for x, y in places)}"/>')
        if each.is_dashed and len(places) <= 60 or len(places) == 1:
            parts += [f'<circle class="dot c{each.colour % NUM_COLOURS}" cx="{x}" cy="{y}" r="3"/>' for x, y in places]
    return "".join(parts)


def _describe(chart: Chart, series: Sequence[Series]) -> str:
    """Return a sentence for each line, for those who do not see it."""
    sentences = []
    for each in series:
        (begin, first), (end, last) = each.points[0], each.points[-1]
        lowest = min(each.points, key=lambda point: point[1])
        highest = max(each.points, key=lambda point: point[1])
        sentences.append(
            f"{each.label}: {format_number(first)} at update {begin:,.0f}, {format_number(last)} at update {end:,.0f}; "
            f"lowest {format_number(lowest[1])} at {lowest[0]:,.0f}, highest {format_number(highest[1])} at "
            f"{highest[0]:,.0f}."
        )
    return " ".join(sentences) + (f" Unit: {chart.unit}." if chart.unit else "")


def _values_table(series: Sequence[Series], identifier: str) -> str:
    steps = sorted({x for each in series for x, _ in each.points})
    if len(steps) > _TABLE_ROWS:
        steps = [steps[round(index * (len(steps) - 1) / (_TABLE_ROWS - 1))] for index in range(_TABLE_ROWS)]
    columns = [dict(each.points) for each in series]
    head = "".join(f'<th scope="col">{escape(each.label)}</th>' for each in series)
    rows = "".join(
        f'<tr><th scope="row">{step:,.0f}</th>'
        + "".join(f"<td>{format_number(column[step]) if step in column else ''}</td>" for column in columns)
        + "</tr>"
        for step in steps
    )
    return (
        f'<details><summary>Values</summary><div class="scroll"><table aria-describedby="{identifier}-t"><thead><tr>'
        f'<th scope="col">update</th>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def draw_shares(shares: Sequence[tuple[str, float]], total: float, label: str) -> str:
    """Return a bar of parts one behind the other, coloured by their place, whose full width is `total`."""
    x, parts = 0.0, []
    for index, (name, value) in enumerate(shares):
        width = 100.0 * value / total if total else 0.0
        if width >= 0.05:
            parts.append(
                f'<rect class="share k{index}" x="{x:.2f}" y="0" width="{width:.2f}" height="10">'
                f"<title>{escape(name)}</title></rect>"
            )
        x += width
    return (
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )
