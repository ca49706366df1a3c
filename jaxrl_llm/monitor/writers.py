# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run: `metrics.jsonl` is the truth; TensorBoard, W&B and trackio get copies.

A run may be killed at any moment and goes on from its last checkpoint, so rows after that
checkpoint are cut off (`truncate`) before they are written again: no step ever appears twice.
"""

from __future__ import annotations

import importlib
import json
import math
import operator
import os
import pathlib
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.errors import ConfigError, RunDirectoryError

METRICS_FILE = "metrics.jsonl"
_EVENTS = "events.out.tfevents."

# JSON knows no such numbers; a null would lose which of them it was.
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonLines:
    """An append-only file of JSON objects, one a line, each with an integer "step"."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        self._file: Any = None

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows and hand them to the operating system, so that a kill loses none of them."""
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._drop_half_line()
                self._file = self.path.open("a", encoding="utf-8", newline="\n")
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise unwritable(self.path, error) from error

    def read(self) -> list[dict[str, Any]]:
        """All whole rows in the order of writing; [] when there is no file."""
        return list(self._rows())

    def truncate(self, after_step: int) -> None:
        """Remove rows with step > `after_step`, and what a kill left half-written, atomically."""
        self.close()
        if not self.path.exists():
            return
        part = self.path.with_name(self.path.name + ".part")
        try:
            with part.open("w", encoding="utf-8", newline="\n") as file:
                for row in self._rows():
                    if row["step"] <= after_step:
                        file.write(json.dumps(row, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.path)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rows(self) -> Iterable[dict[str, Any]]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:  # half a line, or zeros after a power failure
                    continue
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    yield row

    def _drop_half_line(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            # Longer than any row; a row is whole once its newline is there.
            file.seek(max(0, size - (1 << 24)))
            tail = file.read()
            file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)


class MetricsWriter:
    """Writes the metrics of a run, once each.

    `metrics.jsonl` gets one object a line: {"step": 3, "reward": 0.5, …}. NaN and the infinities
    are the strings "NaN", "Infinity" and "-Infinity", which keeps each line valid JSON.

    Args:
        run_dir: the run's directory; `tensorboard/` in it holds the event files.
        tensorboard: also write TensorBoard events.
        wandb: also log to Weights & Biases (extra `wandb`).
        trackio: also log to trackio (extra `trackio`).
        config: the run's config as a dict, shown by W&B and trackio.

    Raises:
        ConfigError: the package of a chosen tracker is not installed.
        RunDirectoryError: the directory can't be written.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        tensorboard: bool = True,
        wandb: bool = False,
        trackio: bool = False,
        config: Mapping[str, Any] | None = None,
    ):
        self.run_dir = pathlib.Path(run_dir)
        self._lines = JsonLines(self.run_dir / METRICS_FILE)
        self._events = _EventFile(self.run_dir / "tensorboard") if tensorboard else None
        self._trackers: list[Any] = []
        name, settings = self.run_dir.resolve().name, dict(config or {})
        if wandb:
            package = _import_extra("wandb")
            run = package.init(
                project="jaxrl_llm",
                name=name,
                id=self._tracker_id(),
                resume="allow",
                config=settings,
                dir=str(self.run_dir),
            )
            self._trackers.append(run)
        if trackio:
            package = _import_extra("trackio")
            self._trackers.append(package.init(project="jaxrl_llm", name=name, config=settings))

    def _tracker_id(self) -> str:
        """One run for W&B however often it is resumed; it ignores the steps that it has."""
        path = self.run_dir / "wandb_id.txt"
        if not path.exists():
            self.run_dir.mkdir(parents=True, exist_ok=True)
            path.write_text(secrets.token_hex(8), encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one row of numbers or one-element arrays; a step may be written in parts."""
        values = {name: _plain(value) for name, value in metrics.items()}
        self._lines.append(
            [{"step": operator.index(step)} | {k: _to_json(v) for k, v in values.items()}]
        )
        if self._events is not None:
            self._events.write(step, values)
        for tracker in self._trackers:
            tracker.log(values, step=step)

    def truncate(self, after_step: int) -> None:
        """Forget every step after `after_step`: a resumed run calls this before it writes."""
        self._lines.truncate(after_step)
        if self._events is not None:
            self._events.truncate(after_step)

    def flush(self) -> None:
        """Nothing is left to do: files are flushed row by row, trackers send when they will."""

    def close(self) -> None:
        self._lines.close()
        if self._events is not None:
            self._events.close()
        for tracker in self._trackers:
            tracker.finish()
        self._trackers = []


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` in order of step, one a step, NaN and infinities as floats.

    A step that was written in parts (training, then evaluation) is one row.
    """
    merged: dict[int, dict[str, Any]] = {}
    for row in JsonLines(pathlib.Path(run_dir) / METRICS_FILE).read():
        values = {k: _SPECIAL.get(v, v) if isinstance(v, str) else v for k, v in row.items()}
        merged.setdefault(row["step"], {}).update(values)
    return [merged[step] for step in sorted(merged)]


def _plain(value: Any) -> int | float:
    """A Python number, also from NumPy and JAX scalars."""
    if isinstance(value, bool):
        return int(value)
    try:
        return operator.index(value)
    except TypeError:
        return float(value)


def _to_json(value: int | float) -> int | float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def unwritable(path: pathlib.Path, error: OSError) -> RunDirectoryError:
    """What a person is told when a file of a run can't be written."""
    return RunDirectoryError(
        f"can't write {path}",
        got=error.strerror or error,
        hint="free some space, or --run_dir elsewhere",
    )


def _import_extra(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"logging to {name} needs the package {name}",
            got="it is not installed",
            hint=f'pip install "jaxrl_llm[{name}]"',
        ) from error


class _EventFile:
    """TensorBoard events, written at once: tensorboardX's own writer queues them in a thread, where
    a kill loses them. A resumed run starts a new file, which tells viewers what to forget."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._writer: Any = None

    def write(self, step: int, metrics: Mapping[str, int | float]) -> None:
        values = [{"tag": tag, "simple_value": value} for tag, value in metrics.items()]
        self._put(step=step, summary={"value": values})

    def truncate(self, after_step: int) -> None:
        self.close()
        if any(self.folder.glob(f"{_EVENTS}*")):
            # Earlier files stay: a viewer that has one of them open would stop at its removal.
            self._put(step=after_step + 1, session_log={"status": "START"})

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _put(self, **event: Any) -> None:
        from tensorboardX.record_writer import RecordWriter

        message = importlib.import_module("tensorboardX.proto.event_pb2").Event
        try:
            if self._writer is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                # Viewers read the files in order of name.
                self._writer = RecordWriter(str(self.folder / f"{_EVENTS}{time.time():.6f}"))
                version = message(wall_time=time.time(), file_version="brain.Event:2")
                self._writer.write(version.SerializeToString())
            self._writer.write(message(wall_time=time.time(), **event).SerializeToString())
            self._writer.flush()
        except OSError as error:
            raise unwritable(self.folder, error) from error
