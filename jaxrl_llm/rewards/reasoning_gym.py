# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The scorers of reasoning-gym, kept from running what a model wrote.

Some of its scorers hand the answer to `eval`, or to SymPy's parser, which does so: an answer such
as `entry["answer"].split()` would then score itself. Such answers must here be plain literals, or
arithmetic over known names, before a scorer sees them; and every scorer runs in a worker process
that the kernel ends when it takes too long.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import pickle
import re
from collections.abc import Sequence
from typing import ClassVar, Literal

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards.workers import WorkerFailed, WorkerLost, Workers
from jaxrl_llm.types import Reward, Rollout

_CPU_S = 5.0
_MEMORY_BYTES = 4 << 30
_MOST_CHARACTERS = 10_000
_TAGS = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_NAMES = frozenset(
    re.findall(
        "[A-Za-z]+",
        "a b c d k m n p q r s t u v w x y z C X Y Z pi E sin cos tan sec csc cot asin acos atan"
        " sinh cosh tanh exp log ln sqrt Abs",
    )
)
_ARITHMETIC = re.compile(r"[A-Za-z0-9+*/^().\s|-]*")

EVALUATING = {
    **dict.fromkeys(("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"), "literal"),
    **dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), "arithmetic"),
    **dict.fromkeys(("simple_integration", "intermediate_integration"), "arithmetic"),
}
"""Data sets whose scorer evaluates the answer, and what an answer may be there."""


@dataclasses.dataclass(frozen=True)
class ReasoningGymScore:
    """What reasoning-gym's own scorer says of the answer, in [0, 1]; `solved` is 1 for full marks.

    For prompts of `jaxrl_llm.data.reasoning_gym.ReasoningGymTask`.

    Attributes:
        answer: "tags" reads what the last <answer>…</answer> holds; "line" the first line of the
            completion, for prompts that end where the answer begins.
    """

    answer: Literal["tags", "line"] = "tags"

    judges_alone: ClassVar[bool] = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Reward | None]:
        return [self._verdict(rollout) for rollout in rollouts]

    def _verdict(self, rollout: Rollout) -> Reward | None:
        dataset, entry = rollout.prompt.columns["dataset"], rollout.prompt.columns["entry"]
        said = self.extract(rollout.completion)
        if said is None or not harmless(said, EVALUATING.get(dataset)):
            return Reward(0.0, {"solved": 0.0})
        try:
            answer = _workers().call(pickle.dumps((dataset, said, entry)))
        except WorkerLost:
            return Reward(0.0, {"solved": 0.0})
        except WorkerFailed as error:
            if "No module named 'reasoning_gym'" in str(error):
                raise RewardError(
                    "scores of reasoning-gym need the package reasoning-gym",
                    hint="pip install 'jaxrl_llm[reasoning-gym]'",
                ) from None
            return None
        value = min(1.0, max(0.0, float(answer)))
        return Reward(value, {"solved": float(value == 1.0)})

    def extract(self, completion: str) -> str | None:
        """The answer that a completion gives; None if it gives none."""
        if self.answer == "line":
            return completion.strip().partition("\n")[0].strip() or None
        if completion.count("<answer>") != len(found := _TAGS.findall(completion)):
            return None
        return found[-1].strip() or None if found else None


def harmless(answer: str, kind: str | None) -> bool:
    """Whether an answer may be evaluated: "literal", "arithmetic", or None where nobody does."""
    if len(answer) > _MOST_CHARACTERS:
        return False
    if kind == "literal" and re.search(r"[\[({'\"]", answer):
        try:
            ast.literal_eval(answer)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return False
        return True
    if kind == "literal":
        return re.fullmatch(r"[A-Za-z0-9_\s,*-]*", answer) is not None and "__" not in answer
    if kind == "arithmetic":
        names = re.findall(r"[A-Za-z]+", answer)
        attribute = re.search(r"\.\s*[A-Za-z]|[A-Za-z)]\s*\.", answer)
        return (
            _ARITHMETIC.fullmatch(answer) is not None
            and not attribute
            and all(name in _NAMES for name in names)
        )
    return True


@functools.cache
def _workers() -> Workers:
    return Workers(
        "jaxrl_llm.rewards.reasoning_gym_worker:score_answer",
        count=os.cpu_count() or 1,
        cpu_s=_CPU_S,
        memory_bytes=_MEMORY_BYTES,
    )
