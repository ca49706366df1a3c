# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts → rows for the trainer, in a small, bounded set of shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl_llm.types import Batch, Rollout

_MIN_STEP = 4


def round_length(length: int) -> int:
    """The next allowed row length: steps of an eighth of the power of two below, at least 4.

    At most 8 shapes for each doubling, and at most an eighth of a row is padding.
    """
    step = max(_MIN_STEP, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def pad_rollouts(rollouts: Sequence[Rollout], *, length: int | None = None) -> Batch:
    """One rollout a row, prompt then completion, padded on the right. Numpy arrays; advantages are 0.

    Rollouts without a verdict (`reward is None`) keep their row, but none of its tokens is trained on.

    Args:
        length: the row length; default: the longest rollout, rounded by `round_length`.
    """
    sizes = [len(r.prompt.tokens) + len(r.tokens) for r in rollouts]
    width = round_length(max(sizes)) if length is None else length
    assert width >= max(sizes), (width, max(sizes))
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


def count_targets(mask: np.ndarray) -> int:
    """A static bound on the trained tokens of a row: the largest count, up to a power of two."""
    most = int(mask.sum(axis=-1).max(initial=0))
    return min(mask.shape[1], 1 << max(0, most - 1).bit_length()) if most > 1 else 1


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
