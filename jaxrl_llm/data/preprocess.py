# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised data of a run: read, checked, cleaned, split, and mixed with weights."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.data.formats import Row, check_row, find_format, ranking_pairs
from jaxrl_llm.data.records import clip, rank
from jaxrl_llm.data.tables import READERS, read_table
from jaxrl_llm.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class Examples:
    """Checked rows of one table.

    Attributes:
        format: their format; rankings have become preferences.
        train, heldout: the rows.
        left_out: why rows were left out → how many.
    """

    format: str
    train: list[Row]
    heldout: list[Row]
    left_out: dict[str, int]


@dataclasses.dataclass(frozen=True)
class TableData:
    """Examples from one table, in any of the formats that the trainer can use.

    Attributes:
        path: a .jsonl, .json, .parquet or .array_record file, a folder of `datasets`, or a name
            of the hub.
        heldout_path: a second table to hold out.
        heldout: or how many rows of `path` to hold out; rows of one prompt stay together.
        split: of a folder or a data set of the hub.
        split_seed: decides which rows are held out; not the run's seed, so that runs compare.
        deduplicate: of equal rows keep the first.
        min_chars: rows with less text are left out.
        max_chars: rows with more text are left out; None keeps all.
        keep: a function of a row as it is in the table; rows for which it is false are left out,
            and then need not be right.
        format: which columns to read where several formats fit; None takes the fullest.
    """

    path: str
    heldout_path: str | None = None
    heldout: int = 0
    split: str = "train"
    split_seed: int = 0
    deduplicate: bool = True
    min_chars: int = 0
    max_chars: int | None = None
    keep: Callable[[Row], bool] | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        if self.heldout < 0:
            raise ConfigError("data.heldout is negative", got=self.heldout, expected="0 or more")
        if self.heldout and self.heldout_path is not None:
            raise ConfigError(
                "both a held-out table and a number of held-out rows are set",
                got=f"heldout_path={self.heldout_path!r} and heldout={self.heldout}",
                expected="one of the two",
            )
        if self.split_seed and not self.heldout:
            raise ConfigError(
                "data.split_seed has no effect: no rows of the table are held out",
                got=self.split_seed,
                hint="--data.heldout=100",
            )
        if self.split != "train" and pathlib.Path(self.path).suffix in READERS:
            raise ConfigError(
                "data.split has no effect on a file",
                got=f"split={self.split!r} of {self.path}",
                hint="path=… and heldout_path=…",
            )
        if self.min_chars < 0 or (self.max_chars is not None and self.max_chars < self.min_chars):
            raise ConfigError(
                "data.min_chars and max_chars keep nothing",
                got=f"min_chars={self.min_chars}, max_chars={self.max_chars}",
                expected="0 ≤ min_chars ≤ max_chars",
            )

    def load(self, fitting: Sequence[str]) -> list[tuple[Examples, float]]:
        """The table's examples, with weight 1.

        Args:
            fitting: names of the formats that the trainer can use.

        Raises:
            DataError: the table can't be read, its columns don't fit, a row is wrong, or nothing is
                left to train on.
        """
        left_out: dict[str, int] = {}
        rows, form = self._rows(self.path, fitting, left_out)
        if self.heldout_path is not None:
            train, (heldout, other) = rows, self._rows(self.heldout_path, [form], left_out)
            assert other == form
            if not heldout:
                raise DataError(f"no row of {self.heldout_path} is left to hold out", got=left_out)
            refuse_overlap(train, heldout)
        else:
            train, heldout = split_rows(rows, self.heldout, self.split_seed, self.path)
        if not train:
            raise DataError(f"no row of {self.path} is left to train on", got=left_out)
        if form == "ranking":
            train, heldout = ([p for row in rows for p in ranking_pairs(row)]
                              for rows in (train, heldout))  # fmt: skip
            form = "preference"
        return [(Examples(form, train, heldout, left_out), 1.0)]

    def _rows(self, path: str, fitting: Sequence[str], left_out: dict[str, int]):
        table = read_table(path, self.split)
        if self.format is not None and self.format not in fitting:
            raise ConfigError("data.format does not fit", got=self.format, expected=list(fitting))
        columns = {c for _, row in table[:100] for c, v in row.items() if v is not None}
        form = self.format or find_format(columns, fitting, path)
        rows, seen = [], set()
        for where, raw in table:
            # Before the check, so that it can leave out what the check would refuse.
            reason = None if self._keeps(raw, where) else "not kept"
            if reason is None:
                row = check_row(raw, form, where)
                reason = self._reason_to_leave_out(row, seen)
            if reason is None:
                rows.append(row)
            else:
                left_out[reason] = left_out.get(reason, 0) + 1
        return rows, form

    def _keeps(self, raw: Row, where: str) -> bool:
        try:
            return self.keep is None or bool(self.keep(raw))
        except Exception as error:  # whatever a user's function may raise
            raise DataError(
                f"data.keep fails on {where}", got=f"{type(error).__name__}: {clip(str(error))}"
            ) from error

    def _reason_to_leave_out(self, row: Row, seen: set[str]) -> str | None:
        size = text_size(row)
        if size < self.min_chars:
            return "too short"
        if self.max_chars is not None and size > self.max_chars:
            return "too long"
        if self.deduplicate:
            key = json.dumps(row, sort_keys=True)
            if key in seen:
                return "double"
            seen.add(key)
        return None


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Several tables, drawn from in fixed proportions whatever their sizes.

    Attributes:
        tables: the tables; each may have another of the formats that fit.
        weights: how often each is drawn from, in relation to the others.
    """

    tables: tuple[TableData, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.tables) != len(self.weights) or not self.tables:
            raise ConfigError(
                "a mixture needs a weight for each table",
                got=f"{len(self.tables)} tables, {len(self.weights)} weights",
            )
        if not all(0 < weight < float("inf") for weight in self.weights):
            raise ConfigError("a weight of a mixture is not positive", got=self.weights)

    def load(self, fitting: Sequence[str]) -> list[tuple[Examples, float]]:
        """The examples of each table, with its weight.

        Raises:
            DataError: as `TableData.load`; or what one table holds out, another one trains on.
        """
        parts = [
            (part, weight)
            for table, weight in zip(self.tables, self.weights, strict=True)
            for part, _ in table.load(fitting)
        ]
        refuse_overlap(
            [row for part, _ in parts for row in part.train],
            [row for part, _ in parts for row in part.heldout],
        )
        return parts


def text_size(value: Any) -> int:
    """Characters of all text in a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(text_size, value.values()))
    return sum(map(text_size, value)) if isinstance(value, list) else 0


