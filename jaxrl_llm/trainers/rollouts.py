# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Where a step's rollouts come from: sampled and judged, or read from an earlier run's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from jaxrl_llm.data.curriculum import CurriculumStream
from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.data.rollout_store import RolloutStore
from jaxrl_llm.errors import DataError
from jaxrl_llm.rollout.engine import Request, SamplingParams
from jaxrl_llm.rollout.engines import Sampler
from jaxrl_llm.sharding.processes import is_first, share
from jaxrl_llm.trainers.collect import Collected, GroupFilter, collect
from jaxrl_llm.trainers.scoring import Scorer
from jaxrl_llm.types import Prompt, Rollout


@dataclasses.dataclass
class Rollouts:
    """Makes the groups of a step.

    Attributes:
        stream: the prompts; it hears how their rollouts were judged.
        prompts_per_step: B.
        group_size: samples per prompt, G.
        rule: which groups are learned from.
        engine: the sampler.
        sampling: how completions are drawn.
        scorer: gives rollouts their text, as they finish, and their rewards.
        written: every step's rollouts go there, or None.
    """

    stream: PromptStream | CurriculumStream
    prompts_per_step: int
    group_size: int
    rule: GroupFilter
    engine: Sampler
    sampling: SamplingParams
    scorer: Scorer
    written: RolloutStore | None = None

    def collect(self, step: int, times: dict[str, float]) -> Collected:
        """B groups of G rollouts, in order, judged as they finish; `step` are done before it."""
        prompts = self.stream.next(step=step)
        found = collect(
            prompts,
            lambda prompts, round_: self._groups(step, times, prompts, round_),
            functools.partial(self._more_prompts, step),
            self.rule,
        )
        self.stream.update(found.sampled)
        if self.written is not None and is_first():
            self.written.write(step + 1, found.rollouts)
        return found

    def greedy(
        self, step: int, times: dict[str, float], prompts: Sequence[Prompt]
    ) -> list[Rollout]:
        """One judged greedy rollout of each prompt."""
        sampling = dataclasses.replace(self.sampling, temperature=0.0)
        return self.judged(step, times, prompts, sampling, 1)

    def judged(
        self,
        step: int,
        times: dict[str, float],
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        count: int,
        round_: int = 0,
    ) -> list[Rollout]:
        """`count` completions of each prompt, in order, as text and with rewards.

        Draws depend on seed, step, round and place. Each of several processes samples its share of
        the prompts, every n-th of the one order that Grain gives all of them, and gets the rollouts
        of all. Completions go to the scorer as they finish: the time of "rewards" is what sampling
        did not hide.
        """
        first = (step * self.rule.rounds + round_) * self.prompts_per_step
        requests = [
            Request(prompt=prompt, n=count, params=sampling, uid=first + index)
            for index, prompt in enumerate(prompts)
        ]
        place = {prompt.id: index for index, prompt in enumerate(prompts)}
        with timed(times, "sampling"):
            sampled = self.engine.generate(share(requests))
            done = [self.scorer.submit(rollout) for rollout in sampled]
        with timed(times, "rewards"):
            return self.scorer.finish(done, lambda r: (place[r.prompt.id], r.sample))

    def metrics(self) -> dict[str, float]:
        """Of the choice of prompts."""
        return self.stream.metrics()

    def _groups(
        self, step: int, times: dict[str, float], prompts: Sequence[Prompt], round_: int
    ) -> list[list[Rollout]]:
        size = self.group_size
        rollouts = self.judged(step, times, prompts, self.sampling, size, round_)
        return in_groups(rollouts, size)

    def _more_prompts(self, step: int, count: int, held: Collection[str]) -> list[Prompt]:
        """Prompts for the places of dropped groups."""
        return self.stream.next(count, step=step, without=held)


