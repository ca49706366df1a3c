# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A dense view of the running rows' pages, for decoding on a CPU.

Reading pages through a block table on a CPU means copying them, at every step. The view is that
copy, made once when a sample starts to run and kept from call to call: per layer keys
[S, K, hd, W] and values [S, K, W, hd], the layouts whose products are fastest there. It has room
for the longest of the running rows and not for the longest that could be, and it is a write-back
cache: tokens that are drawn are written to the view, and to the pages only when the rows move.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.rollout.kv_cache import KVPages

LayerView = tuple[Float[Array, "S K hd W"], Float[Array, "S K W hd"]]
KVView = tuple[LayerView, ...]

ROWS_AT_A_TIME = 8  # that are loaded or stored
MIN_WIDTH = 128


def view_width(needed: int, most: int) -> int:
    """Tokens that a view holds for rows of `needed` tokens: 128, 256, 512 … so that there are few
    programs; `most`: never more than this, rounded up to whole blocks of 64."""
    width = MIN_WIDTH
    while width < needed:
        width *= 2
    return min(width, -(-most // 64) * 64)


def init_view(config: ModelConfig, rows: int, width: int, dtype: jnp.dtype) -> KVView:
    """Zeroed views of every layer."""
    heads, hd = config.num_kv_heads, config.head_dim
    return tuple(
        (jnp.zeros((rows, heads, hd, width), dtype), jnp.zeros((rows, heads, width, hd), dtype))
        for _ in range(config.num_layers)
    )


@functools.partial(jax.jit, donate_argnames="view")
def load_rows(
    view: KVView, pages: KVPages, tables: Int[Array, "R M"], rows: Int[Array, " R"]
) -> KVView:
    """Copy pages into rows of the view; a row number beyond the view's is left out."""
    width = view[0][0].shape[3]

    def dense(x: Float[Array, "P page K hd"]) -> Float[Array, "R W K hd"]:
        read = x[tables]
        read = read.reshape(read.shape[0], -1, *read.shape[3:])[:, :width]
        missing = width - read.shape[1]
        return jnp.pad(read, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else read

    def layer(view, pages):
        k, v = view
        return (
            k.at[rows].set(dense(pages[0]).transpose(0, 2, 3, 1), mode="drop"),
            v.at[rows].set(dense(pages[1]).transpose(0, 2, 1, 3), mode="drop"),
        )

    return tuple(layer(*both) for both in zip(view, pages, strict=True))


@functools.partial(jax.jit, donate_argnames="pages")
def store_rows(
    pages: KVPages, view: KVView, tables: Int[Array, "R M"], rows: Int[Array, " R"]
) -> KVPages:
    """Copy rows of the view back into pages; the null page stands for those to leave alone."""

    def paged(
        dense: Float[Array, "R W K hd"], x: Float[Array, "P page K hd"]
    ) -> Float[Array, "P page K hd"]:
        count, page = tables.shape[1], x.shape[1]
        dense = dense[:, : count * page]
        missing = count * page - dense.shape[1]
        dense = jnp.pad(dense, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else dense
        return x.at[tables].set(dense.reshape(tables.shape[0], count, page, *dense.shape[2:]))

    def layer(pages, view):
        k, v = view[0][rows], view[1][rows]
        return (
            paged(k.transpose(0, 3, 1, 2), pages[0]),
            paged(v.transpose(0, 2, 1, 3), pages[1]),
        )

    return tuple(layer(*both) for both in zip(pages, view, strict=True))


def write_view(
    view: LayerView,
    k: Float[Array, "S K hd"],
    v: Float[Array, "S K hd"],
    positions: Int[Array, " S"],
    wanted: Bool[Array, " S"],
) -> LayerView:
    """Keys and values of one new token for every row that wants it."""
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)
    at = jnp.where(wanted, positions, view[0].shape[3])
    return (
        view[0].at[rows, :, :, at].set(k.astype(view[0].dtype), mode="drop"),
        view[1].at[rows, :, at].set(v.astype(view[1].dtype), mode="drop"),
    )