def split_key(row: Row) -> str:
    """What must not be both trained on and held out: the prompt, or all where there is none.

    The prompt of a conversation is what is said before the assistant first speaks, if a user does.
    """
    prompt = row.get("prompt")
    if "messages" in row:
        before = itertools.takewhile(lambda m: m["role"] != "assistant", row["messages"])
        prompt = list(before)
        if all(message["role"] == "system" for message in prompt):
            prompt = None
    return json.dumps(prompt or row, sort_keys=True)


def refuse_overlap(train: Sequence[Row], heldout: Sequence[Row]) -> None:
    """Raises DataError if a prompt is both trained on and held out."""
    held = {split_key(row) for row in heldout}
    twin = next((key for key in map(split_key, train) if key in held), None)
    if twin is not None:
        raise DataError(
            "a held-out prompt is also trained on",
            got=clip(twin),
            hint="remove it from one of the two tables",
        )


def split_rows(rows: list[Row], heldout: int, seed: int, path: str) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows): prompts by their hash, until `heldout` rows are held out."""
    if heldout == 0:
        return rows, []
    keys = [split_key(row) for row in rows]
    chosen, count = set(), 0
    sizes: dict[str, int] = {}
    for key in keys:
        sizes[key] = sizes.get(key, 0) + 1
    for key in sorted(sizes, key=lambda key: rank(seed, key)):
        if count >= heldout:
            break
        chosen.add(key)
        count += sizes[key]
    if count >= len(rows) or count < heldout:
        raise DataError(
            f"can't hold out that many rows of {path}",
            got=f"heldout={heldout}",
            expected=f"fewer than its {len(rows)} rows of {len(sizes)} different prompts",
            hint="--data.heldout=0, or a smaller number",
        )
    train = [row for row, key in zip(rows, keys, strict=True) if key not in chosen]
    return train, [row for row, key in zip(rows, keys, strict=True) if key in chosen]
