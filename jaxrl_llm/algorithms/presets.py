# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The table of algorithms: a preset is a row of five choices; `resolve` makes functions of it.

advantage × ratio level × per-token objective × reduction × KL

A new algorithm is a function in its module and a row here. `EQUAL` names the rows that compute the
same, and when.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.corrections import CORRECTIONS, REJECTIONS, WEIGHT_LEVELS
from jaxrl_llm.algorithms.kl import KL_ESTIMATORS
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES
from jaxrl_llm.algorithms.ratios import RATIO_LEVELS
from jaxrl_llm.algorithms.reductions import REDUCTIONS
from jaxrl_llm.algorithms.requirements import ADVANTAGES, ALONE, setting_defaults
from jaxrl_llm.algorithms.settings import AlgoConfig, check_ranges
from jaxrl_llm.errors import ConfigError

__all__ = ["EQUAL", "PRESETS", "AlgoConfig", "Algorithm", "Preset", "readable", "resolve"]


@dataclasses.dataclass(frozen=True)
class Preset:
    """One row: the choices by name, and the defaults in which the paper has values of its own.

    Source: the row's own `source`; GRPO, https://arxiv.org/abs/2402.03300.

    Attributes:
        source: the paper.
        advantage: a key of `requirements.ADVANTAGES`.
        objective: a key of `policy_losses.POLICY_LOSSES`.
        reduction: one of `reductions.REDUCTIONS`.
        defaults: setting → this row's default; among them ratio_level, ratio_base, kl_in.
        required: settings that may not be switched off, since the row is nothing without them.
    """

    source: str
    advantage: str
    objective: str
    reduction: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: tuple[str, ...] = ()


def _row(source, advantage, objective, reduction, required=(), **defaults):
    return Preset(
        f"https://arxiv.org/abs/{source}", advantage, objective, reduction, defaults, required
    )


_REWARD_KL = {"kl_in": "reward", "kl_estimator": "k1"}
_SAMPLER = {"ratio_base": "sampler"}

# fmt: off
PRESETS: dict[str, Preset] = {
    # the advantage is the news
    "grpo":          _row("2402.03300", "group_std", "clip", "sequence_mean"),
    "dr_grpo":       _row("2503.20783", "group_mean", "clip", "constant"),
    "dapo":          _row("2503.14476", "group_std", "clip", "token_mean", clip_high=0.28),
    "rloo":          _row("2402.14740", "leave_one_out", "pg", "sequence_sum", **_REWARD_KL),
    "reinforce":     Preset("https://link.springer.com/article/10.1007/BF00992696",
                            "reinforce", "pg", "sequence_sum", _REWARD_KL),
    "reinforce_pp":  _row("2501.03262", "reinforce_pp", "clip", "token_mean", **_REWARD_KL),
    "reinforce_pp_baseline":
                     _row("2501.03262", "reinforce_pp_baseline", "clip", "token_mean",
                          kl_estimator="k2"),
    "remax":         _row("2310.10505", "greedy_baseline", "pg", "sequence_sum", **_REWARD_KL),
    "opo":           _row("2505.23585", "length_weighted", "pg", "sequence_sum"),
    "gpg":           _row("2504.02546", "gpg", "pg", "token_mean"),
    "best_of_group": _row("2503.19595", "best_of_group", "clip", "sequence_mean"),
    "pass_at_k":     _row("2508.10751", "pass_at_k", "clip", "token_mean"),
    "gdpo":          _row("2601.05242", "decoupled_rewards", "clip", "sequence_mean"),
    "maxrl":         _row("2602.02710", "maximum_likelihood", "clip", "token_mean"),
    "otb":           _row("2602.07078", "token_baseline", "clip", "sequence_sum"),
    "otb_tools":     _row("2602.07078", "tool_token_baseline", "clip", "sequence_sum"),
    "agentrl":       _row("2510.04206", "group_mean", "clip", "token_mean", task_normalize=True),
    "ppo":           _row("1707.06347", "gae", "clip", "token_mean", **_REWARD_KL),
    # the objective is the news
    "gspo":          _row("2507.18071", "group_std", "clip", "sequence_mean",
                          ratio_level="sequence", clip_low=3e-4, clip_high=4e-4),
    "gspo_token":    _row("2507.18071", "group_std", "clip", "sequence_mean",
                          ratio_level="sequence_token", clip_low=3e-4, clip_high=4e-4),
    "cispo":         _row("2506.13585", "group_std", "cispo", "token_mean"),
    "sapo":          _row("2511.20347", "group_std", "sapo", "sequence_mean"),
    "gmpo":          _row("2507.20673", "group_std", "gmpo", "sequence_mean"),
    "clip_cov":      _row("2505.22617", "group_std", "clip_cov", "token_mean"),
    "kl_cov":        _row("2505.22617", "group_std", "kl_cov", "token_mean"),
    # off-policy by design
    "dppo":          _row("2602.04879", "group_std", "dppo_tv", "token_mean", **_SAMPLER),
    "dppo_kl":       _row("2602.04879", "group_std", "dppo_kl", "token_mean", **_SAMPLER),
    "aipo":          _row("2505.24034", "group_mean", "aipo", "token_mean", **_SAMPLER),
    "dro":           _row("2405.19107", "group_mean", "dro", "token_mean", **_SAMPLER),
    "decoupled_ppo": _row("2505.24298", "group_std", "clip", "token_mean", ("correction",),
                          correction="plain"),
}
# fmt: on

