# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The update: samples cut into optimiser batches, laid out in rows, gradients added up."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.errors import NonFinite
from jaxrl_llm.models.placement import FREE, Place
from jaxrl_llm.trainers.batching import count_targets
from jaxrl_llm.trainers.critic import Critic, value_metrics
from jaxrl_llm.trainers.metrics import Sums
from jaxrl_llm.trainers.offload import to_devices, to_host
from jaxrl_llm.trainers.passes import Passes
from jaxrl_llm.trainers.policy import (
    Form,
    RouterConfig,
    TrainFunctions,
    Weights,
    effective_share,
    whole_batch_shares,
)
from jaxrl_llm.trainers.state import TrainState, put, take_step, taken
from jaxrl_llm.types import Batch


@dataclasses.dataclass
class Updater:
    """Learns from batches of samples; holds everything that learning changes.

    Attributes:
        algorithm: the resolved row of `algorithms/presets.py`.
        functions: compiled programs.
        form: what of the policy is trained.
        policy: what is trained, and its optimiser.
        frozen: the parameters under an adapter, or None.
        router: losses of a model with experts.
        learning_rate: the schedule, by updates done.
        passes: how batches are gone through.
        kl_coef, entropy_coef: the current values of coefficients that adapt.
        critic: of the algorithms that have one; learns beside the policy.
        place: where the policy lives.
        resting: whether what only an update needs is in the host's memory.
    """

    algorithm: Algorithm
    functions: TrainFunctions
    form: Form
    policy: TrainState
    frozen: Any | None
    router: RouterConfig
    learning_rate: Callable[[int], Any]
    passes: Passes
    kl_coef: float
    entropy_coef: float
    applied_entropy_coef: float
    critic: Critic | None = None
    place: Place = FREE
    resting: bool = False

    @property
    def params(self) -> Any:
        """What is trained: the policy's parameters, or an adapter."""
        return self.policy.params

    @property
    def weights(self) -> Weights:
        """The policy: what is trained, and what stays under it."""
        return self.policy.params, self.frozen

    def merged(self) -> Any:
        """The policy as plain parameters, with stacked layers [L, …]."""
        whole = self.params if self.form == Form() else _merged(self.form, self.weights)
        return self.place.take(whole)

    def merged_later(self) -> Any:
        """As `merged`, each array when it is asked for (`sharding.reshard.now`)."""
        return self.place.take_later(self.form.merged_later(self.weights))

    @property
    def state(self) -> Any:
        """Everything of the models that a checkpoint holds; it wakes them."""
        self.wake()
        policy = taken(self.policy, self.place)
        return policy if self.critic is None else {"policy": policy, "critic": self.critic.saved}

    def rest(self) -> None:
        """Optimiser state and critic to the host's memory, until `wake`."""
        self.resting = True
        self.policy = self.policy.replace(opt_state=to_host(self.policy.opt_state))
        if self.critic is not None:
            self.critic.state = to_host(self.critic.state)

    def wake(self) -> None:
        """All of it on the devices again."""
        if not self.resting:
            return
        self.resting = False
        self.policy = to_devices(self.policy)
        if self.critic is not None:
            self.critic.state = to_devices(self.critic.state)

    @state.setter
    def state(self, state: Any) -> None:
        if self.critic is not None:
            self.critic.saved, state = state["critic"], state["policy"]
        self.policy = put(state, self.place)

    @property
    def takes_several_updates(self) -> bool:
        """Whether the policy moves away from the one that is being updated from."""
        return self.passes.epochs * self.passes.minibatches > 1

    def values(self, samples: Batch) -> np.ndarray:
        """What the critic expects before each trained token of samples, [N, T]."""
        if self.critic is not None:
            return self.critic.values(samples)
        weights = self.weights
        return self.passes.values(samples, lambda rows, _: self.functions.values(weights, rows))

    def logprobs(self, samples: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and entropies of the trained tokens of samples, [N, T]."""
        logprobs = functools.partial(self.functions.logprobs, self.weights)
        return self.passes.values(samples, logprobs)

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
        elif batch.values is not None:
            found = value_metrics(batch)
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
        if not np.isfinite(float(self.functions.state.norm(self.params))):
            raise NonFinite(
                f"the parameters are not finite after step {step + 1}",
                hint="a lower learning rate",
            )
        return metrics

    def _one_update(self, samples: Batch, step: int) -> dict[str, float]:
        """One optimiser step. Counts come first, so that no split of the batch changes the loss."""
        stats = None
        if self.algorithm.needs_batch_stats:
            stats = self.algorithm.batch_stats(*self.logprobs(samples), samples)
        plan = self.passes.plan(samples)
        rows = plan.pack(samples)
        targets = count_targets(rows.mask)
        counts = self.algorithm.counts(rows.mask, rows.segment_ids)
        micro_batches = list(plan.micro_batches(rows))
        routed, params = self._routed(micro_batches), self.params
        coefs = self._coefficients()
        self.policy, metrics = take_step(
            self.functions.state,
            self.policy,
            micro_batches,
            lambda grads, micro: self.functions.accumulate(
                grads,
                params,
                self.frozen,
                self.passes.put(micro),
                counts,
                stats,
                routed,
                coefs,
                targets,
            ),
            step=step,
        )
        return effective_share(metrics)

    def _routed(self, micro_batches: list[Batch]) -> Any:
        """How the whole optimiser batch is spread over experts, where a loss needs it."""
        if self.router == RouterConfig():
            return None
        parts = [
            self.functions.router_stats(self.weights, self.passes.put(micro))
            for micro in micro_batches
        ]
        return whole_batch_shares(parts)

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


@dataclasses.dataclass
class Reference:
    """A policy that stays, and says how likely it finds samples.

    Attributes:
        weights: as of `policy.Form`.
        compiled: `TrainFunctions.logprobs`, where the weights live.
        passes: how samples come there.
        base: whether the weights are those under the policy's adapter, which stay where they are.
    """

    weights: Weights
    compiled: Callable
    passes: Passes
    base: bool = False

    def logprobs(self, samples: Batch) -> np.ndarray:
        """Log-probabilities of the trained tokens of samples, [N, T]."""
        return self.passes.values(samples, functools.partial(self.compiled, self.weights))[0]

    def rest(self) -> None:
        """Its weights to the host's memory, until `wake`."""
        self.weights = self.weights if self.base else to_host(self.weights)

    def wake(self) -> None:
        """All of it on the devices again."""
        self.weights = self.weights if self.base else to_devices(self.weights)


@functools.partial(jax.jit, static_argnums=0)
def _merged(form: Form, weights: Weights) -> Any:
    return form.merged(weights)
