# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation: greedy completions, scored by the run's own rewards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.rollout.engine import Request, SamplingParams
from jaxrl_llm.rollout.engines import Sampler
from jaxrl_llm.sharding.processes import share
from jaxrl_llm.trainers.scoring import Scorer
from jaxrl_llm.types import Prompt, Rollout


def evaluate(
    engine: Sampler,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    scorer: Scorer,
) -> tuple[dict[str, float], list[Rollout]]:
    """Complete every held-out prompt once and score it; several processes share the prompts.

    Returns:
        metrics: "eval/reward", "eval/<name>" for every part of the reward (means over what
            could be judged),
            "eval/mean_length" and "eval/clipped_ratio".
        rollouts: in the order of the prompts.
    """
    requests = [
        Request(prompt=prompt, n=1, params=sampling, uid=index)
        for index, prompt in enumerate(prompts)
    ]
    place = {prompt.id: index for index, prompt in enumerate(prompts)}
    done = [scorer.submit(rollout) for rollout in engine.generate(share(requests))]
    rollouts = scorer.finish(done, lambda rollout: place[rollout.prompt.id])
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    metrics = {
        "eval/mean_length": float(np.mean([len(r.tokens) for r in rollouts])),
        "eval/clipped_ratio": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        "eval/not_judged": float(len(rollouts) - len(rewards)),
    }
    if rewards:
        metrics["eval/reward"] = float(np.mean([reward.value for reward in rewards]))
        for name in sorted({name for reward in rewards for name in reward.parts}):
            parts = [reward.parts[name] for reward in rewards if name in reward.parts]
            metrics[f"eval/{name}"] = float(np.mean(parts))
    return metrics, rollouts
