# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What a reward is, and how the rewards of a run become one verdict per rollout.

A reward is a plain function from rollouts to numbers:

    def short(rollouts):
        return [1.0 if len(rollout.completion) < 80 else 0.0 for rollout in rollouts]

It may return a `Reward` where it has parts or notes to show, and None where it could not judge (a
sandbox that did not start, say): such a rollout is left out of its group, never scored 0.
"""

from __future__ import annotations

import math
import numbers
import reprlib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import RewardError
from jaxrl_llm.types import Reward, Rollout

RewardFn = Callable[[Sequence[Rollout]], Sequence[Reward | float | None]]
RewardRows = Mapping[str, RewardFn | tuple[RewardFn, float]]


def check_rewards(rows: Mapping[str, Any]) -> None:
    """Checks the rewards of a config before a run begins.

    Raises:
        RewardError: there is none, a row is not callable, a weight is not a finite number, or all
            weights are 0.
    """
    if not rows:
        raise RewardError(
            "no reward is set", expected='{"name": function} or {"name": (function, 1.0)}'
        )
    for name, row in rows.items():
        fn, weight = _row(row)
        if not callable(fn):
            raise RewardError(
                f"the reward {name!r} is not a function",
                got=_show(fn),
                expected="a function from rollouts to numbers",
            )
        if _finite(weight) is None:
            raise RewardError(
                f"the weight of the reward {name!r} is not a finite number",
                got=_show(weight),
            )
    if all(_row(row)[1] == 0 for row in rows.values()):
        raise RewardError("all rewards have weight 0", hint="a weight other than 0 for one of them")


def score(rows: RewardRows, rollouts: Sequence[Rollout]) -> list[Reward | None]:
    """Judges rollouts by several rewards: `r = Σᵢ wᵢ·rᵢ`.

    Args:
        rows: a function, or (function, weight), for each name; the weight of a bare function is 1.
            A reward of weight 0 is reported and does not count.
        rollouts: what the functions are called with, all at once.

    Returns:
        One verdict per rollout. Its parts hold every rᵢ, unweighted, under the name of its row, and
        the parts of a returned `Reward` as `name/part`. None where a reward that counts returned
        None.

    Raises:
        RewardError: a function raised, or returned anything but one finite number, `Reward` or None
            for each rollout. Finite means finite in float32, in which advantages are computed.
    """
    return combine(rows, judge(rows, rollouts), rollouts)


def judge(rows: RewardRows, rollouts: Sequence[Rollout]) -> dict[str, list[Reward | None]]:
    """The first half of `score`: what each function says, checked; raises as `score` does."""
    return {name: _call(name, _row(row)[0], rollouts) for name, row in rows.items()}


def combine(
    rows: RewardRows, judged: Mapping[str, Sequence[Reward | None]], rollouts: Sequence[Rollout]
) -> list[Reward | None]:
    """The second half of `score`: one verdict per rollout from what each function says of it."""
    weights = {name: _row(row)[1] for name, row in rows.items()}
    return [
        _combine({name: (weight, judged[name][i]) for name, weight in weights.items()}, rollout)
        for i, rollout in enumerate(rollouts)
    ]


def _row(row: Any) -> tuple[Any, Any]:
    return row if isinstance(row, tuple) else (row, 1.0)


def _call(name: str, fn: RewardFn, rollouts: Sequence[Rollout]) -> list[Reward | None]:
    try:
        result = fn(rollouts)
        ordered = isinstance(result, Iterable) and not isinstance(
            result, str | bytes | Mapping | set
        )
        values = list(result) if ordered else None
    except Exception as error:
        raise RewardError(
            f"the reward {name!r} raised {type(error).__name__}",
            got=f"{_clip(str(error)) or 'no message'} (at {_place(error)})",
            hint="return None for a rollout that can't be judged",
        ) from error
    if values is None:
        raise RewardError(
            f"the reward {name!r} did not return a list",
            got=_show(result),
            expected="one number, Reward or None for each rollout, in their order",
        )
    if len(values) != len(rollouts):
        raise RewardError(
            f"the reward {name!r} returned the wrong number of values",
            got=len(values),
            expected=f"{len(rollouts)}, one for each rollout",
        )
    return [_verdict(name, value, rollout) for value, rollout in zip(values, rollouts, strict=True)]


def _verdict(name: str, value: Any, rollout: Rollout) -> Reward | None:
    if value is None:
        return None
    total, parts, info = value, {}, {}
    if isinstance(value, Reward):
        total, parts, info = value.value, value.parts, value.info
    for suffix, number in (("", total), *((f"/{part}", v) for part, v in parts.items())):
        if _finite(number) is None:
            raise RewardError(
                f"the reward {name + suffix!r} is not a finite number",
                got=f"{_show(number)} for {rollout.prompt.id}, sample {rollout.sample}",
                expected="a finite number, or None for a rollout that can't be judged",
            )
    return Reward(_finite(total), {part: _finite(v) for part, v in parts.items()}, info)


def _combine(
    verdicts: Mapping[str, tuple[float, Reward | None]], rollout: Rollout
) -> Reward | None:
    total, parts, info = 0.0, {}, {}
    for name, (weight, verdict) in verdicts.items():
        if verdict is None:
            if weight != 0:
                return None
            continue
        total += weight * verdict.value if weight != 0 else 0.0
        parts[name] = verdict.value
        parts.update({f"{name}/{part}": value for part, value in verdict.parts.items()})
        if verdict.info:
            info[name] = verdict.info
    if _finite(total) is None:
        raise RewardError(
            "the weighted sum of the rewards is not finite",
            got=f"{total} for prompt {rollout.prompt.id}, sample {rollout.sample}",
            hint="smaller weights",
        )
    return Reward(total, parts, info)


def _finite(value: Any) -> float | None:
    """A real number as a float, or None if it is none, or not finite in float32."""
    is_scalar = isinstance(value, numbers.Real | np.bool_)
    if not is_scalar and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a zero-dimensional array
        is_scalar = isinstance(value, numbers.Real)
    try:
        number = float(value) if is_scalar else math.nan
    except OverflowError:
        return None
    return number if abs(number) <= float(np.finfo(np.float32).max) else None


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"


def _show(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # an integer of more than 4300 digits, or a class of the user's
        return f"a value of type {type(value).__name__}"


def _clip(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
