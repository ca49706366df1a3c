# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Curves are where their values are, for any number of steps and whatever the values."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET

import pytest

from jaxrl_llm.monitor.charts import HEIGHT, WIDTH, Chart, Series, draw, number, smoothing_window


def chart(values, steps=None, **options):
    steps = list(range(1, len(values) + 1)) if steps is None else steps
    return Chart("Title <x>", "caption", "unit & more", [Series("a", steps, values)], **options)


def parsed(picture: Chart):
    svg, hover = draw(picture)
    return ET.fromstring(svg), hover


def points(root, css="line"):
    """Pixel positions of every curve drawn with a class."""
    found = []
    for path in root.iter("path"):
        if css in path.get("class", "").split():
            found.append(
                [tuple(map(float, xy.split(","))) for xy in re.split("[ML]", path.get("d"))[1:]]
            )
    return found


def y_axis(root):
    """The axis read off the picture: value at each labelled height."""
    ticks = [
        t for t in root.iter("text") if t.get("class") == "tick" and t.get("text-anchor") == "end"
    ]
    return {float(t.get("y")) - 4: float(t.text.rstrip("%").replace(",", "")) for t in ticks}


def test_a_curve_lies_where_its_axis_says():
    values = [0.25, 0.5, 0.75, 0.4]
    root, hover = parsed(chart(values))
    axis = sorted(y_axis(root).items())
    (y0, v0), (y1, v1) = axis[0], axis[-1]
    (curve,) = points(root)
    read = [v0 + (y - y0) / (y1 - y0) * (v1 - v0) for _, y in curve]
    assert read == pytest.approx(values, abs=0.005)
    xs = [x for x, _ in curve]
    assert [b - a for a, b in itertools.pairwise(xs)] == pytest.approx(
        [xs[1] - xs[0]] * 3, abs=0.11
    )
    assert hover["x"] == xs
    assert hover["labels"] == ["step 1", "step 2", "step 3", "step 4"]
    assert hover["series"][0]["text"] == ["0.25", "0.5", "0.75", "0.4"]
    assert hover["series"][0]["y"] == [y for _, y in curve]


def test_percent_and_log_axes():
    root, hover = parsed(chart([0.253, 0.853], percent=True))
    assert sorted(y_axis(root).values()) == [0, 20, 40, 60, 80, 100]
    assert hover["series"][0]["text"] == ["25.3%", "85.3%"]
    root, _ = parsed(chart([1e-7, 1e-5, 1e-6], log=True))
    assert sorted(y_axis(root).values()) == pytest.approx([1e-7, 1e-6, 1e-5])
    (curve,) = points(root)
    assert curve[0][1] - curve[2][1] == pytest.approx(curve[2][1] - curve[1][1], abs=0.11)
    root, _ = parsed(chart([0.0, 1e-5], log=True))  # 0 has no logarithm: a linear axis
    assert min(y_axis(root).values()) == 0.0


EDGES = [0.0, -1.0, 1e-12, 1e12, -1e300, 5e-324, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("kind", ["line", "stack"])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        [],
        [0.5],
        [0.0, 0.0],
        [1.0, 1.0],
        [-3.0],
        EDGES,
        [math.nan],
        [1.0, math.nan, 2.0],
        [1e300, -1e300],
    ],
)
def test_no_values_break_a_picture(values, log, kind):
    root, hover = parsed(chart(values, log=log, kind=kind))
    numbers = re.findall(r"-?\d+\.\d+", " ".join(root.itertext()) + str(points(root)))
    assert "nan" not in ET.tostring(root, encoding="unicode").lower()
    assert all(math.isfinite(float(n)) for n in numbers)
    for curve in points(root):
        assert all(-1 <= x <= WIDTH + 1 and -1 <= y <= HEIGHT + 1 for x, y in curve)
    for series in hover["series"]:
        assert len(series["y"]) == len(series["text"]) == len(hover["x"]) == len(hover["labels"])


