# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""How a batch of samples is gone through: epochs, optimiser batches, rows, micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxrl_llm.sharding.reshard import fetch
from jaxrl_llm.trainers.batching import RowPlan, count_targets, take_rows
from jaxrl_llm.types import Batch


@dataclasses.dataclass(frozen=True)
class Passes:
    """How a model goes through a batch of samples; none of it changes the result but the updates.

    Attributes:
        put: moves a batch of numpy arrays onto the mesh.
        plan: lays samples out in rows and cuts rows into micro-batches.
        epochs, minibatches: passes over a batch, and optimiser updates in each.
        group_size: samples of a prompt, which stay in one optimiser batch.
        seed: of the order of prompts.
    """

    put: Callable[[Batch], Batch]
    plan: Callable[[Batch], RowPlan]
    epochs: int
    minibatches: int
    group_size: int
    seed: int

    def values(self, samples: Batch, function: Callable[[Batch, int], Any]) -> Any:
        """What `function` gives of rows, [R, W], as [N, T] of the samples' trained tokens.

        Args:
            function: of rows on the mesh, and the most trained tokens that a row has.
        """
        plan = self.plan(samples)
        rows = plan.pack(samples)
        targets = count_targets(rows.mask)
        parts = [function(self.put(micro), targets) for micro in plan.micro_batches(rows)]
        return jax.tree.map(
            lambda *arrays: plan.unpack(np.concatenate(arrays), samples.mask),
            *fetch(parts),
        )

    def cut(self, batch: Batch, step: int, epoch: int) -> Iterator[Batch]:
        """The optimiser batches of an epoch: each prompt with its samples once, shuffled."""
        samples = np.arange(batch.tokens.shape[0]).reshape(-1, self.group_size)
        if self.minibatches > 1:
            samples = np.random.default_rng((self.seed, step, epoch)).permutation(samples)
        for part in np.split(samples, self.minibatches):
            yield take_rows(batch, part.ravel())
