# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What the scheduler decided, as arrays of fixed shape for the device programs. NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from jaxrl_llm.rollout.programs import DecodeSlots, PrefillChunk
from jaxrl_llm.rollout.sampling import MAX_BIASES, MAX_STOP_IDS, Filters
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


def block_tables(samples: list[Sample | None], width: int) -> np.ndarray:
    """Block tables of rows; the null page where there is no sample or no page."""
    tables = np.full((len(samples), width), NULL_PAGE, np.int32)
    for row, sample in enumerate(samples):
        if sample is not None:
            pages = sample.pages[:width]
            tables[row, : len(pages)] = pages
    return tables


def decode_slots(samples: list[Sample | None]) -> DecodeSlots:
    """Samples as rows of arrays; None: an idle row."""
    stop_ids = np.full((len(samples), MAX_STOP_IDS), -1, np.int32)
    bias_ids = np.full((len(samples), MAX_BIASES), -1, np.int32)
    biases = np.zeros((len(samples), MAX_BIASES), np.float32)
    for row, sample in enumerate(samples):
        if sample is not None:
            params = sample.request.params
            stop_ids[row, : len(params.stop_ids)] = params.stop_ids
            for i, (token, bias) in enumerate(params.logit_bias):
                bias_ids[row, i], biases[row, i] = token, bias

    def column(value: Callable[[Sample], object], dtype: type, fill: object = 0) -> np.ndarray:
        return np.array([fill if s is None else value(s) for s in samples], dtype)

    return DecodeSlots(
        token=column(lambda s: s.next_input, np.int32),
        position=column(lambda s: s.position, np.int32),
        active=np.array([s is not None for s in samples], np.bool_),
        write_from=column(lambda s: s.prefilled, np.int32),
        last_position=column(lambda s: s.last_position, np.int32),
        filters=Filters(
            temperature=column(lambda s: s.request.params.temperature, np.float32, 1.0),
            top_p=column(lambda s: s.request.params.top_p, np.float32, 1.0),
            top_k=column(lambda s: min(s.request.params.top_k, 2**31 - 1), np.int32),
            min_p=column(lambda s: s.request.params.min_p, np.float32),
        ),
        stop_ids=stop_ids,
        bias_ids=bias_ids,
        biases=biases,
        stop_from=column(
            lambda s: len(s.request.prompt.tokens) + s.request.params.min_tokens - 1, np.int32
        ),
        seed=column(lambda s: s.request.params.seed, np.uint32),
        uid=column(lambda s: s.request.uid, np.uint32),
        sample=column(lambda s: s.index, np.uint32),
    )
