# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts are judged while others are sampled, and the run is the same as if they were not."""

import time

import numpy as np

from jaxrl_llm.trainers.scoring import Scorer
from jaxrl_llm.types import Prompt, Rollout


def rollout(sample, tokens, reason="stop"):
    count = len(tokens)
    return Rollout(
        prompt=Prompt("p", (1,), "p", "7"),
        sample=sample,
        tokens=np.array(tokens, np.int32),
        logp_sampler=np.zeros(count, np.float32),
        mask=np.ones(count, bool),
        weights_version=np.zeros(count, np.int32),
        finish_reason=reason,
    )


def counts_letters(rollouts):
    return [float(len(r.completion)) for r in rollouts]


def slow(rollouts):
    time.sleep(0.05)
    return [float(len(r.completion)) for r in rollouts]


slow.judges_alone = True


def compares(rollouts):
    longest = max(len(r.completion) for r in rollouts)
    return [float(len(r.completion) == longest) for r in rollouts]


def decode(tokens):
    return "".join(map(chr, tokens))


def test_text_leaves_out_the_stop_token_and_verdicts_follow_the_order_asked_for():
    rows = {"letters": counts_letters, "slow": (slow, 0.0), "longest": (compares, 10.0)}
    scorer = Scorer(rows, decode, workers=2)
    try:
        finished = [
            scorer.submit(r)
            for r in (rollout(2, [97, 98, 0]), rollout(0, [97], "length"), rollout(1, [97, 0]))
        ]
        scored = scorer.finish(finished, lambda r: r.sample)
    finally:
        scorer.close()
    assert [r.completion for r in scored] == ["a", "a", "ab"]
    assert [r.reward.value for r in scored] == [1.0, 1.0, 12.0]
    assert [r.reward.parts["slow"] for r in scored] == [1.0, 1.0, 2.0]
    assert scorer.lost == 0
