# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts laid out in chunks: every token once, in order, with the right place; little padding."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rollout.layout import block_tables, decode_slots, prefill_chunks
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.rollout.scheduler import Prefill, Request, Sample
from jaxrl_llm.types import Prompt


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=12),
    size=st.sampled_from([8, 48, 64, 256]),
)
def test_every_token_is_prefilled_once_and_in_order(lengths, size):
    prompts = [
        Prefill(tuple(1000 * i + t for t in range(length)), [i + 1] * 4)
        for i, length in enumerate(lengths)
    ]
    seen: list[list[int]] = [[] for _ in lengths]
    total = 0
    for part in prefill_chunks(prompts, size, 5):
        chunk, count = part.arrays, part.tokens
        assert chunk.wanted.sum() == count and chunk.wanted[:count].all()
        total += count
        for n in range(count):
            row, column = chunk.row[n], chunk.column[n]
            assert chunk.index[row, column] == n
            which, position = divmod(int(chunk.tokens[n]), 1000)
            assert chunk.start[row] + column == position == len(seen[which])
            assert chunk.tables[row].tolist() == [which + 1] * 4 + [0]
            last = position == lengths[which] - 1
            assert chunk.targets[n] == (0 if last else chunk.tokens[n] + 1)
            seen[which].append(position)
    assert [len(positions) for positions in seen] == lengths
    assert total == sum(lengths)


def test_eight_prompts_of_21_tokens_fill_three_chunks_of_64():
    chunks = list(prefill_chunks([Prefill(tuple(range(21)), [1])] * 8, 64, 2))
    assert [chunk.tokens for chunk in chunks] == [64, 64, 40]
    assert {chunk.arrays.tokens.shape for chunk in chunks} == {(64,)}
    assert {chunk.arrays.index.shape for chunk in chunks} == {(4, 32)}


def test_decode_rows():
    request = Request(
        Prompt("a", (5, 6, 7), ""),
        SamplingParams(max_tokens=4, temperature=0.5, stop_ids=(9, 2), seed=3),
        uid=8,
    )
    first = Sample(request, 1, [4, 2], prefilled=3)
    second = Sample(request, 2, [3], prefilled=3, tokens=[11])
    samples = [first, second, None]
    np.testing.assert_array_equal(block_tables(samples, 3), [[4, 2, 0], [3, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(block_tables(samples, 1), [[4], [3], [0]])
    slots = decode_slots(samples)
    np.testing.assert_array_equal(slots.token, [7, 11, 0])
    np.testing.assert_array_equal(slots.position, [2, 3, 0])
    np.testing.assert_array_equal(slots.active, [True, True, False])
    np.testing.assert_array_equal(slots.write_from[:2], [3, 3])  # prompt pages are never written
    np.testing.assert_array_equal(slots.last_position[:2], [6, 6])
    np.testing.assert_array_equal(slots.stop_ids[1], [9, 2] + [-1] * 6)
    assert (slots.seed[0], slots.uid[1], slots.sample[1]) == (3, 8, 2)
    assert slots.filters.temperature[0] == 0.5 and slots.filters.top_p[0] == 1.0