def test_what_is_not_finite_is_a_gap_and_a_mark():
    root, hover = parsed(chart([1.0, 2.0, math.nan, 3.0, 4.0, math.inf]))
    assert [len(curve) for curve in points(root)] == [2, 2]
    assert sum(path.get("class") == "broken" for path in root.iter("path")) == 2
    assert hover["series"][0]["text"][2:] == ["NaN", "3", "4", "∞"]
    assert hover["series"][0]["y"][2] is None


def test_a_single_step_is_a_dot():
    root, _ = parsed(chart([0.5]))
    assert len(list(root.iter("circle"))) == 1


def test_thousands_of_steps_are_thinned_without_losing_a_spike():
    values = [0.5] * 5000
    values[1234], values[4321] = 9.0, -9.0
    root, hover = parsed(chart(values))
    (curve,) = points(root)
    assert len(curve) < 800
    assert len(hover["x"]) == len(curve)
    assert {"9", "-9"} <= set(hover["series"][0]["text"])
    assert hover["labels"][0] == "step 1"
    assert hover["labels"][-1] == "step 5000"


def test_a_moving_average_keeps_level_and_length():
    assert smoothing_window(24) == 1
    assert smoothing_window(100) % 2 == 1
    noisy = [0.5 + (0.2 if i % 2 else -0.2) for i in range(100)]
    root, _ = parsed(chart(noisy, smooth=True))
    raw, smooth = points(root)
    assert "raw" in next(p.get("class") for p in root.iter("path") if p.get("class"))
    assert len(raw) == len(smooth) == 100
    spread = [max(y for _, y in c[5:-5]) - min(y for _, y in c[5:-5]) for c in (raw, smooth)]
    assert spread[1] < spread[0] / 3
    flat, _ = parsed(chart([0.5] * 100, smooth=True))
    assert points(flat)[0] == points(flat)[1]


def test_stacked_bars_add_up():
    picture = Chart(
        "t",
        "",
        "s",
        [Series("a", [1, 2], [2.0, 4.0]), Series("b", [1, 2], [6.0, 4.0])],
        kind="stack",
    )
    root, hover = parsed(picture)
    bars = [(r.get("class"), float(r.get("y")), float(r.get("height"))) for r in root.iter("rect")]
    a1, a2, b1, b2 = bars
    assert a2[2] == pytest.approx(2 * a1[2], abs=0.02)
    assert b1[1] + b1[2] == pytest.approx(a1[1], abs=0.02)  # b stands on a
    assert b1[1] == pytest.approx(b2[1], abs=0.02)  # both sum to 8
    assert [s["text"] for s in hover["series"]] == [["2", "4"], ["6", "4"]]
    many, hover = parsed(chart([1.0] * 1000, kind="stack"))
    assert len(list(many.iter("rect"))) <= 100
    assert hover["labels"][0].startswith("steps 1–")


def test_a_band_is_filled_between_its_two_curves():
    series = [Series("low", [1, 2], [1.0, 1.0]), Series("high", [1, 2], [3.0, 2.0])]
    root, hover = parsed(Chart("t", "", "", series, band=("low", "high")))
    (polygon,) = root.iter("polygon")
    ys = [float(pair.split(",")[1]) for pair in polygon.get("points").split()]
    assert ys[0] < ys[1] < ys[2] == ys[3]
    assert points(root) == []
    assert [s["name"] for s in hover["series"]] == ["low", "high"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (3, "3"), (0.853333, "0.8533"), (1e-5, "1e-5"), (2.7e-7, "2.7e-7"),
        (-0.25, "-0.25"), (12345.6, "12,346"), (1.5e9, "1.5e9"), (math.nan, "NaN"),
        (-math.inf, "−∞"),
    ],
)  # fmt: skip
def test_numbers_read_well(value, text):
    assert number(value) == text
