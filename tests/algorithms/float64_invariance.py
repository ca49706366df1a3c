# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""No split, padding, packing or garbage off the mask changes the loss or its gradient.

Presets that differ in their advantage alone share one loss at given advantages: each distinct loss
is tested once, and `test_every_preset_is_tested` says for which presets it stands.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_batch import ALL, batch_of, loss_key, make, ragged_batch

from jaxrl_llm.algorithms.reductions import add_counts, batch_counts
from jaxrl_llm.types import Batch

ROWS, COLUMNS, STEPS = 16, 9, 2
KL = {"kl_coef": 0.1}
# Settings that add every kind of term and statistic to one row.
EXTRAS = {
    "everything": {
        "top_entropy_fraction": 0.5,
        "entropy_coef": 0.01,
        "correction": "truncate",
        "correction_level": "sequence",
        "rejection": "sequence_max_k3",
        "rejection_high": 0.2,
        "off_policy_delta": 0.05,
        "kl_importance": "detached",
    },
    "loglinear": {"proximal": "loglinear", "correction": "icepop", "reduction": "sequence_mean"},
}


def algorithm_of(name):
    if name in EXTRAS:
        return make("dapo", **KL, **EXTRAS[name])
    if name in ("clip_cov", "kl_cov"):
        loose = {"cov_low": -0.5} if name == "clip_cov" else {}
        return make(name, **KL, cov_fraction=0.1, **loose)
    return make(name, **KL)


STANDS_FOR = {loss_key(algorithm_of(name)): name for name in reversed(ALL)}
NAMES = [*STANDS_FOR.values(), *EXTRAS]


@functools.cache
def data():
    """A batch's fields and what the model says of it, as NumPy arrays."""
    batch, model = ragged_batch(ROWS, COLUMNS, seed=11)
    fields = {name: np.asarray(x) for name, x in vars(batch).items() if x is not None}
    return fields, model


def pieces(tree, size, rows=range(ROWS)):
    rows = np.array(rows).reshape(-1, size)
    return [jax.tree.map(lambda x, at=at: x[at], tree) for at in rows]


def padded(tree, fill):
    """Right padding doubled, and everything that is off the mask replaced by garbage."""
    batch, model = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, COLUMNS + 3))), tree)

    def dirty(values):
        return np.where(batch["mask"], values, fill)

    fields = ("advantages", "logp_sampler", "logp_old", "logp_ref")
    model = {**model, "logp": dirty(model["logp"]), "entropy": dirty(model["entropy"])}
    return {**batch, **{name: dirty(batch[name]) for name in fields}}, model


def packed(tree):
    """Two sequences end to end in a row, with padding between and after them."""
    left, right = pieces(tree, 8)

    def pack(a, b):
        return np.concatenate([np.pad(x, ((0, 0), (0, 2))) for x in (a, b)], axis=1)

    batch, model = jax.tree.map(pack, left, right)
    segment_ids = pack(left[0]["segment_ids"], 2 * right[0]["segment_ids"])
    return {**batch, "segment_ids": segment_ids}, model


class Step:
    """Loss and gradient of an optimiser batch from its micro-batches, compiled once per shape."""

    def __init__(self, name):
        algorithm = algorithm_of(name)

        def loss(arrays, batch, age, counts, stats):
            return algorithm.loss(*arrays, Batch(**batch), counts, stats, staleness=age)[0]

        def stats(model, batch):
            arrays = model["logp"], model["entropy"], Batch(**batch)
            return algorithm.batch_stats(*arrays, staleness=model["staleness"])

        self.share, self.stats = jax.jit(jax.value_and_grad(loss)), jax.jit(stats)

    def __call__(self, micro_batches):
        counts = add_counts([_counts(b["mask"], b["segment_ids"]) for b, _ in micro_batches])
        batch, model = jax.tree.map(lambda *x: np.concatenate(x), *micro_batches)
        stats = self.stats(model, batch)
        shares = [
            self.share((model["logp"], model["entropy"]), batch, model["staleness"], counts, stats)
            for batch, model in micro_batches
        ]
        losses, grads = zip(*shares, strict=True)
        return sum(losses), [np.concatenate(part) for part in zip(*grads, strict=True)]


_counts = jax.jit(batch_counts)


