# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Where prompts come from: tasks that load a training and a held-out source of records.

A source is a Grain `RandomAccessDataSource` (`len(source)`, `source[i]`); a record is a plain dict
`{"id": str, "prompt": str | messages, "answer": Any, **columns}`. The held-out records are the same
in every run, and no prompt is in both sources.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from jaxrl_llm.data.records import (
    Record,
    Source,
    check_disjoint,
    check_ids,
    check_prompt,
    clip,
    rank,
    split,
)
from jaxrl_llm.errors import DataError

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_MOST_PAIRS = 4_000_000


@runtime_checkable
class Task(Protocol):
    """What a run asks of a task; any frozen dataclass with this method is one."""

    def load(self) -> tuple[Source, Source]:
        """Returns the training source and the held-out source (which may be empty)."""
        ...


# ----------------------------------------------------------------------------
# Arithmetic
# ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ArithmeticTask:
    """Few-shot arithmetic on two integers, every pair of the ranges once.

    The prompt is a line `a+b=c` for each shot and then `a+b=`. Pairs shown as shots are neither
    trained on nor held out. Where the operation commutes, `b+a` of a held-out `a+b` is left out of
    training too: it is the same question.

    Attributes:
        operation: one of +, -, *.
        first: smallest and largest first operand, inclusive.
        second: smallest and largest second operand, inclusive.
        shots: the pairs shown, in this order.
        heldout: how many pairs are kept from training.
        split_seed: decides which pairs are held out; not the seed of the run, so that all runs
            compare.
    """

    operation: Literal["+", "-", "*"] = "+"
    first: tuple[int, int] = (10, 99)
    second: tuple[int, int] = (0, 9)
    shots: tuple[tuple[int, int], ...] = ((75, 4), (21, 4))
    heldout: int = 150
    split_seed: int = 0

    def __post_init__(self) -> None:
        if self.operation not in _OPERATIONS:
            raise DataError(
                "unknown arithmetic operation", got=repr(self.operation), expected="+, - or *"
            )
        for name, (low, high) in (("first", self.first), ("second", self.second)):
            if low > high:
                raise DataError(
                    f"the range of the {name} operand is empty",
                    got=f"{low}..{high}",
                    expected="the smaller number first",
                )
        pairs = self._num_pairs()
        if pairs > _MOST_PAIRS:
            raise DataError(
                "the operands' ranges hold too many pairs",
                got=f"{pairs:,}",
                expected=f"at most {_MOST_PAIRS:,}",
                hint="narrower ranges",
            )
        if self.heldout < 0:
            raise DataError("heldout is negative", got=self.heldout, expected="0 or more")

    def load(self) -> tuple[Source, Source]:
        """Returns (training pairs, held-out pairs), both in an order fixed by `split_seed`.

        Raises:
            DataError: if no pair would be left to train on.
        """
        shown = {key for pair in self.shots for key in self._same_question(pair)}
        pairs = [
            (a, b)
            for a in range(self.first[0], self.first[1] + 1)
            for b in range(self.second[0], self.second[1] + 1)
            if (a, b) not in shown
        ]
        pairs.sort(key=lambda pair: rank(self.split_seed, self._name(pair)))
        heldout = pairs[: self.heldout]
        kept_out = {key for pair in heldout for key in self._same_question(pair)}
        train = [pair for pair in pairs if pair not in kept_out]
        if not train or len(heldout) < self.heldout:
            raise DataError(
                "no arithmetic pair is left to train on",
                got=f"{len(pairs)} pairs beside the shots, of which {self.heldout} held out",
                hint=f"--task.heldout={max(0, len(pairs) // 6)} or wider ranges",
            )
        return _ArithmeticSource(self, train), _ArithmeticSource(self, heldout)

    def record(self, pair: tuple[int, int]) -> Record:
        """The record of one pair: its id is the question, its answer the result in decimal."""
        compute = _OPERATIONS[self.operation]
        lines = [f"{self._name(shot)}={compute(*shot)}\n" for shot in self.shots]
        return {
            "id": self._name(pair),
            "prompt": "".join(lines) + f"{self._name(pair)}=",
            "answer": str(compute(*pair)),
        }

    def _name(self, pair: tuple[int, int]) -> str:
        return f"{pair[0]}{self.operation}{pair[1]}"

    def _same_question(self, pair: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        return (pair,) if self.operation == "-" else (pair, (pair[1], pair[0]))

    def _num_pairs(self) -> int:
        return (self.first[1] - self.first[0] + 1) * (self.second[1] - self.second[0] + 1)


class _ArithmeticSource(Sequence):
    """Renders a pair only when it is asked for."""

    def __init__(self, task: ArithmeticTask, pairs: list[tuple[int, int]]):
        self._task, self._pairs = task, pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Record:
        return self._task.record(self._pairs[index])


# ----------------------------------------------------------------------------
# JSON lines
# ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class JsonlTask:
    """Prompts from a file with one JSON object a line (UTF-8; blank lines are skipped).

    The columns `prompt`, `answer` and `id` of a record come from the columns named here; every
    other column of the file is handed to the rewards under its own name. Without an id column a
    record is called `<file name>:<line>`.

    Attributes:
        path: the training prompts.
        heldout_path: a second file with the held-out prompts.
        heldout: or how many prompts of `path` to hold out; only prompts that occur once are.
        split_seed: decides which prompts are held out; not the seed of the run, so that all runs
            compare.
        prompt_column: a string, or a list of messages `{"role": str, "content": str}`.
        answer_column: the right answer, of any type; a file without this column has no answers.
        answer_after: of an answer that is text, keep what follows the last of these: `####` for
            GSM8K.
        template: text around a prompt that is text, with `{prompt}` in its place: an instruction,
            or examples.
        id_column: a string or whole number, unique over both sources; optional in the file.
    """

    path: str
    heldout_path: str | None = None
    heldout: int = 0
    split_seed: int = 0
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    answer_after: str | None = None
    template: str = "{prompt}"
    id_column: str = "id"

    def __post_init__(self) -> None:
        if self.heldout < 0:
            raise DataError("heldout is negative", got=self.heldout, expected="0 or more")
        if self.heldout and self.heldout_path is not None:
            raise DataError(
                "both a held-out file and a number of held-out prompts are set",
                got=f"heldout_path={self.heldout_path!r} and heldout={self.heldout}",
                expected="one of the two",
            )

        if "{prompt}" not in self.template:
            raise DataError(
                "the template has no place for the prompt",
                got=clip(repr(self.template)),
                expected="text with {prompt} in it",
            )

    def load(self) -> tuple[Source, Source]:
        """Reads and checks every line; returns (training records, held-out records).

        Raises:
            DataError: a file is missing, empty or not text, a line is not a JSON object, a column
                is missing or of the wrong type, an id occurs twice, a prompt is in both sources, or
                fewer prompts can be held out than were asked for.
        """
        records = self._read(pathlib.Path(self.path).expanduser(), "")
        if self.heldout_path is None:
            train, heldout = split(records, self.heldout, self.split_seed, self.path)
        else:
            heldout_path = pathlib.Path(self.heldout_path).expanduser()
            same_name = heldout_path.name == pathlib.Path(self.path).name
            train, heldout = records, self._read(heldout_path, "heldout/" if same_name else "")
        check_ids([*train, *heldout])
        check_disjoint(train, heldout)
        return train, heldout

    def _read(self, path: pathlib.Path, prefix: str) -> list[Record]:
        records = [
            self.record(row, f"{path}:{line}", f"{prefix}{path.name}:{line}")
            for line, row in json_lines(path)
        ]
        if not records:
            raise DataError(f"{path} holds no prompts", hint="one JSON object a line")
        without = next((i for i, r in enumerate(records) if r["answer"] is None), None)
        if without is not None and any(record["answer"] is not None for record in records):
            raise DataError(
                f"some records of {path} have no answer",
                got=f"none in {records[without]['id']}",
                expected=f"the column {self.answer_column!r} in every record, or in none",
            )
        return records

    def record(self, row: dict[str, Any], where: str, name: str) -> Record:
        """The record of a row; `where` names it in an error, `name` is its id if it has none."""
        if self.prompt_column not in row:
            raise DataError(
                f"{where} has no column {self.prompt_column!r}",
                got=f"the columns {clip(', '.join(map(str, row)) or 'none')}",
                hint="--task.prompt_column=NAME",
            )
        prompt = row[self.prompt_column]
        check_prompt(prompt, f"{where}: the prompt")
        taken = {self.prompt_column, self.answer_column, self.id_column}
        columns = {key: value for key, value in row.items() if key not in taken}
        for key in ("prompt", "answer", "id"):
            if key in columns:
                raise DataError(
                    f"{where}: the column {key!r} would hide the {key} of the record",
                    got=f"{key!r} beside the chosen columns {', '.join(sorted(taken))}",
                    hint=f"rename the column {key!r} in the file",
                )
        identity = row.get(self.id_column, name)
        if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
            raise DataError(
                f"{where}: the id is of the wrong type",
                got=clip(repr(identity)),
                expected="a string or a whole number",
            )
        if isinstance(prompt, str):
            prompt = self.template.replace("{prompt}", prompt)
        answer = self._answer(row.get(self.answer_column), where)
        return {"id": str(identity), "prompt": prompt, "answer": answer, **columns}

    def _answer(self, answer: Any, where: str) -> Any:
        if self.answer_after is None or not isinstance(answer, str):
            return answer
        _, mark, after = answer.rpartition(self.answer_after)
        if not mark or not after.strip():
            raise DataError(
                f"{where}: the answer has nothing after {self.answer_after!r}",
                got=clip(repr(answer)),
            )
        return after.strip()


def json_lines(
    path: pathlib.Path, example: str = '{"prompt": …, "answer": …}'
) -> Iterable[tuple[int, dict[str, Any]]]:
    """The line numbers (from 1) and JSON objects of a file; `example` is shown in errors."""
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            is_array = number == 1 and line.startswith("[")
            raise DataError(
                f"{path}:{number} is not JSON",
                got=f"{clip(line)} ({error or type(error).__name__})",
                expected="one JSON object a line" + (", not one array" if is_array else ""),
            ) from None
        if not isinstance(row, dict):
            raise DataError(
                f"{path}:{number} is not a JSON object",
                got=clip(line),
                expected=example,
            )
        yield number, row


def _read_text(path: pathlib.Path) -> str:
    if path.is_dir():
        raise DataError(f"{path} is a folder", expected="a file with one JSON object a line")
    if not path.exists():
        raise DataError(
            f"no file {path}",
            got=f"the working directory {pathlib.Path.cwd()}" if not path.is_absolute() else None,
            hint="a full path, --task.path=/…/prompts.jsonl",
        )
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"can't read {path}", got=error.strerror) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text",
            got=f"the byte 0x{error.object[error.start]:02x} at offset {error.start}",
            expected="one JSON object a line",
            hint="decompress the file, or save it as UTF-8",
        ) from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises ValueError where a key stands twice: one value would be lost."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r} stands twice in an object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
