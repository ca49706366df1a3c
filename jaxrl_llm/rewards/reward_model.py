# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A reward model as a reward: any HF sequence-classification folder with one label."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards.scoring import scores_of, scoring_model
from jaxrl_llm.text.chat import encode_prompt
from jaxrl_llm.text.files import settled_path
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.types import Rollout


@dataclasses.dataclass(frozen=True)
class RewardModel:
    """``rewards={"model": RewardModel("runs/reward/export")}``: the score at the last token.

    Attributes:
        path: a folder that `trainers/reward.py` exported, or any of that kind.
        same_tokens: the policy has the same vocabulary: its tokens are scored as they are. False
            reads the text anew with the model's own tokenizer, and its end token after a reply that
            ended.
        rows: sequences that are scored at once.
        dtype: of the parameters.
    """

    judges_alone: ClassVar[bool] = True
    stays: ClassVar[bool] = True  # on the devices of this process

    path: str
    same_tokens: bool = False
    rows: int = 16
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", settled_path(self.path))
        if self.rows < 2:
            raise RewardError("RewardModel.rows is too small", got=self.rows, expected="≥ 2")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """A score for each rollout; raises as `scores_of` and `load_score_folder`."""
        model = scoring_model(self.path, self.dtype)
        if model.params["score"]["weight"].shape[0] != 1:
            raise RewardError(
                f"{self.path} judges steps, not replies", hint="rewards.process.ProcessRewardModel"
            )
        if self.same_tokens:
            sequences = [[*r.prompt.tokens, *r.tokens.tolist()] for r in rollouts]
        else:
            sequences = [reply_tokens(rollout, model.tokenizer) for rollout in rollouts]
        return [float(s[-1, 0]) for s in scores_of(model, sequences, rows=self.rows)]


def reply_tokens(rollout: Rollout, tokenizer: Tokenizer) -> list[int]:
    """The text of a rollout in another vocabulary, with an end token if it ended."""
    tokens, _ = encode_prompt(rollout.prompt.text + rollout.completion, tokenizer)
    ended = rollout.finish_reason == "stop" and tokens[-1] not in tokenizer.eos_ids
    return tokens + list(tokenizer.eos_ids[:1]) if ended else tokens
