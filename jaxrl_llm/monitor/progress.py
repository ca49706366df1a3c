# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What a person reads while a run goes on: a banner, one fixed-column line a step, a summary.

The text is the same in a terminal, a log file and a notebook: no colours, no cursor movement.
"""

from __future__ import annotations

import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

HEADER_EVERY = 20
_MOST_REWARD_PARTS = 3
_HELDOUT = "heldout"  # the column that shows the first of these that the step has
_HELDOUT_METRICS = ("eval/accuracy", "eval/reward")

_Metrics = Mapping[str, Any]

# (header, width, metric, how to show it)
Column = tuple[str, int, str, Callable[[float], str]]

# A column is there when the first step has its metric.
_COLUMNS: tuple[Column, ...] = (
    ("reward", 6, "reward", lambda x: f"{x:.3f}"),
    ("std", 5, "reward_std", lambda x: f"{x:.3f}"),
    ("kl", 8, "kl", lambda x: f"{x:.2e}"),
    ("entropy", 7, "entropy", lambda x: f"{x:.3f}"),
    ("length", 6, "completions/mean_length", lambda x: f"{x:.1f}"),
    ("cut", 4, "completions/clipped_ratio", lambda x: f"{x:.0%}"),
    ("grad", 7, "grad_norm", lambda x: f"{x:#.3g}"),
    ("lr", 7, "learning_rate", lambda x: f"{x:.1e}"),
    ("sec", 6, "step_time", lambda x: f"{x:#.3g}"),
    ("smp", 4, "time/sampling", lambda x: f"{x:.0%}"),
    ("rew", 4, "time/rewards", lambda x: f"{x:.0%}"),
    ("lp", 4, "time/logprobs", lambda x: f"{x:.0%}"),
    ("upd", 4, "time/update", lambda x: f"{x:.0%}"),
)

LEGEND = """\
cut: completions that ran into the length limit · grad: gradient norm before clipping
sec: seconds a step, of which smp: sampling, rew: rewards, lp: log-probabilities, upd: update
tok/s: prompt and completion tokens a second · left: time until the last step"""


class Progress:
    """Prints one line a step, and the header again every 20 lines.

    The columns are chosen by the metrics of the first step that is shown and stay: a metric that is
    missing later is blank, a new one is only in `metrics.jsonl`.

    Args:
        total: number of the last step.
        evaluates: whether some steps carry `eval/accuracy` (or else `eval/reward`): a column.
        columns: further columns, which stand first; those of held-out metrics always stand.
        stream: where to print (`write`, `flush`); standard output by default.
        clock: seconds, to estimate what is left.
    """

    def __init__(
        self,
        total: int,
        *,
        evaluates: bool = False,
        columns: Sequence[Column] = (),
        stream: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total = total
        self._evaluates = evaluates
        self._first = tuple(columns)
        self._stream = stream
        self._clock = clock
        self._columns: list[Column] = []
        self._shown = 0
        self._tokens = 0.0
        self._started: tuple[int, float] | None = None

    def update(self, step: int, metrics: _Metrics) -> None:
        """Print the line of a step (and a header where one is due)."""
        if not self._columns:
            self._columns = _choose_columns(metrics, self._evaluates, self._first)
        if self._shown % HEADER_EVERY == 0:
            emit(self.header(), self._stream)
        emit(self.line(step, metrics), self._stream)
        self._shown += 1

    def header(self) -> str:
        """The names of the columns, each over its column."""
        names = [f"{name:>{width}}" for name, width, _, _ in self._columns]
        return " ".join([f"{'step':>{self._step_width}}", *names, f"{'tok/s':>6}", f"{'left':>7}"])

    def line(self, step: int, metrics: _Metrics) -> str:
        """The line of a step; `time/*` are shown as shares of the step's seconds."""
        cells = [f"{f'{step}/{self.total}':>{self._step_width}}"]
        spent = _number(metrics.get("step_time"))
        for _, width, name, show in self._columns:
            if name == _HELDOUT:
                name = next((known for known in _HELDOUT_METRICS if known in metrics), "")
                show = show if name == "eval/accuracy" else "{:.3f}".format
            value = _number(metrics.get(name))
            if name.startswith("time/") and value is not None:
                value = value / spent if spent else None
            cells.append(_cell(value, width, show))
        cells.append(_cell(self._speed(step, metrics, spent), 6, lambda x: f"{x:.0f}"))
        cells.append(f"{self._left(step, spent):>7}")
        return " ".join(cells)

    @property
    def _step_width(self) -> int:
        return max(len("step"), 2 * len(str(self.total)) + 1)

    def _speed(self, step: int, metrics: _Metrics, spent: float | None) -> float | None:
        """Tokens a second from `num_tokens`, which counts since the run's first step."""
        total = _number(metrics.get("num_tokens"))
        if total is None:
            return None
        before, self._tokens = self._tokens, total
        known = (
            step == 1 or self._shown > 0
        )  # after a resume, the first line has nothing to compare
        return (total - before) / spent if spent and known else None

    def _left(self, step: int, spent: float | None) -> str:
        now = self._clock()
        if self._started is None:
            self._started = (step, now)
        first, since = self._started
        # The pace since the first line holds evaluation and checkpoints, but not the compilation.
        pace = (now - since) / (step - first) if step > first else spent
        return (
            "" if pace is None or not math.isfinite(pace) else duration(pace * (self.total - step))
        )


