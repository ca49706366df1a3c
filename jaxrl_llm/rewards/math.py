# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Math answers: the stated answer, compared as mathematics, in processes that can be ended.

What decides is the last `Answer:` line or the last box (`jaxrl_llm.rewards.answer`); what counts as
the same is said in `jaxrl_llm.rewards.math_answers`. Models write expressions that no computer
algebra can work out: such an answer is wrong after `MathReward.cpu_s` CPU seconds, and costs nobody
else anything.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
from collections.abc import Sequence
from concurrent import futures
from typing import ClassVar

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards.answer import answer_text, same_answer, stated_answer
from jaxrl_llm.rewards.workers import WorkerFailed, WorkerLost, Workers
from jaxrl_llm.types import Rollout

_MEMORY_BYTES = 2 << 30


@dataclasses.dataclass(frozen=True)
class MathReward:
    """1 where the stated answer is mathematically `prompt.answer`, otherwise 0.

    The right answer may be a number or text, in LaTeX or as typed, also within `\\boxed{…}`. None
    where no worker process could be started. Safe to call from any thread or event loop (it blocks:
    use `asyncio.to_thread`).

    Attributes:
        cpu_s: CPU seconds for one comparison.
    """

    cpu_s: float = 2.0

    judges_alone: ClassVar[bool] = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        if not rollouts:
            return []
        pairs = [(rollout.completion, answer_text(rollout.prompt.answer)) for rollout in rollouts]
        with futures.ThreadPoolExecutor(min(len(pairs), _workers(self.cpu_s).count)) as pool:
            return list(pool.map(lambda pair: self.verdict(*pair), pairs))

    def verdict(self, completion: str, answer: str) -> float | None:
        """The reward for one completion.

        Raises:
            RewardError: SymPy, which compares what is no plain number or word, is not installed.
        """
        stated, right = stated_answer(completion), stated_answer(answer) or answer
        if stated is None:
            return 0.0
        if same_answer(stated, right):
            return 1.0
        if importlib.util.find_spec("sympy") is None:
            raise RewardError(
                "comparing mathematics needs the package sympy",
                got="an environment without it",
                hint="pip install 'jaxrl_llm[math]', or jaxrl_llm.rewards.answer.anchored_answer",
            )
        request = json.dumps([stated, right]).encode()
        try:
            return float(_workers(self.cpu_s).call(request) == b"true")
        except WorkerLost:
            return 0.0  # the answer is what took too long
        except WorkerFailed:
            return None


@functools.cache
def _workers(cpu_s: float) -> Workers:
    return Workers(
        "jaxrl_llm.rewards.math_answers:compare",
        count=os.cpu_count() or 1,
        cpu_s=cpu_s,
        memory_bytes=_MEMORY_BYTES,
    )


math_answer = MathReward()
"""The reward with its default limits."""
