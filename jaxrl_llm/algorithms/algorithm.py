# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""One algorithm: the five choices of a preset put together as functions of arrays.

What a trainer calls, in this order:

1. `Algorithm.estimate` (or `advantages`) over the whole rollout batch;
2. `Algorithm.counts` over the whole optimiser batch (`add_counts` sums those of micro-batches);
3. `Algorithm.batch_stats` over the whole optimiser batch, where `needs_batch_stats`;
4. `Algorithm.loss` per micro-batch: contributions and gradients add up to the batch's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms import corrections, covariance, entropy, kl, value_losses
from jaxrl_llm.algorithms.advantages import SEQUENCE_ADVANTAGES, check_finite
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES
from jaxrl_llm.algorithms.ratios import RATIO_LEVELS, loglinear_proximal
from jaxrl_llm.algorithms.reductions import (
    Counts,
    batch_counts,
    on_mask,
    reduction_count,
    reduction_sum,
    widened,
)
from jaxrl_llm.algorithms.requirements import ADVANTAGES, Requirements, setting_defaults
from jaxrl_llm.algorithms.returns import spread, task_normalized, terminal_rewards
from jaxrl_llm.types import Batch

Host = Array | np.ndarray
Metrics = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]


@struct.dataclass
class Estimate:
    """What a rollout batch is worth.

    Source: GAE, https://arxiv.org/abs/1506.02438 (returns); GRPO, https://arxiv.org/abs/2402.03300.

    Attributes:
        advantages: 0 on tokens that are not trained on and on rows that could not be judged.
        returns: the critic's targets, None for algorithms without a critic.
    """

    advantages: Float[Array, "N T"]
    returns: Float[Array, "N T"] | None = None


def _apply(row: tuple[Callable, tuple[str, ...]], arrays: Mapping, settings: Mapping):
    function, inputs = row
    for name in inputs:
        assert arrays[name] is not None, f"this algorithm needs {name}"
    chosen = {name: settings[name] for name in setting_defaults(function) if name in settings}
    return function(*(arrays[name] for name in inputs), **chosen)


