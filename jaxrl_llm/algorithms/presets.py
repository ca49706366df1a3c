# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The table of algorithms: a preset is a row of five choices; `resolve` turns a config into functions.

advantage × ratio level × per-token objective × reduction × KL
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.algorithms.advantages import ADVANTAGES, GROUP_ADVANTAGES
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.kl import KL_ESTIMATORS
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES
from jaxrl_llm.algorithms.reductions import REDUCTIONS
from jaxrl_llm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class AlgoConfig:
    """The algorithm of a run. None means: the chosen row's own value.

    Setting something that the chosen row does not use is an error, so no setting is silently ignored.

    Attributes:
        name: a row of `PRESETS`: grpo, dr_grpo, ….
        kl_coef: weight of the KL penalty towards the reference policy; 0 is off (and needs no reference).
        kl_estimator: k1, k2 or k3; k3 where not set. Needs kl_coef > 0.
        entropy_coef: weight of the entropy bonus; 0 is off.
        reduction: token_mean, sequence_mean, sequence_sum or constant.
        constant: tokens that the constant reduction divides each sequence by; the longest completion if not set.
        ddof: 1 for the group's unbiased standard deviation, 0 for the population's.
        eps: added to the group's standard deviation.
        clip_low: how far below 1 the ratio may fall before it is clipped.
        clip_high: how far above 1 the ratio may rise before it is clipped.
        dual_clip: a token of negative advantage never costs more than this times |advantage|.
        ratio_cap: the ratio's cap in the unclipped term.
    """

    name: str = "grpo"
    kl_coef: float = 0.0
    kl_estimator: str | None = None
    entropy_coef: float = 0.0
    reduction: str | None = None
    constant: float | None = None
    ddof: int | None = None
    eps: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_cap: float | None = None


@dataclasses.dataclass(frozen=True)
class Preset:
    """One row: five choices by name, and the defaults in which the paper differs from the functions' own.

    Attributes:
        advantage: a key of `advantages.ADVANTAGES`.
        objective: a key of `policy_losses.POLICY_LOSSES`.
        reduction: one of `reductions.REDUCTIONS`.
        source: the paper.
        defaults: setting → this row's default.
    """

    advantage: str
    objective: str
    reduction: str
    source: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


PRESETS: dict[str, Preset] = {
    "grpo": Preset("group_std", "clip", "sequence_mean", "https://arxiv.org/abs/2402.03300"),
    "dr_grpo": Preset("group_mean", "clip", "constant", "https://arxiv.org/abs/2503.20783"),
}

# Settings that every row reads, so they carry a default of their own.
_SHARED = ("name", "kl_coef", "entropy_coef")


def resolve(
    config: AlgoConfig, *, group_size: int | None = None, max_tokens: int | None = None
) -> Algorithm:
    """The algorithm that a config names, its settings checked and bound.

    Source: the row's paper, see `PRESETS`; GRPO, https://arxiv.org/abs/2402.03300.

    Args:
        group_size: samples per prompt, if known: rows that compare within a group refuse 1.
        max_tokens: the longest completion, the default of `constant`.

    Raises:
        ConfigError: an unknown name, a value out of range, or a setting that this row does not use.
    """
    row = _row(config.name)
    values = _settings(config, row, max_tokens)
    if group_size == 1 and row.advantage in GROUP_ADVANTAGES:
        raise ConfigError(
            f"{config.name} compares the samples of a group with each other",
            got="a group size of 1",
            expected="at least 2 samples per prompt",
        )
    advantage, advantage_inputs = ADVANTAGES[row.advantage]
    objective, objective_inputs = POLICY_LOSSES[row.objective]
    return Algorithm(
        name=config.name,
        advantage=_bind(advantage, values),
        advantage_inputs=advantage_inputs,
        objective=_bind(objective, values),
        objective_inputs=objective_inputs,
        reduction=values["reduction"],
        constant=values.get("constant"),
        kl_coef=config.kl_coef,
        kl_estimator=values.get("kl_estimator", "k3"),
        entropy_coef=config.entropy_coef,
        settings=values,
    )


def _row(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"algo.name={near[0]}" if near else None
    raise ConfigError(
        "unknown algorithm", got=name, expected=f"one of {', '.join(PRESETS)}", hint=hint
    )


def _parameters(function: Callable) -> dict[str, Any]:
    """A function's settings: its keyword-only parameters and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _row_defaults(row: Preset) -> dict[str, Any]:
    """Every setting that the row's own functions read, with this row's default."""
    defaults = {**_parameters(ADVANTAGES[row.advantage][0])}
    defaults |= _parameters(POLICY_LOSSES[row.objective][0])
    return {**defaults, "reduction": row.reduction, **row.defaults}


def _settings(config: AlgoConfig, row: Preset, max_tokens: int | None) -> dict[str, Any]:
    values = _row_defaults(row)
    given = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in _SHARED and getattr(config, field.name) is not None
    }
    if (given.get("reduction") or row.reduction) == "constant":
        values["constant"] = max_tokens
    if config.kl_coef > 0:
        values["kl_estimator"] = "k3"
    for name, value in given.items():
        if name not in values:
            raise ConfigError(
                f"algo.{name} is set, but {_why_unused(name, config)}",
                got=f"algo.{name}={value}",
                hint=f"leave algo.{name} unset",
            )
        values[name] = value
    _check_ranges(config, values)
    return values


def _why_unused(name: str, config: AlgoConfig) -> str:
    if name == "constant":
        return "only the reduction 'constant' uses it"
    if name.startswith("kl_"):
        return "it does nothing while algo.kl_coef is 0"
    rows = [other for other, row in PRESETS.items() if name in _row_defaults(row)]
    return f"{config.name} does not use it (used by {', '.join(rows) or 'no row'})"


def _check_ranges(config: AlgoConfig, values: Mapping[str, Any]) -> None:
    def check(ok: bool, name: str, expected: str) -> None:
        if not ok:
            value = values.get(name, getattr(config, name))
            raise ConfigError(f"algo.{name} is out of range", got=value, expected=expected)

    def at_least(name: str, bound: float, *, strict: bool = False) -> None:
        value = values.get(name)
        ok = value is None or (value > bound if strict else value >= bound)
        check(ok, name, f"{'more than' if strict else 'at least'} {bound}")

    check(config.kl_coef >= 0, "kl_coef", "at least 0")
    check(values["reduction"] in REDUCTIONS, "reduction", f"one of {', '.join(REDUCTIONS)}")
    check(
        values.get("kl_estimator", "k3") in KL_ESTIMATORS,
        "kl_estimator",
        f"one of {', '.join(KL_ESTIMATORS)}",
    )
    check(values.get("ddof", 0) in (0, 1), "ddof", "0 or 1")
    at_least("eps", 0.0)
    at_least("clip_low", 0.0, strict=True)
    at_least("clip_high", 0.0, strict=True)
    at_least("dual_clip", 1.0, strict=True)
    at_least("ratio_cap", 1.0, strict=True)
    check(values.get("clip_low") is None or values["clip_low"] <= 1.0, "clip_low", "at most 1")
    if values["reduction"] == "constant":
        at_least("constant", 0.0, strict=True)
        if values["constant"] is None:
            raise ConfigError(
                "the reduction 'constant' needs algo.constant",
                hint="set algo.constant to the longest completion, in tokens",
            )


def _bind(function: Callable, values: Mapping[str, Any]) -> Callable:
    return functools.partial(function, **{name: values[name] for name in _parameters(function)})
