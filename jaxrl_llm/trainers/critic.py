# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The critic of PPO: a decoder with a linear head that predicts what is still to be won."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.checkpoint.pretrained import settled_name
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import token_values
from jaxrl_llm.models.placement import FREE, Place
from jaxrl_llm.models.transformer import Params, forward
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.trainers.metrics import Sums
from jaxrl_llm.trainers.passes import Passes
from jaxrl_llm.trainers.state import (
    StateFunctions,
    TrainState,
    add_gradients,
    make_state_functions,
    put,
    take_step,
    taken,
)
from jaxrl_llm.types import Batch


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The critic, for algorithms that use one (`--algo.name=ppo`).

    Attributes:
        shared_trunk: one decoder for policy and critic, whose only own part is its head: half the
            memory; False: a decoder of its own.
        value_coef: of the value loss beside the policy's, with a shared decoder.
        path: where its first weights come from: a model as for `model.path`, or a reward model's
            folder; None: the policy's own first weights. The head is new, and 0, unless the folder
            has one.
        learning_rate: of the decoder.
        head_learning_rate: of the head, which starts from nothing.
        warmup_steps: first steps in which only the critic learns.
        max_grad_norm: the gradient's global norm is scaled down to this.
        mesh: of a critic with a decoder of its own; None: as the policy's.
    """

    shared_trunk: bool = False
    value_coef: float = 0.5
    path: str | None = None
    learning_rate: float = 1e-5
    head_learning_rate: float = 1e-3
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    mesh: MeshConfig | None = None

    def __post_init__(self) -> None:
        if self.path is not None:
            object.__setattr__(self, "path", settled_name(self.path))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = 0 if field.name != "max_grad_norm" else 1e-12
            if field.name not in ("path", "shared_trunk", "mesh") and not low <= value < float(
                "inf"
            ):
                raise ConfigError(
                    f"critic.{field.name} is out of range", got=value, expected="finite, ≥ 0"
                )
        if self.mesh is not None:
            self.mesh.check("critic.mesh")
        apart = ("path", "learning_rate", "warmup_steps", "mesh")
        own = apart if self.shared_trunk else ("value_coef",)
        for field in dataclasses.fields(self):
            if field.name in own and getattr(self, field.name) != field.default:
                which = "that shares the policy's decoder" if self.shared_trunk else "of its own"
                raise ConfigError(
                    f"critic.{field.name} has no effect on a critic {which}",
                    got=getattr(self, field.name),
                    hint=f"--critic.shared_trunk={not self.shared_trunk}",
                )


def state_values(
    params: Params, config: ModelConfig, batch: Batch, *, remat: bool = False
) -> Float[Array, "N T"]:
    """``V(s_t)`` of what stands before each trained token (`heads.token_values`); 0 elsewhere.

    Args:
        params: ``{"decoder": …, "score": {"weight": [1, D]}}``, as a reward model's.
    """
    hidden = forward(
        params["decoder"],
        config,
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        batch.prefix_ids,
        reach=batch.reach,
        remat=remat,
    )
    return token_values(hidden, params["score"]["weight"], batch.mask, batch.sources)


class CriticFunctions(NamedTuple):
    """Compiled programs; `values` is (params, rows) → [N, T] and `accumulate` (gradients, params,
    rows, counts) → (gradients, (loss, metrics))."""

    state: StateFunctions
    values: Callable
    accumulate: Callable


def by_part(
    **optimizers: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """One optimiser for each part of ``{"decoder": …, "score": …}``."""
    return optax.partition(
        optimizers,
        lambda params: {name: jax.tree.map(lambda _, n=name: n, params[name]) for name in params},
    )


def shared_optimizer(
    policy: optax.GradientTransformation, critic: CriticConfig
) -> optax.GradientTransformation:
    """The policy's optimiser, and the critic's for the head over the same decoder."""
    head = optax.chain(
        optax.clip_by_global_norm(critic.max_grad_norm), optax.adam(critic.head_learning_rate)
    )
    return by_part(decoder=policy, score=head)


def make_critic_functions(
    model_config: ModelConfig,
    algorithm: Algorithm,
    critic: CriticConfig,
    *,
    remat: bool,
    place: Place = FREE,
) -> CriticFunctions:
    """Compile-on-call functions for the value loss of one algorithm.

    Args:
        place: where the critic lives; `model_config` is then `place.model`.
    """
    optimizer = optax.chain(
        optax.clip_by_global_norm(critic.max_grad_norm),
        by_part(
            decoder=optax.adam(critic.learning_rate), score=optax.adam(critic.head_learning_rate)
        ),
    )

    def accumulate(grads, params, batch: Batch, counts):
        def contribution(params):
            values = state_values(params, model_config, batch, remat=remat)
            return algorithm.value_loss(values, batch.values, batch.returns, batch.mask, counts)

        return add_gradients(contribution, grads, params, place)

    return CriticFunctions(
        state=make_state_functions(optimizer, place),
        values=place.jit(
            lambda params, batch: state_values(params, model_config, batch, remat=remat)
        ),
        accumulate=place.jit(accumulate, donate_argnums=0),
    )


@dataclasses.dataclass
class Critic:
    """Predicts values and learns from returns, over the same optimiser batches as the policy.

    Attributes:
        warmup_steps: first steps in which the policy waits for it.
        The rest is as in `update.Updater`.
    """

    algorithm: Algorithm
    functions: CriticFunctions
    state: TrainState
    passes: Passes
    warmup_steps: int
    place: Place = FREE

    @property
    def saved(self) -> TrainState:
        """The state as a checkpoint holds it."""
        return taken(self.state, self.place)

    @saved.setter
    def saved(self, state: TrainState) -> None:
        self.state = put(state, self.place)

    def values(self, samples: Batch) -> np.ndarray:
        """``V(s_t)`` of the trained tokens of samples, [N, T]."""
        params = self.state.params
        return self.passes.values(samples, lambda rows, _: self.functions.values(params, rows))

    def run(self, batch: Batch, step: int) -> dict[str, float]:
        """All updates of one rollout batch; `batch` has `values` and `returns`.

        Returns:
            "value/loss", "value/clip_ratio", "value/grad_norm" and those of `value_metrics`.

        Raises:
            NonFinite: a loss or a gradient.
        """
        sums = Sums()
        for epoch in range(self.passes.epochs):
            for part in self.passes.cut(batch, step, epoch):
                sums.add_means(self._one_update(part, step))
        metrics = {f"value/{name}": value for name, value in sums.means().items()}
        return metrics | value_metrics(batch)

    def _one_update(self, samples: Batch, step: int) -> dict[str, float]:
        plan = self.passes.plan(samples)
        rows = plan.pack(samples)
        counts = self.algorithm.counts(rows.mask, rows.segment_ids)
        params = self.state.params
        self.state, metrics = take_step(
            self.functions.state,
            self.state,
            plan.micro_batches(rows),
            lambda grads, micro: self.functions.accumulate(
                grads, params, self.passes.put(micro), counts
            ),
            step=step,
            learner="critic",
        )
        return {name.removeprefix("value_"): value for name, value in metrics.items()}


def value_metrics(batch: Batch) -> dict[str, float]:
    """Of the values before an update: "value/mean", "value/returns" and
    "value/explained_variance", ``1 − Var(R − V)/Var(R)``."""
    values, returns = batch.values[batch.mask], batch.returns[batch.mask]
    if not returns.size:
        return {}
    metrics = {"value/mean": float(values.mean()), "value/returns": float(returns.mean())}
    if returns.max() > returns.min():  # the variance of equal numbers is rounded
        unexplained = float((returns - values).var() / returns.var())
        metrics["value/explained_variance"] = 1.0 - unexplained
    return metrics
