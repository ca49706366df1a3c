# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over rows of tokens. Over pages of a key/value cache: `paged_attention.py`.

`attend_rows` is what the decoder calls: a kernel where one serves (`kernels/choice.py`), else
`causal_attention`, which every kernel is compared with.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kernels.choice import Case, choose_rows
from jaxrl_llm.models.kernels.rows import ROW_KERNELS
from jaxrl_llm.models.layers import accumulation_dtype, soft_cap
from jaxrl_llm.types import Reach

QUERIES = 64  # of a block, the fastest of 64, 128 and all on a CPU
_MOST_BLOCKS = 16  # each is compiled


def attend_rows(
    q: Float[Array, "N T H hd"],
    k: Float[Array, "N T K hd"],
    v: Float[Array, "N T K hd"],
    allowed: Bool[Array, "N T T"],
    segment_ids: Int[Array, "N T"],
    config: ModelConfig,
    *,
    windowed: Bool[Array, ""] | bool,
    shared: bool,
    reach: Reach | None = None,
    prefixes: Int[Array, "N B"] | None = None,
) -> Float[Array, "N T H hd"]:
    """Attention of one layer over rows by the back end of `config.attention_backend`.

    Args:
        allowed: who sees whom, the layer's window applied.
        segment_ids: each is a run of consecutive positions, if rows are not `shared`.
        windowed: whether this layer has the model's window.
        shared: whether a token may see a second segment (`causal_segments`).
        reach, prefixes: as for `causal_attention`.

    Raises:
        ConfigError: the back end that was named can't serve.
    """
    traits = {"scale": config.attention_scale, "softcap": config.attention_softcap}
    case = Case.here(
        q,
        k,
        window=config.sliding_window is not None,
        softcap=config.attention_softcap is not None,
        shared=shared,
    )
    choice = choose_rows(config.attention_backend, case)
    if choice.name == "xla":
        return causal_attention(q, k, v, allowed, reach=reach, prefixes=prefixes, **traits)
    kernel = ROW_KERNELS[choice.name]
    window = config.sliding_window
    return kernel(q, k, v, allowed, segment_ids, window=window, windowed=windowed, **traits)


