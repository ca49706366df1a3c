# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics survive kills and resumes: every step once, in every file, valid JSON."""

from __future__ import annotations

import json
import math
import os
import pathlib
import signal
import struct
import subprocess
import sys
import textwrap
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jaxrl_llm.errors import ConfigError, RunDirectoryError
from jaxrl_llm.monitor.writers import JsonLines, MetricsWriter, read_metrics


def events(run_dir: pathlib.Path) -> list[Event]:
    """All TensorBoard events of a run in a viewer's order, read by the layout of TFRecord files."""
    found = []
    for path in sorted((run_dir / "tensorboard").glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while len(data) >= 12:
            (size,) = struct.unpack("<Q", data[:8])
            if len(data) < 16 + size:  # cut off by a kill: viewers go on with the next file
                break
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def scalars(run_dir: pathlib.Path) -> list[tuple[int, str, float]]:
    """What a viewer shows: a session that starts at a step voids that step and later ones."""
    shown: list[tuple[int, str, float]] = []
    for event in events(run_dir):
        if event.session_log.status == SessionLog.START:
            shown = [row for row in shown if row[0] < event.step]
        shown += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return shown


def test_rows_are_json_lines_with_a_step(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"reward": 0.25, "num_tokens": 12, "kl": np.float32(0.5), "lr": jnp.ones(())})
    writer.write(2, {"reward": math.nan, "a": math.inf, "b": -math.inf, "flag": True})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == '{"step": 1, "reward": 0.25, "num_tokens": 12, "kl": 0.5, "lr": 1.0}'
    assert json.loads(lines[1]) == {
        "step": 2, "reward": "NaN", "a": "Infinity", "b": "-Infinity", "flag": 1,
    }  # fmt: skip
    rows = read_metrics(tmp_path)
    assert rows[0]["num_tokens"] == 12
    assert isinstance(rows[0]["num_tokens"], int)
    assert math.isnan(rows[1]["reward"])
    assert (rows[1]["a"], rows[1]["b"]) == (math.inf, -math.inf)
    writer.close()


def test_floats_come_back_bit_for_bit(tmp_path):
    values = np.random.default_rng(0).standard_normal(50) * 10.0 ** np.arange(-25, 25)
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {str(i): value for i, value in enumerate(values)})
    writer.close()
    row = read_metrics(tmp_path)[0]
    assert [row[str(i)] for i in range(50)] == values.tolist()
    assert not (tmp_path / "tensorboard").exists()


