# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What a config file may say about the algorithm, and which values are allowed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class AlgoConfig:
    """The algorithm of a run. None means: the chosen row's own value.

    Setting something that the chosen row does not use is an error: nothing is silently ignored.
    The rows and their values are `presets.PRESETS`; the meaning of each choice is in the function
    that reads it.

    Attributes:
        name: a row of the table: grpo, dr_grpo, dapo, rloo, ppo, gspo, cispo, ….
        advantage: how rewards become advantages, a key of `requirements.ADVANTAGES`.
        ratio_level: token, sequence (GSPO) or sequence_token (GSPO-token).
        ratio_base: the policy under the ratio: old (start of the update) or sampler.
        proximal: recompute the old policy, or guess it (loglinear) from staleness.
        objective: the per-token objective, a key of `policy_losses.POLICY_LOSSES`.
        reduction: token_mean, sequence_mean, sequence_sum or constant.
        constant: what the constant reduction divides each sequence by; the longest completion.
        kl_coef: weight of the KL to the reference policy; 0 is off and needs no reference.
        kl_estimator: k1, k2, k3, abs, or with the reverse KL's gradient k1+, k3+, abs+.
        kl_in: loss or reward.
        kl_importance: none, detached or full: weight the KL by π/μ on off-policy tokens.
        kl_target: adapt kl_coef so that the KL stays near this.
        kl_horizon: sequences over which kl_coef adapts.
        entropy_coef: weight of the entropy bonus; 0 is off.
        entropy_target: adapt entropy_coef so that the entropy does not fall below this, in nats.
        entropy_step: by how much entropy_coef moves at each update.
        entropy_maximum: the largest entropy_coef.
        top_entropy_fraction: policy term only on this share of tokens, the most uncertain ones.
        correction: weight by π_old/μ: none, plain, truncate (TIS), mask (MIS) or icepop.
        correction_level: token, sequence or geometric.
        correction_low: the least weight that icepop keeps.
        correction_high: the cap of truncate, the largest weight that mask and icepop keep.
        rejection: drop by a mismatch statistic: none, token_k1, sequence_mean_k3, ….
        rejection_low: lower bound on μ/π_old for k1 statistics; 1/rejection_high if not set.
        rejection_high: upper bound on μ/π_old for k1 statistics, on the statistic for k2 and k3.
        off_policy_delta: drop bad answers whose mean log μ/π exceeds this.
        target_kl: end the epochs over a rollout once the KL from the old policy exceeds this.
        task_normalize: normalise advantages over all trained tokens of each task.
        ddof: 1 for the unbiased standard deviation, 0 for the population's.
        eps: added to the standard deviation (or mean) that advantages are divided by.
        normalize_std: best_of_group: divide by the group's standard deviation.
        pass_k: pass_at_k: the k.
        gpg_factor: gpg: informative or nonzero_rewards.
        batch_normalize: gdpo: sequences, tokens or none.
        reward_weights: gdpo: one weight per reward part.
        zero_tail: token baselines: none beyond the second longest row.
        gamma: discount per chosen token.
        lam: λ of GAE.
        whiten: whiten the advantages over the rollout batch.
        value_clip: how far the critic may move from its old value; inf is the plain loss.
        clip_low: how far below 1 the ratio may fall (gmpo: its logarithm below 0).
        clip_high: how far above 1 the ratio may rise (gmpo: its logarithm above 0).
        dual_clip: a token of negative advantage never costs more than this times |advantage|.
        ratio_cap: the ratio's cap in the unclipped term.
        weight_max: aipo, dppo: cap of the detached importance weight.
        gate_positive: sapo: gate temperature for positive advantages.
        gate_negative: sapo: gate temperature for the others.
        divergence_low: dppo: trust region for tokens to be made rarer.
        divergence_high: dppo: trust region for tokens to be made likelier.
        dro_beta: dro: weight of the quadratic penalty.
        cov_fraction: clip_cov, kl_cov: share of tokens selected.
        cov_low: clip_cov: least covariance of a candidate.
        cov_high: clip_cov: largest covariance of a candidate.
        cov_kl_coef: kl_cov: weight of the penalty on the selected tokens.
    """

    name: str = "grpo"
    advantage: str | None = None
    ratio_level: str | None = None
    ratio_base: str | None = None
    proximal: str | None = None
    objective: str | None = None
    reduction: str | None = None
    constant: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str | None = None
    kl_in: str | None = None
    kl_importance: str | None = None
    kl_target: float | None = None
    kl_horizon: float | None = None
    entropy_coef: float = 0.0
    entropy_target: float | None = None
    entropy_step: float | None = None
    entropy_maximum: float | None = None
    top_entropy_fraction: float | None = None
    correction: str | None = None
    correction_level: str | None = None
    correction_low: float | None = None
    correction_high: float | None = None
    rejection: str | None = None
    rejection_low: float | None = None
    rejection_high: float | None = None
    off_policy_delta: float | None = None
    target_kl: float | None = None
    task_normalize: bool | None = None
    ddof: int | None = None
    eps: float | None = None
    normalize_std: bool | None = None
    pass_k: int | None = None
    gpg_factor: str | None = None
    batch_normalize: str | None = None
    reward_weights: tuple[float, ...] | None = None
    zero_tail: bool | None = None
    gamma: float | None = None
    lam: float | None = None
    whiten: bool | None = None
    value_clip: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_cap: float | None = None
    weight_max: float | None = None
    gate_positive: float | None = None
    gate_negative: float | None = None
    divergence_low: float | None = None
    divergence_high: float | None = None
    dro_beta: float | None = None
    cov_fraction: float | None = None
    cov_low: float | None = None
    cov_high: float | None = None
    cov_kl_coef: float | None = None