def masked_attention(
    q: Float[Array, "N T H hd"],
    k: Float[Array, "N S K hd"],
    v: Float[Array, "N S K hd"],
    allowed: Bool[Array, "N T S"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "N T H hd"]:
    """Grouped-query attention ``softmax(cap(s·q·kᵀ))·v`` over the allowed keys, in ≥ float32.

    H query heads share K key/value heads in runs of H/K. A query that may see nothing returns 0.

    Args:
        scale: s; None: hd^(−1/2).
        softcap: scores are kept within ± it by ``softcap · tanh(score / softcap)``.
    """
    n, t, h, hd = q.shape
    heads = k.shape[2]
    groups = h // heads
    wide = accumulation_dtype(q.dtype)
    scale = hd**-0.5 if scale is None else scale
    # Heads before tokens: on a CPU other products of batches take three times as long.
    q = q.reshape(n, t, heads, groups, hd).transpose(0, 2, 3, 1, 4).reshape(n, heads, -1, hd)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = jnp.einsum("nkqd,nksd->nkqs", q, k, preferred_element_type=wide) * scale
    scores = soft_cap(scores, softcap).reshape(n, heads, groups, t, -1)
    allowed = allowed[:, None, None, :, :]
    scores = jnp.where(allowed, scores, jnp.finfo(wide).min)
    weights = jnp.where(allowed, jax.nn.softmax(scores, axis=-1), 0.0).astype(q.dtype)
    weights = weights.reshape(n, heads, groups * t, -1)
    out = jnp.einsum("nkqs,nksd->nkqd", weights, v, preferred_element_type=wide)
    out = out.reshape(n, heads, groups, t, hd).transpose(0, 3, 1, 2, 4)
    return out.reshape(n, t, h, hd).astype(q.dtype)


def causal_attention(
    q: Float[Array, "N T H hd"],
    k: Float[Array, "N T K hd"],
    v: Float[Array, "N T K hd"],
    allowed: Bool[Array, "N T T"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    reach: Reach | None = None,
    prefixes: Int[Array, "N B"] | None = None,
) -> Float[Array, "N T H hd"]:
    """`masked_attention` for rows in which no token sees one that stands to its right.

    Queries go a block at a time over the keys up to the block's end, and scores are computed again
    in the backward pass: half the work, and no array of T × T is kept. Where `reach` bounds what a
    row holds, a block reads its shared prompt and the keys that its own segments can stand among.

    Args:
        allowed: as from `causal_segments`, where positions rise from left to right within each
            segment, a prefix stands to the left of what follows it, and the sequences of one
            prefix follow it without others between.
        reach: of the rows; None: unknown.
        prefixes: as from `block_prefixes`; needed where `reach` says that prompts are shared.
    """
    part = functools.partial(masked_attention, scale=scale, softcap=softcap)
    length = q.shape[1]
    if length <= QUERIES:
        return part(q, k, v, allowed)

    def of_block(index: int, start: int, end: int, low: int) -> Array:
        # Keys and values are cut inside, so that all blocks keep the same two arrays. Within a scan
        # over layers the two passes are separate programs: nothing to be merged.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def attend(q, k, v, allowed):
            near = k[:, low:end], v[:, low:end], allowed[:, start:end, low:end]
            if low and reach.prefix:
                at = prefixes[:, index]
                far = _prefix_keys(at, reach.prefix, k, v, allowed[:, start:end], low)
                pairs = zip(far, near, (1, 1, 2), strict=True)
                near = tuple(jnp.concatenate((x, y), axis) for x, y, axis in pairs)
            return part(q, *near)

        return attend(q[:, start:end], k, v, allowed)

    blocks = enumerate(_blocks(length, reach))
    return jnp.concatenate([of_block(index, *where) for index, where in blocks], axis=1)


def _prefix_keys(
    at: Int[Array, " N"],
    count: int,
    k: Float[Array, "N T K hd"],
    v: Float[Array, "N T K hd"],
    allowed: Bool[Array, "N q T"],
    low: int,
) -> tuple[Array, Array, Array]:
    """`count` keys of each row from place `at` on, those from `low` on not to be seen."""
    at = jnp.minimum(at, k.shape[1] - count)

    def cut(x: Array, axis: int) -> Array:
        slice_ = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=count, axis=axis - 1)
        return jax.vmap(lambda row, start: slice_(row, start))(x, at)

    seen = (
        cut(allowed, 2) & (at[:, None] + jnp.arange(count, dtype=at.dtype)[None, :] < low)[:, None]
    )
    return cut(k, 1), cut(v, 1), seen


def block_prefixes(
    segment_ids: Int[Array, "N T"], prefix_ids: Int[Array, "N T"]
) -> Int[Array, "N B"]:
    """Where the shared prompt of each block of queries begins: of its first token that has one.

    A second prompt of a block begins within it. Blocks without one: anywhere.
    """
    starts = []
    for start, end, _ in _blocks(segment_ids.shape[1], None):
        ids = prefix_ids[:, start:end]
        first = jnp.argmax(ids > 0, axis=1)
        prompt = jnp.take_along_axis(ids, first[:, None], axis=1)
        starts.append(jnp.argmax(segment_ids == prompt, axis=1))
    return jnp.stack(starts, axis=1)


def _blocks(length: int, reach: Reach | None) -> list[tuple[int, int, int]]:
    """Of each block of queries its start and end, and from which key on it reads."""
    if length <= QUERIES:
        return [(0, length, 0)]
    block = -(-length // (_MOST_BLOCKS * QUERIES)) * QUERIES
    blocks = []
    for start in range(0, length, block):
        low = 0
        if reach is not None:
            low = max(start + 1 - reach.segment, 0) // QUERIES * QUERIES
            low = low if low > reach.prefix else 0
        blocks.append((start, min(start + block, length), low))
    return blocks


def keys_read(length: int | float, reach: Reach | None = None) -> float:
    """How many keys `causal_attention` reads for a query, on average over a row."""
    total = 0
    for start, end, low in _blocks(int(length), reach):
        total += (end - start) * (end - low + (reach.prefix if low else 0))
    return total / int(length)


def queries_at_once(length: int) -> int:
    """How many queries of a row `causal_attention` works on at a time."""
    return _blocks(length, None)[0][1]


def causal_segments(
    positions: Int[Array, "N T"],
    segment_ids: Int[Array, "N T"],
    prefix_ids: Int[Array, "N T"] | None = None,
) -> Bool[Array, "N T T"]:
    """Which tokens see which: same segment, not padding (segment 0), not later in position.

    Args:
        prefix_ids: a second segment that a token sees, earlier positions only, or 0: the prompt
            that several completions of a row share.
    """
    visible = segment_ids[:, :, None] == segment_ids[:, None, :]
    if prefix_ids is not None:
        visible |= prefix_ids[:, :, None] == segment_ids[:, None, :]
    causal = positions[:, :, None] >= positions[:, None, :]
    return visible & causal & (segment_ids > 0)[:, None, :]


def within_window(
    positions: Int[Array, "N T"], window: Int[Array, ""] | int
) -> Bool[Array, "N T T"]:
    """Which tokens are at most ``window − 1`` positions before which (the token itself counts)."""
    return positions[:, :, None] - positions[:, None, :] < window
