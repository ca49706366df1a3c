# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""One algorithm: the five choices of a preset put together as functions of arrays.

What a trainer calls, in this order:

1. `Algorithm.advantages` over the whole rollout batch;
2. `Algorithm.counts` over the whole optimiser batch (add up those of micro-batches with `add_counts`);
3. `Algorithm.batch_stats` over the whole optimiser batch, where `needs_batch_stats`;
4. `Algorithm.loss` for each micro-batch: the contributions, and their gradients, add up to the batch's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms.kl import KL_ESTIMATORS
from jaxrl_llm.algorithms.reductions import (
    Counts,
    batch_counts,
    on_mask,
    reduction_count,
    reduction_sum,
)
from jaxrl_llm.types import Batch

Metrics = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Algorithm:
    """Five choices with their settings bound. Made by `presets.resolve`; holds no arrays and no state.

    Attributes:
        name: the preset's name.
        advantage: rewards → advantages, with its settings bound; reads `advantage_inputs`.
        objective: (log-ratio, advantages, …) → per-token loss; reads `objective_inputs`.
        reduction: how per-token terms become one number; `constant` belongs to "constant".
        kl_estimator: the KL penalty's estimator; used where `kl_coef` > 0.
    """

    name: str
    advantage: Callable
    advantage_inputs: tuple[str, ...]
    objective: Callable
    objective_inputs: tuple[str, ...]
    reduction: str
    constant: float | None
    kl_coef: float
    kl_estimator: str
    entropy_coef: float
    settings: Mapping[str, Any]

    @property
    def needs_ref(self) -> bool:
        """Whether log-probabilities under a reference policy are read."""
        return self.kl_coef > 0

    @property
    def needs_batch_stats(self) -> bool:
        """Whether a gradient-free first pass over the optimiser batch must come before the losses."""
        return "stats" in self.objective_inputs

    def advantages(
        self,
        rewards: Float[Array | np.ndarray, "B G"],
        mask: Bool[Array | np.ndarray, "N T"],
        *,
        valid: Bool[Array | np.ndarray, "B G"] | None = None,
    ) -> Float[Array, "N T"]:
        """One advantage per trained token, 0 elsewhere; statistics are those of all rows handed over.

        Source: the advantage of the preset, see `presets.PRESETS` and GRPO, https://arxiv.org/abs/2402.03300.

        Args:
            rewards: one per sequence; rows n = b·G + g of `mask` belong to them, one sequence per row.
            mask: tokens that are trained on, before `advantages.drop_unjudged`.
            valid: False where no verdict could be formed; those rows get 0.
        """
        rewards, mask = jnp.asarray(rewards), jnp.asarray(mask)
        valid = jnp.ones(rewards.shape, bool) if valid is None else jnp.asarray(valid)
        available = {"rewards": rewards, "valid": valid}
        result = self.advantage(*(available[name] for name in self.advantage_inputs))
        return jnp.where(mask, result.reshape(-1, 1), jnp.zeros((), result.dtype))

    def counts(
        self, mask: Bool[Array, "N T"], segment_ids: Int[Array, "N T"] | None = None
    ) -> Counts:
        """What the sums are divided by; those of micro-batches add up.

        Source: token counts of DAPO, https://arxiv.org/abs/2503.14476, Eq. 8.
        """
        return batch_counts(mask, segment_ids)

    def batch_stats(
        self, logp: Float[Array, "N T"], entropy: Float[Array, "N T"], batch: Batch
    ) -> Any:
        """Statistics of ratio and entropy over the whole optimiser batch, without gradient; None if not needed.

        Source: see the objective of the preset in `presets.PRESETS`; https://arxiv.org/abs/2505.22617.
        """
        return None

    def loss(
        self,
        logp: Float[Array, "N T"],
        entropy: Float[Array, "N T"],
        batch: Batch,
        counts: Counts,
        stats: Any = None,
        *,
        kl_coef: Float[Array, ""] | float | None = None,
        entropy_coef: Float[Array, ""] | float | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the loss, ``Σᵢ coefᵢ · sumᵢ / countᵢ``, and metrics as (sum, count).

        The policy and KL terms are reduced as the preset says, the entropy bonus is a mean over tokens.

        Source: the preset's objective, see `presets.PRESETS`; GRPO, https://arxiv.org/abs/2402.03300, Eq. 3.

        Args:
            logp: log-probability of each token under the policy; gradients flow through it.
            entropy: entropy of each token's distribution; gradients flow where its coefficient is not 0.
            batch: `logp_old` None means one on-policy update: the ratio is 1, with its gradient.
            counts: of the whole optimiser batch.
            stats: from `batch_stats`.
            kl_coef, entropy_coef: the current values of adaptive coefficients; the settings' if None.
        """
        mask = batch.mask
        with jax.named_scope("policy_loss"):
            logp = on_mask(logp, mask)
            arrays = {
                "log_ratio": logp - _reference_point(logp, batch.logp_old, mask),
                "advantages": on_mask(batch.advantages, mask),
            }
            terms, marks = self.objective(*(arrays[name] for name in self.objective_inputs))
            total = self._reduced(terms, batch, counts)
        metrics = {name: _token_metric(value, mask) for name, value in marks.items()}
        if self.needs_ref:
            with jax.named_scope("kl"):
                assert batch.logp_ref is not None, "this algorithm needs logp_ref"
                kl = KL_ESTIMATORS[self.kl_estimator](logp, on_mask(batch.logp_ref, mask))
                coef = self.kl_coef if kl_coef is None else kl_coef
                total = total + coef * self._reduced(kl, batch, counts)
                metrics["kl"] = _token_metric(jax.lax.stop_gradient(kl), mask)
        with jax.named_scope("entropy"):
            entropy = on_mask(entropy, mask)
            coef = self.entropy_coef if entropy_coef is None else entropy_coef
            if entropy_coef is not None or self.entropy_coef != 0.0:
                count = reduction_count(counts, reduction="token_mean", dtype=entropy.dtype)
                total = total - coef * jnp.sum(entropy) / count
            metrics["entropy"] = _token_metric(jax.lax.stop_gradient(entropy), mask)
        return total, metrics

    def _reduced(self, terms, batch, counts):
        total = reduction_sum(
            terms, batch.mask, reduction=self.reduction, segment_ids=batch.segment_ids
        )
        count = reduction_count(
            counts, reduction=self.reduction, constant=self.constant, dtype=total.dtype
        )
        return total / count


def _reference_point(logp, logp_old, mask):
    return jax.lax.stop_gradient(logp) if logp_old is None else on_mask(logp_old, mask)


def _token_metric(values, mask):
    values = on_mask(jax.lax.stop_gradient(values.astype(jnp.float32)), mask)
    return jnp.sum(values), jnp.sum(mask, dtype=values.dtype)
