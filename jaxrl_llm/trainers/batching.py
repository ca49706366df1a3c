# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts → rows for the trainer, in a small, bounded set of shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl_llm.types import Batch, Rollout

_SHORTEST = 32
_FEWEST_TARGETS = 16


def round_length(length: int, longest: int) -> int:
    """The next allowed row length: 32, 48, 64, 96, 128, …, and at most `longest`.

    Two shapes for each doubling: a new shape is compiled for seconds to minutes, padding costs a
    sixth of a row on average. Rows of a short task always have the one length `longest`.

    Args:
        length: tokens of the longest rollout.
        longest: tokens that a rollout of this run can have.
    """
    assert length <= longest, (length, longest)
    size = _SHORTEST
    while size < length:
        half = size + size // 2
        size = half if length <= half else 2 * size
    return min(size, longest)


def pad_rollouts(rollouts: Sequence[Rollout], *, longest: int) -> Batch:
    """One rollout a row: prompt, completion, padding. Numpy arrays; advantages are 0.

    Rollouts without a verdict (`reward is None`) keep their row, but none of its tokens is trained
    on.

    Args:
        longest: tokens that a rollout of this run can have; rows are cut by `round_length`.
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
        mask[row, start:size] = rollout.mask if rollout.reward is not None else False
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


def count_targets(mask: np.ndarray, longest: int) -> int:
    """A static bound on the trained tokens of a row: 16, 32, 64, …, and at most `longest`.

    Args:
        longest: tokens that a completion of this run can have.
    """
    most, size = int(mask.sum(axis=-1).max(initial=0)), _FEWEST_TARGETS
    while size < most:
        size *= 2
    return min(size, longest)


def take_rows(batch: Batch, rows: np.ndarray | slice) -> Batch:
    """Some rows of a batch of numpy arrays; fields that are None stay None."""
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    return Batch(**{k: None if v is None else v[rows] for k, v in fields.items()})


def micro_batches(batch: Batch, size: int) -> Iterator[Batch]:
    """The batch in consecutive pieces of `size` rows; the loss does not depend on the split."""
    count = batch.tokens.shape[0]
    assert count % size == 0, (count, size)
    for start in range(0, count, size):
        yield take_rows(batch, slice(start, start + size))
