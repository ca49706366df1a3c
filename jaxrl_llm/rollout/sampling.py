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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from jaxrl_llm.errors import RequestError

MAX_STOP_IDS = 8
MAX_BIASES = 64
MAX_TOP_LOGPS = 20
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
        top_k: draw from the k likeliest tokens, ties by the lower id; 0 is off.
        min_p: draw from tokens at least min_p times as likely as the likeliest; 0 is off.
        min_tokens: no stop id is drawn, and no stop string ends it, before so many tokens.
        stop_strings: a completion ends with the token that completes one of these; the engine
            needs a `decode` function for it.
        logit_bias: (token, what is added to its logit), −inf bans it; at most 64.
        top_logprobs: also tell the log-probabilities of so many likeliest tokens (at most 20) for
            every token that is drawn; costs a partial sort of the vocabulary.
        prompt_logprobs: also tell the log-probabilities of the prompt's tokens.

    What is drawn from: the logits plus `logit_bias`, divided by τ; of those tokens the ones that
    top_k *and* min_p keep, and of these the top-p set. Every log-probability that is told is that
    of softmax(logits/τ) over all tokens, without biases (at τ = 0: of softmax(logits)).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    @property
    def edits(self) -> bool:
        """Whether some logits are changed before the draw."""
        return bool(self.logit_bias) or self.min_tokens > 0

    def check(self) -> None:
        """Raises RequestError for a value that can't be sampled with."""
        for name, least, most in (
            ("max_tokens", 1, 2**31 - 1),
            ("seed", 0, 2**32 - 1),
            ("top_k", 0, 2**63 - 1),
            ("min_tokens", 0, self.max_tokens),
            ("top_logprobs", 0, MAX_TOP_LOGPS),
        ):
            if not is_integer(value := getattr(self, name), least, most):
                expected = f"an integer in {least} … {most}"
                raise RequestError(f"bad {name}", got=repr(value), expected=expected)
        for name, right, expected in (
            ("temperature", lambda x: x == 0 or 0 < np.float32(x) < np.inf, "0, or a float32 > 0"),
            ("top_p", lambda x: np.float32(x) > 0 and x <= 1, "in (0, 1]"),
            ("min_p", lambda x: 0 <= x <= 1, "in [0, 1]"),
        ):
            value = getattr(self, name)
            with np.errstate(over="ignore", under="ignore"):
                fits = _is_number(value) and right(value)
            if not fits:
                raise RequestError(f"bad {name}", got=repr(value), expected=expected)
        if not (
            isinstance(self.stop_ids, tuple | list)
            and len(self.stop_ids) <= MAX_STOP_IDS
            and all(is_integer(token, 0, 2**31 - 1) for token in self.stop_ids)
        ):
            raise RequestError(
                "bad stop_ids", got=self.stop_ids, expected=f"at most {MAX_STOP_IDS} token ids ≥ 0"
            )
        if not isinstance(self.stop_strings, tuple | list) or not all(
            isinstance(text, str) and text for text in self.stop_strings
        ):
            raise RequestError(
                "bad stop_strings", got=repr(self.stop_strings), expected="strings, none empty"
            )
        self._check_biases()

    def _check_biases(self) -> None:
        biases = self.logit_bias
        pairs = isinstance(biases, tuple | list) and all(
            isinstance(pair, tuple | list)
            and len(pair) == 2
            and is_integer(pair[0], 0, 2**31 - 1)
            and _is_number(pair[1])
            for pair in biases
        )
        with np.errstate(over="ignore"):
            if (
                not pairs
                or len(biases) > MAX_BIASES
                or any(not np.float32(value) < np.inf for _, value in biases)
            ):
                raise RequestError(
                    "bad logit_bias",
                    got=f"{biases!r:.100}",
                    expected=f"at most {MAX_BIASES} pairs of a token and a float32 below +∞",
                )
        if len({token for token, _ in biases}) < len(biases):
            raise RequestError("logit_bias names a token twice")