@dataclasses.dataclass
class StoredRollouts(Rollouts):
    """Reads the groups of a step that an earlier run wrote, with their rewards.

    Attributes:
        read: where they lie.
        vocab_size: token ids are below it.
        weights: of the rewards that count, by name; the stored rewards must be made of these.
    """

    read: RolloutStore = dataclasses.field(kw_only=True)
    vocab_size: int = dataclasses.field(kw_only=True)
    weights: Mapping[str, float] = dataclasses.field(kw_only=True)

    def collect(self, step: int, times: dict[str, float]) -> Collected:
        with timed(times, "sampling"):
            rollouts = self.read.read(step + 1, vocab_size=self.vocab_size)
        self._check(step + 1, rollouts)
        return Collected(in_groups(rollouts, self.group_size), False, 1, [])

    def metrics(self) -> dict[str, float]:
        return {}

    def _check(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """The batch must be one that this config could have sampled."""
        path, size = self.read.path(step), self.group_size
        if len(rollouts) != self.prompts_per_step * size:
            raise DataError(
                f"{path} holds another number of rollouts than a step of this config has",
                got=len(rollouts),
                expected=f"{self.prompts_per_step} prompts × {size} samples",
                hint="the train.prompts_per_step and sampler.group_size that they were made with",
            )
        check_groups(path, rollouts, size)
        check_stored_rewards(path, rollouts, self.weights)
        prompt = max(len(rollout.prompt.tokens) for rollout in rollouts)
        new = max(len(rollout.tokens) for rollout in rollouts)
        config = self.engine.config
        if prompt > config.max_prompt_tokens or new > config.max_new_tokens:
            raise DataError(
                f"{path} holds rollouts that are longer than this config allows",
                got=f"{prompt} prompt and {new} new tokens",
                expected=f"at most {config.max_prompt_tokens} and {config.max_new_tokens}",
                hint=f"--sampler.max_prompt_tokens={prompt} --sampler.max_new_tokens={new}",
            )


def check_groups(path: pathlib.Path, rollouts: Sequence[Rollout], size: int) -> None:
    """That stored rollouts are whole groups of `size`, each of a prompt of its own.

    Raises:
        DataError: they are not.
    """
    expected = f"{size} samples of each prompt, one after another"
    seen: set[str] = set()
    for group in in_groups(rollouts, size):
        ids = {rollout.prompt.id for rollout in group}
        name = ", ".join(sorted(ids)[:3])
        if len(ids) > 1:
            got = f"{name} in one group"
        elif ids & seen:
            got = f"{name} in several groups"
        elif (samples := [rollout.sample for rollout in group]) != list(range(size)):
            got = f"the samples {samples} of {name}"
        else:
            seen |= ids
            continue
        raise DataError(f"{path} holds groups of another size", got=got, expected=expected)


def check_stored_rewards(
    path: pathlib.Path, rollouts: Sequence[Rollout], weights: Mapping[str, float]
) -> None:
    """That stored rewards are ``Σᵢ wᵢ·partᵢ`` of the rewards that count; None stays None.

    Raises:
        DataError: they were made by other rewards, or with other weights.
    """
    for rollout in rollouts:
        if rollout.reward is None:
            continue
        value, parts = rollout.reward.value, rollout.reward.parts
        terms = [weight * parts.get(name, math.nan) for name, weight in weights.items()]
        # Rows in another order add up to other last bits.
        if not abs(sum(terms) - value) <= 1e-9 * sum(map(abs, terms)):
            named = " + ".join(f"{weight:g}·{name}" for name, weight in weights.items())
            found = ", ".join(f"{name} {part:g}" for name, part in list(parts.items())[:4])
            raise DataError(
                f"{path} holds rewards that are not this config's",
                got=f"{value:g} from {found or 'no parts'}",
                expected=named,
                hint="the rewards and weights that they were made with",
            )


def in_groups(rollouts: Sequence[Rollout], size: int) -> list[list[Rollout]]:
    """Consecutive rollouts in lists of `size`."""
    return [list(rollouts[start : start + size]) for start in range(0, len(rollouts), size)]


@contextlib.contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of the block to `times[name]`."""
    start = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - start
