# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""From logits to a token and its log-probability.

A draw depends on (seed, uid, sample, position) and on the logits, on nothing else: one uniform
number per token, turned into a token by the inverse of the cumulative distribution. There is no
random number per logit and no sort of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from jaxrl_llm.errors import RequestError

MAX_STOP_IDS = 8
CDF_BLOCK = 128  # divides the vocabularies of Llama, SmolLM2, Qwen and Gemma


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
    """The key of each sequence: `sample` folded into the Threefry key (seed, uid), where any two
    words make a key (https://doi.org/10.1145/2063384.2063405)."""
    keys = jax.random.wrap_key_data(jnp.stack([seed, uid], axis=-1), impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, sample)


def position_uniforms(keys: Key[Array, " S"], position: Int[Array, " S"]) -> Float[Array, " S"]:
    """One float32 uniform in [0, 1), of 24 bits, for the token at `position` of each sequence.

    Folding in is one Threefry block, and its output is the random word: nothing is drawn twice.
    """
    words = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, position))[:, 0]
    return (words >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


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

    The uniform number has 24 random bits, so probabilities are honoured to about 1e-7.
    """
    rows = logits.shape[0]
    greedy = temperature == 0.0
    scale = jnp.where(greedy, 1.0, temperature).astype(logits.dtype)
    top = jnp.max(logits, axis=-1)
    blocks = _blocks(logits, -jnp.inf)

    def weigh(part: Float[Array, "S b n"]) -> Float[Array, "S b n"]:
        return jnp.exp((part - top[:, None, None]) / scale[:, None, None])

    sums = jnp.sum(weigh(blocks), axis=-1)
    total = jnp.sum(sums, axis=-1)

    def from_all():
        target = uniform.astype(total.dtype) * total
        return _inverse_cdf(target, sums, lambda b: weigh(_take_block(blocks, b)))

    def from_top_p():
        weights = weigh(blocks).reshape(rows, -1)
        kept = jnp.where(top_p_set(weights, top_p), weights, 0.0).reshape(blocks.shape)
        held = jnp.sum(kept, axis=-1)
        target = uniform.astype(total.dtype) * jnp.sum(held, axis=-1)
        return _inverse_cdf(target, held, lambda b: _take_block(kept, b))

    with jax.named_scope("draw"):
        drawn = jax.lax.cond(jnp.any((top_p < 1.0) & ~greedy), from_top_p, from_all)
    with jax.named_scope("greedy"):
        best = jax.lax.cond(
            jnp.any(greedy), lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32), lambda: drawn
        )
    token = jnp.where(greedy, best, drawn)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token, (chosen - top) / scale - jnp.log(total)


def _blocks(x: Float[Array, "S V"], fill: float) -> Float[Array, "S b n"]:
    """The vocabulary in blocks of CDF_BLOCK, the last one filled up."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % CDF_BLOCK)), constant_values=fill)
    return x.reshape(x.shape[0], -1, CDF_BLOCK)


def _take_block(blocks: Float[Array, "S b n"], index: Int[Array, " S"]) -> Float[Array, "S 1 n"]:
    return jnp.take_along_axis(blocks, index[:, None, None], axis=1)


def _inverse_cdf(
    target: Float[Array, " S"],
    sums: Float[Array, "S b"],
    masses_of: Callable[[Int[Array, " S"]], Float[Array, "S 1 n"]],
) -> Int[Array, " S"]:
    """The first id whose running mass exceeds the target: first a block, by the blocks' sums, then
    an id within it."""
    block, before = _first_above(sums, target)
    token, _ = _first_above(masses_of(block)[:, 0, :], target - before)
    return block * CDF_BLOCK + token


def _first_above(
    masses: Float[Array, "S n"], target: Float[Array, " S"]
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """First index whose running sum exceeds the target, and the sum before it.

    Never an index of mass 0; where rounding leaves no sum above the target, the last with mass.
    """
    running = _running_sums(masses)
    has_mass = masses > 0.0
    above = (running > target[:, None]) & has_mass
    last = masses.shape[-1] - 1 - jnp.argmax(has_mass[:, ::-1], axis=-1)
    index = jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last).astype(jnp.int32)
    before = jnp.take_along_axis(running, jnp.maximum(index - 1, 0)[:, None], axis=-1)[:, 0]
    return index, jnp.where(index > 0, before, 0.0)


def _running_sums(x: Float[Array, "S n"]) -> Float[Array, "S n"]:
    """cumsum as a product with a triangle: a scan would take seconds to compile."""
    count = x.shape[-1]
    triangle = jnp.triu(jnp.ones((count, count), x.dtype))
    return jnp.einsum("sn,nm->sm", x, triangle, precision=jax.lax.Precision.HIGHEST)


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
    needed = jnp.maximum(jnp.ceil(missing / jnp.where(least > 0.0, least, 1.0)[:, 0]), 1.0)
    ties = _blocks(equal.astype(weights.dtype), 0.0)
    last_kept = _inverse_cdf(needed - 0.5, jnp.sum(ties, axis=-1), lambda b: _take_block(ties, b))
    ids = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None, :]
    kept = larger | (equal & (ids <= last_kept[:, None]))
    return kept | (top_p >= 1.0)[:, None]
