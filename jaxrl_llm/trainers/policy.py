# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The policy as the update sees it: what of it is trained, and its compiled functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxrl_llm.algorithms import kl
from jaxrl_llm.algorithms.ratios import bounded_exp
from jaxrl_llm.algorithms.reductions import on_mask
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import hidden_logprobs, token_values
from jaxrl_llm.models.lora import LoraConfig, attach, merge
from jaxrl_llm.models.moe import RouterStats, assigned_shares, load_balancing_part
from jaxrl_llm.models.placement import FREE, Place
from jaxrl_llm.models.transformer import Params, routed_forward
from jaxrl_llm.sharding.reshard import Later
from jaxrl_llm.trainers.state import StateFunctions, add_gradients, make_state_functions
from jaxrl_llm.types import Batch

Weights = tuple[Any, Any]
"""(what is trained, what stays under it or None); (None, base) is an adapter's base alone."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How what is trained and what stays make a decoder.

    Attributes:
        lora: adapters are trained, over parameters that stay.
        scored: the score head of a critic that shares the decoder is trained with it: ``{"decoder":
            …, "score": {"weight": [1, D]}}``.
    """

    lora: LoraConfig | None = None
    scored: bool = False

    def decoder(self, weights: Weights, put_together: Callable = attach) -> Params:
        """The parameters that the model reads; adapters lie beside their matrices."""
        trained, base = weights
        if trained is None:
            return base
        part = trained["decoder"] if self.scored else trained
        return part if self.lora is None else put_together(base, part, self.lora)

    def merged(self, weights: Weights) -> Params:
        """Plain parameters, for the sampler and for exports."""
        return self.decoder(weights, merge)

    def merged_later(self, weights: Weights) -> Params:
        """As `merged`, but each matrix that has an adapter is merged when it is asked for
        (`sharding.reshard.now`)."""
        return self.decoder(weights, _merge_later)


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Losses of the routers of a model with experts, over the tokens that are trained on.

    Attributes:
        balance_coef: of the load-balancing loss (Switch Transformer,
            https://arxiv.org/abs/2101.03961, Eq. 4–6); 0.001 is usual.
        z_coef: of the mean squared logsumexp of router logits (ST-MoE,
            https://arxiv.org/abs/2202.08906, Eq. 5).
    """

    balance_coef: float = 0.0
    z_coef: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ConfigError(
                    f"router.{field.name} is out of range", got=value, expected="finite, ≥ 0"
                )

    def check(self, model_config: ModelConfig) -> None:
        """Raises ConfigError where the model has no routers."""
        if self != RouterConfig() and not model_config.num_experts:
            raise ConfigError(
                "router.* has no effect: the model has no experts", hint="leave out --router.*"
            )


class TrainFunctions(NamedTuple):
    """Compiled programs of the trainer; each is pure.

    Attributes:
        state: init, zeros, norm and apply over what is trained.
        logprobs: (weights, batch, num_targets) → (logp, entropy), both [N, T], without gradient.
        values: (weights, batch) → [N, T], of a critic that shares the decoder.
        router_stats: (weights, batch) → RouterStats of the tokens trained on.
        accumulate: (accumulators, trained, frozen, batch, counts, stats, router, coefs,
            num_targets) → (accumulators, (loss, metrics)); the old accumulators are donated.
    """

    state: StateFunctions
    logprobs: Callable
    values: Callable
    router_stats: Callable
    accumulate: Callable


def make_train_functions(
    model_config: ModelConfig,
    loss: Callable,
    optimizer: optax.GradientTransformation,
    *,
    temperature: float,
    remat: bool,
    form: Form | None = None,
    router: RouterConfig | None = None,
    value_loss: Callable | None = None,
    place: Place = FREE,
) -> TrainFunctions:
    """Compile-on-call functions for one model, one loss and one optimiser.

    Args:
        loss: ``(logp, entropy, batch, counts, stats, **coefs) → (contribution, metrics)`` of a
            micro-batch: the contributions of all micro-batches of an optimiser batch sum to its
            loss.
        temperature: τ of the policy.
        remat: recompute layers in the backward pass.
        form: what is trained; None: all parameters.
        router: losses of the routers; None: none.
        value_loss: ``(values, batch, counts) → (contribution, metrics)`` of a critic that shares
            the decoder (`form.scored`).
        place: where the policy lives; `model_config` is then `place.model`.
    """
    form, router = form or Form(), router or RouterConfig()

    def run(decoder: Params, batch: Batch):
        return routed_forward(
            decoder,
            model_config,
            batch.tokens,
            batch.positions,
            batch.segment_ids,
            batch.prefix_ids,
            counted=batch.mask if model_config.num_experts else None,
            reach=batch.reach,
            remat=remat,
        )

    def read(decoder: Params, hidden: Array, batch: Batch, num_targets: int):
        return hidden_logprobs(
            decoder,
            model_config,
            hidden,
            batch.tokens,
            batch.mask,
            batch.sources,
            num_targets=num_targets,
            temperature=temperature,
        )

    def logprobs(weights: Weights, batch: Batch, num_targets: int):
        decoder = form.decoder(weights)
        return read(decoder, run(decoder, batch)[0], batch, num_targets)

    def values(weights: Weights, batch: Batch):
        hidden = run(form.decoder(weights), batch)[0]
        return token_values(hidden, weights[0]["score"]["weight"], batch.mask, batch.sources)

    def accumulate(grads, trained, frozen, batch, counts, stats, routed, coefs, num_targets):
        def contribution(trained):
            decoder = form.decoder((trained, frozen))
            hidden, router_stats = run(decoder, batch)
            logp, entropy = read(decoder, hidden, batch, num_targets)
            total, metrics = loss(logp, entropy, batch, counts, stats, **coefs)
            metrics = {**metrics, **sampler_gap(logp, batch)}
            if value_loss is not None:
                head = trained["score"]["weight"]
                found = token_values(hidden, head, batch.mask, batch.sources)
                part, value_metrics = value_loss(found, batch, counts)
                total, metrics = total + part, {**metrics, **value_metrics}
            if router_stats is not None:
                part, router_metrics = router_loss(router, router_stats, routed)
                total, metrics = total + part.astype(total.dtype), {**metrics, **router_metrics}
            return total, metrics

        return add_gradients(contribution, grads, trained, place)

    return TrainFunctions(
        state=make_state_functions(optimizer, place),
        logprobs=place.jit(logprobs, static_argnums=2),
        values=place.jit(values),
        router_stats=place.jit(lambda weights, batch: run(form.decoder(weights), batch)[1]),
        accumulate=place.jit(accumulate, static_argnums=8, donate_argnums=0),
    )


def router_loss(
    config: RouterConfig,
    stats: RouterStats,
    routed: tuple[Float[Array, " E"], Float[Array, ""]] | None,
) -> tuple[Float[Array, ""], dict[str, tuple[Array, Array]]]:
    """What a micro-batch adds to the router losses of its optimiser batch, and metrics.

    Args:
        routed: the shares of tokens that each expert gets and the number of tokens times layers,
            over the whole optimiser batch; None where no loss is wanted.
    """
    tokens = jnp.sum(stats.tokens)
    load = jax.lax.stop_gradient(stats.assignments)
    busiest = jnp.max(load * load.shape[-1] / jnp.maximum(jnp.sum(load, -1, keepdims=True), 1.0))
    one = jnp.ones_like(tokens)
    metrics = {
        "router/max_load/max": (busiest, one),
        "router/idle_experts": (jnp.mean((load == 0).astype(load.dtype)), one),
        "router/z_loss": (jax.lax.stop_gradient(jnp.sum(stats.z)), tokens),
    }
    if routed is None:
        return jnp.zeros_like(tokens), metrics
    shares, total = routed
    balance = load_balancing_part(stats, shares, total)
    metrics["router/load_balancing_loss/sum"] = (jax.lax.stop_gradient(balance), one)
    part = config.balance_coef * balance + config.z_coef * jnp.sum(stats.z) / jnp.maximum(total, 1)
    return part, metrics


def _merge_later(base: Params, adapter: Any, lora: LoraConfig) -> Params:
    layers = dict(base["layers"])
    for name, parts in adapter.items():
        matrix = base["layers"][name]
        layers[name] = Later(functools.partial(_merge_one, name, matrix, parts, lora))
    return {**base, "layers": layers}


@functools.partial(jax.jit, static_argnums=(0, 3))
def _merge_one(name: str, matrix: Array, parts: Any, lora: LoraConfig) -> Array:
    return merge({"layers": {name: matrix}}, {name: parts}, lora)["layers"][name]


def whole_batch_shares(parts: list[RouterStats]) -> tuple[Float[Array, " E"], Float[Array, ""]]:
    """From the statistics of micro-batches, what `router_loss` needs of the optimiser batch."""
    whole = jax.tree.map(lambda *arrays: sum(arrays[1:], arrays[0]), *parts)
    return assigned_shares(whole), jnp.sum(whole.tokens)


def sampler_gap(
    logp: Float[Array, "N T"], batch: Batch
) -> dict[str, tuple[Float[Array, ""], Array]]:
    """Trainer (π) against sampler (μ) on the trained tokens: (sum, count), (largest, 1) for "/max".

    `mismatch_k1` and `mismatch_k3` estimate KL(μ ‖ π) (`algorithms.kl`); the ratio π/μ is told by
    its mean, mean square and largest value (`effective_share`).
    """
    logp = on_mask(jax.lax.stop_gradient(logp), batch.mask)
    sampler = on_mask(batch.logp_sampler.astype(logp.dtype), batch.mask)
    gap = logp - sampler
    count = jnp.sum(batch.mask).astype(logp.dtype)
    ratio, one = on_mask(bounded_exp(gap), batch.mask), jnp.ones_like(count)
    return {
        "sampling/sampling_logp_difference/mean": (jnp.sum(jnp.abs(gap)), count),
        "sampling/sampling_logp_difference/max": (jnp.max(jnp.abs(gap)), one),
        "sampling/mismatch_k1": (jnp.sum(kl.k1(sampler, logp)), count),
        "sampling/mismatch_k3": (jnp.sum(kl.k3(sampler, logp)), count),
        "sampling/importance_sampling_ratio/mean": (jnp.sum(ratio), count),
        "sampling/importance_sampling_ratio/max": (jnp.max(ratio), one),
        _SQUARE: (jnp.sum(jnp.square(ratio)), count),
    }


_SQUARE = "sampling/importance_sampling_ratio/square"


def effective_share(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of a whole batch with the effective sample size of its ratios, as a share of its
    tokens, ``(Σ w)² / (n · Σ w²)``, in place of their mean square."""
    rest = dict(metrics)
    square = rest.pop(_SQUARE, None)
    if square is not None:
        mean = rest["sampling/importance_sampling_ratio/mean"]
        rest["sampling/effective_sample_size"] = mean**2 / square if square else 0.0
    return rest
