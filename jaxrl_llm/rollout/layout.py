# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What the scheduler decided, as arrays of fixed shape for the device programs. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxrl_llm.rollout.programs import DecodeSlots, PrefillChunk
from jaxrl_llm.rollout.sampling import MAX_STOP_IDS
from jaxrl_llm.rollout.scheduler import NULL_PAGE, Sample

ROW_TOKENS = 16


def prefill_chunks(
    prompts: list[tuple[tuple[int, ...], list[int]]], size: int, width: int
) -> Iterator[tuple[PrefillChunk, int]]:
    """Cut prompts, one after the other, into chunks of `size` tokens in rows of at most 16.

    A chunk has rows for twice its tokens, so that prompts which end within a row waste no chunk.

    Args:
        prompts: tokens and pages of each.
        width: of the block tables.

    Yields:
        chunks and how many tokens each holds.
    """
    columns = min(ROW_TOKENS, size)
    rows = 2 * -(-size // columns)
    parts: list[tuple[tuple[int, ...], int, list[int]]] = []
    room = size
    for tokens, pages in prompts:
        start = 0
        while start < len(tokens):
            part = tokens[start : start + min(columns, room)]
            parts.append((part, start, pages))
            start, room = start + len(part), room - len(part)
            if room == 0 or len(parts) == rows:
                yield _prefill_chunk(parts, size, rows, columns, width), size - room
                parts, room = [], size
    if parts:
        yield _prefill_chunk(parts, size, rows, columns, width), size - room


def _prefill_chunk(parts: list, size: int, rows: int, columns: int, width: int) -> PrefillChunk:
    flat = np.zeros((4, size), np.int32)  # tokens, row, column, wanted
    index = np.zeros((rows, columns), np.int32)
    start = np.zeros(rows, np.int32)
    tables = np.full((rows, width), NULL_PAGE, np.int32)
    end = 0
    for row, (tokens, first, pages) in enumerate(parts):
        count = len(tokens)
        column = np.arange(count)
        flat[:, end : end + count] = tokens, np.full(count, row), column, np.ones(count)
        index[row, :count] = end + column
        start[row], tables[row, : len(pages)] = first, pages
        end += count
    return PrefillChunk(
        tokens=flat[0],
        row=flat[1],
        column=flat[2],
        wanted=flat[3].astype(np.bool_),
        index=index,
        start=start,
        tables=tables,
    )


def decode_slots(running: list[Sample], rows: int, width: int) -> DecodeSlots:
    """The running samples as rows of arrays, the rest idle."""
    assert 0 < len(running) <= rows, (len(running), rows)

    def column(values: list, dtype: type, fill: object = 0) -> np.ndarray:
        out = np.full(rows, fill, dtype)
        out[: len(values)] = values
        return out

    tables = np.full((rows, width), NULL_PAGE, np.int32)
    stop_ids = np.full((rows, MAX_STOP_IDS), -1, np.int32)
    for row, sample in enumerate(running):
        tables[row, : len(sample.pages)] = sample.pages
        ids = sample.request.params.stop_ids
        stop_ids[row, : len(ids)] = ids
    params = [sample.request.params for sample in running]
    return DecodeSlots(
        tables=tables,
        token=column([s.next_input for s in running], np.int32),
        position=column([s.position for s in running], np.int32),
        active=column([True] * len(running), np.bool_, False),
        write_from=column([len(s.request.prompt.tokens) for s in running], np.int32),
        last_position=column([s.last_position for s in running], np.int32),
        temperature=column([p.temperature for p in params], np.float32, 1.0),
        top_p=column([p.top_p for p in params], np.float32, 1.0),
        stop_ids=stop_ids,
        seed=column([p.seed for p in params], np.uint32),
        uid=column([s.request.uid for s in running], np.uint32),
        sample=column([s.index for s in running], np.uint32),
    )
