# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Estimators of KL(π ‖ π_ref), one per token at a fixed prefix, and what their gradients descend.

With ``x = log π − log π_ref`` on a token drawn from π (on-policy):

=========  ================  =============  ==============================================
estimator  value             E[value]       the expected gradient of the value as a loss
=========  ================  =============  ==============================================
k1         x                 KL(π‖π_ref)    0: it descends nothing
k2         x²/2              biased         that of KL(π‖π_ref), the reverse KL
k3         e⁻ˣ − 1 + x       KL(π‖π_ref)    that of KL(π_ref‖π), the forward KL
abs        abs(x)            a distance     E[sign(x) ∇log π]: of no KL
k1+, k3+   as k1, k3         as k1, k3      that of KL(π‖π_ref): straight through k2
abs+       as abs            as abs         that of KL(π‖π_ref): straight through k2
=========  ================  =============  ==============================================

On tokens drawn from another policy μ the same holds after weighting by the detached π/μ
(`importance_weighted`). In the reward (`reward_penalty`) nothing is differentiated: k1 is exact.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.ratios import LOG_RATIO_BOUND, bounded_exp


def k1(logp: Float[Array, "*S"], logp_ref: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """``x = log π − log π_ref``: unbiased for the value of the KL, of either sign.

    As a loss its gradient is ∇log π, whose expectation under π is 0: it descends nothing. Use it in
    the reward, or `k2` or a straight-through form in the loss.

    Source: Schulman, http://joschu.net/blog/kl-approx.html.
    """
    return logp - logp_ref


def k2(logp: Float[Array, "*S"], logp_ref: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """``x²/2``: its value is biased; its gradient, x ∇log π, descends the reverse KL(π‖π_ref).

    Source: Schulman, http://joschu.net/blog/kl-approx.html; on the gradient,
    https://arxiv.org/abs/2510.01555.
    """
    return 0.5 * jnp.square(logp - logp_ref)


def k3(logp: Float[Array, "*S"], logp_ref: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """``e⁻ˣ − 1 + x``: unbiased for the value of the KL and never negative; GRPO's estimator.

    As a loss its gradient, (1 − π_ref/π) ∇log π, descends the forward KL(π_ref‖π), not the reverse
    one. The exponent is bounded at ±20; beyond, the exponential keeps its last gradient, so that a
    token far below the reference is still drawn up.

    Source: Schulman, http://joschu.net/blog/kl-approx.html; GRPO,
    https://arxiv.org/abs/2402.03300, Eq. 4.
    """
    x = logp - logp_ref
    inside = jnp.abs(x) <= LOG_RATIO_BOUND
    inner = jnp.where(inside, x, jnp.zeros_like(x))
    edge = jax.lax.stop_gradient(bounded_exp(-x))
    outer = edge * (1.0 - (x - jax.lax.stop_gradient(x)))
    return jnp.where(inside, jnp.exp(-inner), outer) - 1.0 + x


def absolute(logp: Float[Array, "*S"], logp_ref: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """``|x|``: a robust distance; as a loss its gradient is sign(x) ∇log π and descends no KL.

    Source: the "abs" penalty of TRL's and verl's PPO, https://arxiv.org/abs/2409.19256.
    """
    return jnp.abs(logp - logp_ref)


def straight_through(
    estimator: Callable[[Float[Array, "*S"], Float[Array, "*S"]], Float[Array, "*S"]],
    logp: Float[Array, "*S"],
    logp_ref: Float[Array, "*S"],
) -> Float[Array, "*S"]:
    """The value of `estimator` with the gradient of `k2`: ``k2 − sg(k2) + sg(estimator)``.

    As a loss, on-policy, it descends the reverse KL(π‖π_ref) in expectation.

    Source: https://arxiv.org/abs/2510.01555; verl's "+" forms.
    """
    value, carrier = estimator(logp, logp_ref), k2(logp, logp_ref)
    return carrier + jax.lax.stop_gradient(value - carrier)


def k1_plus(logp: Float[Array, "*S"], logp_ref: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """The value of `k1` with the gradient of `k2`: descends the reverse KL(π‖π_ref).

    Source: https://arxiv.org/abs/2510.01555.
    """
    return straight_through(k1, logp, logp_ref)


def k3_plus(logp: Float[Array, "*S"], logp_ref: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """The value of `k3` with the gradient of `k2`: descends the reverse KL(π‖π_ref).

    Source: https://arxiv.org/abs/2510.01555.
    """
    return straight_through(k3, logp, logp_ref)


def absolute_plus(logp: Float[Array, "*S"], logp_ref: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """The value of `absolute` with the gradient of `k2`: descends the reverse KL(π‖π_ref).

    Source: https://arxiv.org/abs/2510.01555.
    """
    return straight_through(absolute, logp, logp_ref)


def importance_weighted(
    kl: Float[Array, "*S"],
    logp: Float[Array, "*S"],
    logp_sampler: Float[Array, "*S"],
    *,
    detach: bool = True,
) -> Float[Array, "*S"]:
    """A KL term on tokens drawn from μ instead of π, weighted by ``π/μ`` (log-ratio within ±20).

    With the weight detached, `k2` and the straight-through forms descend the reverse KL(π‖π_ref) in
    expectation under μ. With gradients through the weight, `k3` does, in value and gradient.

    Source: https://arxiv.org/abs/2510.01555 (detached); DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556, Eq. 7 (through the weight, with k3).
    """
    weight = bounded_exp(logp - logp_sampler)
    return kl * (jax.lax.stop_gradient(weight) if detach else weight)


def reward_penalty(
    token_rewards: Float[Array, "N T"], kl: Float[Array, "N T"], coef: Float[Array, ""] | float
) -> Float[Array, "N T"]:
    """``r_t − β kl_t``: the KL in the reward, where it is a constant of the update.

    With k1 the policy gradient then descends the reverse KL(π‖π_ref) of whole sequences.

    Source: https://arxiv.org/abs/1909.08593, Eq. 2.
    """
    return token_rewards - coef * jax.lax.stop_gradient(kl)


def adaptive_kl_coef(
    coef: float, kl: float, *, target: float, horizon: float, samples: int
) -> float:
    """The next β: ``β (1 + clip(kl/target − 1, −0.2, 0.2) · samples / horizon)``.

    Source: https://arxiv.org/abs/1909.08593, Section 2.2.

    Args:
        kl: the mean KL just measured.
        samples: sequences since the last update.
        horizon: sequences over which an error of the full 20 % would move β by 20 %.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * samples / horizon)


KL_ESTIMATORS: dict[str, Callable] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": k1_plus,
    "k3+": k3_plus,
    "abs+": absolute_plus,
}
