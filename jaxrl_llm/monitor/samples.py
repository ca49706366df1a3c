# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts, completions and rewards, for people: `samples.jsonl` whole, `samples.txt` as a table.

The text of a model is hostile: it may hold terminal escapes, reversed writing or halves of
characters. The table and the console show all of these as escapes; the JSON file keeps them.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import os
import pathlib
import shutil
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rich.box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxrl_llm.monitor.progress import emit
from jaxrl_llm.monitor.writers import JsonLines, unwritable

SAMPLES_FILE = "samples.jsonl"
TABLE_FILE = "samples.txt"
_PROMPT_WIDTH, _COMPLETION_WIDTH = 40, 60
_MOST_PARTS = 4

# Controls, invisible and direction marks, surrogates, private and unassigned ones, separators.
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_NAMES = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}

Sample = Mapping[str, Any]


def visible(text: str, keep: str = "") -> str:
    """The text with every character that can't be seen as an escape (`\\n`, `\\x1b`, `\\u202e`).

    Args:
        keep: characters to leave as they are ("\\n" where lines may break).
    """
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_escapes(keep))


class _Escapes(dict[int, str]):
    """How each character is shown, found out once, as `str.translate` reads it."""

    def __missing__(self, code: int) -> str:
        self[code] = _escape(chr(code))
        return self[code]


@functools.cache
def _escapes(keep: str) -> _Escapes:
    return _Escapes({ord(char): char for char in keep})


def _escape(char: str) -> str:
    if unicodedata.category(char) not in _HIDDEN:
        return char
    code = ord(char)
    short = rf"\x{code:02x}" if code < 0x100 else rf"\u{code:04x}"
    return _NAMES.get(char, short if code < 0x10000 else rf"\U{code:08x}")


