# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""From logits to a token and its log-probability.

A draw depends on (seed, uid, sample, position) and on the logits, on nothing else: one uniform
number per token, turned into a token by the inverse of the cumulative distribution. There is no
random number per logit and no sort of the vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from jaxrl_llm.errors import RequestError

MAX_STOP_IDS = 8
CDF_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. None of these values ever causes a recompilation.

    Attributes:
        max_tokens: the most tokens that a completion may have, its stop token included.
        temperature: τ of the policy softmax(logits/τ); 0 is greedy.
        top_p: draw from the smallest set of tokens whose probability reaches top_p; 1 is off.
        stop_ids: a completion ends with the first of these that it draws (at most 8).
        seed: the draws depend on it, in 0 .. 2³² − 1.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    def check(self) -> None:
        """Raises RequestError for a value that can't be sampled with."""
        if self.max_tokens < 1:
            raise RequestError("max_tokens is too small", got=self.max_tokens, expected="≥ 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise RequestError("bad temperature", got=self.temperature, expected="≥ 0 and finite")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError("bad top_p", got=self.top_p, expected="in (0, 1]")
        if len(self.stop_ids) > MAX_STOP_IDS or any(i < 0 for i in self.stop_ids):
            raise RequestError(
                "bad stop_ids", got=self.stop_ids, expected=f"at most {MAX_STOP_IDS} token ids ≥ 0"
            )
        if not 0 <= self.seed < 2**32:
            raise RequestError("bad seed", got=self.seed, expected="in 0 .. 2³² − 1")


def sequence_keys(
    seed: UInt[Array, " S"], uid: UInt[Array, " S"], sample: UInt[Array, " S"]
) -> Key[Array, " S"]:
    """The key of each sequence; `position_uniforms` folds the position in."""

    def one(seed, uid, sample):
        key = jax.random.fold_in(jax.random.key(seed), uid)
        return jax.random.fold_in(key, sample)

    return jax.vmap(one)(seed, uid, sample)


def position_uniforms(keys: Key[Array, " S"], position: Int[Array, " S"]) -> Float[Array, " S"]:
    """One float32 uniform in [0, 1) for the token at `position` of each sequence."""

    def one(key, position):
        return jax.random.uniform(jax.random.fold_in(key, position), dtype=jnp.float32)

    return jax.vmap(one)(keys, position)


def sample_tokens(
    logits: Float[Array, "S V"],
    uniform: Float[Array, " S"],
    temperature: Float[Array, " S"],
    top_p: Float[Array, " S"],
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """A token of each row, and its log-probability over the full vocabulary.

    ``token = min{v : Σ_{w ≤ v} p_w > u · Σ p}`` with ``p = softmax(logits/τ)`` restricted to the
    top-p set, and ``logp = log softmax(logits/τ)[token]`` *not* restricted. Rows with τ = 0 take
    the first largest logit and its log-probability under softmax(logits).

    The uniform number has 23 random bits, so probabilities are honoured to about 1e-7.
    """
    greedy = temperature == 0.0
    scale = jnp.where(greedy, 1.0, temperature).astype(logits.dtype)
    shifted = (logits - jnp.max(logits, axis=-1, keepdims=True)) / scale[:, None]
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    with jax.named_scope("top_p"):
        kept = jax.lax.cond(
            jnp.any((top_p < 1.0) & ~greedy),
            lambda: jnp.where(top_p_set(weights, top_p), weights, 0.0),
            lambda: weights,
        )
    with jax.named_scope("inverse_cdf"):
        drawn = _inverse_cdf(kept, uniform)
    token = jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), drawn)
    logp = jnp.take_along_axis(shifted, token[:, None], axis=-1)[:, 0] - jnp.log(total)
    return token, logp


def _inverse_cdf(weights: Float[Array, "S V"], uniform: Float[Array, " S"]) -> Int[Array, " S"]:
    """Two levels: a block of the vocabulary by the blocks' sums, then a token within it."""
    rows, vocab = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % CDF_BLOCK)))
    blocks = padded.reshape(rows, -1, CDF_BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    target = uniform.astype(weights.dtype) * jnp.sum(sums, axis=-1)
    block, before = _first_above(sums, target)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0, :]
    token, _ = _first_above(inside, target - before)
    return block * CDF_BLOCK + token


def _first_above(
    masses: Float[Array, "S n"], target: Float[Array, " S"]
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """First index whose running sum exceeds the target, and the sum before it.

    Never an index of mass 0; where rounding leaves no sum above the target, the last with mass.
    """
    running = jnp.cumsum(masses, axis=-1)
    has_mass = masses > 0.0
    above = (running > target[:, None]) & has_mass
    last = masses.shape[-1] - 1 - jnp.argmax(has_mass[:, ::-1], axis=-1)
    index = jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last).astype(jnp.int32)
    chosen = lambda x: jnp.take_along_axis(x, index[:, None], axis=-1)[:, 0]  # noqa: E731
    return index, chosen(running) - chosen(masses)


def top_p_set(weights: Float[Array, "S V"], top_p: Float[Array, " S"]) -> Bool[Array, "S V"]:
    """The smallest set of tokens whose weights reach the share top_p of each row's sum.

    Nucleus sampling (https://arxiv.org/abs/1904.09751). The weight of the least likely token of the
    set is found by bisection on its bit pattern (non-negative floats sort like their bits), so it
    is exact; of several tokens with that very weight, those with the lowest ids are kept. `weights`
    are unnormalised and at most 1. Rows with top_p = 1 keep everything.
    """
    bits = jnp.finfo(weights.dtype).bits
    integer = jnp.dtype(f"int{bits}")
    as_float = lambda x: jax.lax.bitcast_convert_type(x, weights.dtype)  # noqa: E731
    goal = top_p.astype(weights.dtype) * jnp.sum(weights, axis=-1)
    ones = jnp.ones(weights.shape[0], weights.dtype)
    low = jnp.zeros(weights.shape[0], integer)
    high = jax.lax.bitcast_convert_type(ones, integer) + 1

    def halve(_, bounds):
        low, high = bounds  # the set {w ≥ low} reaches the goal, {w ≥ high} does not
        middle = low + (high - low) // 2
        held = jnp.sum(jnp.where(weights >= as_float(middle)[:, None], weights, 0.0), axis=-1)
        reached = held >= goal
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    low, _ = jax.lax.fori_loop(0, bits, halve, (low, high))
    least = as_float(low)[:, None]
    larger, equal = weights > least, weights == least
    missing = goal - jnp.sum(jnp.where(larger, weights, 0.0), axis=-1)
    rank = jnp.cumsum(equal, axis=-1, dtype=jnp.int32)
    needed = jnp.ceil(missing[:, None] / jnp.where(least > 0.0, least, 1.0))
    kept = larger | (equal & (rank <= jnp.maximum(needed, 1.0).astype(jnp.int32)))
    return kept | (top_p >= 1.0)[:, None]