def test_an_array_of_several_numbers_is_refused(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    with pytest.raises(TypeError):
        writer.write(1, {"x": np.zeros(2)})
    assert read_metrics(tmp_path) == []


def test_a_step_written_in_parts_reads_as_one_row(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {"reward": 0.5})
    writer.write(2, {"reward": 0.6})
    writer.write(1, {"eval/accuracy": 0.7})
    writer.close()
    assert read_metrics(tmp_path) == [
        {"step": 1, "reward": 0.5, "eval/accuracy": 0.7},
        {"step": 2, "reward": 0.6},
    ]


def test_tensorboard_holds_every_scalar(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in (1, 2):
        writer.write(step, {"reward": step / 4, "clip_ratio/low_mean": 0.0})
        assert scalars(tmp_path)[-2:] == [
            (step, "reward", step / 4), (step, "clip_ratio/low_mean", 0.0),
        ]  # fmt: skip
    writer.close()


def test_truncate_leaves_each_step_once_in_every_file(tmp_path):
    first = MetricsWriter(tmp_path)
    for step in range(6):
        first.write(step, {"reward": float(step), "step_time": 2.0})
    first.close()
    second = MetricsWriter(tmp_path)
    second.truncate(after_step=3)
    for step in range(4, 8):
        second.write(step, {"reward": 10.0 + step, "step_time": 2.0})
    second.close()
    expected = [0.0, 1.0, 2.0, 3.0, 14.0, 15.0, 16.0, 17.0]
    assert [row["reward"] for row in read_metrics(tmp_path)] == expected
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 8
    curve = [(step, value) for step, tag, value in scalars(tmp_path) if tag == "reward"]
    assert curve == list(enumerate(expected))


@pytest.mark.parametrize(
    "tail", [b'{"step": 4, "rew', b"\x00" * 40, b'{"step": 4}', b"nonsense\n[1]\n"]
)
def test_a_half_written_tail_is_dropped_by_reading_resuming_and_appending(tmp_path, tail):
    def run(name: str) -> MetricsWriter:
        writer = MetricsWriter(tmp_path / name, tensorboard=False)
        for step in range(4):
            writer.write(step, {"x": step})
        writer.close()
        with (tmp_path / name / "metrics.jsonl").open("ab") as file:
            file.write(tail)
        return MetricsWriter(tmp_path / name, tensorboard=False)

    resumed = run("resumed")
    resumed.truncate(after_step=3)
    resumed.write(4, {"x": 4})
    resumed.close()
    text = (tmp_path / "resumed" / "metrics.jsonl").read_text()
    assert [json.loads(line)["x"] for line in text.splitlines()] == [0, 1, 2, 3, 4]

    appended = run("appended")
    appended.write(4, {"x": 4})
    appended.close()
    assert [row["x"] for row in read_metrics(tmp_path / "appended")] == [0, 1, 2, 3, 4]


def test_nothing_is_lost_by_kill_9(tmp_path):
    script = textwrap.dedent(
        """
        import sys
        from jaxrl_llm.monitor.writers import MetricsWriter
        writer = MetricsWriter(sys.argv[1])
        for step in range(100000):
            writer.write(step, {"reward": 0.5})
            print(step, flush=True)
        """
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    seen = [int(child.stdout.readline()) for _ in range(20)][-1]
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert [row["step"] for row in read_metrics(tmp_path)][: seen + 1] == list(range(seen + 1))
    writer = MetricsWriter(tmp_path)
    writer.truncate(after_step=seen)
    writer.close()
    assert [step for step, _, _ in scalars(tmp_path)] == list(range(seen + 1))


def test_truncating_an_empty_run_makes_no_files(tmp_path):
    writer = MetricsWriter(tmp_path / "new")
    writer.truncate(after_step=0)
    writer.close()
    assert not (tmp_path / "new").exists()
    assert read_metrics(tmp_path / "new") == []


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    writer = MetricsWriter(tmp_path / "file" / "run")
    with pytest.raises(RunDirectoryError, match="can't write") as error:
        writer.write(1, {"x": 1.0})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_tracker_names_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf'pip install "jaxrl_llm\[{name}\]"'):
        MetricsWriter(tmp_path, **{name: True})


def test_trackers_get_the_same_rows(tmp_path, monkeypatch):
    class Run:
        def __init__(self, **settings):
            self.settings, self.rows, self.finished = settings, [], False
            runs.append(self)

        def log(self, metrics, step):
            self.rows.append((step, metrics))

        def finish(self):
            self.finished = True

    runs: list[Run] = []
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(init=lambda **kw: Run(**kw)))
    for _ in range(2):
        writer = MetricsWriter(
            tmp_path / "grpo", tensorboard=False, wandb=True, trackio=True, config={"steps": 3}
        )
        writer.write(1, {"reward": np.float32(0.5)})
        writer.close()
    assert [run.rows for run in runs] == [[(1, {"reward": 0.5})]] * 4
    assert all(run.finished and run.settings["name"] == "grpo" for run in runs)
    assert all(run.settings["config"] == {"steps": 3} for run in runs)
    assert runs[0].settings["id"] == runs[2].settings["id"]  # a resumed run goes on in the same one


def test_json_lines_read_back_what_was_appended(tmp_path):
    lines = JsonLines(tmp_path / "a" / "b.jsonl")
    rows = [{"step": 1, "text": "é\u2028\n\ud800"}, {"step": 2, "text": ""}]
    lines.append(rows)
    assert lines.read() == rows
    assert (tmp_path / "a" / "b.jsonl").read_bytes().isascii()
    lines.close()
