# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Per-token objectives: what each token adds to the loss (to be minimised) before any reduction.

``x`` is the log-ratio log π − log π_base at the chosen level (`ratios.RATIO_LEVELS`), ``r = eˣ``
(bounded), ``A`` the advantage. Every function returns the loss and indicators that become metrics.
Inputs are finite everywhere: `reductions.on_mask` comes first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrl_llm.algorithms import covariance
from jaxrl_llm.algorithms.ratios import bounded_exp
from jaxrl_llm.algorithms.reductions import sequence_mean

TokenLoss = tuple[Float[Array, "N T"], dict[str, Array]]


def policy_gradient(logp: Float[Array, "N T"], advantages: Float[Array, "N T"]) -> TokenLoss:
    """``loss = −A log π``: REINFORCE, without any ratio.

    Source: REINFORCE, https://link.springer.com/article/10.1007/BF00992696; GPG,
    https://arxiv.org/abs/2504.02546.
    """
    return -advantages * logp, {}


def clipped_surrogate(
    log_ratio: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate with separate bounds, and optionally a bound for bad tokens.

    ``loss = −min(r A, clip(r, 1 − low, 1 + high) A)``. With `dual_clip` c, a token of negative
    advantage never costs more than ``−c A``; with `ratio_cap` δ, r is replaced by ``min(r, δ)`` in
    the unclipped term. For δ = c ≥ 1 + high the two are equal.

    Source: PPO, https://arxiv.org/abs/1707.06347, Eq. 7; separate bounds, DAPO,
    https://arxiv.org/abs/2503.14476, Eq. 8; dual clip, https://arxiv.org/abs/1912.09729;
    two-sided cap, INTELLECT-2, https://arxiv.org/abs/2505.07291, Section 4.1.
    """
    ratio = bounded_exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    free = ratio if ratio_cap is None else jnp.minimum(ratio, ratio_cap)
    loss = jnp.maximum(-advantages * free, -advantages * clipped)
    if dual_clip is not None:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -advantages * dual_clip), loss)
    return loss, _clip_marks(ratio, advantages, clip_low, clip_high)


def clipped_weight(
    log_ratio: Float[Array, "N T"],
    logp: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> TokenLoss:
    """CISPO: ``loss = −sg(clip(r, 1 − low, 1 + high)) A log π``: no token loses its gradient.

    The default has no lower bound, as in the paper; its upper bound is ScaleRL's.

    Source: CISPO, https://arxiv.org/abs/2506.13585; https://arxiv.org/abs/2510.13786.
    """
    ratio = bounded_exp(log_ratio)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high))
    low, high = ratio < 1.0 - clip_low, ratio > 1.0 + clip_high
    marks = {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
    }
    return -weight * advantages * logp, marks


def one_sided_weight(
    log_ratio: Float[Array, "N T"],
    logp: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    *,
    weight_max: float = 2.0,
) -> TokenLoss:
    """AIPO: ``loss = −sg(min(π/μ, ρ)) A log π``, with the policy μ that sampled as the base.

    Source: LlamaRL, https://arxiv.org/abs/2505.24034 (asynchronous importance-weighted policy
    optimisation).
    """
    ratio = bounded_exp(log_ratio)
    weight = jax.lax.stop_gradient(jnp.minimum(ratio, weight_max))
    return -weight * advantages * logp, {"clip_ratio/high_mean": ratio > weight_max}


def soft_gate(
    log_ratio: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    *,
    gate_positive: float = 1.0,
    gate_negative: float = 1.05,
) -> TokenLoss:
    """SAPO: ``loss = −A (4/τ) σ(τ (r − 1))``, τ by the sign of the advantage.

    A smooth gate instead of a clip; its gradient at r = 1 is that of −A log π.

    Source: SAPO, https://arxiv.org/abs/2511.20347.
    """
    ratio = bounded_exp(log_ratio)
    tau = jnp.where(
        advantages > 0,
        jnp.full_like(advantages, gate_positive),
        jnp.full_like(advantages, gate_negative),
    )
    return -advantages * jax.nn.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau, {}


def geometric_mean_surrogate(
    token_log_ratio: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    segment_ids: Int[Array, "N T"] | None = None,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    """GMPO: ``loss = −A exp(mean_t x'_t)``, x' the token log-ratio clipped where it would gain.

    ``x' = min(x, clip(x, −low, high))`` for A > 0, the maximum for A < 0: the bounds are on the
    *logarithm*. Every token of a sequence carries the sequence's loss: reduce by ``sequence_mean``.

    Source: GMPO, https://arxiv.org/abs/2507.20673.
    """
    clipped = jnp.clip(token_log_ratio, -clip_low, clip_high)
    cautious = jnp.where(
        advantages > 0,
        jnp.minimum(token_log_ratio, clipped),
        jnp.maximum(token_log_ratio, clipped),
    )
    cautious = jnp.where(advantages == 0, jnp.zeros_like(cautious), cautious)
    ratio = bounded_exp(sequence_mean(cautious, mask, segment_ids))
    low = (token_log_ratio < -clip_low) & (advantages < 0)
    high = (token_log_ratio > clip_high) & (advantages > 0)
    marks = {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
    }
    return -advantages * ratio, marks


def divergence_mask_tv(
    token_log_ratio: Float[Array, "N T"],
    logp: Float[Array, "N T"],
    logp_base: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    *,
    divergence_low: float = 0.15,
    divergence_high: float = 0.15,
    weight_max: float = 20.0,
) -> TokenLoss:
    """DPPO with a binary total-variation trust region: ``loss = −M A sg(min(r, c)) log π``.

    M drops a token that would leave the region: A > 0 and ``π − π_base > high``, or A ≤ 0 and
    ``π − π_base < −low``. Probabilities, not ratios: rare tokens may move by large factors.

    Source: DPPO, https://arxiv.org/abs/2602.04879 (Binary-TV).
    """
    shift = jax.lax.stop_gradient(jnp.exp(logp) - jnp.exp(logp_base))
    low = (advantages <= 0) & (shift < -divergence_low)
    high = (advantages > 0) & (shift > divergence_high)
    return _masked_weight(token_log_ratio, logp, advantages, low, high, weight_max)


def divergence_mask_kl(
    token_log_ratio: Float[Array, "N T"],
    logp: Float[Array, "N T"],
    logp_base: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    *,
    divergence_low: float = 0.05,
    divergence_high: float = 0.05,
    weight_max: float = 20.0,
) -> TokenLoss:
    """DPPO with a binary KL trust region: ``loss = −M A sg(min(r, c)) log π``.

    M drops a token whose KL(Bernoulli(π_base) ‖ Bernoulli(π)) exceeds the bound and that would move
    further out: A > 0 with π > π_base, or A ≤ 0 with π < π_base. 1e-8 guards the logarithms.

    Source: DPPO, https://arxiv.org/abs/2602.04879 (Binary-KL).
    """
    now, base = jnp.exp(jax.lax.stop_gradient(logp)), jnp.exp(logp_base)
    kept = base * (logp_base - jax.lax.stop_gradient(logp))
    # A probability may exceed 1 by its rounding.
    base_rest, now_rest = jnp.maximum(1.0 - base, 0.0), jnp.maximum(1.0 - now, 0.0)
    rest = base_rest * jnp.log((base_rest + 1e-8) / (now_rest + 1e-8))
    divergence = kept + rest
    low = (advantages <= 0) & (divergence > divergence_low) & (now < base)
    high = (advantages > 0) & (divergence > divergence_high) & (now > base)
    return _masked_weight(token_log_ratio, logp, advantages, low, high, weight_max)


def quadratic_penalty(
    logp: Float[Array, "N T"],
    logp_base: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    *,
    dro_beta: float = 0.05,
) -> TokenLoss:
    """DRO: ``loss = −A log π + (β/2) (log π − log π_base)²``, per token.

    Source: DRO, https://arxiv.org/abs/2405.19107; in this form,
    https://tinker-docs.thinkingmachines.ai/losses.
    """
    return -advantages * logp + 0.5 * dro_beta * jnp.square(logp - logp_base), {}


def clip_covariance(
    log_ratio: Float[Array, "N T"],
    logp: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    scores: UInt[Array, "N T"],
    stats: covariance.BatchStats,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_fraction: float = 0.0002,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> TokenLoss:
    """Clip-Cov: the clipped surrogate, without a random few tokens of high covariance.

    Of the tokens that the clip leaves alone and whose covariance
    ``(log π − mean)(A − mean)`` lies in (low, high), ``max(⌊fraction · tokens⌋, 1)`` of the whole
    optimiser batch lose their term. The draw hashes each token, so that no split changes it.

    Source: https://arxiv.org/abs/2505.22617 (Clip-Cov).
    """
    loss, marks = clipped_surrogate(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    candidates = covariance.clip_candidates(
        log_ratio, logp, advantages, stats, clip_low, clip_high, cov_low, cov_high
    )
    drawn = candidates & (scores <= stats.score_cutoff)
    return jnp.where(drawn, jnp.zeros_like(loss), loss), {**marks, "clip_cov/mean": drawn}


def kl_covariance(
    log_ratio: Float[Array, "N T"],
    logp: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    stats: covariance.BatchStats,
    *,
    cov_fraction: float = 0.0002,
    cov_kl_coef: float = 1.0,
) -> TokenLoss:
    """KL-Cov: ``loss = −r A``, plus ``β |x|`` on the tokens of highest covariance.

    These are the ``max(⌊fraction · tokens⌋, 1)`` of the whole optimiser batch with the largest
    ``(log π − mean)(A − mean)``.

    Source: https://arxiv.org/abs/2505.22617 (KL-Cov).
    """
    top = covariance.token_covariance(logp, advantages, stats) >= stats.covariance_cutoff
    penalty = cov_kl_coef * jnp.abs(log_ratio)
    loss = -advantages * bounded_exp(log_ratio)
    return loss + jnp.where(top, penalty, jnp.zeros_like(penalty)), {"kl_cov/mean": top}


def _clip_marks(ratio, advantages, clip_low, clip_high):
    low = (ratio < 1.0 - clip_low) & (advantages < 0)
    high = (ratio > 1.0 + clip_high) & (advantages > 0)
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
    }


def _masked_weight(token_log_ratio, logp, advantages, low, high, weight_max):
    weight = jax.lax.stop_gradient(jnp.minimum(bounded_exp(token_log_ratio), weight_max))
    loss = jnp.where(low | high, jnp.zeros_like(logp), -advantages * weight * logp)
    marks = {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
    }
    return loss, marks


# name → (function, the arrays it reads). The function's keyword-only parameters are its settings.
POLICY_LOSSES = {
    "pg": (policy_gradient, ("logp", "advantages")),
    "clip": (clipped_surrogate, ("log_ratio", "advantages")),
    "cispo": (clipped_weight, ("log_ratio", "logp", "advantages")),
    "aipo": (one_sided_weight, ("log_ratio", "logp", "advantages")),
    "sapo": (soft_gate, ("log_ratio", "advantages")),
    "gmpo": (
        geometric_mean_surrogate,
        ("token_log_ratio", "advantages", "mask", "segment_ids"),
    ),
    "dppo_tv": (divergence_mask_tv, ("token_log_ratio", "logp", "logp_base", "advantages")),
    "dppo_kl": (divergence_mask_kl, ("token_log_ratio", "logp", "logp_base", "advantages")),
    "dro": (quadratic_penalty, ("logp", "logp_base", "advantages")),
    "clip_cov": (clip_covariance, ("log_ratio", "logp", "advantages", "scores", "stats")),
    "kl_cov": (kl_covariance, ("log_ratio", "logp", "advantages", "stats")),
}
