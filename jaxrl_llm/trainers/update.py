# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The update: samples cut into optimiser batches, laid out in rows, gradients added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.errors import NonFinite
from jaxrl_llm.trainers.batching import RowPlan, count_targets, take_rows
from jaxrl_llm.trainers.metrics import Sums
from jaxrl_llm.trainers.state import TrainFunctions, TrainState
from jaxrl_llm.types import Batch


@dataclasses.dataclass
class Updater:
    """Learns from batches of samples; holds everything that learning changes.

    Attributes:
        algorithm: the resolved row of `algorithms/presets.py`.
        functions: compiled programs.
        put: moves a batch of numpy arrays onto the mesh.
        learning_rate: the schedule, by updates done.
        plan: lays samples out in rows and cuts rows into micro-batches; never changes the result.
        epochs, minibatches: passes over a batch, and optimiser updates in each.
        group_size: samples of a prompt, which stay in one optimiser batch.
        seed: of the order of prompts.
        kl_coef, entropy_coef: the current values of coefficients that adapt.
    """

    algorithm: Algorithm
    functions: TrainFunctions
    put: Callable[[Batch], Batch]
    state: TrainState
    learning_rate: Callable[[int], Any]
    plan: Callable[[Batch], RowPlan]
    epochs: int
    minibatches: int
    group_size: int
    seed: int
    kl_coef: float
    entropy_coef: float
    applied_entropy_coef: float

    @property
    def takes_several_updates(self) -> bool:
        """Whether the policy moves away from the one that is being updated from."""
        return self.epochs * self.minibatches > 1

    def logprobs(self, params: Any, samples: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and entropies of the trained tokens of samples, [N, T]."""
        plan = self.plan(samples)
        rows = plan.pack(samples)
        targets = count_targets(rows.mask)
        parts = [
            self.functions.logprobs(params, self.put(micro), targets)
            for micro in plan.micro_batches(rows)
        ]
        logp, entropy = (
            plan.unpack(np.concatenate(jax.device_get(values)), samples.mask)
            for values in zip(*parts, strict=True)
        )
        return logp, entropy

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
        """The optimiser batches of an epoch: each prompt once, shuffled by (seed, step, epoch)."""
        samples = np.arange(batch.tokens.shape[0]).reshape(-1, self.group_size)
        if self.minibatches > 1:
            samples = np.random.default_rng((self.seed, step, epoch)).permutation(samples)
        for part in np.split(samples, self.minibatches):
            yield take_rows(batch, part.ravel())

    def _one_update(self, samples: Batch, step: int) -> dict[str, float]:
        """One optimiser step. Counts come first, so that no split of the batch changes the loss."""
        stats = None
        if self.algorithm.needs_batch_stats:
            stats = self.algorithm.batch_stats(*self.logprobs(self.state.params, samples), samples)
        plan = self.plan(samples)
        rows = plan.pack(samples)
        targets = count_targets(rows.mask)
        counts = self.algorithm.counts(rows.mask, rows.segment_ids)
        sums, coefs = Sums(), self._coefficients()
        grads = self.functions.zeros(self.state.params)
        for micro in plan.micro_batches(rows):
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
