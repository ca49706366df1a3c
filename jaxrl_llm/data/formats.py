# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The columns of supervised data, named as in TRL, and the rows that they turn into.

A row that has passed `check_row` holds the columns of its format and nothing else: the replies of a
preference without the prompt that both begin with, rankings as they were given.
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
import reprlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl_llm.data.records import check_prompt, check_unicode, clip
from jaxrl_llm.errors import DataError

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Format:
    """One way to write an example.

    Attributes:
        columns: those that must be there.
        optional: those that may be.
        meaning: the columns' types, for errors.
    """

    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()
    meaning: str = ""


_TEXT = "text, or a list of messages"
_JSON = (str, int, float, type(None), list, tuple, dict)
_DEEPEST = 100
_LARGEST = 1e38  # of numbers whose differences float32 holds
FORMATS: dict[str, Format] = {
    "text": Format(("text",), meaning="text: all of it is learnt"),
    "messages": Format(("messages",), meaning="a list of messages; what the assistant says counts"),
    "prompt_completion": Format(("prompt", "completion"), meaning=_TEXT),
    "preference": Format(("chosen", "rejected"), ("prompt", "margin"), meaning=_TEXT),
    "ranking": Format(("prompt", "completions", "scores"), meaning="replies and a number for each"),
    "unpaired": Format(("prompt", "completion", "label"), meaning=f"{_TEXT}; label: true or false"),
    "stepwise": Format(
        ("prompt", "completions", "labels"), meaning="steps, and true or false for each"
    ),
}


def find_format(columns: Iterable[str], fitting: Sequence[str], where: str) -> str:
    """The format of a table by its columns: of those that fit, the one that must have most of them.

    Args:
        fitting: names of the formats that the trainer can use.
        where: what the error calls the table.

    Raises:
        DataError: none fits, or two do equally; names the columns and formats.
    """
    held = set(columns)
    usable = [name for name in fitting if held.issuperset(FORMATS[name].columns)]
    most = max((len(FORMATS[name].columns) for name in usable), default=0)
    fullest = [name for name in usable if len(FORMATS[name].columns) == most]
    if len(fullest) > 1:
        raise DataError(
            f"{where} can be read in several ways",
            got="the columns of " + " and of ".join(fullest),
            hint=f"--data.format={fullest[0]} or {fullest[-1]}, or drop the other columns",
        )
    if fullest:
        return fullest[0]
    raise DataError(
        f"{where} has no columns to train on",
        got="the columns " + (clip(", ".join(sorted(held))) or "none"),
        expected=" or ".join(describe(name) for name in fitting),
        hint="rename the columns, or another trainer",
    )


def describe(name: str) -> str:
    """A format's columns as an error shows them: `chosen, rejected[, prompt][, margin]`."""
    row = FORMATS[name]
    return ", ".join(row.columns) + "".join(f"[, {column}]" for column in row.optional)


def check_row(row: Mapping[str, Any], name: str, where: str) -> Row:
    """The columns of the format `name` in `row`, checked; other columns are left out.

    Raises:
        DataError: a column is missing or of the wrong type; `where` names the row.
    """
    form = FORMATS[name]
    for column in form.columns:
        if column not in row:
            raise DataError(
                f"{where} has no column {column!r}",
                got="the columns " + clip(", ".join(map(str, row)) or "none"),
                expected=describe(name),
            )
    optional = [c for c in form.optional if row.get(c) is not None]
    kept = {column: row[column] for column in (*form.columns, *optional)}
    for column, value in kept.items():
        check_json(value, f"{where}: the column {column!r}")
    _CHECKS[name](kept, where)
    for column, value in kept.items():
        check_unicode(value, f"{where}: the column {column!r}")
    return _with_prompt(kept, where) if name == "preference" else kept


def _check_text(row: Row, where: str) -> None:
    if not isinstance(row["text"], str):
        _wrong_type(where, "text", row["text"], "text")
    check_prompt(row["text"], f"{where}: the text")


def _check_messages(row: Row, where: str) -> None:
    if not isinstance(row["messages"], list):
        _wrong_type(where, "messages", row["messages"], "a list of messages")
    check_prompt(row["messages"], f"{where}: the conversation")


def _check_completion(row: Row, where: str, column: str = "completion") -> None:
    """Prompt and completion are of one kind; an empty prompt is one that nothing is asked by."""
    if row["prompt"] != "":
        check_prompt(row["prompt"], f"{where}: the prompt")
    _check_reply(row, row[column], column, where)


def _check_reply(row: Row, reply: Any, name: str, where: str) -> None:
    check_prompt(reply, f"{where}: the {name}")
    if type(row["prompt"]) is not type(reply):
        raise DataError(
            f"{where}: prompt and {name} are of different kinds",
            got=f"{type(row['prompt']).__name__} and {type(reply).__name__}",
            expected="both text, or both lists of messages",
        )


def _check_preference(row: Row, where: str) -> None:
    for column in ("chosen", "rejected"):
        if "prompt" in row:
            _check_completion(row, where, column)
        else:
            check_prompt(row[column], f"{where}: the {column} reply")
    if type(row["chosen"]) is not type(row["rejected"]):
        raise DataError(f"{where}: the replies are of different kinds", expected=_TEXT)
    if row["chosen"] == row["rejected"]:
        raise DataError(
            f"{where}: both replies are the same",
            got=clip(reprlib.repr(row["chosen"])),
            hint="leave such rows out",
        )
    if "margin" in row and not _is_number(row["margin"]):
        _wrong_type(where, "margin", row["margin"], "a finite number")


