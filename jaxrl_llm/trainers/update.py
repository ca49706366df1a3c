# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The update: a batch of rows cut into optimiser batches and micro-batches, gradients added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.errors import NonFinite
from jaxrl_llm.trainers.batching import count_targets, micro_batches, take_rows
from jaxrl_llm.trainers.metrics import Sums
from jaxrl_llm.trainers.state import TrainFunctions, TrainState
from jaxrl_llm.types import Batch


@dataclasses.dataclass
class Updater:
    """Learns from batches of rows; holds everything that learning changes.

    Attributes:
        algorithm: the resolved row of `algorithms/presets.py`.
        functions: compiled programs.
        put: moves a batch of numpy arrays onto the mesh.
        learning_rate: the schedule, by updates done.
        epochs, minibatches, micro_batch: how a batch is cut; micro-batches never change the result.
        max_targets: trained tokens that a row can have.
        seed: of the order of rows.
        kl_coef, entropy_coef: the current values of coefficients that adapt.
    """

    algorithm: Algorithm
    functions: TrainFunctions
    put: Callable[[Batch], Batch]
    state: TrainState
    learning_rate: Callable[[int], Any]
    epochs: int
    minibatches: int
    micro_batch: int
    max_targets: int
    seed: int
    kl_coef: float
    entropy_coef: float
    applied_entropy_coef: float

    @property
    def takes_several_updates(self) -> bool:
        """Whether the policy moves away from the one that is being updated from."""
        return self.epochs * self.minibatches > 1

    def logprobs(self, params: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and entropies of the trained tokens, a micro-batch at a time."""
        targets = count_targets(batch.mask, self.max_targets)
        parts = [
            self.functions.logprobs(params, self.put(micro), targets)
            for micro in micro_batches(batch, self.micro_batch)
        ]
        logp, entropy = zip(*parts, strict=True)
        return np.concatenate(jax.device_get(logp)), np.concatenate(jax.device_get(entropy))

    def run(self, batch: Batch, step: int) -> dict[str, float]:
        """All optimiser steps of one rollout batch; returns their metrics, averaged.

        Raises:
            NonFinite: a loss, a gradient or the parameters themselves; nothing of this is saved.
        """
        sums = Sums()
        for epoch in range(self.epochs):
            last: dict[str, float] = {}
            for part, minibatch in enumerate(self._cut(batch, step, epoch)):
                last = self._one_update(minibatch, step)
                # After the first update the policy has left the sampler: no gap of theirs is left.
                moved = epoch > 0 or part > 0
                kept = {k: v for k, v in last.items() if not (moved and k.startswith("sampling/"))}
                sums.add_means(kept)
            if self.algorithm.stops_epochs(last.get("approx_kl", 0.0)):
                break
        metrics = sums.means()
        metrics["epochs"] = float(epoch + 1)
        metrics["learning_rate"] = float(self.learning_rate(int(self.state.updates) - 1))
        self._adapt(metrics, batch.tokens.shape[0])
        if not np.isfinite(float(self.functions.norm(self.state.params))):
            raise NonFinite(
                f"the parameters are not finite after step {step + 1}",
                hint="a lower learning rate; the last checkpoint before it is intact",
            )
        return metrics

    def _cut(self, batch: Batch, step: int, epoch: int) -> Iterator[Batch]:
        """The optimiser batches of an epoch: each row once, shuffled by (seed, step, epoch)."""
        rows = batch.tokens.shape[0]
        order = np.arange(rows)
        if self.minibatches > 1:
            order = np.random.default_rng((self.seed, step, epoch)).permutation(rows)
        for part in np.split(order, self.minibatches):
            yield take_rows(batch, part)

    def _one_update(self, batch: Batch, step: int) -> dict[str, float]:
        """One optimiser step. Counts come first, so that no split of the batch changes the loss."""
        targets = count_targets(batch.mask, self.max_targets)
        counts = self.algorithm.counts(batch.mask, batch.segment_ids)
        stats = None
        if self.algorithm.needs_batch_stats:
            stats = self.algorithm.batch_stats(*self.logprobs(self.state.params, batch), batch)
        sums, coefs = Sums(), self._coefficients()
        grads = self.functions.zeros(self.state.params)
        for micro in micro_batches(batch, self.micro_batch):
            grads, (loss, metrics) = self.functions.accumulate(
                grads, self.state.params, self.put(micro), counts, stats, coefs, targets
            )
            sums.add({**metrics, "loss/sum": (loss, 1.0)})
        norm = float(self.functions.norm(grads))
        metrics = sums.means() | {"grad_norm": norm}
        if not (np.isfinite(metrics["loss"]) and np.isfinite(norm)):
            raise NonFinite(
                f"a loss or gradient is not finite in step {step + 1}",
                got=f"loss {metrics['loss']}, gradient norm {norm}",
                hint="a lower learning rate; the last checkpoint before it is intact",
            )
        self.state = self.functions.apply(self.state, grads)
        return metrics

    def _coefficients(self) -> dict[str, np.float32]:
        """The loss's coefficients, as arrays: a new value compiles nothing."""
        coefs = {}
        if self.algorithm.needs_ref and not self.algorithm.kl_in_reward:
            coefs["kl_coef"] = np.float32(self.kl_coef)
        if self.algorithm.needs_entropy_gradient:
            coefs["entropy_coef"] = np.float32(self.applied_entropy_coef)
        return coefs

    def _adapt(self, metrics: dict[str, float], samples: int) -> None:
        """The coefficients of the next step, from the KL and the entropy of this one."""
        if "kl" in metrics:
            metrics["kl_coef"] = self.kl_coef
            self.kl_coef = self.algorithm.next_kl_coef(self.kl_coef, metrics["kl"], samples)
        if "entropy" in metrics:
            self.entropy_coef, self.applied_entropy_coef = self.algorithm.next_entropy_coef(
                self.entropy_coef, metrics["entropy"]
            )
