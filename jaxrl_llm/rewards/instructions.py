# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Instructions that can be checked: length, keywords, case, bullets, beginnings and ends.

The column `constraints` of a prompt is a list such as

    [{"kind": "words", "most": 100}, {"kind": "bullets", "least": 3, "most": 3}]

(after the instructions of IFEval, https://arxiv.org/abs/2311.07911).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.types import Reward, Rollout

_BULLET = re.compile(r"^[ \t]*(?:[-*•+]|[0-9]+[.)])[ \t]+\S", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?…]+(?=[\s\"')\]]|$)")


@dataclasses.dataclass(frozen=True)
class Instructions:
    """The share of a prompt's constraints that the completion follows; `followed` is 1 for all of
    them.

    An empty completion follows nothing. See `CONSTRAINTS` for the kinds.

    Attributes:
        column: the name of the column with the constraints.
    """

    column: str = "constraints"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Reward]:
        return [self._verdict(rollout) for rollout in rollouts]

    def _verdict(self, rollout: Rollout) -> Reward:
        constraints = rollout.prompt.columns[self.column]
        if not constraints:
            raise ValueError(f"prompt {rollout.prompt.id} has no constraints")
        text = rollout.completion.strip()
        kept = [bool(text) and _follows(text, constraint) for constraint in constraints]
        share = sum(kept) / len(kept)
        return Reward(share, {"followed": float(all(kept))})


def _follows(text: str, constraint: Mapping[str, Any]) -> bool:
    options = dict(constraint)
    kind = options.pop("kind", None)
    if kind not in CONSTRAINTS:
        raise ValueError(f"unknown constraint {kind!r}; known are {', '.join(CONSTRAINTS)}")
    try:
        return bool(CONSTRAINTS[kind](text, **options))
    except TypeError:
        raise ValueError(f"the constraint {kind!r} does not take {options}") from None


def _within(count: int, least: float | int = 0, most: float | int = math.inf) -> bool:
    return least <= count <= most


def _counts(count: Callable[[str], int]) -> Callable[..., bool]:
    return lambda text, *, least=0, most=math.inf: _within(count(text), least, most)


def _count_word(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _keyword(text: str, *, word: str, least: float | int = 1, most: float | int = math.inf) -> bool:
    return _within(_count_word(text, word), least, most)


def _case(text: str, *, case: str) -> bool:
    if case not in ("upper", "lower"):
        raise ValueError(f"unknown case {case!r}; known are upper and lower")
    return text.isupper() if case == "upper" else text.islower()


def _forbidden(text: str, *, words: list[str]) -> bool:
    return not any(_count_word(text, word) for word in words)


CONSTRAINTS: dict[str, Callable[..., bool]] = {
    "words": _counts(lambda text: len(text.split())),
    "characters": _counts(len),
    "sentences": _counts(lambda text: len(_SENTENCE_END.findall(text))),
    "paragraphs": _counts(lambda text: len(re.split(r"\n\s*\n", text))),
    "lines": _counts(lambda text: len([line for line in text.split("\n") if line.strip()])),
    "bullets": _counts(lambda text: len(_BULLET.findall(text))),
    "keyword": _keyword,
    "forbidden": _forbidden,
    "case": _case,
    "begins": lambda text, *, prefix: text.startswith(prefix),
    "ends": lambda text, *, suffix: text.endswith(suffix),
    "no_commas": lambda text: "," not in text,
}
