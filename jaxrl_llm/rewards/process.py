# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A process reward model as a reward: how likely each step is right, made one number."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards.scoring import scores_of, scoring_model
from jaxrl_llm.text.files import settled_path
from jaxrl_llm.text.steps import encode_marked_steps, split_steps
from jaxrl_llm.types import Reward, Rollout

Aggregation = Literal["min", "mean", "last"]


@dataclasses.dataclass(frozen=True)
class ProcessRewardModel:
    """``rewards={"steps": ProcessRewardModel("runs/prm/export", aggregate="min")}``.

    A completion is cut into steps at `separator`; a step is judged at its mark, by
    ``softmax(logits)["right"]`` (https://arxiv.org/abs/2305.20050). A completion without a step
    scores 0.

    Attributes:
        path: a folder that `trainers/reward.py` exported with kind="steps", or any HF
            token-classification folder with the labels wrong and right.
        aggregate: the reward is the least, the mean or the last of the steps' probabilities.
        separator: what the model was trained with.
        rows: sequences that are scored at once.
        dtype: of the parameters.
    """

    judges_alone: ClassVar[bool] = True
    stays: ClassVar[bool] = True  # on the devices of this process

    path: str
    aggregate: Aggregation = "min"
    separator: str = "\n"
    rows: int = 16
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", settled_path(self.path))
        if self.rows < 2:
            raise RewardError("ProcessRewardModel.rows is too small", got=self.rows, expected="≥ 2")
        if self.aggregate not in AGGREGATIONS:
            raise RewardError(
                "unknown aggregation", got=self.aggregate, expected=", ".join(AGGREGATIONS)
            )

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Reward]:
        """A verdict for each rollout, with the probability of each step in its notes."""
        model = scoring_model(self.path, self.dtype)
        if model.params["score"]["weight"].shape[0] != 2:
            raise RewardError(
                f"{self.path} judges replies, not steps", hint="rewards.reward_model.RewardModel"
            )
        marked = [
            encode_marked_steps(
                rollout.prompt.text,
                split_steps(rollout.completion, self.separator),
                model.tokenizer,
                self.separator,
            )
            for rollout in rollouts
        ]
        scores = scores_of(model, [tokens for tokens, _ in marked], rows=self.rows)
        return [
            self._verdict(_right(logits[marks]))
            for logits, (_, marks) in zip(scores, marked, strict=True)
        ]

    def _verdict(self, steps: np.ndarray) -> Reward:
        value = AGGREGATIONS[self.aggregate](steps) if len(steps) else 0.0
        return Reward(float(value), info={"steps": [round(float(p), 4) for p in steps]})


def _right(logits: np.ndarray) -> np.ndarray:
    """Probability of "right" of each step: the sigmoid of the difference of its logits."""
    difference = np.clip(logits[:, 1] - logits[:, 0], -80.0, 80.0)
    return 1.0 / (1.0 + np.exp(-difference))


AGGREGATIONS = {"min": np.min, "mean": np.mean, "last": lambda steps: steps[-1]}
