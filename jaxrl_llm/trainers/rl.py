# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""One step of reinforcement learning, top to bottom. Read this file first.

    prompts ─► sampler ─► rollouts ─► rewards ─► advantages ─► log-probabilities ─► update
                  ▲                                                                   │
                  └─────────────────────────── new weights ◄──────────────────────────┘

`build.py` makes the pieces, `rollouts.py` samples and judges, `update.py` cuts batches and adds
gradients up, `loop.py` repeats the step, saves, evaluates and stops.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from jaxrl_llm.rollout.engines import Sampler
from jaxrl_llm.trainers.batching import pad_rollouts
from jaxrl_llm.trainers.credit import credit
from jaxrl_llm.trainers.memory import PeakMemory, return_memory
from jaxrl_llm.trainers.metrics import rollout_metrics
from jaxrl_llm.trainers.rollouts import Rollouts, timed
from jaxrl_llm.trainers.update import Reference, Updater
from jaxrl_llm.types import Rollout


@dataclasses.dataclass
class RLTrainer:
    """The pieces of a run and what changes while it runs.

    Attributes:
        source: samples and judges a step's rollouts, or reads stored ones.
        engine: the sampler; its weights always carry the number of the step that made them.
        updater: learns from a batch of rows; holds what is trained and its optimiser.
        learns: False only samples, judges and stores.
        to_sampler: → the policy's parameters as the sampler takes them.
        reference: the policy that the KL is measured from, or None where none is.
        reward_parts: names of the rewards that count, in order.
        mask_truncated: completions that were cut off are judged and not trained on.
        longest_row: tokens that prompt and completion can have together.
        offload: what only the update needs waits in the host's memory while the sampler runs.
        step: steps done.
        num_tokens: prompt and completion tokens seen since the run began.
    """

    source: Rollouts
    engine: Sampler
    updater: Updater
    learns: bool
    to_sampler: Callable[[], Any]
    reference: Reference | None
    reward_parts: tuple[str, ...]
    mask_truncated: bool
    longest_row: int
    offload: bool = False
    memory: PeakMemory = dataclasses.field(default_factory=PeakMemory)
    step: int = 0
    num_tokens: int = 0

    def train_step(self) -> tuple[dict[str, float], list[Rollout]]:
        """Sample, score and learn from one batch; returns the step's metrics and its rollouts."""
        source, updater, algorithm = self.source, self.updater, self.updater.algorithm
        times: dict[str, float] = {}
        start = time.perf_counter()
        return_memory()
        self.memory.begin()
        self.make_room()

        # ── 1 · prompts and rollouts: B prompts × G samples, in order, judged as they finish ──────
        collected = source.collect(self.step, times)
        rollouts = collected.rollouts
        metrics = rollout_metrics(rollouts, source.group_size)
        metrics |= collected.metrics() | source.metrics()
        self.num_tokens += sum(len(r.prompt.tokens) + len(r.tokens) for r in rollouts)
        metrics["num_tokens"] = float(self.num_tokens)
        if not self.learns:
            self.step += 1
            return self.finished(metrics, times, start), rollouts

        # ── 2 · greedy completions of the same prompts, where they are the baseline ───────────────
        baseline = []
        if algorithm.needs_greedy_baseline:
            prompts = [group[0].prompt for group in collected.groups]
            baseline = source.greedy(self.step, times, prompts)

        # ── 3 · rows, and the log-probabilities that the algorithm needs before the update ────────
        self.engine.release()  # until it gets new weights, its memory is the update's
        return_memory()
        self.wake()
        with timed(times, "logprobs"):
            batch = pad_rollouts(
                rollouts, longest=self.longest_row, mask_truncated=self.mask_truncated
            )
            if updater.takes_several_updates or algorithm.needs_rollout_logp:
                batch = batch.replace(logp_old=updater.logprobs(batch)[0])
            if self.reference is not None:
                batch = batch.replace(logp_ref=self.reference.logprobs(batch))
            if algorithm.needs_values:
                batch = batch.replace(values=updater.values(batch))

        # ── 4 · advantages: one a token, statistics over the whole batch ──────────────────────────
        batch = credit(
            batch,
            rollouts,
            baseline,
            algorithm,
            group_size=source.group_size,
            reward_parts=self.reward_parts,
            kl_coef=updater.kl_coef,
        )

        # ── 5 · update: epochs × minibatches optimiser steps, gradients summed over micro-batches ─
        with timed(times, "update"):
            metrics |= updater.run(batch, self.step)

        # ── 6 · the sampler gets the new weights ──────────────────────────────────────────────────
        self.make_room()
        with timed(times, "sampling"):
            self.step += 1
            self.engine.set_params(self.to_sampler(), self.step)
        return self.finished(metrics, times, start), rollouts

    def make_room(self) -> None:
        """For the sampler."""
        for model in (self.updater, self.reference) if self.offload else ():
            if model is not None:
                model.rest()

    def wake(self) -> None:
        """What gave way to the sampler comes back."""
        for model in (self.updater, self.reference) if self.offload else ():
            if model is not None:
                model.wake()

    def finished(
        self, metrics: dict[str, float], times: dict[str, float], start: float
    ) -> dict[str, float]:
        """The step's metrics with its times and its memory."""
        metrics["step_time"] = time.perf_counter() - start
        metrics |= {f"time/{name}": seconds for name, seconds in times.items()}
        return metrics | self.memory.metrics()

    def host_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the arrays of `updater.state`, as JSON values."""
        coefs = {name: getattr(self.updater, name) for name in _COEFFICIENTS}
        return {"step": self.step, "num_tokens": self.num_tokens, **coefs}

    def set_host_state(self, state: dict[str, Any]) -> None:
        """Continue where `host_state` was called; the sampler gets the updater's parameters."""
        self.step, self.num_tokens = state["step"], state["num_tokens"]
        for name in _COEFFICIENTS:
            setattr(self.updater, name, state[name])
        self.engine.set_params(self.to_sampler(), self.step)


_COEFFICIENTS = ("kl_coef", "entropy_coef", "applied_entropy_coef")