def same(ours, reference):
    np.testing.assert_allclose(ours[0], reference[0], rtol=0, atol=1e-10)
    for grad, expected in zip(ours[1], reference[1], strict=True):
        grad = grad[:, : expected.shape[1]]
        np.testing.assert_allclose(grad, expected, rtol=0, atol=1e-10)


def test_every_preset_is_tested():
    shared = {name: STANDS_FOR[loss_key(algorithm_of(name))] for name in ALL}
    assert set(shared) == set(ALL)
    assert set(shared.values()) | set(EXTRAS) == set(NAMES)
    assert shared["gdpo"] == "grpo" and shared["ppo"] == "reinforce_pp"


@pytest.mark.parametrize("name", NAMES)
def test_no_split_padding_packing_or_garbage_changes_anything(name):
    step = Step(name)
    tree = batch, model = data()
    whole = step([tree])
    assert np.abs(whole[1][0]).max() > 1e-4
    assert not np.asarray(whole[1][0])[~batch["mask"]].any()

    same(step(pieces(tree, 4)), whole)
    for fill in (np.nan, 1e9):
        ours = step(pieces(padded(tree, fill), 1))
        same(ours, whole)
        assert not ours[1][0][:, COLUMNS:].any()

    # A row masked out is the row left out.
    without = np.array([i for i in range(ROWS) if i % 4 != 2])
    masked = batch["mask"] & np.isin(np.arange(ROWS), without)[:, None]
    loss, grads = step([({**batch, "mask": masked}, model)])
    same((loss, [g[without] for g in grads]), step(pieces(tree, 4, without)))
    assert not grads[0][2::4].any()

    loss, grads = step([packed(tree)])
    halves = [(g[:, :COLUMNS], g[:, COLUMNS + 2 : 2 * COLUMNS + 2]) for g in grads]
    same((loss, [np.concatenate(pair) for pair in halves]), whole)

    # Two optimiser steps per rollout, on a table of log-probabilities.
    ends = []
    for size, view in ((4, lambda tree: tree), (1, lambda tree: padded(tree, np.nan))):
        table = np.array(model["logp"])
        for half in (range(0, 8), range(8, 16)):
            now = view((batch, {**model, "logp": table.copy()}))
            _, grads = step(pieces(now, size, half))
            table[half[0] : half[-1] + 1] -= 0.5 * grads[0][:, :COLUMNS]
        ends.append(table)
    assert np.abs(ends[0] - np.asarray(model["logp"])).max() > 1e-4
    np.testing.assert_allclose(ends[1], ends[0], rtol=0, atol=1e-10)


def test_on_policy_batches_split_as_well():
    batch, model = data()
    batch = {name: x for name, x in batch.items() if name != "logp_old"}
    for name in ("grpo", "gspo", "decoupled_ppo"):
        step = Step(name)
        same(step(pieces((batch, model), 4)), step([(batch, model)]))


def test_long_rows_are_summed_in_blocks():
    rng = np.random.default_rng(5)
    columns = 1100
    segments = np.sort(rng.integers(0, 6, (2, columns)), axis=1)[:, ::-1].copy()
    mask = (rng.uniform(size=segments.shape) < 0.8) & (segments > 0)
    batch = batch_of(
        tokens=segments, positions=segments, segment_ids=segments, mask=mask,
        **{k: rng.normal(size=mask.shape) for k in ("advantages", "logp_sampler", "logp_old")},
    )  # fmt: skip
    algorithm = make("gspo", clip_low=0.5, clip_high=0.5)
    logp = jnp.asarray(batch.logp_old + rng.normal(0, 0.1, mask.shape))
    counts = algorithm.counts(mask, segments)
    loss, grad = jax.jit(
        jax.value_and_grad(lambda x: algorithm.loss(x, x * 0.0, batch, counts)[0])
    )(logp)
    change, advantages = np.asarray(logp - batch.logp_old), np.asarray(batch.advantages)
    total, count = 0.0, 0
    expected = np.zeros_like(mask, dtype=float)
    for row in range(2):
        for segment in range(1, 6):
            here = (segments[row] == segment) & mask[row]
            if here.any():
                ratio = np.exp(np.mean(change[row][here]))
                mean = advantages[row][here].mean()
                total -= ratio * mean
                expected[row, here] = -ratio * mean / here.sum()
                count += 1
    np.testing.assert_allclose(loss, total / count, atol=1e-12)
    np.testing.assert_allclose(grad, expected / count, atol=1e-12)
