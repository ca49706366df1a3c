# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Records of prompts: what makes one valid, and how they are split for training and testing.

A record is a plain dict `{"id": str, "prompt": str | messages, "answer": Any, **columns}`.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrl_llm.errors import DataError

Record = dict[str, Any]
Source = Sequence[Record]


def rank(seed: int, name: str) -> bytes:
    """A place in an order that looks random and is the same on every machine and version."""
    return hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogatepass")).digest()


def check_prompt(prompt: Any, where: str) -> None:
    """Raises DataError unless the prompt is text or a list of messages, not empty, and Unicode.

    A message that calls tools (`tool_calls`) need not say anything: its content may be missing.
    `where` names the prompt in the message.
    """
    texts = [prompt] if isinstance(prompt, str) else prompt
    wrong = not isinstance(texts, list) or not texts
    if isinstance(prompt, list):
        wrong = wrong or not all(
            isinstance(message, dict)
            and isinstance(_said(message), str)
            and isinstance(message.get("role"), str)
            for message in prompt
        )
        texts = [] if wrong else [_said(message) for message in prompt]
    if wrong:
        raise DataError(
            f"{where} is of the wrong type",
            got=clip(reprlib.repr(prompt)),
            expected='a string, or a list of messages {"role": "user", "content": "…"}',
        )
    called = isinstance(prompt, list) and any(map(_calls, prompt))
    if not called and not any(text.strip() for text in texts):
        raise DataError(f"{where} is empty", expected="text")
    check_unicode(prompt, where)


def _said(message: Record) -> Any:
    """The content of a message; nothing is said where it is missing beside calls of tools."""
    content = message.get("content")
    return "" if content is None and _calls(message) else content


def _calls(message: Record) -> bool:
    calls = message.get("tool_calls")
    return isinstance(calls, list) and bool(calls)


def check_unicode(value: Any, where: str) -> None:
    """Raises DataError if a text in a JSON value, however deep, holds half of a surrogate pair."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where} is not valid Unicode",
                got=f"a lone surrogate at character {error.start}",
                expected="surrogate pairs (\\ud83d\\ude00), or the character itself",
            ) from None
    elif isinstance(value, dict):
        check_unicode([*value, *value.values()], where)
    elif isinstance(value, list):
        for item in value:
            check_unicode(item, where)


def _prompt_key(record: Record) -> str:
    return json.dumps(record["prompt"], sort_keys=True)


def split(
    records: list[Record], heldout: int, seed: int, path: str
) -> tuple[list[Record], list[Record]]:
    """Holds out prompts that occur once, by their hash: lines may be added or reordered.

    Returns (training records in their order, held-out records in an order fixed by `seed`).
    """
    if heldout == 0:
        return records, []
    keys = [_prompt_key(record) for record in records]
    times: dict[str, int] = {}
    for key in keys:
        times[key] = times.get(key, 0) + 1
    unique = sorted((rank(seed, key), i) for i, key in enumerate(keys) if times[key] == 1)
    if len(unique) < heldout or heldout >= len(records):
        raise DataError(
            f"can't hold out that many prompts of {path}",
            got=f"heldout={heldout}",
            expected=f"fewer than its {len(records)} records, {len(unique)} of which occur once",
        )
    chosen = {i for _, i in unique[:heldout]}
    return (
        [record for i, record in enumerate(records) if i not in chosen],
        [records[i] for _, i in unique[:heldout]],
    )


def check_ids(records: Iterable[Record]) -> None:
    """Raises DataError if an id occurs twice."""
    seen: set[str] = set()
    for record in records:
        if record["id"] in seen:
            raise DataError(
                "two records have the same id",
                got=clip(repr(record["id"])),
                expected="ids that are unique over the training and the held-out prompts",
            )
        seen.add(record["id"])


def check_disjoint(train: Source, heldout: Source) -> None:
    """Raises DataError if a prompt, whatever its id, is both trained on and held out."""
    trained = {_prompt_key(record): record["id"] for record in train} if heldout else {}
    for record in heldout:
        if (twin := trained.get(_prompt_key(record))) is not None:
            raise DataError(
                "a held-out prompt is also trained on",
                got=f"held-out {record['id']} = training {twin}",
                hint="remove it from one of the two files",
            )


def clip(text: str, most: int = 100) -> str:
    """Text short enough for an error message."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"
