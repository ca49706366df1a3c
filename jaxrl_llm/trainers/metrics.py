# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step, from rollouts and from (sum, count) pairs; names follow TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm.types import Rollout


class Sums:
    """Adds up (sum, count) pairs by name."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple]] = {}

    def add(self, metrics: Mapping[str, tuple]) -> None:
        for name, pair in metrics.items():
            self._pairs.setdefault(name, []).append(pair)

    def add_means(self, metrics: Mapping[str, float]) -> None:
        """Add plain numbers, to be averaged."""
        self.add({name: (value, 1.0) for name, value in metrics.items()})

    def means(self) -> dict[str, float]:
        """Σ sum / Σ count for every name; names without any count are left out.

        "name/max" is the largest of its sums, "name/sum" becomes "name": Σ sum.
        """
        result = {}
        for name, pairs in self._pairs.items():
            sums = [float(s) for s, _ in pairs]
            count = sum(float(c) for _, c in pairs)
            if name.endswith("/max"):
                result[name] = max(sums)
            elif name.endswith("/sum"):
                result[name.removesuffix("/sum")] = sum(sums)
            elif count > 0:
                result[name] = sum(sums) / count
        return result


def rollout_metrics(rollouts: Sequence[Rollout], group_size: int) -> dict[str, float]:
    """Rewards, their parts, lengths and truncation over one batch of rollouts, ordered by group.

    The spread within groups is that of groups with two judged rollouts or more; without any such
    group it is left out.
    """
    lengths = np.array([len(r.tokens) for r in rollouts])
    clipped = np.array([r.finish_reason == "length" for r in rollouts])
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(clipped.mean()),
    }
    judged = [r.reward for r in rollouts if r.reward is not None]
    metrics["rewards/not_judged"] = float(len(rollouts) - len(judged))
    if not judged:
        return metrics
    values = np.array([reward.value for reward in judged], np.float64)
    metrics["reward"] = float(values.mean())
    for name in sorted({name for reward in judged for name in reward.parts}):
        part = np.array([reward.parts[name] for reward in judged if name in reward.parts])
        metrics[f"rewards/{name}/mean"] = float(part.mean())
        metrics[f"rewards/{name}/std"] = float(part.std())
    spreads = []
    for start in range(0, len(rollouts), group_size):
        group = [r.reward.value for r in rollouts[start : start + group_size] if r.reward]
        if len(group) > 1:
            # The mean of equal numbers is rounded, and their standard deviation then not 0.
            spreads.append(np.std(group, ddof=1) if max(group) > min(group) else 0.0)
    if spreads:
        metrics["reward_std"] = float(np.mean(spreads))
        metrics["frac_reward_zero_std"] = float(np.mean(np.array(spreads) == 0.0))
    return metrics
