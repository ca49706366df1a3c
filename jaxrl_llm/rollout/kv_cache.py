# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The key/value cache as pages: per layer two arrays [P, page, K, hd], with no axis of slots.

A sequence's *block table* lists its pages: position t lies at [table[t // page], t % page]. Page 0
is the null page: writes that nobody wants go there, and nobody reads it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.rollout.page_pool import NULL_PAGE
from jaxrl_llm.rollout.scheduler import PageNeed

LayerPages = tuple[Float[Array, "P page K hd"], Float[Array, "P page K hd"]]
KVPages = tuple[LayerPages, ...]


def init_pages(
    config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype = jnp.float32
) -> KVPages:
    """Zeroed pages: (k, v) for every layer, each a buffer of its own."""
    shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
    return tuple(
        (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)
    )


def default_num_pages(
    *, slots: int, page_size: int, max_prompt_tokens: int, max_new_tokens: int, group_size: int
) -> int:
    """Pages of the default pool: enough that groups of `group_size` samples fill every slot.

    For a prompt of T tokens, ``shared(T) = T // page`` pages serve a whole group and each sample
    owns ``own(T) = ceil((T % page + max_new − 1) / page)``. Filling the slots with them takes

        need(T) = 1 + 1 + slots · own(T) + groups · shared(T)

    pages: the null page, one template for the group that is being admitted, and room for `groups`
    distinct prompts at a time: slots/group_size and half as many again for groups of which only
    stragglers run, but, if group_size > 1, fewer than there are slots.

    The pool is the largest need of any prompt that shares a page. Prompts too short to share one
    may need more; for them it grows to just below slots · (pages of the longest request).
    With group_size 1, or if no prompt fills a page, nothing is shared and it is the largest need.
    """
    whole = -(-slots // group_size)
    groups = min(whole + -(-slots // (2 * group_size)), slots)
    if group_size > 1 and groups == slots:
        groups = max(whole, slots - 1)

    def largest_need(first: int) -> int:
        # own(T) repeats with the page size and shared(T) grows: the last page's worth decides.
        first = max(first, max_prompt_tokens - page_size + 1)
        needs = (
            PageNeed.of(t, max_new_tokens, page_size) for t in range(first, max_prompt_tokens + 1)
        )
        return 2 + max(slots * need.own + groups * need.shared for need in needs)

    if group_size == 1 or max_prompt_tokens < page_size:
        return largest_need(1)
    longest = PageNeed.of(max_prompt_tokens, max_new_tokens, page_size)
    unshared = slots * (longest.shared + longest.own)
    return max(largest_need(page_size), min(largest_need(1), unshared - 1))


def page_slots(
    tables: Int[Array, "S M"],
    positions: Int[Array, "S T"],
    wanted: Bool[Array, "S T"],
    page_size: int,
) -> tuple[Int[Array, "S T"], Int[Array, "S T"]]:
    """Page and offset of each position; those that are not wanted go to the null page."""
    index = jnp.clip(positions // page_size, 0, tables.shape[1] - 1)
    pages = jnp.take_along_axis(tables, index, axis=1)
    return jnp.where(wanted, pages, NULL_PAGE), positions % page_size


def write_tokens(
    pages: Float[Array, "P page K hd"],
    values: Float[Array, "S T K hd"],
    page: Int[Array, "S T"],
    offset: Int[Array, "S T"],
) -> Float[Array, "P page K hd"]:
    """Keys or values of new tokens, written to their places."""
    return pages.at[page, offset].set(values.astype(pages.dtype))


@functools.partial(jax.jit, donate_argnums=0)
def copy_pages(pages: KVPages, source: Int[Array, " C"], target: Int[Array, " C"]) -> KVPages:
    """Copy whole pages, in every layer; pad with copies of the null page onto itself."""
    return jax.tree.map(lambda x: x.at[target].set(x[source]), pages)