# Pairs of rows that compute the same gradient, and when.
EQUAL: dict[frozenset[str], str] = {
    frozenset({"gspo", "gspo_token"}): "the advantages are constant over each sequence",
    frozenset({"reinforce_pp", "reinforce_pp_baseline"}): (
        "every group has the same mean reward, gamma is 1 and no KL is used"
    ),
    frozenset({"otb", "otb_tools"}): "no row has an observation between its chosen tokens",
    frozenset({"dppo", "dppo_kl"}): (
        "both masks drop the same tokens, as they do while none leaves its region"
    ),
}

_CHOICES: dict[str, tuple[Any, ...]] = {
    "advantage": tuple(ADVANTAGES),
    "objective": tuple(POLICY_LOSSES),
    "reduction": REDUCTIONS,
    "ratio_level": tuple(RATIO_LEVELS),
    "ratio_base": ("old", "sampler"),
    "proximal": ("recompute", "loglinear"),
    "kl_estimator": tuple(KL_ESTIMATORS),
    "kl_in": ("loss", "reward"),
    "kl_importance": ("none", "detached", "full"),
    "correction": ("none", *CORRECTIONS),
    "correction_level": WEIGHT_LEVELS,
    "rejection": ("none", *REJECTIONS),
    "ddof": (0, 1),
    "gpg_factor": ("informative", "nonzero_rewards"),
    "batch_normalize": ("sequences", "tokens", "none"),
}


def resolve(
    config: AlgoConfig, *, group_size: int | None = None, max_tokens: int | None = None
) -> Algorithm:
    """The algorithm that a config names, its settings checked and filled in.

    Source: the row's paper, see `PRESETS`; GRPO, https://arxiv.org/abs/2402.03300.

    Args:
        group_size: samples per prompt, if known: rows that compare within a group refuse 1.
        max_tokens: the longest completion, the default of `constant`.

    Raises:
        ConfigError: an unknown name, a value out of range, a setting that this row does not use,
            or a combination that would mean nothing.
    """
    row = _find(config.name)
    given = _given(config)
    check_ranges(given, _CHOICES)
    settings = readable(row, given)
    for name, value in given.items():
        if name not in settings and not (name in ("kl_coef", "entropy_coef") and value == 0):
            raise ConfigError(
                f"algo.{name} is set, but {_why_unused(name, config, given)}",
                got=f"algo.{name}={value}",
                hint=f"leave algo.{name} unset",
            )
    settings |= {name: value for name, value in given.items() if name in settings}
    if settings["reduction"] == "constant" and settings["constant"] is None:
        settings["constant"] = None if max_tokens is None else float(max_tokens)
    check_ranges(settings, _CHOICES)
    _check_together(config.name, row, settings, group_size)
    return Algorithm(config.name, settings)


