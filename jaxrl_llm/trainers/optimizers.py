# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Optimisers and schedules: Optax's, chosen by one small dataclass."""

from __future__ import annotations

import dataclasses
from typing import Literal

import optax

from jaxrl_llm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (https://arxiv.org/abs/1711.05101) with a schedule and clipping by the global norm.

    Attributes:
        learning_rate: the peak learning rate.
        schedule: what follows the warm-up: "constant", "linear" to 0 or "cosine" to 0 at the
            last update.
        warmup_steps: optimiser updates over which the rate rises from 0; 0 starts at the peak.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of matrices (norms are never decayed).
        max_grad_norm: the gradient's global norm is scaled down to this.
    """

    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        checks = {
            "learning_rate": 0 <= self.learning_rate < float("inf"),
            "warmup_steps": self.warmup_steps >= 0,
            "b1": 0 <= self.b1 < 1,
            "b2": 0 <= self.b2 < 1,
            "eps": 0 < self.eps < float("inf"),
            "weight_decay": 0 <= self.weight_decay < float("inf"),
            "max_grad_norm": self.max_grad_norm > 0,
        }
        for field, good in checks.items():
            if not good:
                expected = {"b1": "0 ≤ b1 < 1", "b2": "0 ≤ b2 < 1", "eps": "finite and above 0"}
                expected["max_grad_norm"] = "above 0; inf clips nothing"
                raise ConfigError(
                    f"optimizer.{field} is out of range",
                    got=getattr(self, field),
                    expected=expected.get(field, "finite and not negative"),
                )


def make_schedule(config: OptimizerConfig, total_updates: int) -> optax.Schedule:
    """Learning rate by the number of updates done before this one."""
    if config.warmup_steps >= total_updates and config.warmup_steps > 0:
        raise ConfigError(
            "the warm-up is as long as the run",
            got=f"optimizer.warmup_steps={config.warmup_steps} of {total_updates} updates",
            expected=f"at most {total_updates - 1}",
            hint=f"--optimizer.warmup_steps={total_updates - 1}, or a longer run",
        )
    peak, rest = config.learning_rate, total_updates - config.warmup_steps
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
    }[config.schedule]()
    if config.warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(0.0, peak, config.warmup_steps)
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, total_updates: int) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW with the schedule."""
    import jax

    def decayed(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "norm" not in jax.tree_util.keystr(path), params
        )

    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            make_schedule(config, total_updates),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decayed if config.weight_decay else None,
        ),
    )
