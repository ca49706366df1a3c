# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""One step of reinforcement learning, top to bottom. Read this file first.

    prompts ─► sampler ─► rollouts ─► rewards ─► advantages ─► log-probabilities ─► update
                  ▲                                                                   │
                  └─────────────────────────── new weights ◄──────────────────────────┘

`build.py` makes the pieces, `collect.py` says which groups are learned from, `update.py` cuts
batches and adds gradients up, `loop.py` repeats the step, saves, evaluates and stops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from jaxrl_llm.data.curriculum import CurriculumStream
from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.rollout.engine import Engine, Request, SamplingParams
from jaxrl_llm.trainers.batching import pad_rollouts
from jaxrl_llm.trainers.collect import GroupFilter, collect
from jaxrl_llm.trainers.credit import credit
from jaxrl_llm.trainers.metrics import rollout_metrics
from jaxrl_llm.trainers.scoring import Scorer
from jaxrl_llm.trainers.update import Updater
from jaxrl_llm.types import Prompt, Rollout


@dataclasses.dataclass
class RLTrainer:
    """The pieces of a run and what changes while it runs.

    Attributes:
        stream: the prompts; it hears how their rollouts were judged.
        prompts_per_step: B.
        rule: which groups are learned from.
        mask_truncated: completions that were cut off are judged and not trained on.
        engine: the sampler; its weights always carry the number of the step that made them.
        sampling: how completions are drawn.
        group_size: samples per prompt, G.
        scorer: gives rollouts their text, as they finish, and their rewards.
        reward_parts: names of the rewards that count, in order.
        updater: learns from a batch of rows; holds parameters and optimiser state.
        to_sampler: moves parameters from the trainer's devices to the sampler's.
        ref_params: the reference policy, or None where its KL is not used.
        longest_row: tokens that prompt and completion can have together.
        step: steps done.
        num_tokens: prompt and completion tokens seen since the run began.
    """

    stream: PromptStream | CurriculumStream
    prompts_per_step: int
    rule: GroupFilter
    mask_truncated: bool
    engine: Engine
    sampling: SamplingParams
    group_size: int
    scorer: Scorer
    reward_parts: tuple[str, ...]
    updater: Updater
    to_sampler: Callable[[Any], Any]
    ref_params: Any | None
    longest_row: int
    step: int = 0
    num_tokens: int = 0

    def train_step(self) -> tuple[dict[str, float], list[Rollout]]:
        """Sample, score and learn from one batch; returns the step's metrics and its rollouts."""
        algorithm, updater = self.updater.algorithm, self.updater
        times: dict[str, float] = {}
        start = time.perf_counter()

        # ── 1 · prompts and rollouts: B prompts × G samples, in order, judged as they finish ──────
        prompts = self.stream.next(step=self.step)
        sample = functools.partial(self.groups, times)
        collected = collect(prompts, sample, self.more_prompts, self.rule)
        rollouts = collected.rollouts
        self.stream.update(collected.sampled)

        # ── 2 · greedy completions of the same prompts, where they are the baseline ───────────────
        baseline = []
        if algorithm.needs_greedy_baseline:
            greedy = dataclasses.replace(self.sampling, temperature=0.0)
            prompts = [group[0].prompt for group in collected.groups]
            baseline = self.judged(times, prompts, greedy, 1)

        # ── 3 · rows, and the log-probabilities that the algorithm needs before the update ────────
        with timed(times, "logprobs"):
            batch = pad_rollouts(
                rollouts, longest=self.longest_row, mask_truncated=self.mask_truncated
            )
            if updater.takes_several_updates or algorithm.needs_rollout_logp:
                batch = batch.replace(logp_old=updater.logprobs(updater.params, batch)[0])
            if self.ref_params is not None:
                batch = batch.replace(logp_ref=updater.logprobs(self.ref_params, batch)[0])
            if updater.critic is not None:
                batch = batch.replace(values=updater.critic.values(batch))

        # ── 4 · advantages: one a token, statistics over the whole batch ──────────────────────────
        batch = credit(
            batch,
            rollouts,
            baseline,
            algorithm,
            group_size=self.group_size,
            reward_parts=self.reward_parts,
            kl_coef=updater.kl_coef,
        )

        # ── 5 · update: epochs × minibatches optimiser steps, gradients summed over micro-batches ─
        with timed(times, "update"):
            metrics = updater.run(batch, self.step)

        # ── 6 · the sampler gets the new weights ──────────────────────────────────────────────────
        with timed(times, "sampling"):
            self.step += 1
            self.engine.set_params(self.to_sampler(updater.params), self.step)

        self.num_tokens += sum(len(r.prompt.tokens) + len(r.tokens) for r in rollouts)
        metrics |= rollout_metrics(rollouts, self.group_size) | collected.metrics()
        metrics |= self.stream.metrics()
        metrics["num_tokens"] = float(self.num_tokens)
        metrics["step_time"] = time.perf_counter() - start
        metrics |= {f"time/{name}": seconds for name, seconds in times.items()}
        return metrics, rollouts

    def more_prompts(self, count: int, held: Collection[str]) -> list[Prompt]:
        """Prompts for the places of dropped groups."""
        return self.stream.next(count, step=self.step, without=held)

    def groups(
        self, times: dict[str, float], prompts: Sequence[Prompt], round_: int
    ) -> list[list[Rollout]]:
        """A judged group for each prompt; every round of a step draws anew."""
        size = self.group_size
        rollouts = self.judged(times, prompts, self.sampling, size, round_)
        return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]

    def judged(
        self,
        times: dict[str, float],
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        count: int,
        round_: int = 0,
    ) -> list[Rollout]:
        """`count` completions of each prompt, in order, as text and with rewards.

        Draws depend on seed, step, round and place. Completions go to the scorer as they finish:
        the time of "rewards" is what sampling did not hide.
        """
        first = (self.step * self.rule.rounds + round_) * self.prompts_per_step
        requests = [
            Request(prompt=prompt, n=count, params=sampling, uid=first + index)
            for index, prompt in enumerate(prompts)
        ]
        place = {prompt.id: index for index, prompt in enumerate(prompts)}
        with timed(times, "sampling"):
            done = [self.scorer.submit(rollout) for rollout in self.engine.generate(requests)]
        with timed(times, "rewards"):
            return self.scorer.finish(
                sorted(done, key=lambda rollout: (place[rollout.prompt.id], rollout.sample))
            )

    def host_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the arrays of `updater.state`, as JSON values."""
        coefs = {name: getattr(self.updater, name) for name in _COEFFICIENTS}
        return {"step": self.step, "num_tokens": self.num_tokens, **coefs}

    def set_host_state(self, state: dict[str, Any]) -> None:
        """Continue where `host_state` was called; the sampler gets the updater's parameters."""
        self.step, self.num_tokens = state["step"], state["num_tokens"]
        for name in _COEFFICIENTS:
            setattr(self.updater, name, state[name])
        self.engine.set_params(self.to_sampler(self.updater.params), self.step)


_COEFFICIENTS = ("kl_coef", "entropy_coef", "applied_entropy_coef")


@contextlib.contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of the block to `times[name]`."""
    start = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - start
