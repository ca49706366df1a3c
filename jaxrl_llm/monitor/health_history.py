# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What the alarms remember of a run's metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any


class History:
    """The first and the latest values of the metrics that are looked at; small, and JSON-able.

    Args:
        window: the most steps that a check looks back.
        baseline: first steps of the run, which later ones are compared with.
    """

    def __init__(self, *, window: int, baseline: int):
        self._window, self._baseline = window, baseline
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, list[float]] = {}
        self.lowest, self.highest = math.inf, -math.inf  # rewards of the whole run
        # (step, held-out result, mean training reward of the window before it or None)
        self.evaluations: list[tuple[int, float, float | None]] = []
        self.fresh: set[str] = set()  # metrics of the latest step

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One more step; what is missing or not finite is skipped."""
        values = {name: float(metrics[name]) for name in _SERIES if name in metrics}
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        self.fresh = set(values)
        for name, value in values.items():
            first = self._first.setdefault(name, [])
            if len(first) < self._baseline:
                first.append(value)
            # One more than the window: a spike is compared with the window before it.
            self._last[name] = [*self._last.get(name, []), value][-self._window - 1 :]
        self.lowest = min(self.lowest, values.get("rewards/lowest", math.inf))
        self.highest = max(self.highest, values.get("rewards/highest", -math.inf))
        for name in HELDOUT:
            if name in values:
                before = self.latest("reward", self._window)
                mean = statistics.fmean(before) if before else None
                self.evaluations.append((step, values[name], mean))
                break
        # The best and the last two decide.
        best = sorted(self.evaluations[:-2], key=lambda e: e[1])[-1:]
        self.evaluations = best + self.evaluations[-2:]

    def latest(self, name: str, count: int) -> list[float]:
        """At most `count` of the latest values."""
        return self._last.get(name, [])[-count:]

    def mean(self, name: str, count: int) -> float | None:
        """The mean of the latest `count` values; None before there are as many."""
        values = self.latest(name, count)
        return statistics.fmean(values) if len(values) == count else None

    def start(self, name: str) -> float | None:
        """The mean over the first steps; None before they are over."""
        values = self._first.get(name, [])
        return statistics.fmean(values) if len(values) == self._baseline else None

    @property
    def reward_range(self) -> float | None:
        """Highest − lowest reward of the run; None where rewards were not given."""
        return self.highest - self.lowest if self.highest >= self.lowest else None

    def get_state(self) -> dict[str, Any]:
        range_ = [self.lowest, self.highest] if self.reward_range is not None else None
        return {
            "first": {name: list(values) for name, values in self._first.items()},
            "last": {name: list(values) for name, values in self._last.items()},
            "rewards": range_,
            "evaluations": [list(evaluation) for evaluation in self.evaluations],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._first = {name: [*map(float, values)] for name, values in state["first"].items()}
        self._last = {name: [*map(float, values)] for name, values in state["last"].items()}
        self.lowest, self.highest = state["rewards"] or (math.inf, -math.inf)
        self.evaluations = [(int(s), float(v), r) for s, v, r in state["evaluations"]]
        self.fresh = set()


HELDOUT = ("eval/accuracy", "eval/reward")  # the first that a run has
_SERIES = (
    "frac_reward_zero_std", "groups/alike_reward", "rewards/lowest", "rewards/highest",
    "rewards/not_judged_ratio", "reward", "entropy", "kl", "grad_norm",
    "completions/distinct_3", "completions/mean_length", "completions/clipped_ratio",
    "completions/clipped_reward", "completions/clipped_reward_std", "completions/finished_reward",
    "sampling/sampling_logp_difference/mean", *HELDOUT,
)  # fmt: skip
