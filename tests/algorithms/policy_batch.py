# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Batches for the tests of the algorithms: the stored one, and ragged random ones."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.presets import PRESETS, AlgoConfig, Algorithm, resolve
from jaxrl_llm.algorithms.requirements import ADVANTAGES, setting_defaults
from jaxrl_llm.types import Batch

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "policy_gradient.json").read_text()
)
STORED = {name: np.array(value) for name, value in GOLDEN["inputs"].items()}
VERL = {name: np.array(value) for name, value in GOLDEN["verl"].items()}
MASK = STORED["response_mask"] > 0
REWARDS = STORED["token_level_rewards"].sum(1).reshape(2, 3)


def make(name: str = "grpo", **settings) -> Algorithm:
    """A preset for answers of at most 5 tokens, as the stored batch has them."""
    return resolve(AlgoConfig(name=name, **settings), max_tokens=5)


def rollout_arrays(rewards: np.ndarray, mask: np.ndarray, rng: np.random.Generator) -> dict:
    """Everything that some advantage reads beside rewards and mask."""
    parts = np.stack([rewards, rng.normal(size=rewards.shape)], axis=2)
    return {
        "values": rng.normal(size=mask.shape),
        "greedy_rewards": np.full(rewards.shape[0], 0.25),
        "reward_parts": parts,
        "logp": -rng.uniform(0.1, 2.0, mask.shape),
        "logp_ref": -rng.uniform(0.1, 2.0, mask.shape),
        "sum_pi_squared": rng.uniform(0.1, 0.6, mask.shape),
        "tasks": np.arange(mask.shape[0]) // rewards.shape[1],
    }


def stored_rollout() -> dict:
    """The stored batch as `Algorithm.estimate` takes it (`valid` and rewards apart)."""
    return {
        "values": STORED["values"],
        "greedy_rewards": np.full(2, 0.25),
        "reward_parts": np.stack([REWARDS, np.array([[0, 1, 1], [0, 1, 3]])], axis=2).astype(float),
        "logp": STORED["old_log_prob"],
        "logp_ref": STORED["ref_log_prob"],
        "sum_pi_squared": STORED["sum_pi_squared"],
        "tasks": np.zeros(6, int),
    }


def stored_batch(advantages: np.ndarray, **changes) -> Batch:
    rows, columns = MASK.shape
    fields = {
        "tokens": np.arange(rows * columns).reshape(rows, columns),
        "positions": np.tile(np.arange(columns), (rows, 1)),
        "segment_ids": np.ones((rows, columns), int),
        "mask": MASK,
        "advantages": np.asarray(advantages),
        "logp_sampler": STORED["rollout_log_prob"],
        "logp_old": STORED["old_log_prob"],
        "logp_ref": STORED["ref_log_prob"],
    }
    return batch_of(**{**fields, **changes})


def batch_of(**fields) -> Batch:
    return Batch(**jax.tree.map(jnp.asarray, fields))


def ragged_batch(rows: int, columns: int, seed: int) -> tuple[Batch, dict[str, np.ndarray]]:
    """Rows of 1 to `columns` tokens, some with gaps, and what the model says about them."""
    rng = np.random.default_rng(seed)
    steps = np.arange(columns)[None]
    lengths = np.concatenate([[1, columns], rng.integers(2, columns, rows - 2)])[:, None]
    inside = steps < lengths
    mask = inside & ~((rng.uniform(size=inside.shape) < 0.2) & (steps > 0))
    old = -rng.uniform(0.05, 3.0, mask.shape)
    batch = batch_of(
        tokens=rng.integers(0, 90, mask.shape),
        positions=np.tile(steps, (rows, 1)),
        segment_ids=inside.astype(int),
        mask=mask,
        advantages=np.where(mask, np.repeat(rng.normal(size=(rows, 1)), columns, 1), 0.0),
        logp_sampler=np.minimum(old + rng.normal(0, 0.3, mask.shape), -0.01),
        logp_old=old,
        logp_ref=np.minimum(old + rng.normal(0, 0.3, mask.shape), -0.01),
    )
    model = {
        "logp": np.minimum(old + rng.normal(0, 0.3, mask.shape), -0.01),
        "entropy": rng.uniform(0.0, 2.0, mask.shape),
        "staleness": rng.integers(0, 4, mask.shape),
    }
    return batch, model


def loss_and_gradient(algorithm: Algorithm, logp, entropy, batch, *, staleness=None, counts=None):
    """Value, gradients by (logp, entropy) and metrics of one batch, without compiling."""
    counts = algorithm.counts(batch.mask, batch.segment_ids) if counts is None else counts
    stats = algorithm.batch_stats(logp, entropy, batch, staleness=staleness)

    def loss(logp, entropy):
        return algorithm.loss(logp, entropy, batch, counts, stats, staleness=staleness)

    arrays = jnp.asarray(logp), jnp.asarray(entropy)
    (value, metrics), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*arrays)
    return value, grads, metrics


ALL = tuple(PRESETS)


def loss_key(algorithm: Algorithm) -> tuple:
    """What tells two losses apart at given advantages."""
    estimator = ADVANTAGES[algorithm.settings["advantage"]][0]
    rollout = {"advantage", "task_normalize", "reward_weights", "value_clip"}
    rollout |= set(setting_defaults(estimator))
    return tuple(sorted((k, str(v)) for k, v in algorithm.settings.items() if k not in rollout))


# One preset for each distinct loss: the others differ from one of these in their advantage alone.
LOSSES = tuple({loss_key(make(name)): name for name in reversed(ALL)}.values())
