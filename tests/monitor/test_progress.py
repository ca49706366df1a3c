# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The console shows every step in fixed columns, whatever the numbers."""

from __future__ import annotations

import io
import math

import pytest

from jaxrl_llm.monitor.progress import HEADER_EVERY, Progress, banner, duration, emit, summary

STEP = {
    "reward": 0.25,
    "reward_std": 0.433,
    "rewards/answer/mean": 0.25,
    "entropy": 1.234,
    "completions/mean_length": 3.5,
    "completions/clipped_ratio": 0.125,
    "grad_norm": 2.5,
    "learning_rate": 1e-5,
    "step_time": 10.0,
    "num_tokens": 500,
    "time/sampling": 2.4,
    "time/rewards": 0.001,
    "time/logprobs": 0.0,
    "time/update": 7.6,
}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def show(steps, total=100, clock=None, **options) -> list[str]:
    stream, clock = io.StringIO(), clock or Clock()
    progress = Progress(total, stream=stream, clock=clock, **options)
    for step, metrics in steps:
        progress.update(step, metrics)
        clock.now += 12.0
    return stream.getvalue().splitlines()


def cells(lines: list[str]) -> list[dict[str, str]]:
    """Each line cut where the header's columns end."""
    header = lines[0]
    ends = [
        i + 1
        for i in range(len(header))
        if header[i : i + 2].strip() and header[i + 1 : i + 2] in ("", " ")
    ]
    starts = [0, *ends[:-1]]
    names = [header[a:b].strip() for a, b in zip(starts, ends, strict=True)]
    return [
        dict(
            zip(names, (line[a:b].strip() for a, b in zip(starts, ends, strict=True)), strict=True)
        )
        for line in lines[1:]
    ]


def test_a_line_shows_what_the_step_did():
    (row,) = cells(show([(1, STEP)]))
    assert row == {
        "step": "1/100", "reward": "0.250", "std": "0.433", "entropy": "1.234", "length": "3.5",
        "cut": "12%", "grad": "2.50", "lr": "1.0e-05", "sec": "10.0",
        "smp": "24%", "rew": "0%", "lp": "0%", "upd": "76%", "tok/s": "50", "left": "16m30s",
    }  # fmt: skip


def test_columns_follow_the_metrics_of_the_first_step():
    parts = STEP | {"rewards/format/mean": 1.0, "kl": 0.00123}
    row = cells(show([(1, parts)], evaluates=True))[0]
    assert row["answer"] == "0.250"
    assert row["format"] == "1.000"
    assert row["kl"] == "1.23e-03"
    assert row["heldout"] == ""
    bare = cells(show([(1, {"reward": 1.0}), (2, parts)]))
    assert list(bare[0]) == ["step", "reward", "tok/s", "left"]
    assert bare[1]["reward"] == "0.250"


def test_a_metric_that_is_missing_leaves_its_column_blank():
    rows = cells(show([(1, STEP), (2, {"reward": 0.5})]))
    assert rows[1] | {"left": ""} == dict.fromkeys(rows[0], "") | {
        "step": "2/100",
        "reward": "0.500",
    }


@pytest.mark.parametrize(
    "value", [0.0, -123.4567, 1e9, -1e-9, 123456.7, math.nan, math.inf, -math.inf]
)
def test_no_number_breaks_the_columns(value):
    steps = [(1, STEP), (2, dict.fromkeys(STEP, value)), (3, STEP)]
    lines = show(steps, total=10**6)
    assert len({len(line) for line in lines[:2]}) == 1
    rows = cells(lines)
    assert rows[0] | {"step": "", "left": "", "tok/s": ""} == rows[2] | {
        "step": "",
        "left": "",
        "tok/s": "",
    }
    if math.isfinite(value):
        # .0e shows one digit; the sign and size survive in every column
        assert float(rows[1]["reward"]) == pytest.approx(value, rel=0.05, abs=1e-3)


def test_the_header_comes_again_every_twenty_lines():
    lines = show([(step, STEP) for step in range(1, 46)])
    headers = [i for i, line in enumerate(lines) if line.split()[0] == "step"]
    assert headers == [0, HEADER_EVERY + 1, 2 * (HEADER_EVERY + 1)]
    assert {len(line) for line in lines} == {len(lines[0])}


def test_what_is_left_follows_the_clock_and_tokens_a_second_the_count():
    steps = [(step, STEP | {"num_tokens": 500 * step}) for step in (1, 2, 3)]
    rows = cells(show(steps, total=13))
    assert [row["left"] for row in rows] == ["2m00s", "2m12s", "2m00s"]  # 10 s, then 12 s a step
    assert [row["tok/s"] for row in rows] == ["50", "50", "50"]


def test_after_a_resume_the_first_line_has_no_speed():
    rows = cells(show([(7, STEP | {"num_tokens": 3500}), (8, STEP | {"num_tokens": 4000})]))
    assert [row["tok/s"] for row in rows] == ["", "50"]


def test_the_text_is_plain():
    text = "\n".join(show([(1, STEP), (2, STEP)]))
    assert text.isprintable() or set(text) - {"\n"} <= {chr(i) for i in range(32, 127)}
    assert "\x1b" not in text
    assert "\r" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (200, "3m20s"),
        (3720, "1h02m"),
        (183600, "2d03h"),
        (-3, "0s"),
    ],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


def test_a_stream_that_cannot_encode_gets_question_marks():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    emit("25% → 85%", stream)
    assert raw.getvalue() == b"25% ? 85%\n"


def test_banner_names_model_devices_and_directory():
    text = banner(
        "grpo.py", model="tiny", num_params=134515008, devices="8 × cpu", run_dir="runs/x", seed=3
    )
    assert "tiny (134.5 M parameters)" in text
    assert all(word in text for word in ("grpo.py", "8 × cpu", "runs/x", "seed"))


def test_summary_tells_before_and_after_and_names_only_what_is_there(tmp_path):
    (tmp_path / "report.html").write_text("")
    (tmp_path / "export").mkdir()
    text = summary(
        tmp_path,
        steps=20,
        before={"accuracy": 0.25, "well_formed": 0.99},
        after={"eval/accuracy": 0.85, "eval/well_formed": 1.0, "count": 150},
        seconds=200,
    )
    assert "done: 20 steps in 3m20s" in text
    assert "25.0% → 85.0% (+60.0 points) on 150 prompts" in text
    assert "99.0% → 100.0% (+1.0 points)" in text
    assert str(tmp_path / "report.html") in text
    assert str(tmp_path / "export") in text
    assert "samples.txt" not in text
    assert "checkpoints" not in text
    assert summary(tmp_path / "none", steps=0) == "done: 0 steps"


def test_without_accuracy_the_heldout_reward_is_shown(tmp_path):
    rows = cells(show([(1, STEP), (2, STEP | {"eval/reward": -1.5})], evaluates=True))
    assert [row["heldout"] for row in rows] == ["", "-1.500"]
    rows = cells(show([(1, STEP | {"eval/reward": 0.5, "eval/accuracy": 0.25})]))
    assert rows[0]["heldout"] == "25.0%"
    text = summary(tmp_path, steps=1, before={"reward": -1.5}, after={"reward": 0.5, "count": 10})
    assert "held-out reward  -1.500 → 0.500 (+2.000) on 10 prompts" in text
    both = summary(tmp_path, steps=1, after={"reward": 0.5, "accuracy": 0.25})
    assert "held-out accuracy  25.0%" in both
    assert "reward" not in both
