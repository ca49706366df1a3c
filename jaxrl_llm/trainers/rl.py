# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""One step of reinforcement learning, top to bottom. Read this file first.

    prompts ─► sampler ─► rollouts ─► rewards ─► advantages ─► log-probabilities ─► update
                  ▲                                                                   │
                  └─────────────────────────── new weights ◄──────────────────────────┘

`build.py` makes the pieces, `loop.py` repeats the step, saves, evaluates and stops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.advantages import reward_arrays
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.errors import NonFinite
from jaxrl_llm.rollout.engine import Engine, Request, SamplingParams
from jaxrl_llm.trainers.batching import count_targets, micro_batches, pad_rollouts, take_rows
from jaxrl_llm.trainers.metrics import Sums, rollout_metrics
from jaxrl_llm.trainers.state import TrainFunctions, TrainState
from jaxrl_llm.types import Batch, Prompt, Rollout


@dataclasses.dataclass
class RLTrainer:
    """The pieces of a run and what changes while it runs.

    Attributes:
        next_prompts: the prompts of the next step.
        engine: the sampler; its weights always carry the number of the step that made them.
        sampling: how completions are drawn.
        group_size: samples per prompt, G.
        score: rollouts → rollouts with rewards and completions as text.
        algorithm: the resolved row of `algorithms/presets.py`.
        functions: compiled programs of the update.
        put: moves a batch of numpy arrays onto the mesh.
        to_sampler: moves parameters from the trainer's devices to the sampler's.
        ref_params: the reference policy, or None where its KL is not used.
        learning_rate: the schedule, by updates done.
        epochs, minibatches, micro_batch: how a rollout batch is cut into optimiser updates.
        longest_row: tokens that prompt and completion can have together.
        step: steps done.
        num_tokens: prompt and completion tokens seen since the run began.
    """

    next_prompts: Callable[[], list[Prompt]]
    engine: Engine
    sampling: SamplingParams
    group_size: int
    score: Callable[[Sequence[Rollout]], list[Rollout]]
    algorithm: Algorithm
    functions: TrainFunctions
    put: Callable[[Batch], Batch]
    to_sampler: Callable[[Any], Any]
    state: TrainState
    ref_params: Any | None
    learning_rate: Callable[[int], Any]
    epochs: int
    minibatches: int
    micro_batch: int
    longest_row: int
    seed: int
    step: int = 0
    num_tokens: int = 0

    def train_step(self) -> tuple[dict[str, float], list[Rollout]]:
        """Sample, score and learn from one batch; returns the step's metrics and its rollouts."""
        times: dict[str, float] = {}
        start = time.perf_counter()

        # ── 1 · prompts and rollouts: B prompts × G samples, in order ─────────────────────────────
        with timed(times, "sampling"):
            prompts = self.next_prompts()
            rollouts = self.sample(prompts)

        # ── 2 · rewards: text rendered from tokens, verdicts attached, None = not judged ──────────
        with timed(times, "rewards"):
            rollouts = self.score(rollouts)

        # ── 3 · rows and advantages: one rollout a row, statistics over the whole batch ───────────
        batch = pad_rollouts(rollouts, longest=self.longest_row)
        batch = batch.replace(advantages=self.advantages(rollouts, batch))

        # ── 4 · log-probabilities before the update, where the algorithm needs them ───────────────
        with timed(times, "logprobs"):
            if self.epochs * self.minibatches > 1:
                batch = batch.replace(logp_old=self.logprobs(self.state.params, batch)[0])
            if self.ref_params is not None:
                batch = batch.replace(logp_ref=self.logprobs(self.ref_params, batch)[0])

        # ── 5 · update: epochs × minibatches optimiser steps, gradients summed over micro-batches ─
        with timed(times, "update"):
            sums = Sums()
            for minibatch in self.cut(batch):
                self.update(minibatch, sums)
            jax.block_until_ready(self.state.params)

        # ── 6 · the sampler gets the new weights ──────────────────────────────────────────────────
        with timed(times, "sampling"):
            self.step += 1
            self.engine.set_params(self.to_sampler(self.state.params), self.step)

        metrics = rollout_metrics(rollouts, self.group_size) | sums.means()
        self.num_tokens += sum(len(r.prompt.tokens) + len(r.tokens) for r in rollouts)
        metrics["num_tokens"] = float(self.num_tokens)
        metrics["learning_rate"] = float(self.learning_rate(int(self.state.updates) - 1))
        metrics["step_time"] = time.perf_counter() - start
        metrics |= {f"time/{name}": seconds for name, seconds in times.items()}
        return metrics, rollouts

    def sample(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """G completions of each prompt, in order; draws depend on (seed, step, prompt, sample)."""
        first = self.step * len(prompts)
        requests = [
            Request(prompt=prompt, n=self.group_size, params=self.sampling, uid=first + index)
            for index, prompt in enumerate(prompts)
        ]
        place = {prompt.id: index for index, prompt in enumerate(prompts)}
        done = list(self.engine.generate(requests))
        return sorted(done, key=lambda rollout: (place[rollout.prompt.id], rollout.sample))

    def advantages(self, rollouts: Sequence[Rollout], batch: Batch) -> np.ndarray:
        """One advantage a token, from the whole batch; 0 for rollouts that were not judged."""
        values = [None if r.reward is None else r.reward.value for r in rollouts]
        rewards, valid = reward_arrays(values, self.group_size)
        return np.asarray(self.algorithm.advantages(rewards, batch.mask, valid=valid), np.float32)

    def logprobs(self, params: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and entropies of the trained tokens, a micro-batch at a time."""
        targets = count_targets(batch.mask, self.sampling.max_tokens)
        parts = [
            self.functions.logprobs(params, self.put(micro), targets)
            for micro in micro_batches(batch, self.micro_batch)
        ]
        logp, entropy = zip(*parts, strict=True)
        return np.concatenate(jax.device_get(logp)), np.concatenate(jax.device_get(entropy))

    def cut(self, batch: Batch) -> Iterator[Batch]:
        """This step's optimiser batches: each row once an epoch, shuffled by (seed, step)."""
        rows = batch.tokens.shape[0]
        for epoch in range(self.epochs):
            order = np.arange(rows)
            if self.minibatches > 1:
                order = np.random.default_rng((self.seed, self.step, epoch)).permutation(rows)
            for part in np.split(order, self.minibatches):
                yield take_rows(batch, part)

    def update(self, batch: Batch, sums: Sums) -> None:
        """One optimiser step. Counts come first, so that no split of the batch changes the loss."""
        counts = self.algorithm.counts(batch.mask, batch.segment_ids)
        targets = count_targets(batch.mask, self.sampling.max_tokens)
        stats = None
        if self.algorithm.needs_batch_stats:
            logp, entropy = self.logprobs(self.state.params, batch)
            stats = self.algorithm.batch_stats(logp, entropy, batch)
        grads = self.functions.zeros(self.state.params)
        losses = []
        for micro in micro_batches(batch, self.micro_batch):
            grads, (loss, metrics) = self.functions.accumulate(
                grads, self.state.params, self.put(micro), counts, stats, targets
            )
            losses.append(loss)
            sums.add(metrics)
        loss, norm = float(sum(losses)), float(self.functions.norm(grads))
        if not (np.isfinite(loss) and np.isfinite(norm)):
            raise NonFinite(
                f"a loss or gradient is not finite in step {self.step + 1}",
                got=f"loss {loss}, gradient norm {norm}",
                hint="a lower learning rate; the last checkpoint before it is intact",
            )
        sums.add({"loss": (loss, 1.0), "grad_norm": (norm, 1.0)})
        self.state = self.functions.apply(self.state, grads)


@contextlib.contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of the block to `times[name]`."""
    start = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - start
