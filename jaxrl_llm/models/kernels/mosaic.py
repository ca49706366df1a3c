# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding over pages on a TPU: one Pallas (Mosaic) kernel over the cache as it lies.

The grid goes over sequences. Blocks of pages are copied to fast memory while the block before is
computed, also from one sequence to the next. Within a block the keys of all heads are one matrix
[tokens · K, hd], as they lie in a page: every query meets the keys of every head, and those of
other heads are masked. The MXU has to load each key once either way, and nothing is reshuffled.
JAX's own kernels keep pages head by head, or keys and values as one array: they don't fit.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_TOKENS = 256  # of a block, while its buffers stay below
_BUFFERS = 4 * 2**20  # bytes


def mosaic_attention(
    q: Float[Array, "S H hd"],
    k_pages: Float[Array, "P page K hd"],
    v_pages: Float[Array, "P page K hd"],
    tables: Int[Array, "S M"],
    positions: Int[Array, " S"],
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    interpret: bool = False,
) -> Float[Array, "S H hd"]:
    """`paged_attention` of one query per sequence."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows, heads, hd = q.shape
    count, page, kv_heads, _ = k_pages.shape
    per_block = _pages_of_block(page, kv_heads, hd, k_pages.dtype.itemsize, tables.shape[1])
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % per_block)))[:, None, :]
    flat = (count, page * kv_heads, hd)

    def table(ahead: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, 1, tables.shape[2]),
            lambda s, *_: (jnp.minimum(s + ahead, rows - 1), 0, 0),
            memory_space=pltpu.SMEM,
        )

    of_row = pl.BlockSpec((None, heads, hd), lambda s, *_: (s, 0, 0))
    buffer = pltpu.VMEM((2, per_block, page * kv_heads, hd), k_pages.dtype)
    kernel = functools.partial(
        _kernel,
        page=page,
        kv_heads=kv_heads,
        per_block=per_block,
        window=window,
        softcap=softcap,
        scale=hd**-0.5 if scale is None else scale,
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows,),
            in_specs=[table(0), table(1), of_row, anywhere, anywhere],
            out_specs=of_row,
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_decode",
    )(positions, tables, tables, q, k_pages.reshape(flat), v_pages.reshape(flat))


def _pages_of_block(page: int, kv_heads: int, hd: int, itemsize: int, width: int) -> int:
    held = 4 * page * kv_heads * hd * itemsize  # keys and values, each twice
    return max(1, min(_TOKENS // page, _BUFFERS // held, width))


def _kernel(
    last_ref,  # [S]
    table_ref,  # [1, M]
    next_table_ref,  # [1, M], of the next sequence
    q_ref,  # [H, hd]
    k_ref,  # [P, page · K, hd]
    v_ref,
    out_ref,  # [H, hd]
    k_buffer,  # [2, pages, page · K, hd]
    v_buffer,
    arrived,  # [2, keys or values]
    slot_ref,  # [1]: the half of the buffers that the next block to compute is copied to
    *,
    page: int,
    kv_heads: int,
    per_block: int,
    window: int | None,
    softcap: float | None,
    scale: float,
):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    row, rows = pl.program_id(0), pl.num_programs(0)
    heads, hd = q_ref.shape
    span, keys = per_block * page, per_block * page * kv_heads
    last = last_ref[row]

    def first_block(at):
        return 0 if window is None else jnp.maximum(at - (window - 1), 0) // span

    def copies(table, block, slot):
        for i in range(per_block):
            source = table[0, block * per_block + i]
            for kind, (pages, buffer) in enumerate(((k_ref, k_buffer), (v_ref, v_buffer))):
                yield pltpu.make_async_copy(
                    pages.at[source], buffer.at[slot, i], arrived.at[slot, kind]
                )

    def start(table, block, slot):
        for copy in copies(table, block, slot):
            copy.start()

    @pl.when(row == 0)
    def _():
        slot_ref[0] = 0
        start(table_ref, first_block(last), 0)

    end = last // span + 1
    q = q_ref[...]
    exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = functools.partial(
        jax.lax.dot_general, precision=exact, preferred_element_type=jnp.float32
    )
    column = jax.lax.broadcasted_iota(jnp.int32, (heads, keys), 1)
    head = jax.lax.broadcasted_iota(jnp.int32, (heads, keys), 0) // (heads // kv_heads)
    token, mine = column // kv_heads, column % kv_heads == head
    lowest = jnp.float32(jnp.finfo(jnp.float32).min)

    def one_block(block, carry):
        top, total, out = carry
        slot = slot_ref[0]
        more = block + 1 < end

        @pl.when(more)
        def _():
            start(table_ref, block + 1, 1 - slot)

        @pl.when(jnp.logical_not(more) & (row + 1 < rows))
        def _():
            start(next_table_ref, first_block(last_ref[row + 1]), 1 - slot)

        for copy in copies(table_ref, block, slot):
            copy.wait()
        slot_ref[0] = 1 - slot
        scores = dot(q, k_buffer[slot].reshape(keys, hd), (((1,), (1,)), ((), ()))) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        at = block * span + token
        allowed = mine & (at <= last)
        if window is not None:
            allowed &= at > last - window
        scores = jnp.where(allowed, scores, lowest)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(allowed, jnp.exp(scores - new_top), 0.0)
        keep = jnp.exp(top - new_top)
        values = v_buffer[slot].reshape(keys, hd)
        part = dot(weights.astype(values.dtype), values, (((1,), (0,)), ((), ())))
        total = total * keep + jnp.sum(weights, axis=1, keepdims=True)
        return new_top, total, out * keep + part

    begin = (
        jnp.full((heads, 1), lowest, jnp.float32),
        jnp.zeros((heads, 1), jnp.float32),
        jnp.zeros((heads, hd), jnp.float32),
    )
    _, total, out = jax.lax.fori_loop(first_block(last), end, one_block, begin)
    out_ref[...] = (out / total).astype(out_ref.dtype)