def _check_ranking(row: Row, where: str) -> None:
    replies, scores = row["completions"], row["scores"]
    check_prompt(row["prompt"], f"{where}: the prompt")
    if not isinstance(replies, list) or not isinstance(scores, list) or len(replies) < 2:
        _wrong_type(where, "completions", replies, "two or more replies, and a score for each")
    if len(replies) != len(scores) or not all(map(_is_number, scores)):
        _wrong_type(where, "scores", scores, f"{len(replies)} finite numbers")
    for number, reply in enumerate(replies, 1):
        _check_reply(row, reply, f"reply {number}", where)
    if not _is_number(max(scores) - min(scores)):
        _wrong_type(where, "scores", scores, "numbers whose difference is finite")
    if len(set(scores)) < 2:
        raise DataError(f"{where}: no reply is better than another", got=scores)
    for (one, high), (other, low) in itertools.combinations(zip(replies, scores, strict=True), 2):
        if one == other and high != low:
            raise DataError(
                f"{where}: equal replies have different scores",
                got=f"{clip(reprlib.repr(one))} with {high} and {low}",
                hint="leave one of them out",
            )


def _check_unpaired(row: Row, where: str) -> None:
    _check_completion(row, where)
    if not isinstance(row["label"], bool):
        _wrong_type(where, "label", row["label"], "true or false")


def _check_stepwise(row: Row, where: str) -> None:
    steps, labels = row["completions"], row["labels"]
    check_prompt(row["prompt"], f"{where}: the prompt")
    if not isinstance(row["prompt"], str):
        _wrong_type(where, "prompt", row["prompt"], "text")
    if not isinstance(steps, list) or not steps or not all(isinstance(s, str) and s for s in steps):
        _wrong_type(where, "completions", steps, "a list of steps, each a text")
    good = isinstance(labels, list) and all(isinstance(label, bool) for label in labels)
    if not good or len(labels) != len(steps):
        _wrong_type(where, "labels", labels, f"{len(steps)} times true or false")


_CHECKS = {
    "text": _check_text,
    "messages": _check_messages,
    "prompt_completion": _check_completion,
    "preference": _check_preference,
    "ranking": _check_ranking,
    "unpaired": _check_unpaired,
    "stepwise": _check_stepwise,
}


def check_json(value: Any, where: str) -> None:
    """Raises DataError for a value that holds what JSON can't, or that is nested too deeply for
    templates: they go through it by recursion."""
    level = [value]
    for _ in range(_DEEPEST):
        wrong = next((v for v in level if not isinstance(v, _JSON)), None)
        if wrong is not None:
            raise DataError(
                f"{where} holds a value that is not JSON",
                got=f"{type(wrong).__name__} {clip(reprlib.repr(wrong), 60)}",
                expected="text, numbers, true, false, null, lists or objects",
            )
        level = [
            inner
            for outer in level
            if isinstance(outer, list | tuple | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise DataError(f"{where} is nested too deeply", expected=f"at most {_DEEPEST} levels")


def _is_number(value: Any) -> bool:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and abs(value) <= _LARGEST  # false for NaN


def _wrong_type(where: str, column: str, value: Any, expected: str) -> None:
    raise DataError(
        f"{where}: the column {column!r} is of the wrong type",
        got=clip(reprlib.repr(value)),
        expected=expected,
    )


def _with_prompt(row: Row, where: str) -> Row:
    """A preference with its prompt: given, or what both replies begin with."""
    if "prompt" in row:
        return row
    chosen, rejected = row["chosen"], row["rejected"]
    equal = [one == other for one, other in zip(chosen, rejected, strict=False)]
    shared = equal.index(False) if False in equal else len(equal)
    if isinstance(chosen, str):
        shared = _word_start(chosen, rejected, shared)
    rest = {"chosen": chosen[shared:], "rejected": rejected[shared:]}
    if not rest["chosen"] or not rest["rejected"]:
        raise DataError(
            f"{where}: one reply is the beginning of the other",
            got=clip(reprlib.repr(chosen)),
            hint="a column prompt",
        )
    if not isinstance(chosen, str) and not shared:
        raise DataError(f"{where}: the replies have no message in common", hint="a column prompt")
    return {**row, "prompt": chosen[:shared], **rest}


def _word_start(chosen: str, rejected: str, shared: int) -> int:
    """Back from the first difference to where its word begins, the blank before it included.

    Where no blank or sign of a script without blanks comes before, the first difference stays: a
    prompt does not vanish for want of blanks. No reply is left empty, and no accent alone.
    """
    shared = max(0, min(shared, len(chosen) - 1, len(rejected) - 1))
    while shared and any(unicodedata.category(t[shared])[0] == "M" for t in (chosen, rejected)):
        shared -= 1
    if chosen[shared].isspace() and rejected[shared].isspace():
        return shared
    start = shared
    while start and not chosen[start - 1].isspace() and not _needs_no_blank(chosen[start - 1]):
        start -= 1
    if not start:
        return shared
    return start - 1 if chosen[start - 1] == " " else start


_SCRIPTS_WITHOUT_BLANKS = (
    "CJK", "IDEOGRAPHIC", "FULLWIDTH", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "BOPOMOFO",
    "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE", "BALINESE", "TAI ", "NEW TAI LUE",
)  # fmt: skip


def _needs_no_blank(sign: str) -> bool:
    """Whether words are written behind this sign without a blank between."""
    return unicodedata.name(sign, "").startswith(_SCRIPTS_WITHOUT_BLANKS)


def ranking_pairs(row: Row) -> list[Row]:
    """A ranking as preferences: every better reply against every worse one.

    ``margin`` is the difference of their scores when the rows' trainer asks for margins.
    """
    ranked = list(zip(row["completions"], row["scores"], strict=True))
    return [
        {"prompt": row["prompt"], "chosen": better, "rejected": worse, "margin": float(high - low)}
        for better, high in ranked
        for worse, low in ranked
        if high > low
    ]