def readable(row: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting that a row reads, given the choices that a config makes, with its default.

    Source: the row's paper, see `PRESETS`; GRPO, https://arxiv.org/abs/2402.03300.
    """
    base = {"advantage": row.advantage, "objective": row.objective, "reduction": row.reduction}
    chosen = {**base, **row.defaults, **given}
    advantage, rollout_inputs = ADVANTAGES[chosen["advantage"]]
    objective, inputs = POLICY_LOSSES[chosen["objective"]]
    settings: dict[str, Any] = {
        **base,
        "kl_coef": 0.0,
        "entropy_coef": 0.0,
        "entropy_target": None,
        "top_entropy_fraction": None,
        "correction": "none",
        "rejection": "none",
        "off_policy_delta": None,
        "target_kl": None,
        "task_normalize": False,
        **setting_defaults(advantage),
        **setting_defaults(objective),
    }
    if settings.get("normalize_std") is False and not chosen.get("normalize_std"):
        del settings["ddof"], settings["eps"]
    if chosen["reduction"] == "constant":
        settings["constant"] = None
    if "values" in rollout_inputs:
        settings["value_clip"] = 0.2
    if "reward_weights" in rollout_inputs:
        settings["reward_weights"] = None
    if "log_ratio" in inputs:
        settings["ratio_level"] = "token"
    if {"log_ratio", "token_log_ratio", "logp_base"} & set(inputs):
        if "correction" not in row.required:
            settings["ratio_base"] = "old"
        if chosen.get("ratio_base", "old") == "old":
            settings["proximal"] = "recompute"
    settings |= _readable_kl(chosen) | _readable_corrections(chosen)
    if chosen.get("entropy_target") is not None:
        settings |= {"entropy_step": 0.005, "entropy_maximum": 0.1}
    return settings | {name: v for name, v in row.defaults.items() if name in settings}


def _readable_kl(chosen: Mapping[str, Any]) -> dict[str, Any]:
    if not chosen.get("kl_coef"):
        return {}
    settings: dict[str, Any] = {"kl_estimator": "k3", "kl_in": "loss", "kl_target": None}
    if chosen.get("kl_in", "loss") == "loss":
        settings["kl_importance"] = "none"
    if chosen.get("kl_target") is not None:
        settings["kl_horizon"] = 10_000.0
    return settings


def _readable_corrections(chosen: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    correction, rejection = chosen.get("correction", "none"), chosen.get("rejection", "none")
    if correction != "none":
        settings |= {"correction_level": "token", **setting_defaults(CORRECTIONS[correction])}
    if rejection != "none":
        settings["rejection_high"] = 2.0 if rejection.endswith("k1") else 0.1
        if rejection.endswith("k1"):
            settings["rejection_low"] = None
    return settings


def _given(config: AlgoConfig) -> dict[str, Any]:
    """The settings that a config makes; any number stands for the float that it means."""
    given = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name != "name" and value is not None:
            number = isinstance(value, (int, float)) and field.type.startswith("float")
            given[field.name] = float(value) if number else value
    return given


def _find(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1)
    raise ConfigError(
        "unknown algorithm",
        got=name,
        expected=f"one of {', '.join(PRESETS)}",
        hint=f"algo.name={near[0]}" if near else None,
    )


def _why_unused(name: str, config: AlgoConfig, given: Mapping[str, Any]) -> str:
    switches = {
        "constant": "only the reduction 'constant' uses it",
        "entropy_step": "it does nothing without algo.entropy_target",
        "entropy_maximum": "it does nothing without algo.entropy_target",
        "kl_horizon": "it does nothing without algo.kl_target",
        "proximal": "with the ratio over the sampler there is no proximal policy",
    }
    if name.startswith("kl_") and not config.kl_coef:
        return "it does nothing while algo.kl_coef is 0"
    if name.startswith(("correction_", "rejection_")):
        switch = name.partition("_")[0]
        return f"algo.{switch}={given.get(switch, 'none')} does not use it"
    rows = [other for other, row in PRESETS.items() if name in readable(row, {})]
    if config.name in rows:
        return f"{config.name} with these other settings does not use it"
    if rows:
        return f"{config.name} does not use it (used by {', '.join(rows)})"
    return switches.get(name, f"{config.name} does not use it")


def _check_together(
    name: str, row: Preset, settings: Mapping[str, Any], group_size: int | None
) -> None:
    if group_size == 1 and settings["advantage"] not in ALONE:
        raise ConfigError(
            f"{name} compares the samples of a group with each other",
            got="a group size of 1",
            expected="at least 2 samples per prompt",
        )
    if group_size is not None and settings.get("pass_k", 1) > group_size:
        raise ConfigError(
            "algo.pass_k is larger than a group",
            got=settings["pass_k"],
            expected=f"at most {group_size} samples",
        )
    for needed in row.required:
        if settings[needed] == "none":
            raise ConfigError(
                f"{name} without algo.{needed} would silently lose its behaviour weight",
                got=f"algo.{needed}=none",
                expected=f"one of {', '.join(_CHOICES[needed][1:])}",
            )
    if settings.get("kl_in") == "reward" and settings["advantage"] == "decoupled_rewards":
        raise ConfigError(
            "a KL in the reward would be lost: the parts of the reward are normalised one by one",
            got="algo.kl_in=reward",
            hint="algo.kl_in=loss",
        )
    if settings.get("ratio_base") == "sampler" and settings["correction"] != "none":
        raise ConfigError(
            "the mismatch would be corrected twice: the ratio is already over the sampler",
            got=f"algo.correction={settings['correction']}",
            hint="algo.correction=none or algo.ratio_base=old",
        )
    if settings["reduction"] == "constant" and settings["constant"] is None:
        raise ConfigError(
            "the reduction 'constant' needs algo.constant",
            hint="set algo.constant to the longest completion, in tokens",
        )