# setting → (lower bound, whether the bound itself is allowed, upper bound which always is)
_RANGES: dict[str, tuple[float, bool, float]] = {
    "constant": (0.0, False, float("inf")),
    "kl_coef": (0.0, True, float("inf")),
    "kl_target": (0.0, False, float("inf")),
    "kl_horizon": (0.0, False, float("inf")),
    "entropy_coef": (0.0, True, float("inf")),
    "entropy_target": (0.0, False, float("inf")),
    "entropy_step": (0.0, False, float("inf")),
    "entropy_maximum": (0.0, False, float("inf")),
    "top_entropy_fraction": (0.0, False, 1.0),
    "correction_low": (0.0, True, float("inf")),
    "correction_high": (0.0, False, float("inf")),
    "rejection_low": (0.0, False, float("inf")),
    "rejection_high": (0.0, False, float("inf")),
    "off_policy_delta": (0.0, True, float("inf")),
    "target_kl": (0.0, False, float("inf")),
    "eps": (0.0, True, float("inf")),
    "pass_k": (1, True, float("inf")),
    "gamma": (0.0, True, 1.0),
    "lam": (0.0, True, 1.0),
    "value_clip": (0.0, False, float("inf")),
    "clip_low": (0.0, False, 1.0),
    "clip_high": (0.0, False, float("inf")),
    "dual_clip": (1.0, False, float("inf")),
    "ratio_cap": (1.0, False, float("inf")),
    "weight_max": (0.0, False, float("inf")),
    "gate_positive": (0.0, False, float("inf")),
    "gate_negative": (0.0, False, float("inf")),
    "divergence_low": (0.0, True, float("inf")),
    "divergence_high": (0.0, True, float("inf")),
    "dro_beta": (0.0, True, float("inf")),
    "cov_fraction": (0.0, False, 1.0),
    "cov_kl_coef": (0.0, True, float("inf")),
}


# Settings whose infinity means "no bound on this side".
_MAY_BE_INFINITE = frozenset(
    {
        "value_clip", "clip_high", "correction_high", "rejection_high", "weight_max",
        "divergence_low", "divergence_high",
    }
)  # fmt: skip


def check_ranges(values: Mapping[str, Any], choices: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses a value outside its range or its list of choices.

    Source: the bounds that the settings' own papers imply, see `presets.PRESETS` and
    https://arxiv.org/abs/1707.06347.

    Raises:
        ConfigError: naming the setting, its value and what is allowed.
    """
    for name, value in values.items():
        if value is None:
            continue
        if name in choices and value not in choices[name]:
            allowed = ", ".join(str(choice) for choice in choices[name])
            raise ConfigError(f"algo.{name} is unknown", got=value, expected=f"one of {allowed}")
        unbounded = name in _MAY_BE_INFINITE and value == float("inf")
        if isinstance(value, float) and not math.isfinite(value) and not unbounded:
            raise ConfigError(f"algo.{name} is not finite", got=value)
        if name in _RANGES:
            low, closed, high = _RANGES[name]
            above = value >= low if closed else value > low
            if not (above and value <= high):
                least = f"{'at least' if closed else 'more than'} {low:g}"
                most = "" if high == float("inf") else f" and at most {high:g}"
                raise ConfigError(f"algo.{name} is out of range", got=value, expected=least + most)
    for low_name, high_name in (
        ("correction_low", "correction_high"),
        ("rejection_low", "rejection_high"),
        ("cov_low", "cov_high"),
    ):
        low_value, high_value = values.get(low_name), values.get(high_name)
        if low_value is not None and high_value is not None and low_value > high_value:
            raise ConfigError(
                f"algo.{low_name} lies above algo.{high_name}",
                got=f"{low_value} and {high_value}",
            )
    _check_ratio_one(values)


def _check_ratio_one(values: Mapping[str, Any]) -> None:
    """Bounds on a ratio must keep 1: a sampler that agrees with the trainer loses no token."""
    bounded = []
    if values.get("correction") in ("mask", "icepop"):
        bounded += [("correction_low", 1.0), ("correction_high", -1.0)]
    if str(values.get("rejection")).endswith("_k1"):
        bounded += [("rejection_low", 1.0), ("rejection_high", -1.0)]
    for name, side in bounded:
        value = values.get(name)
        if value is not None and side * value > side:
            raise ConfigError(
                f"algo.{name} drops tokens on which sampler and trainer agree: their ratio is 1",
                got=value,
                expected="at most 1" if side > 0 else "at least 1",
            )
