# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Pages as arrays, and the size of the default pool."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.rollout.kv_cache import (
    copy_pages,
    default_num_pages,
    init_pages,
    page_slots,
    write_tokens,
)
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.rollout.scheduler import PageNeed, Request, Scheduler
from jaxrl_llm.types import Prompt


def test_pages_have_no_slot_axis(tiny_config):
    pages = init_pages(tiny_config, 7, 4)
    assert len(pages) == 2
    assert {x.shape for layer in pages for x in layer} == {(7, 4, 2, 8)}


def test_writes_land_in_their_pages_and_the_unwanted_in_the_null_page():
    tables = jnp.array([[3, 1], [2, 0]], jnp.int32)
    positions = jnp.array([[3, 4], [1, 2]], jnp.int32)
    wanted = jnp.array([[True, True], [False, True]])
    page, offset = page_slots(tables, positions, wanted, 4)
    np.testing.assert_array_equal(page, [[3, 1], [0, 2]])
    np.testing.assert_array_equal(offset, [[3, 0], [1, 2]])
    values = jnp.arange(1, 5, dtype=jnp.float32).reshape(2, 2, 1, 1)
    written = np.asarray(write_tokens(jnp.zeros((5, 4, 1, 1)), values, page, offset))[..., 0, 0]
    assert written[3, 3] == 1 and written[1, 0] == 2 and written[2, 2] == 4
    assert written[1:].sum() == 7  # 3 went to page 0


def test_copies_whole_pages(tiny_config):
    rng = np.random.default_rng(0)
    shape = (5, 4, 2, 8)
    before = [rng.normal(size=shape).astype(np.float32) for _ in range(4)]
    pages = (
        (jnp.array(before[0]), jnp.array(before[1])),
        (jnp.array(before[2]), jnp.array(before[3])),
    )
    after = copy_pages(pages, jnp.array([3, 0], jnp.int32), jnp.array([1, 0], jnp.int32))
    for old, new in zip(before, [x for layer in after for x in layer], strict=True):
        np.testing.assert_array_equal(new[1], old[3])
        np.testing.assert_array_equal(np.delete(new, 1, 0), np.delete(old, 1, 0))


SIZES = list(itertools.product([2, 3, 64], [1, 4, 16], [1, 16, 21, 70], [1, 4, 64], [1, 2, 8]))


def test_default_pool_fills_every_slot_with_groups():
    """For every prompt length that shares a page (or if none can)."""
    for slots, page_size, longest, new, group in SIZES:
        sizes = dict(slots=slots, page_size=page_size, max_new_tokens=new, group_size=group)
        num_pages = default_num_pages(**sizes, max_prompt_tokens=longest)
        shortest = 1 if group == 1 or longest < page_size else page_size
        for tokens in {shortest, max(shortest, longest - 1), longest}:
            scheduler = Scheduler(slots=slots, page_size=page_size, num_pages=num_pages)
            for uid in range(slots):
                prompt = Prompt(id=str(uid), tokens=(0,) * tokens, text="")
                scheduler.add(Request(prompt, SamplingParams(max_tokens=new), n=group, uid=uid))
            scheduler.admit()
            assert len(scheduler.running) == slots, (slots, page_size, longest, new, group, tokens)


def test_default_pool_is_below_slots_times_the_longest_request():
    """64 slots, page 16: what would be needed if nothing were shared."""
    sizes = dict(slots=64, page_size=16, max_prompt_tokens=1000, max_new_tokens=64)
    longest = 64 * 67
    # 1000 tokens: 62 pages shared, ceil((8 + 63)/16) = 5 own; 12 prompts; 2 more
    assert default_num_pages(**sizes, group_size=8) == 64 * 5 + 12 * 62 + 2 < longest / 4
    assert default_num_pages(**sizes, group_size=2) < longest
    # Prompts of 16–21 tokens need 64 · 1 + 12 · 1 + 2, those of 15 need 64 · 2, none shared.
    short = dict(slots=64, page_size=16, max_prompt_tokens=21, max_new_tokens=4)
    assert default_num_pages(**short, group_size=8) == 127 < 64 * 2
    # Never below what one request needs, whatever the sizes.
    for slots, page_size, prompt, new, group in SIZES:
        num_pages = default_num_pages(
            slots=slots,
            page_size=page_size,
            max_prompt_tokens=prompt,
            max_new_tokens=new,
            group_size=group,
        )
        needs = [PageNeed.of(t, new, page_size).least(group) for t in range(1, prompt + 1)]
        assert num_pages - 1 >= max(needs)
