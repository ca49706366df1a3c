# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts → samples → rows for the trainer, in a small, bounded set of shapes.

*Samples* are one rollout each, from the left: what advantages are computed on. *Rows* are what the
model gets; `plan_rows` lays samples out in them:

    padded          | prompt a · completion 1 · · · |      one sample a row
    packed          | a · 1 · · | a · 2 | b · 1 · · |      several samples a row
    shared_prefix   | prompt a · 1 · · · 2 · 3 · ·  |      the completions of a prompt follow one
                                                           copy of it, each at its own positions

The loss and its gradient are the same for all three.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import numpy as np

from jaxrl_llm.data.packing import best_fit, round_up, row_reach
from jaxrl_llm.types import Batch, Reach, Rollout

Layout = Literal["shared_prefix", "packed", "padded"]
_FEWEST_TARGETS = 16


def round_length(length: int, longest: int) -> int:
    """The next allowed row length: 32, 48, 64, 96, … 256, 288, 320, … 512, 576, …, and at most
    `longest`. Long rows cost most: above 256 there are eight sizes for each doubling."""
    assert length <= longest, (length, longest)
    if length <= 256:
        return round_up(length, longest)
    step = 1 << ((length - 1).bit_length() - 4)
    return min(-(-length // step) * step, longest)


def pad_rollouts(
    rollouts: Sequence[Rollout], *, longest: int, mask_truncated: bool = False
) -> Batch:
    """One rollout a row: prompt, completion, padding. Numpy arrays; advantages are 0.

    Rollouts without a verdict (`reward is None`) keep their row, but none of its tokens is trained
    on.

    Args:
        longest: tokens that a rollout of this run can have; rows are cut by `round_length`.
        mask_truncated: nor are the tokens of completions that ended by their length (overlong
            filtering, DAPO, https://arxiv.org/abs/2503.14476, Sec. 3.4).
    """
    sizes = [len(r.prompt.tokens) + len(r.tokens) for r in rollouts]
    width = round_length(max(sizes), longest)
    shape = (len(rollouts), width)
    tokens = np.zeros(shape, np.int32)
    segment_ids = np.zeros(shape, np.int32)
    mask = np.zeros(shape, bool)
    logp_sampler = np.zeros(shape, np.float32)
    for row, (rollout, size) in enumerate(zip(rollouts, sizes, strict=True)):
        start = len(rollout.prompt.tokens)
        tokens[row, :start] = rollout.prompt.tokens
        tokens[row, start:size] = rollout.tokens
        segment_ids[row, :size] = 1
        cut_off = mask_truncated and rollout.finish_reason == "length"
        trained = rollout.reward is not None and not cut_off
        mask[row, start:size] = rollout.mask if trained else False
        logp_sampler[row, start:size] = rollout.logp_sampler
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), shape).copy()
    return Batch(
        tokens=tokens,
        positions=positions,
        segment_ids=segment_ids,
        mask=mask,
        advantages=np.zeros(shape, np.float32),
        logp_sampler=logp_sampler,
    )


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Where the tokens of samples [N, T] stand in rows [R, W], and how rows are cut.

    Attributes:
        sample, column: which sample's token, and which of its tokens; sample is −1 on padding.
        segment_ids, prefix_ids, sources, reach: as in `Batch`; prefixes in layout "shared_prefix"
            alone.
        micro: rows of a micro-batch; R is a multiple of it.
    """

    sample: np.ndarray  # int [R, W]
    column: np.ndarray  # int [R, W]
    segment_ids: np.ndarray  # int [R, W]
    prefix_ids: np.ndarray | None  # int [R, W]
    sources: np.ndarray  # int [R, W]
    micro: int
    reach: Reach | None = None

    def pack(self, samples: Batch) -> Batch:
        """The same tokens as rows; 0 on padding. A shared prompt is taken from one sample."""
        placed = self.sample >= 0

        def laid_out(values: np.ndarray) -> np.ndarray:
            zero = np.zeros((), values.dtype)
            return np.where(placed, values[self.sample, self.column], zero)

        return jax.tree.map(laid_out, samples).replace(
            segment_ids=self.segment_ids,
            prefix_ids=self.prefix_ids,
            sources=self.sources,
            reach=self.reach,
        )

    def unpack(self, rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Values [R, W] of trained tokens back as [N, T] of samples; 0 where `mask` is False."""
        values = np.zeros(mask.shape, rows.dtype)
        placed = self.sample >= 0
        values[self.sample[placed], self.column[placed]] = rows[placed]
        return np.where(mask, values, np.zeros((), rows.dtype))

    def micro_batches(self, rows: Batch) -> Iterator[Batch]:
        """The rows in pieces of one shape; the loss does not depend on the cut."""
        for start in range(0, self.sample.shape[0], self.micro):
            yield take_rows(rows, slice(start, start + self.micro))


