# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The update: samples cut into optimiser batches, laid out in rows, gradients added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.errors import NonFinite
from jaxrl_llm.trainers.batching import RowPlan, count_targets, take_rows
from jaxrl_llm.trainers.metrics import Sums
from jaxrl_llm.trainers.state import TrainFunctions, TrainState
from jaxrl_llm.types import Batch

if TYPE_CHECKING:
    from jaxrl_llm.trainers.critic import Critic


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

    def cut(self, batch: Batch, step: int, epoch: int) -> Iterator[Batch]:
        """The optimiser batches of an epoch: each prompt with its samples once, shuffled."""
        samples = np.arange(batch.tokens.shape[0]).reshape(-1, self.group_size)
        if self.minibatches > 1:
            samples = np.random.default_rng((self.seed, step, epoch)).permutation(samples)
        for part in np.split(samples, self.minibatches):
            yield take_rows(batch, part.ravel())


@dataclasses.dataclass
class Updater:
    """Learns from batches of samples; holds everything that learning changes.

    Attributes:
        algorithm: the resolved row of `algorithms/presets.py`.
        functions: compiled programs.
        policy: parameters and optimiser.
        learning_rate: the schedule, by updates done.
        passes: how batches are gone through.
        kl_coef, entropy_coef: the current values of coefficients that adapt.
        critic: of the algorithms that have one; learns beside the policy.
    """

    algorithm: Algorithm
    functions: TrainFunctions
    policy: TrainState
    learning_rate: Callable[[int], Any]
    passes: Passes
    kl_coef: float
    entropy_coef: float
    applied_entropy_coef: float
    critic: Critic | None = None

    @property
    def params(self) -> Any:
        """The policy's parameters."""
        return self.policy.params

    @property
    def state(self) -> Any:
        """Everything of the models that a checkpoint holds."""
        if self.critic is None:
            return self.policy
        return {"policy": self.policy, "critic": self.critic.state}

    @state.setter
    def state(self, state: Any) -> None:
        if self.critic is None:
            self.policy = state
        else:
            self.policy, self.critic.state = state["policy"], state["critic"]

    @property
    def takes_several_updates(self) -> bool:
        """Whether the policy moves away from the one that is being updated from."""
        return self.passes.epochs * self.passes.minibatches > 1

    def logprobs(self, params: Any, samples: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and entropies of the trained tokens of samples, [N, T]."""
        plan = self.passes.plan(samples)
        rows = plan.pack(samples)
        targets = count_targets(rows.mask)
        parts = [
            self.functions.logprobs(params, self.passes.put(micro), targets)
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
        found: dict[str, float] = {}
        if self.critic is not None:
            found = self.critic.run(batch, step)
            batch = batch.replace(values=None, returns=None)
            if step < self.critic.warmup_steps:
                return found
        sums = Sums()
        for epoch in range(self.passes.epochs):
            last: dict[str, float] = {}
            parts = self.passes.cut(batch, step, epoch)
            for part, minibatch in enumerate(parts):
                last = self._one_update(minibatch, step)
                # After the first update the policy has left the sampler: no gap of theirs is left.
                moved = epoch > 0 or part > 0
                kept = {k: v for k, v in last.items() if not (moved and k.startswith("sampling/"))}
                sums.add_means(kept)
            if self.algorithm.stops_epochs(last.get("approx_kl", 0.0)):
                break
        metrics = found | sums.means()
        metrics["epochs"] = float(epoch + 1)
        metrics["learning_rate"] = float(self.learning_rate(int(self.policy.updates) - 1))
        self._adapt(metrics, batch.tokens.shape[0])
        if not np.isfinite(float(self.functions.norm(self.params))):
            raise NonFinite(
                f"the parameters are not finite after step {step + 1}",
                hint="a lower learning rate; the last checkpoint before it is intact",
            )
        return metrics

    def _one_update(self, samples: Batch, step: int) -> dict[str, float]:
        """One optimiser step. Counts come first, so that no split of the batch changes the loss."""
        stats = None
        if self.algorithm.needs_batch_stats:
            stats = self.algorithm.batch_stats(*self.logprobs(self.params, samples), samples)
        plan = self.passes.plan(samples)
        rows = plan.pack(samples)
        targets = count_targets(rows.mask)
        counts = self.algorithm.counts(rows.mask, rows.segment_ids)
        sums, coefs = Sums(), self._coefficients()
        grads = self.functions.zeros(self.params)
        for micro in plan.micro_batches(rows):
            grads, (loss, metrics) = self.functions.accumulate(
                grads, self.params, self.passes.put(micro), counts, stats, coefs, targets
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
        self.policy = self.functions.apply(self.policy, grads)
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
