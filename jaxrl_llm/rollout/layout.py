# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What the scheduler decided, as arrays of fixed shape for the device programs. NumPy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from jaxrl_llm.rollout.page_pool import NULL_PAGE
from jaxrl_llm.rollout.programs import DecodeSlots, PrefillChunk
from jaxrl_llm.rollout.sampling import MAX_BIASES, MAX_STOP_IDS, Filters
from jaxrl_llm.rollout.scheduler import Prefill, Request, Sample

ROW_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Part:
    """A row of a chunk: `count` tokens of a prompt from number `first` on."""

    prefill: Prefill
    first: int
    count: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What the prefill program gets, and what it stands for: rows, whose tokens follow each other
    in the flat arrays."""

    arrays: PrefillChunk
    parts: list[Part]

    @property
    def tokens(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def scored(self) -> bool:
        return any(part.prefill.scored is not None for part in self.parts)

    def scores(self, logps: np.ndarray) -> Iterator[tuple[Request, int, np.ndarray]]:
        """Requests whose prompts are scored, each with log-probabilities from target number i on
        (target 0 is the prompt's second token)."""
        end = 0
        for part in self.parts:
            values = logps[end : end + part.count]
            end += part.count
            if part.prefill.scored is not None:
                yield part.prefill.scored, part.first, values


def prefill_chunks(prompts: list[Prefill], size: int, width: int) -> Iterator[Chunk]:
    """Cut prompts, one after the other, into chunks of `size` tokens in rows of at most 32.

    A chunk has rows for twice its tokens, so that prompts which end within a row waste no chunk.

    Args:
        width: of the block tables.
    """
    columns = min(ROW_TOKENS, size)
    rows = 2 * -(-size // columns)
    parts: list[Part] = []
    room = size
    for prompt in prompts:
        start = prompt.start
        while start < len(prompt.tokens):
            count = min(columns, room, len(prompt.tokens) - start)
            parts.append(Part(prompt, start, count))
            start, room = start + count, room - count
            if room == 0 or len(parts) == rows:
                yield Chunk(_arrays(parts, size, rows, columns, width), parts)
                parts, room = [], size
    if parts:
        yield Chunk(_arrays(parts, size, rows, columns, width), parts)


def _arrays(parts: list[Part], size: int, rows: int, columns: int, width: int) -> PrefillChunk:
    flat = np.zeros((5, size), np.int32)  # tokens, row, column, wanted, targets
    temperature = np.ones(size, np.float32)
    index = np.zeros((rows, columns), np.int32)
    start = np.zeros(rows, np.int32)
    tables = np.full((rows, width), NULL_PAGE, np.int32)
    end = 0
    for row, part in enumerate(parts):
        prompt, count, stop = part.prefill, part.count, part.first + part.count
        column, here = np.arange(count), slice(end, end + count)
        tokens = prompt.tokens[part.first : stop]
        targets = (*tokens[1:], *prompt.tokens[stop : stop + 1], 0)[:count]
        flat[:, here] = tokens, np.full(count, row), column, np.ones(count), targets
        index[row, :count] = end + column
        start[row], tables[row, : len(prompt.pages)] = part.first, prompt.pages
        if prompt.scored is not None:
            temperature[here] = prompt.scored.params.temperature
        end += count
    return PrefillChunk(
        tokens=flat[0],
        row=flat[1],
        column=flat[2],
        wanted=flat[3].astype(np.bool_),
        index=index,
        start=start,
        tables=tables,
        targets=flat[4],
        temperature=temperature,
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