@dataclasses.dataclass
class _Piece:
    """What stays together in a row: a prefix of one sample, then parts of samples after it."""

    prefix: int  # tokens
    parts: list[tuple[int, int, int]]  # sample, first and last + 1 of its tokens

    @property
    def size(self) -> int:
        return self.prefix + sum(end - start for _, start, end in self.parts)


def plan_rows(
    samples: Batch,
    *,
    layout: Layout,
    row_tokens: int,
    micro_tokens: int,
    longest: int,
    multiple: int = 1,
) -> RowPlan:
    """Lay samples out in rows of one length, and rows in micro-batches of one size.

    Samples without a trained token have no place in rows. What comes before a sample's first
    trained token is its prompt; samples with the same prompt share it, as far as a row reaches.

    Args:
        samples: numpy arrays, a sample a row, from the left.
        row_tokens: the longest row, unless one sample is longer; a prompt whose completions don't
            fit is repeated in another row.
        micro_tokens: tokens of a micro-batch, padding included; at least one row for each device.
        longest: tokens that a sample of this run can have.
        multiple: rows of a micro-batch are a multiple of this (devices of the data axes).
    """
    limit = max(row_tokens, longest)
    pieces = _pieces(samples, layout, limit)
    width = round_length(max((piece.size for piece in pieces), default=1), limit)
    rows = [[i] for i in range(len(pieces))]
    if layout != "padded":
        rows = best_fit([piece.size for piece in pieces], width)
    most = max(micro_tokens // width // multiple, 1)
    needed = -(-max(len(rows), 1) // multiple)
    calls = -(-needed // most)
    micro = round_up(-(-needed // calls), most, 1) * multiple
    shape = (-(-max(len(rows), 1) // micro) * micro, width)
    plan = _empty_plan(shape, micro, shared=layout == "shared_prefix")
    for row, members in enumerate(rows):
        _fill_row(plan, row, [pieces[member] for member in members])
    return dataclasses.replace(plan, reach=_reach(pieces, width))


def _reach(pieces: list[_Piece], width: int) -> Reach | None:
    prefix = max((piece.prefix for piece in pieces), default=0)
    parts = [end - start for piece in pieces for _, start, end in piece.parts]
    return row_reach(max([prefix, *parts]), prefix, width)


def _pieces(samples: Batch, layout: Layout, limit: int) -> list[_Piece]:
    trained = samples.mask.any(axis=1)
    starts = samples.mask.argmax(axis=1)
    sizes = (samples.segment_ids > 0).sum(axis=1)
    pieces: list[_Piece] = []
    open_pieces: dict[bytes, _Piece] = {}
    for sample in np.flatnonzero(trained):
        start, size = int(starts[sample]), int(sizes[sample])
        assert start > 0, "the first token of a sequence has nothing before it"
        if layout != "shared_prefix":
            pieces.append(_Piece(0, [(int(sample), 0, size)]))
            continue
        prompt = samples.tokens[sample, :start].tobytes()
        piece = open_pieces.get(prompt)
        if piece is None or piece.size + size - start > limit:
            piece = open_pieces[prompt] = _Piece(start, [])
            pieces.append(piece)
        piece.parts.append((int(sample), start, size))
    return pieces


def _empty_plan(shape: tuple[int, int], micro: int, *, shared: bool) -> RowPlan:
    zeros = functools.partial(np.zeros, shape, np.int32)
    prefix_ids = zeros() if shared else None
    return RowPlan(zeros() - 1, zeros(), zeros(), prefix_ids, zeros(), micro)


def _fill_row(plan: RowPlan, row: int, pieces: list[_Piece]) -> None:
    place, segment = 0, 0

    def write(sample: int, start: int, end: int, *, after: int, prefix: int) -> None:
        """Tokens start … end of a sample as the next segment; the first follows place `after`."""
        nonlocal place, segment
        segment += 1
        here = slice(place, place + end - start)
        plan.sample[row, here] = sample
        plan.column[row, here] = np.arange(start, end)
        plan.segment_ids[row, here] = segment
        if plan.prefix_ids is not None:
            plan.prefix_ids[row, here] = prefix
        plan.sources[row, here] = np.arange(place - 1, place - 1 + end - start)
        plan.sources[row, place] = after
        place += end - start

    for piece in pieces:
        prompt = 0
        if piece.prefix:
            write(piece.parts[0][0], 0, piece.prefix, after=place, prefix=0)
            prompt = segment
        last = place - 1
        for sample, start, end in piece.parts:
            write(sample, start, end, after=last if prompt else place, prefix=prompt)
    assert place <= plan.sample.shape[1]


def count_targets(mask: np.ndarray) -> int:
    """A static bound on the trained tokens of a row: 16, 24, 32, 48, …, and at most its length."""
    most = int(mask.sum(axis=-1).max(initial=0))
    return round_up(most, mask.shape[-1], _FEWEST_TARGETS)


def take_rows(batch: Batch, rows: np.ndarray | slice) -> Batch:
    """Some rows of a batch of numpy arrays; fields that are None stay None."""
    return jax.tree.map(lambda values: values[rows], batch)
