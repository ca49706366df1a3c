# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The critic of PPO: a decoder with a linear head that predicts what is still to be won."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.errors import ConfigError, NonFinite
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import accumulation_dtype
from jaxrl_llm.models.transformer import Params, forward
from jaxrl_llm.trainers.metrics import Sums
from jaxrl_llm.trainers.state import TrainState, make_train_functions
from jaxrl_llm.trainers.update import Passes
from jaxrl_llm.types import Batch


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The critic, for algorithms that use one (`--algo.name=ppo`).

    Attributes:
        path: where its first weights come from: a model as for `model.path`, or a reward model's
            folder; None: the policy's own first weights. The head is new, and 0, unless the folder
            has one.
        learning_rate: of the decoder.
        head_learning_rate: of the head, which starts from nothing.
        warmup_steps: first steps in which only the critic learns.
        max_grad_norm: the gradient's global norm is scaled down to this.
    """

    path: str | None = None
    learning_rate: float = 1e-5
    head_learning_rate: float = 1e-3
    warmup_steps: int = 0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = 0 if field.name != "max_grad_norm" else 1e-12
            if field.name != "path" and not low <= value < float("inf"):
                raise ConfigError(
                    f"critic.{field.name} is out of range", got=value, expected="finite, ≥ 0"
                )


def state_values(
    params: Params, config: ModelConfig, batch: Batch, *, remat: bool = False
) -> Float[Array, "N T"]:
    """``V(s_t)`` of what stands before each trained token, in at least float32; 0 elsewhere.

    The value of token t is read where its log-probability is: at the token before it. PPO,
    https://arxiv.org/abs/1707.06347.

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
        remat=remat,
    )
    wide = accumulation_dtype(hidden.dtype)
    weight = params["score"]["weight"][0]
    with jax.named_scope("value"):
        values = jnp.einsum("ntd,d->nt", hidden, weight, preferred_element_type=wide)
        before = (
            jnp.arange(values.shape[1])[None, :] - 1 if batch.sources is None else batch.sources
        )
        before = jnp.broadcast_to(jnp.maximum(before, 0), values.shape)
        return jnp.where(batch.mask, jnp.take_along_axis(values, before, axis=1), 0.0)


class CriticFunctions(NamedTuple):
    """Compiled programs: see `state.TrainFunctions`; `values` is (params, rows) → [N, T] and
    `accumulate` (gradients, params, rows, counts) → (gradients, (loss, metrics))."""

    init: Callable
    values: Callable
    zeros: Callable
    accumulate: Callable
    norm: Callable
    apply: Callable


def make_critic_functions(
    model_config: ModelConfig, algorithm: Algorithm, critic: CriticConfig, *, remat: bool
) -> CriticFunctions:
    """Compile-on-call functions for the value loss of one algorithm."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(critic.max_grad_norm),
        optax.partition(
            {
                "decoder": optax.adam(critic.learning_rate),
                "score": optax.adam(critic.head_learning_rate),
            },
            lambda params: {
                name: jax.tree.map(lambda _, n=name: n, params[name]) for name in params
            },
        ),
    )
    shared = make_train_functions(
        model_config, lambda *_: None, optimizer, temperature=1.0, remat=remat
    )

    def accumulate(grads, params, batch: Batch, counts):
        def contribution(params):
            values = state_values(params, model_config, batch, remat=remat)
            return algorithm.value_loss(values, batch.values, batch.returns, batch.mask, counts)

        (loss, metrics), new = jax.value_and_grad(contribution, has_aux=True)(params)
        grads = jax.tree.map(lambda total, g: total + g.astype(total.dtype), grads, new)
        return grads, (loss, metrics)

    return CriticFunctions(
        init=shared.init,
        values=jax.jit(
            lambda params, batch: state_values(params, model_config, batch, remat=remat)
        ),
        zeros=shared.zeros,
        accumulate=jax.jit(accumulate, donate_argnums=0),
        norm=shared.norm,
        apply=shared.apply,
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

    def values(self, samples: Batch) -> np.ndarray:
        """``V(s_t)`` of the trained tokens of samples, [N, T]."""
        plan = self.passes.plan(samples)
        parts = [
            self.functions.values(self.state.params, self.passes.put(micro))
            for micro in plan.micro_batches(plan.pack(samples))
        ]
        return plan.unpack(np.concatenate(jax.device_get(parts)), samples.mask)

    def run(self, batch: Batch, step: int) -> dict[str, float]:
        """All updates of one rollout batch; `batch` has `values` and `returns`.

        Returns:
            "value/loss", "value/clip_ratio", "value/grad_norm", "value/mean", "value/returns" and
            "value/explained_variance", ``1 − Var(R − V)/Var(R)`` of the values before the update.

        Raises:
            NonFinite: a loss or a gradient.
        """
        sums = Sums()
        for epoch in range(self.passes.epochs):
            for part in self.passes.cut(batch, step, epoch):
                sums.add_means(self._one_update(part, step))
        values, returns = batch.values[batch.mask], batch.returns[batch.mask]
        metrics = {f"value/{name}": value for name, value in sums.means().items()}
        if returns.size:
            metrics |= {"value/mean": float(values.mean()), "value/returns": float(returns.mean())}
            if returns.var() > 0:
                unexplained = float((returns - values).var() / returns.var())
                metrics["value/explained_variance"] = 1.0 - unexplained
        return metrics

    def _one_update(self, samples: Batch, step: int) -> dict[str, float]:
        plan = self.passes.plan(samples)
        rows = plan.pack(samples)
        counts = self.algorithm.counts(rows.mask, rows.segment_ids)
        sums, grads = Sums(), self.functions.zeros(self.state.params)
        for micro in plan.micro_batches(rows):
            grads, (loss, metrics) = self.functions.accumulate(
                grads, self.state.params, self.passes.put(micro), counts
            )
            named = {name.removeprefix("value_"): pair for name, pair in metrics.items()}
            sums.add({**named, "loss/sum": (loss, 1.0)})
        norm = float(self.functions.norm(grads))
        metrics = sums.means() | {"grad_norm": norm}
        if not (np.isfinite(metrics["loss"]) and np.isfinite(norm)):
            raise NonFinite(
                f"the critic's loss or gradient is not finite in step {step + 1}",
                got=f"loss {metrics['loss']}, gradient norm {norm}",
                hint="a lower critic.learning_rate; the last checkpoint before it is intact",
            )
        self.state = self.functions.apply(self.state, grads)
        return metrics