@dataclasses.dataclass(frozen=True, eq=False)
class Algorithm(Requirements):
    """Five choices with their settings. Made by `presets.resolve`; holds no arrays and no state.

    Source: the row's paper, see `presets.PRESETS`; GRPO, https://arxiv.org/abs/2402.03300.
    """

    # ---- the rollout batch ---------------------------------------------------------------------

    def advantages(
        self, rewards: Float[Host, "B G"], mask: Bool[Host, "N T"], **arrays: Any
    ) -> Float[Array, "N T"]:
        """`estimate(...).advantages`: one advantage per trained token, 0 elsewhere.

        Source: the advantage of the preset; GRPO, https://arxiv.org/abs/2402.03300.
        """
        return self.estimate(rewards, mask, **arrays).advantages

    def estimate(
        self,
        rewards: Float[Host, "B G"],
        mask: Bool[Host, "N T"],
        *,
        valid: Bool[Host, "B G"] | None = None,
        values: Float[Host, "N T"] | None = None,
        greedy_rewards: Float[Host, " B"] | None = None,
        reward_parts: Float[Host, "B G P"] | None = None,
        logp: Float[Host, "N T"] | None = None,
        logp_ref: Float[Host, "N T"] | None = None,
        sum_pi_squared: Float[Host, "N T"] | None = None,
        tasks: Int[Host, " N"] | None = None,
        kl_coef: float | None = None,
    ) -> Estimate:
        """Advantages and returns; every statistic is that of all rows handed over.

        Source: the advantage of the preset, see `presets.PRESETS`; GRPO,
        https://arxiv.org/abs/2402.03300.

        Args:
            rewards: one per sequence. Row n = b·G + g of the [N, T] arrays is sample g of prompt b.
            mask: tokens that are trained on, before `advantages.drop_unjudged`.
            valid: False where no verdict could be formed; those rows get 0 and influence nothing.
            values: the critic's, where `needs_values`.
            greedy_rewards: of one greedy answer per prompt, where `needs_greedy_baseline`.
            reward_parts: where `needs_reward_parts`.
            logp, logp_ref: the trainer's and the reference's, where `needs_rollout_logp`.
            sum_pi_squared: Σ_v π_v² of each token, where `needs_sum_pi_squared`.
            tasks: an integer per row, where `needs_tasks`.
            kl_coef: the current value of an adaptive coefficient; the settings' if None.

        Raises:
            RewardError: a reward handed over as a NumPy array is not finite.
        """
        _check_host_rewards(rewards, valid, reward_parts, greedy_rewards)
        rewards, mask = _wide(rewards), jnp.asarray(mask)
        valid = jnp.ones(rewards.shape, bool) if valid is None else jnp.asarray(valid)
        rewards = jnp.where(valid, rewards, jnp.zeros_like(rewards))
        mask = mask & valid.reshape(-1, 1)
        token_rewards = terminal_rewards(rewards.reshape(-1), mask)
        if self.kl_in_reward:
            assert logp is not None and logp_ref is not None, "this algorithm needs logp, logp_ref"
            penalty = self._token_kl(on_mask(_wide(logp), mask), on_mask(_wide(logp_ref), mask))
            coef = self.kl_coef if kl_coef is None else kl_coef
            token_rewards = kl.reward_penalty(token_rewards, on_mask(penalty, mask), coef)
            rewards = jnp.sum(token_rewards, axis=1).reshape(rewards.shape)
        weights = self.settings.get("reward_weights")
        if reward_parts is not None and weights is None:
            weights = (1.0,) * reward_parts.shape[2]
        arrays = {
            "rewards": rewards,
            "valid": valid,
            "mask": mask,
            "lengths": jnp.sum(mask, axis=1, dtype=rewards.dtype).reshape(rewards.shape),
            "token_rewards": token_rewards,
            "values": _wide(values),
            "greedy_rewards": _wide(greedy_rewards),
            "reward_parts": _wide(reward_parts),
            "reward_weights": None if weights is None else jnp.asarray(weights, rewards.dtype),
            "logp": _wide(logp),
            "sum_pi_squared": _wide(sum_pi_squared),
        }
        result = _apply(ADVANTAGES[self.settings["advantage"]], arrays, self.settings)
        advantages, returns = result if isinstance(result, tuple) else (result, None)
        if self.settings["advantage"] in SEQUENCE_ADVANTAGES:
            advantages = spread(advantages, mask)
        if self.needs_tasks:
            assert tasks is not None, "this algorithm needs tasks"
            advantages = task_normalized(advantages, mask, jnp.asarray(tasks))
        return Estimate(advantages, returns)

    # ---- the optimiser batch -------------------------------------------------------------------

    def counts(
        self, mask: Bool[Host, "N T"], segment_ids: Int[Host, "N T"] | None = None
    ) -> Counts:
        """What the sums are divided by; those of micro-batches add up.

        Source: token counts of DAPO, https://arxiv.org/abs/2503.14476, Eq. 8.
        """
        segments = None if segment_ids is None else jnp.asarray(segment_ids)
        return batch_counts(jnp.asarray(mask), segments)

    def batch_stats(
        self,
        logp: Float[Host, "N T"],
        entropies: Float[Host, "N T"],
        batch: Batch,
        *,
        staleness: Int[Host, "N T"] | None = None,
    ) -> covariance.BatchStats | None:
        """Statistics of ratio and entropy over the whole optimiser batch; None if none are read.

        No gradient flows. The rows are those of all micro-batches and devices together.

        Source: https://arxiv.org/abs/2505.22617 (covariances); https://arxiv.org/abs/2506.01939
        (entropy).
        """
        if not self.needs_batch_stats:
            return None
        given = jax.tree.map(jnp.asarray, (logp, entropies, batch, staleness))
        logp, entropies, batch, staleness = jax.lax.stop_gradient(given)
        arrays = self._arrays(logp, batch, staleness)
        mask, logp, advantages = batch.mask, arrays["logp"], arrays["advantages"]
        stats = covariance.with_means(covariance.empty_stats(logp.dtype), logp, advantages, mask)
        if self._is_on("top_entropy_fraction"):
            fraction = self.settings["top_entropy_fraction"]
            threshold = entropy.entropy_threshold(on_mask(entropies, mask), mask, fraction)
            stats = stats.replace(entropy_threshold=threshold)
        if "cov_fraction" not in self.settings:
            return stats
        count = covariance.chosen_count(mask, self.settings["cov_fraction"])
        if "scores" not in self._inputs():
            values = covariance.token_covariance(logp, advantages, stats)
            cutoff = covariance.largest_cutoff(values, mask, count)
            return stats.replace(covariance_cutoff=cutoff)
        bounds = [self.settings[k] for k in ("clip_low", "clip_high", "cov_low", "cov_high")]
        candidates = covariance.clip_candidates(
            arrays["log_ratio"], logp, advantages, stats, *bounds
        )
        cutoff = covariance.smallest_cutoff(arrays["scores"], candidates & mask, count)
        return stats.replace(score_cutoff=cutoff)

    def loss(
        self,
        logp: Float[Array, "N T"],
        entropies: Float[Array, "N T"],
        batch: Batch,
        counts: Counts,
        stats: covariance.BatchStats | None = None,
        *,
        staleness: Int[Array, "N T"] | None = None,
        kl_coef: Float[Array, ""] | float | None = None,
        entropy_coef: Float[Array, ""] | float | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the loss, ``Σᵢ coefᵢ · sumᵢ / countᵢ``, and its metrics.

        Metrics are (sum, count) over these rows, to be added up and divided. The policy and KL
        terms are reduced as the preset says, the entropy bonus is a mean over tokens. Corrections,
        rejection and masks multiply the policy term alone and change no count.

        Source: the preset's objective, see `presets.PRESETS`; GRPO,
        https://arxiv.org/abs/2402.03300, Eq. 3.

        Args:
            logp: log-probability of each token under the policy; gradients flow through it.
            entropies: of each token's distribution, in nats; see `needs_entropy_gradient`.
            batch: `logp_old` None means one on-policy update: the ratio is 1, with its gradient.
            counts: of the whole optimiser batch.
            stats: from `batch_stats`.
            staleness: updates since each token was chosen, where `needs_staleness`.
            kl_coef, entropy_coef: the current values of adaptive coefficients.
        """
        mask = batch.mask
        arrays = {**self._arrays(logp, batch, staleness), "stats": stats}
        with jax.named_scope("policy_loss"):
            terms, marks = _apply(POLICY_LOSSES[self.settings["objective"]], arrays, self.settings)
            weights, kept, weight_marks = self._weights(arrays, entropies, batch, stats)
            terms = jnp.where(kept, terms * weights, jnp.zeros_like(terms))
            total = self._reduced(terms, batch, counts)
        marks = {**marks, **weight_marks}
        if batch.logp_old is not None:
            marks["approx_kl"] = kl.k3(arrays["logp_old"], arrays["logp"])
        if self.needs_ref:
            assert batch.logp_ref is not None, "this algorithm needs logp_ref"
            with jax.named_scope("kl"):
                terms = self._token_kl(arrays["logp"], arrays["logp_ref"])
                marks["kl"] = terms
                if not self.kl_in_reward:
                    coef = self.kl_coef if kl_coef is None else kl_coef
                    weighted = self._behaviour_weighted(terms, arrays)
                    total = total + coef * self._reduced(weighted, batch, counts)
        with jax.named_scope("entropy"):
            bonus = on_mask(entropies, mask)
            coef = self.entropy_coef if entropy_coef is None else entropy_coef
            if self.needs_entropy_gradient:
                count = reduction_count(counts, reduction="token_mean", dtype=total.dtype)
                total = total - coef * jnp.sum(bonus).astype(total.dtype) / count
            marks["entropy"] = bonus
        return total, {name: _token_metric(value, mask) for name, value in marks.items()}

    def value_loss(
        self,
        values: Float[Array, "N T"],
        old_values: Float[Array, "N T"],
        returns: Float[Array, "N T"],
        mask: Bool[Array, "N T"],
        counts: Counts,
    ) -> tuple[Float[Array, ""], Metrics]:
        """The critic's share of its loss for this micro-batch, a mean over tokens, and metrics.

        Source: PPO, https://arxiv.org/abs/1707.06347, Eq. 9; clipping,
        https://arxiv.org/abs/2005.12729.
        """
        values, old, returns = (on_mask(x, mask) for x in (values, old_values, returns))
        clip = self.settings["value_clip"]
        if math.isinf(clip):
            terms, clipped = value_losses.value_loss(values, returns), jnp.zeros_like(mask)
        else:
            terms, clipped = value_losses.clipped_value_loss(values, returns, old, value_clip=clip)
        count = reduction_count(counts, reduction="token_mean", dtype=terms.dtype)
        metrics = {
            "value_loss": _token_metric(terms, mask),
            "value_clip_ratio": _token_metric(clipped, mask),
        }
        return jnp.sum(on_mask(terms, mask)) / count, metrics

    # ---- inside --------------------------------------------------------------------------------

    def _arrays(self, logp, batch, staleness):
        """Everything an objective can read, finite everywhere and in one dtype."""
        mask = batch.mask
        given = (logp, batch.advantages, batch.logp_sampler, batch.logp_old, batch.logp_ref)
        narrow = all(x is None or x.dtype != jnp.float64 for x in given)
        dtype = jnp.float32 if narrow else jnp.float64
        logp, advantages, sampler, old, ref = (
            None if x is None else on_mask(x, mask).astype(dtype) for x in given
        )
        old = jax.lax.stop_gradient(logp) if old is None else old
        base = sampler if self.settings.get("ratio_base") == "sampler" else old
        if self.needs_staleness:
            assert staleness is not None, "this algorithm needs staleness"
            base = loglinear_proximal(logp, sampler, staleness)
        token_log_ratio = logp - base
        level = RATIO_LEVELS[self.settings.get("ratio_level", "token")]
        return {
            "logp": logp,
            "logp_base": base,
            "logp_old": old if not self.needs_staleness else base,
            "logp_sampler": sampler,
            "logp_ref": ref,
            "advantages": advantages,
            "token_log_ratio": token_log_ratio,
            "log_ratio": level(token_log_ratio, logp, mask, batch.segment_ids),
            "mask": mask,
            "segment_ids": batch.segment_ids,
            "scores": covariance.token_scores(batch.tokens, batch.positions, sampler),
        }

    def _weights(self, arrays, entropies, batch, stats):
        """(weight per token, tokens whose policy term is kept, metrics)."""
        mask, segments = batch.mask, batch.segment_ids
        old, sampler = arrays["logp_old"], arrays["logp_sampler"]
        weights, kept, marks = jnp.ones_like(arrays["logp"]), mask, {}
        if self._is_on("correction"):
            level = self.settings["correction_level"]
            raw = corrections.importance_weights(old, sampler, mask, segments, level=level)
            function = corrections.CORRECTIONS[self.settings["correction"]]
            weights = _apply((function, ("raw",)), {"raw": raw}, self.settings)
            marks["correction/ratio_mean"] = raw
            marks["correction/changed_mean"] = weights != raw
        if self._is_on("rejection"):
            chosen = {
                name: self.settings.get(name)
                for name in ("rejection", "rejection_low", "rejection_high")
            }
            passed = corrections.rejection_mask(old, sampler, mask, segments, **chosen)
            kept, marks["rejection/dropped_mean"] = kept & passed, ~passed
        if self._is_on("off_policy_delta"):
            delta = self.settings["off_policy_delta"]
            near = corrections.off_policy_sequences(
                arrays["logp"], sampler, arrays["advantages"], mask, segments, delta=delta
            )
            kept, marks["off_policy/dropped_mean"] = kept & near, ~near
        if self._is_on("top_entropy_fraction"):
            assert stats is not None, "the entropy threshold comes from batch_stats"
            high = on_mask(jax.lax.stop_gradient(entropies), mask) >= stats.entropy_threshold
            kept, marks["top_entropy/kept_mean"] = kept & high, high
        return weights, kept, marks

    def _token_kl(self, logp, logp_ref):
        return kl.KL_ESTIMATORS[self.settings["kl_estimator"]](logp, logp_ref)

    def _behaviour_weighted(self, terms, arrays):
        if not self._is_on("kl_importance"):
            return terms
        detach = self.settings["kl_importance"] == "detached"
        return kl.importance_weighted(terms, arrays["logp"], arrays["logp_sampler"], detach=detach)

    def _reduced(self, terms, batch, counts):
        how = self.settings["reduction"]
        total = reduction_sum(terms, batch.mask, reduction=how, segment_ids=batch.segment_ids)
        constant = self.settings.get("constant")
        return total / reduction_count(counts, reduction=how, constant=constant, dtype=total.dtype)


def _check_host_rewards(rewards, valid, reward_parts, greedy_rewards):
    """Under jit rewards are abstract; there `advantages.reward_arrays` has looked at them."""
    judged = True if valid is None else np.asarray(valid)
    if isinstance(rewards, np.ndarray):
        check_finite(np.where(judged, rewards, 0.0).ravel())
    if isinstance(reward_parts, np.ndarray):
        rows = np.where(np.expand_dims(judged, -1), reward_parts, 0.0)
        check_finite(rows.reshape(-1, rows.shape[2]), "a part of the reward of rollout")
    if isinstance(greedy_rewards, np.ndarray):
        check_finite(greedy_rewards, "the greedy reward of prompt")


def _wide(values):
    """A jax array of at least float32; None stays None."""
    if values is None:
        return None
    return widened(jnp.asarray(values))


def _token_metric(values, mask):
    values = jax.lax.stop_gradient(values).astype(jnp.float32)
    values = on_mask(values, mask)
    return jnp.sum(values), jnp.sum(mask, dtype=values.dtype)
