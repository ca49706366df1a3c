# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Run by test_update.py with float64: prints how far gradients of equal batches are apart."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.algorithms.presets import AlgoConfig, resolve
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import init_params
from jaxrl_llm.trainers.batching import count_targets, pad_rollouts, plan_rows
from jaxrl_llm.trainers.policy import make_train_functions
from jaxrl_llm.types import Prompt, Reward, Rollout

CONFIG = ModelConfig(61, 16, 24, 2, 4, 2, 8, tie_word_embeddings=True)


def make_rollouts(rng):
    rollouts = []
    for row in range(16):
        if row % 4 == 0:
            prompt = Prompt(str(row // 4), tuple(rng.integers(0, 61, 3 + row // 4).tolist()), "")
        size = int(rng.integers(1, 11))
        rollouts.append(
            Rollout(
                prompt=prompt,
                sample=row % 4,
                tokens=rng.integers(0, 61, size).astype(np.int32),
                logp_sampler=rng.normal(-3, 1, size).astype(np.float32),
                mask=np.ones(size, bool),
                weights_version=np.zeros(size, np.int32),
                finish_reason="stop",
                reward=None if row == 5 else Reward(float(rng.normal())),
            )
        )
    return rollouts


def gradient(functions, algorithm, params, samples, *, layout="padded", micro=1024, row=64):
    """The gradient of an optimiser batch, added up over micro-batches of rows."""
    plan = plan_rows(
        samples, layout=layout, micro_tokens=micro, row_tokens=row, longest=samples.mask.shape[1]
    )
    rows = plan.pack(samples)
    stats = None
    if algorithm.needs_batch_stats:
        targets = count_targets(rows.mask)
        parts = [
            functions.logprobs((params, None), part, targets) for part in plan.micro_batches(rows)
        ]
        logp, entropy = (
            plan.unpack(np.concatenate(jax.device_get(values)), samples.mask)
            for values in zip(*parts, strict=True)
        )
        stats = algorithm.batch_stats(logp, entropy, samples)
    counts = algorithm.counts(rows.mask, rows.segment_ids)
    targets = count_targets(rows.mask)
    grads = functions.state.zeros(params)
    for part in plan.micro_batches(rows):
        grads, _ = functions.accumulate(grads, params, None, part, counts, stats, None, {}, targets)
    return grads


def distance(left, right):
    """Largest difference over the largest entry, over all leaves."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


def main(name: str) -> None:
    rng = np.random.default_rng(7)
    params = init_params(CONFIG, jax.random.key(0), jnp.float64)
    params = jax.tree.map(lambda x: x * 8.0 if x.ndim > 1 else x, params)
    algorithm = resolve(AlgoConfig(name=name, kl_coef=0.1), group_size=4, max_tokens=10)
    functions = make_train_functions(
        CONFIG, algorithm.loss, optax.sgd(0.1), temperature=0.8, remat=False
    )
    rematerialised = make_train_functions(
        CONFIG, algorithm.loss, optax.sgd(0.1), temperature=0.8, remat=True
    )
    rollouts = make_rollouts(rng)

    def rows(length=18):
        batch = pad_rollouts(rollouts, longest=length)
        noise = np.random.default_rng(3)
        shape, wide = batch.mask.shape, lambda x: np.asarray(x, np.float64)
        judged = [None if r.reward is None else r.reward.value for r in rollouts]
        rewards = np.array([0.0 if r is None else r for r in judged]).reshape(4, 4)
        valid = np.array([r is not None for r in judged]).reshape(4, 4)
        old = np.zeros(shape)
        ref = np.zeros(shape)
        for row in range(shape[0]):
            columns = np.flatnonzero(batch.mask[row])
            old[row, columns] = noise.normal(-4, 0.5, len(columns))
            ref[row, columns] = noise.normal(-4, 0.5, len(columns))
        inputs = {"valid": valid}
        if algorithm.needs_greedy_baseline:
            inputs["greedy_rewards"] = np.zeros(4)
        if algorithm.needs_reward_parts:
            inputs["reward_parts"] = rewards[:, :, None]
        if algorithm.needs_rollout_logp:
            inputs |= {"logp": old, "logp_ref": ref}
        return batch.replace(
            advantages=wide(algorithm.advantages(rewards, batch.mask, **inputs)),
            logp_sampler=wide(batch.logp_sampler),
            logp_old=old,
            logp_ref=ref,
        )

    def far(samples, functions=functions, **how):
        return distance(gradient(functions, algorithm, params, samples, **how), whole)

    whole = gradient(functions, algorithm, params, rows())
    shared = {"layout": "shared_prefix"}
    result = {
        "micro-batches of 4 rows": far(rows(), micro=4 * 18),
        "packed": far(rows(), layout="packed"),
        "shared prompts": far(rows(), **shared),
        "prompts of long groups repeated, a row a micro-batch": far(
            rows(), **shared, row=32, micro=1
        ),
    }
    poisoned = rows()
    for field, poison in (("advantages", np.nan), ("logp_sampler", 1e9), ("logp_old", np.nan),
                          ("logp_ref", -np.inf)):  # fmt: skip
        values = np.where(poisoned.mask, getattr(poisoned, field), poison)
        poisoned = poisoned.replace(**{field: values})
    result["NaN where masked"] = far(poisoned, **shared)
    keep = np.array([r.reward is not None for r in rollouts])
    without = jax.tree.map(lambda x: x[keep], rows())
    result["row not judged = row left out"] = far(without, **shared)
    result["remat"] = far(rows(), rematerialised, **shared)
    others = rows().replace(advantages=rows().advantages * 1.01)
    result["control: other advantages"] = far(others, **shared)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
