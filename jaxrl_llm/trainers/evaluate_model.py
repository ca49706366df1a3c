# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A finished model against the held-out data of a config: perplexity, preference accuracy, reward
and pass@k."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.checkpoint.pretrained import load
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.rollout.engine import Engine, Request, SamplingParams
from jaxrl_llm.trainers.build import engine_config, scoring_workers, stop_ids
from jaxrl_llm.trainers.build_data import build_data
from jaxrl_llm.trainers.build_supervised import gather, make_trainer
from jaxrl_llm.trainers.scoring import Scorer
from jaxrl_llm.trainers.settings import RLConfig
from jaxrl_llm.types import Rollout


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """``1 − C(n − c, k)/C(n, k)``: the chance that one of k draws from n samples is right.

    Unbiased (https://arxiv.org/abs/2107.03374, Eq. 1).

    Args:
        correct: c, right samples.
        samples: n ≥ k.
    """
    assert 0 <= correct <= samples and 1 <= k <= samples, (correct, samples, k)
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def evaluate_model(
    config: Any, path: str, *, samples: int, ks: Sequence[int], correct: str | None, seed: int
) -> dict[str, float]:
    """The held-out metrics of the model at `path` under a config.

    Args:
        samples: completions a prompt, for configs of reinforcement learning; 1 is greedy.
        ks: for which k pass@k is told.
        correct: the reward that is > ½ where a completion is right; None: the reward as a whole.

    Raises:
        ConfigError: k is larger than the samples, there is no such reward, or the config is not one
            that anything is sampled for.
        DataError: the config holds nothing out.
    """
    if not isinstance(config, RLConfig):
        if samples != 1 or ks or correct is not None or seed:
            raise ConfigError(
                "--samples, --pass-at, --correct and --seed have no effect: nothing is sampled for "
                "this kind of config"
            )
        trainer, _ = make_trainer(gather(config, seed, trained=path))
        metrics, _ = trainer.evaluate()
        if not metrics:
            raise DataError("the config holds nothing out", hint="--data.heldout=100")
        return {name.removeprefix("eval/"): value for name, value in metrics.items()}
    if max(ks, default=1) > samples:
        raise ConfigError("pass@k needs k samples", got=f"k={max(ks)}, {samples} samples")
    rollouts = sample(config, path, samples, seed)
    return reward_metrics(rollouts, samples, ks, correct)


def sample(config: RLConfig, path: str, samples: int, seed: int) -> list[Rollout]:
    """`samples` scored completions of each held-out prompt, in order."""
    model = load(path, jnp.dtype(config.model.dtype))
    _, heldout, _ = build_data(config, model.tokenizer, model.config, seed)
    if not heldout:
        raise DataError("the config holds nothing out", hint="--task.heldout=100")
    sampler = dataclasses.replace(config.sampler, group_size=samples)
    engine = Engine(
        model.config, jax.device_put(model.params, jax.devices()[0]), engine_config(sampler)
    )
    params = SamplingParams(
        max_tokens=sampler.max_new_tokens,
        temperature=sampler.temperature if samples > 1 else 0.0,
        stop_ids=stop_ids(sampler.stop, model.tokenizer),
        seed=seed,
    )
    requests = [
        Request(prompt=prompt, n=samples, params=params, uid=index)
        for index, prompt in enumerate(heldout)
    ]
    place = {prompt.id: index for index, prompt in enumerate(heldout)}
    scorer = Scorer(config.rewards, model.tokenizer.decode, scoring_workers(config))
    try:
        done = [scorer.submit(rollout) for rollout in engine.generate(requests)]
        return scorer.finish(done, lambda r: (place[r.prompt.id], r.sample))
    finally:
        scorer.close()


def reward_metrics(
    rollouts: Sequence[Rollout], samples: int, ks: Sequence[int], correct: str | None
) -> dict[str, float]:
    """Mean reward, its parts, lengths and pass@k; prompts with a sample that could not be judged
    are left out of pass@k."""
    judged = [r.reward for r in rollouts if r.reward is not None]
    if not judged:
        raise DataError("no completion could be judged")
    metrics = {"reward": float(np.mean([reward.value for reward in judged]))}
    for name in sorted({name for reward in judged for name in reward.parts}):
        parts = [reward.parts[name] for reward in judged if name in reward.parts]
        metrics[name] = float(np.mean(parts))
    if correct is not None and correct not in metrics:
        raise ConfigError("there is no such reward", got=correct, expected=", ".join(metrics))
    metrics["mean_length"] = float(np.mean([len(r.tokens) for r in rollouts]))
    groups = [rollouts[i : i + samples] for i in range(0, len(rollouts), samples)]
    groups = [group for group in groups if all(r.reward is not None for r in group)]
    for k in ks:
        values = [pass_at_k(sum(_right(r, correct) for r in group), samples, k) for group in groups]
        metrics[f"pass@{k}"] = float(np.mean(values)) if values else math.nan
    return metrics


def _right(rollout: Rollout, correct: str | None) -> bool:
    value = rollout.reward.value if correct is None else rollout.reward.parts.get(correct, 0.0)
    return value > 0.5