def _choose_columns(metrics: _Metrics, evaluates: bool, first: Sequence[Column] = ()) -> list[Any]:
    """The columns whose metric the first step has, with reward parts and held-out accuracy."""
    if first:
        shown = [c for c in first if c[2] in metrics or c[2].startswith("eval/")]
        return shown + [column for column in _COLUMNS if column[2] in metrics]
    columns: list[Any] = [column for column in _COLUMNS if column[2] in metrics]
    parts = [name for name in metrics if name.startswith("rewards/") and name.endswith("/mean")]
    after_reward = sum(column[2] in ("reward", "reward_std") for column in columns)
    if len(parts) > 1:  # a single one is the reward itself
        columns[after_reward:after_reward] = [
            (label, max(6, len(label)), name, lambda x: f"{x:.3f}")
            for name in parts[:_MOST_REWARD_PARTS]
            for label in [name.removeprefix("rewards/").removesuffix("/mean")[:11]]
        ]
    if evaluates or any(name in metrics for name in _HELDOUT_METRICS):
        columns.insert(after_reward, ("heldout", 7, _HELDOUT, lambda x: f"{x:.1%}"))
    return columns


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _cell(value: float | None, width: int, show: Callable[[float], str]) -> str:
    """A right-aligned number that keeps its column, with fewer digits if it must."""
    if value is None:
        return " " * width
    text = show(value) if math.isfinite(value) else str(value)
    for spec in (".1f", ".0f", ".2e", ".1e", ".0e"):
        if len(text) > width:
            text = format(value, spec)
    return f"{text:>{width}}"


def duration(seconds: int | float) -> str:
    """Seconds as a person says them: `45s`, `3m20s`, `1h02m`, `2d03h`."""
    whole = max(0, round(seconds))
    for size, unit, smaller, name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // smaller:02d}{name}"
    return f"{whole}s"


def banner(
    title: str,
    *,
    model: str,
    num_params: int,
    devices: str,
    run_dir: str | pathlib.Path,
    **more: Any,
) -> str:
    """What is about to run, as a small table; `more` adds rows (`steps=20`, `seed=1`)."""
    rows: dict[str, Any] = {
        "model": f"{model} ({num_params / 1e6:,.1f} M parameters)",
        "devices": devices,
    }
    rows |= {name.replace("_", " "): value for name, value in more.items() if value is not None}
    rows["run directory"] = run_dir
    return "\n".join([f"jaxrl_llm · {title}", *_table(rows)])


def summary(
    run_dir: str | pathlib.Path,
    *,
    steps: int,
    before: _Metrics | None = None,
    after: _Metrics | None = None,
    seconds: int | float | None = None,
) -> str:
    """The result of a run, and where everything of it lies (only what is there is named).

    Args:
        before, after: held-out results: `accuracy`, `well_formed` (shares), `reward`, `count`.
        seconds: how long the training took.
    """
    run_dir = pathlib.Path(run_dir)
    took = f" in {duration(seconds)}" if seconds is not None else ""
    changes = {
        "held-out accuracy": _change(before, after, "accuracy", percent=True),
        "held-out reward": _change(before, after, "reward", percent=False),
        "well-formed answers": _change(before, after, "well_formed", percent=True),
    }
    if changes["held-out accuracy"]:
        changes["held-out reward"] = ""
    rows: dict[str, Any] = {name: text for name, text in changes.items() if text}
    count = _result(after, "count")
    if count is not None and rows:
        rows[next(iter(rows))] += f" on {count:.0f} prompts"
    for label, name in (
        ("samples", "samples.txt"),
        ("curves", "report.html"),
        ("metrics", "metrics.jsonl"),
        ("checkpoints", "checkpoints"),
        ("Hugging Face model", "export"),
    ):
        if (run_dir / name).exists():
            rows[label] = run_dir / name
    return "\n".join([f"done: {steps} steps{took}", *_table(rows)])


def _change(before: _Metrics | None, after: _Metrics | None, key: str, *, percent: bool) -> str:
    old, new = _result(before, key), _result(after, key)
    shown = ["" if x is None else f"{x:.1%}" if percent else f"{x:.3f}" for x in (old, new)]
    if old is None or new is None:
        return "".join(shown)
    gain = f"{(new - old) * 100:+.1f} points" if percent else f"{new - old:+.3f}"
    return f"{shown[0]} → {shown[1]} ({gain})"


def _result(results: _Metrics | None, key: str) -> float | None:
    results = results or {}
    return _number(results.get(key, results.get(f"eval/{key}")))


def _table(rows: Mapping[str, Any]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"  {name:<{width}}  {value}" for name, value in rows.items()]


def emit(text: str, stream: Any = None) -> None:
    """Print a line at once; what the stream can't encode becomes "?"."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()
    except BrokenPipeError:  # `… | head` must not stop a training run
        pass