def cut(text: str, width: int, keep: str = "both") -> str:
    """Text of at most `width` columns; what is left out becomes "…".

    Args:
        keep: which part to show: "start", "end", or "both" with the ellipsis between.
    """
    if cell_len(text) <= width:
        return text
    room = max(0, width - 1)
    head = {"start": room, "end": 0}.get(keep, room - room // 2)
    return set_cell_size(text, head).rstrip() + "…" + _tail(text, room - head)


def _tail(text: str, width: int) -> str:
    """The longest end of the text within `width` columns."""
    taken, used = len(text), 0
    while taken and used + cell_len(text[taken - 1]) <= width:
        taken -= 1
        used += cell_len(text[taken])
    return text[taken:]


def _pad(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


class SamplesWriter:
    """Writes the samples of a run.

    A sample is a dict with `prompt_id`, `sample` (its index in the group), `prompt`, `completion`,
    `reward` (None: not judged), and perhaps `parts` (name → value), `advantage`, `finish_reason`,
    `length` (tokens) and `split` ("train" or "heldout"); anything else that is JSON is kept.
    """

    def __init__(self, run_dir: str | os.PathLike[str]):
        self.run_dir = pathlib.Path(run_dir)
        self._lines = JsonLines(self.run_dir / SAMPLES_FILE)

    def write(self, step: int, samples: Sequence[Sample]) -> None:
        """Append the samples of one step to both files."""
        rows = [{"step": step} | {k: _plain(v) for k, v in sample.items()} for sample in samples]
        self._lines.append(rows)
        path = self.run_dir / TABLE_FILE
        try:
            with path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(samples_table(step, rows) + "\n")
        except OSError as error:
            raise unwritable(path, error) from error

    def truncate(self, after_step: int) -> None:
        """Forget every step after `after_step`: a resumed run calls this before it writes."""
        self._lines.truncate(after_step)
        if not self._lines.path.exists():
            return
        table = self.run_dir / TABLE_FILE
        part = table.with_name(table.name + ".part")
        with part.open("w", encoding="utf-8", newline="\n") as file:
            written = itertools.groupby(self._lines.read(), lambda r: (r["step"], r.get("split")))
            for (step, _), rows in written:
                file.write(samples_table(step, list(rows)) + "\n")
        os.replace(part, table)

    def close(self) -> None:
        self._lines.close()


def read_samples(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All samples of a run, in the order of writing."""
    return JsonLines(pathlib.Path(run_dir) / SAMPLES_FILE).read()


def by_step(rows: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Samples grouped by step, in order of step."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["step"], []).append(row)
    return dict(sorted(groups.items()))


def samples_table(step: int, samples: Sequence[Sample]) -> str:
    """The samples of one step as aligned columns of plain text, one line each."""
    rows = [
        _cells(sample, _part_names(samples), _PROMPT_WIDTH, _COMPLETION_WIDTH) for sample in samples
    ]
    names = _column_names(samples)
    widths = [max(cell_len(line[i]) for line in [names, *rows]) for i in range(len(names))]
    split = samples[0].get("split", "train") if samples else "train"
    kind = "" if split == "train" else f" · {visible(str(split))}"
    lines = [f"step {step}{kind} · {len(samples)} samples"]
    for row in [names, *rows]:
        cells = [
            _pad(cell, width) if name in ("prompt", "completion") else f"{cell:>{width}}"
            for name, cell, width in zip(names, row, widths, strict=True)
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines) + "\n"


def console_table(step: int, samples: Sequence[Sample], *, most: int = 4) -> Table:
    """A few samples as a rich table: the best and the worst of the step, best first."""
    ranked = sorted(samples, key=lambda sample: -_rank(sample))
    shown = ranked[: most - most // 2] + ranked[-(most // 2) :] if len(ranked) > most else ranked
    table = Table(
        title=f"step {step}: {len(shown)} of {len(samples)} samples",
        title_justify="left",
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("reward", "len", "end"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("prompt", "completion"):
        table.add_column(name, overflow="fold")
    for sample in shown:
        score, _, *rest = _cells(sample, [], _PROMPT_WIDTH, 2 * _COMPLETION_WIDTH)
        # Text, not str: square brackets in a completion are no markup.
        table.add_row(*map(Text, [score, *rest]))
    return table


def print_samples(
    step: int, samples: Sequence[Sample], *, most: int = 4, stream: Any = None
) -> None:
    """Print `console_table`, the same in a terminal, a log and a notebook: no colours."""
    if samples:
        text = io.StringIO()
        width = max(80, shutil.get_terminal_size((120, 24)).columns)
        console = Console(file=text, width=width, color_system=None, force_jupyter=False)
        console.print(console_table(step, samples, most=most))
        emit("\n".join(line.rstrip() for line in text.getvalue().splitlines()), stream)


def _part_names(samples: Sequence[Sample]) -> list[str]:
    """Names of the reward's parts; a single part is the reward itself."""
    names = list(dict.fromkeys(name for s in samples for name in s.get("parts") or {}))
    return names[:_MOST_PARTS] if len(names) > 1 else []


def _column_names(samples: Sequence[Sample]) -> list[str]:
    parts = [cut(visible(name), 12) for name in _part_names(samples)]
    return ["reward", *parts, "adv", "len", "end", "prompt", "completion"]


def _cells(sample: Sample, parts: list[str], prompt_width: int, completion_width: int) -> list[str]:
    scores = sample.get("parts") or {}
    return [
        _score(sample.get("reward")),
        *(_score(scores.get(name)) for name in parts),
        _score(sample.get("advantage")),
        visible(str(sample.get("length", ""))),
        visible(str(sample.get("finish_reason", ""))),
        cut(visible(str(sample.get("prompt", ""))), prompt_width, "end"),
        cut(visible(str(sample.get("completion", ""))), completion_width),
    ]


def _score(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:.3f}"
    return "-" if value is None else visible(str(value))


def _rank(sample: Sample) -> float:
    reward = sample.get("reward")
    if not isinstance(reward, int | float) or math.isnan(reward):
        return -math.inf
    return float(reward)


def _plain(value: Any) -> Any:
    """JSON values from NumPy scalars and nested mappings; NaN and infinities as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)
