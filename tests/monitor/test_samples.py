# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Samples are readable, survive resumes, and no text of a model reaches the terminal raw."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
from rich.cells import cell_len

from jaxrl_llm.monitor.samples import (
    SamplesWriter,
    cut,
    print_samples,
    read_samples,
    samples_table,
    visible,
)

HOSTILE = (
    "\x1b[31m\x1b]0;title\x07\x00\x9b2J\r\x7f\u202eabc\u2066\ud800\u200b\u2028\ufeff[red]日本語"
)


def sample(index=0, completion="39", reward=1.0, **more):
    return {
        "prompt_id": "34+5",
        "sample": index,
        "prompt": "75+4=79\n21+4=25\n34+5=",
        "completion": completion,
        "reward": reward,
        "finish_reason": "stop",
        "length": 3,
    } | more


def is_harmless(text: str) -> bool:
    return all(c == "\n" or visible(c) == c for c in text)


def test_what_cannot_be_seen_is_escaped():
    assert visible("a\nb\tc") == r"a\nb\tc"
    assert visible("\x1b[0m\x00\x7f\x9b") == r"\x1b[0m\x00\x7f\x9b"
    assert visible("\u202e\u200b\ud800\U000e0001") == r"\u202e\u200b\ud800\U000e0001"
    assert visible("a\nb\x07", keep="\n") == "a\nb\\x07"
    assert visible("é 日本 🙂 \\frac{1}{2} <b>") == "é 日本 🙂 \\frac{1}{2} <b>"
    assert is_harmless(visible(HOSTILE))
    assert visible(HOSTILE).encode("utf-8")


@pytest.mark.parametrize("keep", ["start", "end", "both"])
@pytest.mark.parametrize("text", ["abcdefghijklmnop", "日本語日本語日本語", "a日b本c語d日e本f語"])
def test_cut_text_fits_and_keeps_what_was_asked(text, keep):
    assert cut(text, 100, keep) == text
    for width in range(3, 16):
        short = cut(text, width, keep)
        assert cell_len(short) <= width
        assert short.count("…") == 1
        first, last = short.split("…")
        assert text.startswith(first)
        assert text.endswith(last)
        assert bool(first) == (keep != "end") or width < 5
        assert bool(last) == (keep != "start") or width < 5


def test_files_hold_every_sample_and_resume(tmp_path):
    writer = SamplesWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, [sample(i, completion=f"s{step}i{i}") for i in range(2)])
        if step < 3:
            writer.write(step, [sample(0, "held", split="heldout")])
    writer.close()
    before = (tmp_path / "samples.txt").read_text()
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 4, "prom')
    with (tmp_path / "samples.txt").open("a") as file:
        file.write("half a ta")
    resumed = SamplesWriter(tmp_path)
    resumed.truncate(after_step=2)
    assert [row["step"] for row in read_samples(tmp_path)] == [1, 1, 1, 2, 2, 2]
    resumed.write(3, [sample(i, completion=f"s3i{i}") for i in range(2)])
    resumed.close()
    assert (tmp_path / "samples.txt").read_text() == before
    assert before.count("step 2 · 2 samples\n") == 1
    assert before.count("step 2 · heldout · 1 samples\n") == 1
    assert [row["completion"] for row in read_samples(tmp_path)] == [
        "s1i0", "s1i1", "held", "s2i0", "s2i1", "held", "s3i0", "s3i1",
    ]  # fmt: skip


def test_json_keeps_the_text_and_the_table_escapes_it(tmp_path):
    writer = SamplesWriter(tmp_path)
    row = sample(
        completion=HOSTILE, reward=np.float32(0.5), parts={"x": math.nan}, finish_reason="\x1b[2J"
    )
    writer.write(1, [row])
    writer.close()
    (read,) = read_samples(tmp_path)
    assert read["completion"] == HOSTILE
    assert read["reward"] == 0.5
    assert read["parts"] == {"x": "nan"}
    for line in (tmp_path / "samples.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert is_harmless((tmp_path / "samples.txt").read_text())


def test_the_table_is_aligned():
    rows = [
        sample(0, "39", 1.0, advantage=0.875),
        sample(1, "日本語", 0.0, advantage=-1.25),
        sample(2, "x" * 500, None),
        sample(3, HOSTILE, math.nan, advantage=0.0),
    ]
    lines = samples_table(7, rows).splitlines()
    assert lines[0] == "step 7 · 4 samples"
    start = cell_len(lines[1][: lines[1].index("completion")])
    for line, completion in zip(lines[2:], ("39", "日本語", "xxx", r"\x1b[31m"), strict=True):
        assert cell_len(line[: line.index(completion)]) == start
        assert cell_len(line) <= start + 60
    assert lines[1].split() == ["reward", "adv", "len", "end", "prompt", "completion"]
    assert lines[2].split() == ["1.000", "0.875", "3", "stop", r"75+4=79\n21+4=25\n34+5=", "39"]
    assert lines[4].split()[:2] == ["-", "-"]


def test_parts_have_columns_when_there_are_several():
    rows = [sample(parts={"answer": 1.0, "format": 0.5}), sample(parts={"answer": 0.0})]
    lines = samples_table(1, rows).splitlines()
    assert lines[1].split()[:3] == ["reward", "answer", "format"]
    assert lines[2].split()[:3] == ["1.000", "1.000", "0.500"]
    assert lines[3].split()[:3] == ["1.000", "0.000", "-"]
    assert "answer" not in samples_table(1, [sample(parts={"answer": 1.0})])


def test_the_console_shows_the_best_and_the_worst_and_nothing_raw():
    rewards = [0.1, 0.9, math.nan, 0.5, 0.3, None, 0.7]
    rows = [sample(i, f"answer{i} {HOSTILE}", r) for i, r in enumerate(rewards)]
    stream = io.StringIO()
    print_samples(3, rows, most=4, stream=stream)
    text = stream.getvalue()
    assert [n for n in "0123456" if f"answer{n}" in text] == ["1", "2", "5", "6"]
    assert "[red]" in text.replace("\n", "")
    assert "4 of 7" in text
    assert is_harmless(text)
    print_samples(3, [], stream=stream)
    assert stream.getvalue() == text


def test_a_console_without_unicode_gets_question_marks():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_samples(1, [sample(completion="日" * 300)], stream=stream)
    assert b"step 1: 1 of 1 samples" in raw.getvalue()


def test_truncating_nothing_makes_no_files(tmp_path):
    SamplesWriter(tmp_path).truncate(after_step=0)
    assert list(tmp_path.iterdir()) == []