def is_integer(value: object, least: int, most: int) -> bool:
    """Whether it is one, of Python or NumPy, within bounds; True and False are none."""
    return (
        isinstance(value, int | np.integer)
        and not isinstance(value, bool)
        and least <= value <= most
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


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


@struct.dataclass
class Filters:
    """How each row draws.

    Attributes:
        temperature, top_p, top_k, min_p: as in `SamplingParams`.
    """

    temperature: Any  # float32 [S]
    top_p: Any  # float32 [S]
    top_k: Any  # int32 [S]
    min_p: Any  # float32 [S]


def edit_logits(
    logits: Float[Array, "S V"],
    bias_ids: Int[Array, "S B"],
    biases: Float[Array, "S B"],
    banned: Int[Array, "S E"],
) -> Float[Array, "S V"]:
    """Logits with biases added to some of each row, and others set to −∞; ids below 0 are none."""
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    outside = jnp.int32(logits.shape[1])
    at = jnp.where(bias_ids < 0, outside, bias_ids)
    logits = logits.at[rows, at].add(biases.astype(logits.dtype), mode="drop")
    at = jnp.where(banned < 0, outside, banned)
    return logits.at[rows, at].set(-jnp.inf, mode="drop")


def sample_tokens(
    logits: Float[Array, "S V"],
    uniform: Float[Array, " S"],
    filters: Filters,
    edited: Float[Array, "S V"] | None = None,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """A token of each row, and its log-probability over the full vocabulary.

    ``token = min{v : Σ_{w ≤ v} p_w > u · Σ p}`` with ``p = softmax(logits/τ)`` restricted to the
    kept set, and ``logp = log softmax(logits/τ)[token]`` *not* restricted. Rows with τ = 0 take
    the first largest logit and its log-probability under softmax(logits).

    The uniform number has 24 random bits, so probabilities are honoured to about 1e-7.

    Args:
        edited: logits to draw from, where they are not those of the log-probability.
    """
    greedy = filters.temperature == 0.0
    scale = _scale(filters.temperature, logits.dtype)
    source = logits if edited is None else edited
    top, sums, weigh = _weights(source, scale)
    blocks = _blocks(source, -jnp.inf)
    total = jnp.sum(sums, axis=-1)

    def from_all():
        target = uniform.astype(total.dtype) * total
        return _inverse_cdf(target, sums, lambda b: weigh(_take_block(blocks, b)))

    def from_kept():
        weights = weigh(blocks).reshape(logits.shape[0], -1)
        kept = jnp.where(kept_set(weights, filters), weights, 0.0).reshape(blocks.shape)
        held = jnp.sum(kept, axis=-1)
        target = uniform.astype(total.dtype) * jnp.sum(held, axis=-1)
        return _inverse_cdf(target, held, lambda b: _take_block(kept, b))

    filtered = (filters.top_p < 1.0) | (filters.top_k > 0) | (filters.min_p > 0.0)
    with jax.named_scope("draw"):
        drawn = jax.lax.cond(jnp.any(filtered & ~greedy), from_kept, from_all)
    with jax.named_scope("greedy"):
        best = jax.lax.cond(
            jnp.any(greedy), lambda: jnp.argmax(source, axis=-1).astype(jnp.int32), lambda: drawn
        )
    token = jnp.where(greedy, best, drawn)
    if edited is not None:
        top, sums, _ = _weights(logits, scale)
        total = jnp.sum(sums, axis=-1)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token, (chosen - top) / scale - jnp.log(total)


def token_logps(
    logits: Float[Array, "S V"], tokens: Int[Array, " S"], temperature: Float[Array, " S"]
) -> Float[Array, " S"]:
    """Log-probability of a token of each row under softmax(logits/τ); τ = 0 counts as 1."""
    scale = _scale(temperature, logits.dtype)
    top, sums, _ = _weights(logits, scale)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return (chosen - top) / scale - jnp.log(jnp.sum(sums, axis=-1))


def top_logps(
    logits: Float[Array, "S V"], temperature: Float[Array, " S"]
) -> tuple[Int[Array, "S k"], Float[Array, "S k"]]:
    """The MAX_TOP_LOGPS likeliest tokens of each row, ties by the lower id, and their
    log-probabilities under softmax(logits/τ); τ = 0 counts as 1."""
    scale = _scale(temperature, logits.dtype)
    top, sums, _ = _weights(logits, scale)
    best, ids = jax.lax.top_k(logits, min(MAX_TOP_LOGPS, logits.shape[-1]))
    logps = (best - top[:, None]) / scale[:, None] - jnp.log(jnp.sum(sums, axis=-1))[:, None]
    return ids.astype(jnp.int32), logps


def _scale(temperature: Float[Array, " S"], dtype: jnp.dtype) -> Float[Array, " S"]:
    return jnp.where(temperature == 0.0, 1.0, temperature).astype(dtype)


def _weights(logits, scale) -> tuple[Array, Array, Callable[[Array], Array]]:
    """The largest logit of each row, sums by blocks of exp((logits − largest)/τ), and the function
    from blocks of logits to those."""
    top = jnp.max(logits, axis=-1)

    def weigh(part: Float[Array, "S b n"]) -> Float[Array, "S b n"]:
        return jnp.exp((part - top[:, None, None]) / scale[:, None, None])

    return top, jnp.sum(weigh(_blocks(logits, -jnp.inf)), axis=-1), weigh


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


def kept_set(weights: Float[Array, "S V"], filters: Filters) -> Bool[Array, "S V"]:
    """What top-k, min-p and then top-p leave of unnormalised weights whose largest is 1."""
    kept = top_k_set(weights, filters.top_k)
    kept &= weights >= filters.min_p.astype(weights.dtype)[:, None]
    return kept & top_p_set(jnp.where(kept, weights, 0.0), filters.top_p)


def top_p_set(weights: Float[Array, "S V"], top_p: Float[Array, " S"]) -> Bool[Array, "S V"]:
    """The smallest set of tokens whose weights reach the share top_p of each row's sum.

    Nucleus sampling (https://arxiv.org/abs/1904.09751). `weights` are unnormalised and at most 1;
    of several tokens with the least weight of the set, those with the lowest ids are kept. Rows
    with top_p = 1 keep everything.
    """
    goal = top_p.astype(weights.dtype) * jnp.sum(weights, axis=-1)
    kept = _least_set(weights, goal, lambda chosen: jnp.where(chosen, weights, 0.0))
    return kept | (top_p >= 1.0)[:, None]


def top_k_set(weights: Float[Array, "S V"], top_k: Int[Array, " S"]) -> Bool[Array, "S V"]:
    """The k tokens of largest weight of each row, ties by the lower id; all of them for k = 0."""
    goal = jnp.minimum(top_k, weights.shape[-1]).astype(weights.dtype)
    kept = _least_set(weights, goal, lambda chosen: chosen.astype(weights.dtype))
    return kept | (top_k == 0)[:, None]


def _least_set(
    weights: Float[Array, "S V"],
    goal: Float[Array, " S"],
    value: Callable[[Bool[Array, "S V"]], Float[Array, "S V"]],
) -> Bool[Array, "S V"]:
    """The smallest set of the likeliest tokens whose summed `value` reaches the goal.

    The weight of its least likely token is found by bisection on its bit pattern (non-negative
    floats sort like their bits), so it is exact, and nothing is sorted.
    """
    bits = jnp.finfo(weights.dtype).bits
    integer = jnp.dtype(f"int{bits}")
    as_float = lambda x: jax.lax.bitcast_convert_type(x, weights.dtype)  # noqa: E731 - short
    ones = jnp.ones(weights.shape[0], weights.dtype)
    low = jnp.zeros(weights.shape[0], integer)
    high = jax.lax.bitcast_convert_type(ones, integer) + 1

    def halve(_, bounds):
        low, high = bounds  # the set {w ≥ low} reaches the goal, {w ≥ high} does not
        middle = low + (high - low) // 2
        held = jnp.sum(value(weights >= as_float(middle)[:, None]), axis=-1)
        reached = held >= goal
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    low, _ = jax.lax.fori_loop(0, bits, halve, (low, high))
    least = as_float(low)[:, None]
    larger, equal = weights > least, weights == least
    missing = goal - jnp.sum(value(larger), axis=-1)
    each = jnp.max(value(equal), axis=-1)
    needed = jnp.maximum(jnp.ceil(missing / jnp.where(each > 0.0, each, 1.0)), 1.0)
    ties = _blocks(equal.astype(weights.dtype), 0.0)
    last_kept = _inverse_cdf(needed - 0.5, jnp.sum(ties, axis=-1), lambda b: _take_block(ties, b))
    ids = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None, :]
    return larger | (equal & (ids <= last_kept[:, None]))
