# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What follows from an algorithm's settings: its needs, and its coefficients between updates."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.algorithms import entropy, kl
from jaxrl_llm.algorithms.advantages import SEQUENCE_ADVANTAGES
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES
from jaxrl_llm.algorithms.returns import TOKEN_ADVANTAGES

ADVANTAGES = SEQUENCE_ADVANTAGES | TOKEN_ADVANTAGES
# Those that do not compare the samples of one prompt; a group of one has nothing to compare.
ALONE = frozenset({"greedy_baseline", "gae", "reinforce", "reinforce_pp"})


def setting_defaults(function: Callable) -> dict[str, Any]:
    """A function's settings: its keyword-only parameters and their defaults.

    Source: the house rule of this package; see the function's own source, as for PPO
    https://arxiv.org/abs/1707.06347.
    """
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@dataclasses.dataclass(frozen=True, eq=False)
class Requirements:
    """Settings, and what follows from them for whoever calls the algorithm.

    Source: the row's paper, see `presets.PRESETS`; GRPO, https://arxiv.org/abs/2402.03300.

    Attributes:
        name: the preset's name.
        settings: every setting that this algorithm reads, with its value.
    """

    name: str
    settings: Mapping[str, Any]

    def _inputs(self) -> tuple[str, ...]:
        objective = POLICY_LOSSES[self.settings["objective"]][1]
        return (*ADVANTAGES[self.settings["advantage"]][1], *objective)

    def _is_on(self, name: str) -> bool:
        value = self.settings.get(name)
        return value is not None and value is not False and value != "none"

    @property
    def kl_coef(self) -> float:
        """The KL's weight, or its first value where it adapts."""
        return self.settings["kl_coef"]

    @property
    def entropy_coef(self) -> float:
        """The entropy bonus's weight, or its first value where it adapts."""
        return self.settings["entropy_coef"]

    @property
    def needs_ref(self) -> bool:
        """Whether log-probabilities under a reference policy are read."""
        return self.kl_coef > 0

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is taken off the rewards rather than added to the loss."""
        return self.needs_ref and self.settings["kl_in"] == "reward"

    @property
    def needs_old_logp(self) -> bool:
        """Whether log-probabilities of the policy at the start of the update are read.

        With one update per rollout `logp_old` may be None all the same: the policy itself is it.
        """
        if self.needs_staleness:
            return False
        ratio = self.settings.get("ratio_base") == "old"
        return ratio or self._is_on("correction") or self._is_on("rejection")

    @property
    def needs_staleness(self) -> bool:
        """Whether `loss` reads how many updates ago each token was chosen."""
        return self.settings.get("proximal") == "loglinear"

    @property
    def compares_groups(self) -> bool:
        """Whether answers are measured by the others to their prompt; equal ones teach nothing."""
        return self.settings["advantage"] not in ALONE

    @property
    def needs_values(self) -> bool:
        """Whether a critic's values are read, and returns given back for it."""
        return "values" in self._inputs()

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether the reward of a greedy answer to each prompt is read."""
        return "greedy_rewards" in self._inputs()

    @property
    def needs_reward_parts(self) -> bool:
        """Whether the rewards' parts are read, one array per part."""
        return "reward_parts" in self._inputs()

    @property
    def needs_sum_pi_squared(self) -> bool:
        """Whether Σ_v π_v² of each token's distribution is read by `estimate`."""
        return "sum_pi_squared" in self._inputs()

    @property
    def needs_rollout_logp(self) -> bool:
        """Whether `estimate` reads the trainer's log-probabilities of the rollout."""
        return self.needs_sum_pi_squared or self.kl_in_reward

    @property
    def needs_tasks(self) -> bool:
        """Whether `estimate` reads which task each row belongs to."""
        return self._is_on("task_normalize")

    @property
    def needs_batch_stats(self) -> bool:
        """Whether a gradient-free first pass over the optimiser batch comes before the losses."""
        return "stats" in self._inputs() or self._is_on("top_entropy_fraction")

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether gradients flow through the entropy."""
        return self.entropy_coef > 0 or self._is_on("entropy_target")

    def next_kl_coef(self, coef: float, mean_kl: float, samples: int) -> float:
        """The KL's next weight: unchanged unless `kl_target` is set.

        Source: https://arxiv.org/abs/1909.08593, Section 2.2.
        """
        if not self._is_on("kl_target"):
            return coef
        target, horizon = self.settings["kl_target"], self.settings["kl_horizon"]
        return kl.adaptive_kl_coef(coef, mean_kl, target=target, horizon=horizon, samples=samples)

    def next_entropy_coef(self, coef: float, mean_entropy: float) -> tuple[float, float]:
        """The entropy's next (kept, applied) weights: unchanged unless `entropy_target` is set.

        Keep the first and pass it in again; give the second to `loss`.

        Source: Skywork-OR1, https://arxiv.org/abs/2505.22312.
        """
        if not self._is_on("entropy_target"):
            return coef, coef
        target = self.settings["entropy_target"]
        step, maximum = self.settings["entropy_step"], self.settings["entropy_maximum"]
        coef = entropy.adaptive_entropy_coef(
            coef, mean_entropy, target=target, step=step, maximum=maximum
        )
        return coef, entropy.active_entropy_coef(coef, mean_entropy, target=target)

    def stops_epochs(self, approx_kl: float) -> bool:
        """Whether the epochs over this rollout end here: the KL from the old policy is too large.

        Source: PPO's early stopping, https://spinningup.openai.com/en/latest/algorithms/ppo.html.

        Args:
            approx_kl: the mean of the metric of that name over the last optimiser batch.
        """
        return self._is_on("target_kl") and approx_kl > self.settings["target_kl"]
