# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention over rows, called alike and on every device's own rows and heads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.kernels.cudnn import cudnn_attention
from jaxrl_llm.models.kernels.shards import on_shards
from jaxrl_llm.models.kernels.splash import splash_attention
from jaxrl_llm.models.kernels.triton import triton_rows

RowKernel = Callable[..., Array]
_HEADS = (
    ("rows", None, "heads", None),
    ("rows", None, "kv_heads", None),
    ("rows", None, "kv_heads", None),
)


def splash(
    q: Float[Array, "N T H hd"],
    k: Float[Array, "N T K hd"],
    v: Float[Array, "N T K hd"],
    allowed: Bool[Array, "N T T"],
    segment_ids: Int[Array, "N T"],
    *,
    window: int | None,
    windowed: Bool[Array, ""] | bool,
    scale: float | None,
    softcap: float | None,
) -> Float[Array, "N T H hd"]:
    """Masks are fixed when the kernel is made: layers that differ are branches."""
    axes = (*_HEADS, ("rows", None))

    def branch(window: int | None) -> Callable[..., Array]:
        attend = functools.partial(splash_attention, window=window, scale=scale, softcap=softcap)
        return on_shards(attend, axes, _HEADS[0])

    if isinstance(windowed, bool):
        return branch(window if windowed else None)(q, k, v, segment_ids)
    return jax.lax.cond(windowed, branch(window), branch(None), q, k, v, segment_ids)


def cudnn(q, k, v, allowed, segment_ids, *, window, windowed, scale, softcap):
    """Everything that decides who sees whom is in `allowed`."""
    attend = functools.partial(cudnn_attention, scale=scale)
    return on_shards(attend, (*_HEADS, ("rows", None, None)), _HEADS[0])(q, k, v, allowed)


def triton(q, k, v, allowed, segment_ids, *, window, windowed, scale, softcap):
    """Packed rows without windows (`choice.py`)."""
    attend = functools.partial(triton_rows, scale=scale)
    return on_shards(attend, (*_HEADS, ("rows", None)), _HEADS[0])(q, k, v, segment_ids)


ROW_KERNELS: dict[str, RowKernel] = {"splash": splash, "cudnn": cudnn, "triton": triton}
