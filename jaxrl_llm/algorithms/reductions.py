# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""From per-token terms to one number, as (sum, count), so that no split changes the loss.

A sequence is a run of equal, positive `segment_ids` in a row (packed rows hold several); without
segment ids every row is one sequence. It counts if at least one of its tokens is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

Reduction = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
REDUCTIONS: tuple[str, ...] = ("token_mean", "sequence_mean", "sequence_sum", "constant")
_BLOCK = 256


@struct.dataclass
class Counts:
    """What the sums of a loss are divided by, over the whole optimiser batch (all devices).

    Source: token counts of DAPO, https://arxiv.org/abs/2503.14476, Eq. 8.

    Attributes:
        tokens: how many tokens are trained on.
        sequences: how many sequences have a token that is trained on.
    """

    tokens: Int[Array, ""]
    sequences: Int[Array, ""]


def widened(values: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """`values` in at least float32: promoted where narrower, never demoted.

    Source: mixed-precision training, https://arxiv.org/abs/1710.03740.
    """
    return values if values.dtype == jnp.float64 else values.astype(jnp.float32)


def on_mask(values: Float[Array, "N T"], mask: Bool[Array, "N T"]) -> Float[Array, "N T"]:
    """`values` where trained on and 0 elsewhere, in at least float32.

    What stands on masked positions, NaN included, reaches neither values nor gradients of anything
    computed from the result.

    Source: the double-where rule, https://docs.jax.dev/en/latest/faq.html.
    """
    values = widened(values)
    return jnp.where(mask, values, jnp.zeros_like(values))


def sequence_total(
    values: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    segment_ids: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
    """At every position, the sum of the masked values of the sequence that it belongs to.

    All pairs of positions in a row are compared, a block at a time. Unlike a scatter this adds in
    one fixed order: results and gradients repeat bit for bit, and are equal at all positions of a
    sequence.

    Source: |o_i| and Σ_t of GRPO, https://arxiv.org/abs/2402.03300, Eq. 3.
    """
    values = on_mask(values, mask)
    if segment_ids is None:
        return jnp.broadcast_to(jnp.sum(values, axis=1, keepdims=True), values.shape)
    return _segment_sum(values, segment_ids)


def sequence_length(
    mask: Bool[Array, "N T"],
    segment_ids: Int[Array, "N T"] | None = None,
    dtype: jnp.dtype = jnp.float32,
) -> Float[Array, "N T"]:
    """At every position, how many tokens of its sequence are trained on; 1 where there are none.

    Source: |o_i| of GRPO, https://arxiv.org/abs/2402.03300, Eq. 3.
    """
    length = sequence_total(mask.astype(dtype), mask, segment_ids)
    return jnp.maximum(length, jnp.ones((), length.dtype))


def sequence_mean(
    values: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    segment_ids: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
    """At every position, the mean of the masked values of its sequence; 0 if none is trained on.

    Source: the length-normalised log-ratio of GSPO, https://arxiv.org/abs/2507.18071.
    """
    total = sequence_total(values, mask, segment_ids)
    return total / sequence_length(mask, segment_ids, total.dtype)


def sequence_maximum(
    values: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    segment_ids: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
    """At every position, the largest masked value of its sequence, for values ≥ 0; 0 if none.

    Carries no gradient.

    Source: the sequence maximum of https://richardli.xyz/rl-collapse.
    """
    values = on_mask(values, mask)
    if segment_ids is None:
        return jnp.broadcast_to(jnp.max(values, axis=1, keepdims=True), values.shape)
    return jax.lax.stop_gradient(_over_segments(jnp.max, values, segment_ids))


def sequence_marks(
    mask: Bool[Array, "N T"], segment_ids: Int[Array, "N T"] | None = None
) -> Bool[Array, "N T"]:
    """True at the last position of every sequence that has a trained token.

    A sum over these positions is a sum over sequences.

    Source: the counting of sequences in GRPO, https://arxiv.org/abs/2402.03300, Eq. 3.
    """
    trained = sequence_total(mask.astype(jnp.float32), mask, segment_ids) > 0
    outer = jnp.ones((mask.shape[0], 1), bool)
    if segment_ids is None:
        return trained & jnp.concatenate([jnp.zeros_like(mask[:, 1:]), outer], axis=1)
    ends = jnp.concatenate([segment_ids[:, 1:] != segment_ids[:, :-1], outer], axis=1)
    return trained & ends


def batch_counts(mask: Bool[Array, "N T"], segment_ids: Int[Array, "N T"] | None = None) -> Counts:
    """Trained tokens and sequences in these rows; counts of several micro-batches add up.

    Source: token counts of DAPO, https://arxiv.org/abs/2503.14476, Eq. 8.
    """
    marks = sequence_marks(mask, segment_ids)
    return Counts(tokens=jnp.sum(mask, dtype=jnp.int32), sequences=jnp.sum(marks, dtype=jnp.int32))


def add_counts(counts: Sequence[Counts]) -> Counts:
    """The counts of the whole optimiser batch from those of its micro-batches.

    Source: token counts of DAPO, https://arxiv.org/abs/2503.14476, Eq. 8.
    """
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *counts)


def reduction_sum(
    values: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    reduction: Reduction,
    segment_ids: Int[Array, "N T"] | None = None,
) -> Float[Array, ""]:
    """The numerator: ``Σ x`` over trained tokens, or ``Σ_sequences mean_tokens x``.

    The latter for ``sequence_mean``.

    Source: GRPO, https://arxiv.org/abs/2402.03300, Eq. 3 (``sequence_mean``); DAPO,
    https://arxiv.org/abs/2503.14476, Eq. 8 (``token_mean``); Dr. GRPO,
    https://arxiv.org/abs/2503.20783 (``constant``, ``sequence_sum``).
    """
    values = on_mask(values, mask)
    if reduction == "sequence_mean":
        values = values / sequence_length(mask, segment_ids, values.dtype)
    return jnp.sum(values)


def reduction_count(
    counts: Counts,
    *,
    reduction: Reduction,
    constant: float | None = None,
    dtype: jnp.dtype = jnp.float32,
) -> Float[Array, ""]:
    """The denominator that belongs to `reduction`, from counts over the whole optimiser batch.

    ==================================  ==========================================
    ``token_mean``                      trained tokens
    ``sequence_mean``, `sequence_sum`   sequences with a trained token
    ``constant``                        `constant` × sequences with a trained token
    ==================================  ==========================================

    An empty batch counts as 1.

    Source: as for `reduction_sum`; Dr. GRPO divides by a constant, so that a token weighs the same
    in an answer of any length, https://arxiv.org/abs/2503.20783.
    """
    assert reduction in REDUCTIONS, reduction
    count = counts.tokens if reduction == "token_mean" else counts.sequences
    count = jnp.maximum(count, 1).astype(dtype)
    if reduction == "constant":
        assert constant is not None, "the constant reduction needs its constant"
        count = count * constant
    return count


def reduce_terms(
    values: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    reduction: Reduction,
    constant: float | None = None,
    segment_ids: Int[Array, "N T"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum, count) of per-token terms over these rows; the reduced value is sum / count.

    Source: as for `reduction_sum` (https://arxiv.org/abs/2402.03300,
    https://arxiv.org/abs/2503.14476, https://arxiv.org/abs/2503.20783).
    """
    total = reduction_sum(values, mask, reduction=reduction, segment_ids=segment_ids)
    counts = batch_counts(mask, segment_ids)
    count = reduction_count(counts, reduction=reduction, constant=constant, dtype=total.dtype)
    return total, count


def _over_segments(reduce, values, segment_ids):
    """`reduce` over the values that share a row and a segment with each position."""
    rows, columns = values.shape

    def block(segments):
        same = segments[:, :, None] == segment_ids[:, None, :]
        return reduce(jnp.where(same, values[:, None, :], jnp.zeros((), values.dtype)), axis=2)

    if columns <= 2 * _BLOCK:
        return block(segment_ids)
    filled = jnp.pad(segment_ids, ((0, 0), (0, -columns % _BLOCK)))
    blocks = filled.reshape(rows, -1, _BLOCK).swapaxes(0, 1)
    return jax.lax.map(block, blocks).swapaxes(0, 1).reshape(rows, -1)[:, :columns]


@jax.custom_vjp
def _segment_sum(values, segment_ids):
    return _over_segments(jnp.sum, values, segment_ids)


def _segment_sum_forward(values, segment_ids):
    return _segment_sum(values, segment_ids), segment_ids


def _segment_sum_backward(segment_ids, cotangent):
    # "Shares a segment with" is symmetric: the sum is its own transpose.
    return _segment_sum(cotangent, segment_ids), None


_segment_sum.defvjp(_segment_sum_forward, _segment_sum_backward)
