# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Losses on preferences: the DPO family on pairs, KTO on single replies. One value per pair.

Everything starts from `Pairs`, the log-probabilities of whole replies. A loss that compares with a
reference reads it through ``h = s(chosen) − s(rejected)``, where ``s`` is the score that a
divergence gives to ``log π/π_ref`` (`DIVERGENCES`). Rows of `PREFERENCE_LOSSES` say which settings
a loss reads, so that a setting without effect can be refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms.reductions import widened

_LARGEST_EXPONENT = 80.0  # exp of more is not finite in float32


@struct.dataclass
class Pairs:
    """P pairs of replies to the same prompt. Log-probabilities are sums over the reply, in nats.

    Source: the notation of DPO, https://arxiv.org/abs/2305.18290.

    Attributes:
        chosen, rejected: ``log π(y|x)``.
        ref_chosen, ref_rejected: ``log π_ref(y|x)``; None for losses without a reference.
        chosen_length, rejected_length: tokens of the replies, end of turn included.
    """

    chosen: Float[Array, " P"]
    rejected: Float[Array, " P"]
    chosen_length: Float[Array, " P"]
    rejected_length: Float[Array, " P"]
    ref_chosen: Float[Array, " P"] | None = None
    ref_rejected: Float[Array, " P"] | None = None


# ── the score of a log-ratio, by divergence ───────────────────────────────────────────────────────


def reverse_kl_score(logratio: Float[Array, "*S"], alpha: float) -> Float[Array, "*S"]:
    """``log t``, ``t = π/π_ref``: DPO. Source: https://arxiv.org/abs/2309.16240, Table 1."""
    del alpha
    return logratio


def forward_kl_score(logratio: Float[Array, "*S"], alpha: float) -> Float[Array, "*S"]:
    """``1 − 1/t``. Source: https://arxiv.org/abs/2309.16240, Table 1, up to its constant."""
    del alpha
    return 1.0 - _bounded_exp(-logratio)


def jensen_shannon_score(logratio: Float[Array, "*S"], alpha: float) -> Float[Array, "*S"]:
    """``log(2t/(1 + t))``. Source: https://arxiv.org/abs/2309.16240, Table 1."""
    del alpha
    return math.log(2.0) + jax.nn.log_sigmoid(logratio)


def alpha_score(logratio: Float[Array, "*S"], alpha: float) -> Float[Array, "*S"]:
    """``(t^(α−1) − 1)/(α − 1)``; α → 1 is `reverse_kl_score`, α = 0 is `forward_kl_score`.

    Source: α-divergences of f-DPO, https://arxiv.org/abs/2309.16240, Table 1.
    """
    if abs(alpha - 1.0) < 1e-6:
        return logratio
    return (_bounded_exp((alpha - 1.0) * logratio) - 1.0) / (alpha - 1.0)


def _bounded_exp(x):
    return jnp.exp(jnp.minimum(x, _LARGEST_EXPONENT))


DIVERGENCES: dict[str, Callable] = {
    "reverse_kl": reverse_kl_score,
    "forward_kl": forward_kl_score,
    "jensen_shannon": jensen_shannon_score,
    "alpha": alpha_score,
}


# ── losses with a reference ───────────────────────────────────────────────────────────────────────


def dpo_loss(
    pairs: Pairs,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    divergence: str = "reverse_kl",
    alpha: float = 1.0,
) -> Float[Array, " P"]:
    """``−(1 − ε) log σ(βh) − ε log σ(−βh)``: DPO, and with ε > 0 conservative DPO.

    Source: https://arxiv.org/abs/2305.18290, Eq. 7; ε: https://ericmitchell.ai/cdpo.pdf, Eq. 3;
    divergences: https://arxiv.org/abs/2309.16240.
    """
    h = beta * _margin(pairs, divergence, alpha)
    return _smoothed_sigmoid(h, label_smoothing)


def robust_dpo_loss(
    pairs: Pairs,
    *,
    beta: float,
    label_smoothing: float,
    divergence: str = "reverse_kl",
    alpha: float = 1.0,
) -> Float[Array, " P"]:
    """``[−(1 − ε) log σ(βh) + ε log σ(−βh)] / (1 − 2ε)``, unbiased when a share ε is flipped.

    Source: https://arxiv.org/abs/2403.00409, Eq. 7.
    """
    h = beta * _margin(pairs, divergence, alpha)
    right, flipped = -jax.nn.log_sigmoid(h), -jax.nn.log_sigmoid(-h)
    return ((1.0 - label_smoothing) * right - label_smoothing * flipped) / (
        1.0 - 2.0 * label_smoothing
    )


def hinge_loss(
    pairs: Pairs, *, beta: float, divergence: str = "reverse_kl", alpha: float = 1.0
) -> Float[Array, " P"]:
    """``max(0, 1 − βh)``, the hinge of SLiC on DPO's margin.

    Source: https://arxiv.org/abs/2305.10425; on the margin: https://arxiv.org/abs/2309.06657,
    Eq. 10.
    """
    return jax.nn.relu(1.0 - beta * _margin(pairs, divergence, alpha))


def ipo_loss(pairs: Pairs, *, beta: float) -> Float[Array, " P"]:
    """``(h − 1/(2β))²`` with h a difference of means over tokens, so that β has one scale for all
    lengths.

    Source: https://arxiv.org/abs/2310.12036, Eq. 17; the mean over tokens is how its authors ran
    it. `ipo_sum_loss` is the equation as printed.
    """
    chosen = (pairs.chosen - pairs.ref_chosen) / pairs.chosen_length
    rejected = (pairs.rejected - pairs.ref_rejected) / pairs.rejected_length
    return jnp.square(chosen - rejected - 1.0 / (2.0 * beta))


def ipo_sum_loss(pairs: Pairs, *, beta: float) -> Float[Array, " P"]:
    """``(h − 1/(2β))²``, sums over the reply. Source: https://arxiv.org/abs/2310.12036, Eq. 17."""
    return jnp.square(_margin(pairs, "reverse_kl", 1.0) - 1.0 / (2.0 * beta))


def normalized_dpo_loss(
    pairs: Pairs, *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, " P"]:
    """DPO on means over tokens: ``−log σ(β (Δ_c/|y_c| − Δ_r/|y_r|))``, ``Δ = log π/π_ref``.

    Source: length-normalised DPO of Tülu 3, https://arxiv.org/abs/2411.15124, Eq. 6.
    """
    chosen = (pairs.chosen - pairs.ref_chosen) / pairs.chosen_length
    rejected = (pairs.rejected - pairs.ref_rejected) / pairs.rejected_length
    return _smoothed_sigmoid(beta * (chosen - rejected), label_smoothing)


def exo_loss(pairs: Pairs, *, beta: float, label_smoothing: float) -> Float[Array, " P"]:
    """``KL(q ‖ p)`` with ``q = [σ(βh), σ(−βh)]`` and ``p = [1 − ε, ε]``, ε > 0.

    Source: EXO, https://arxiv.org/abs/2402.00856, Eq. 16.
    """
    h = beta * _margin(pairs, "reverse_kl", 1.0)
    win = jax.nn.sigmoid(h) * (jax.nn.log_sigmoid(h) - math.log1p(-label_smoothing))
    lose = jax.nn.sigmoid(-h) * (jax.nn.log_sigmoid(-h) - math.log(label_smoothing))
    return win + lose


def nca_loss(pairs: Pairs, *, beta: float) -> Float[Array, " P"]:
    """``−log σ(r_c) − ½ log σ(−r_c) − ½ log σ(−r_r)`` with ``r = β log π/π_ref``.

    Source: NCA, https://arxiv.org/abs/2402.05369, Eq. 8 for two replies.
    """
    chosen, rejected = _rewards(pairs, beta)
    return -(
        jax.nn.log_sigmoid(chosen)
        + 0.5 * jax.nn.log_sigmoid(-chosen)
        + 0.5 * jax.nn.log_sigmoid(-rejected)
    )


def sppo_loss(pairs: Pairs, *, beta: float) -> Float[Array, " P"]:
    """``(Δ_c − 1/(2β))² + (Δ_r + 1/(2β))²`` with ``Δ = log π/π_ref`` and hard preferences.

    Source: SPPO, https://arxiv.org/abs/2405.00675, Eq. 4.7 with probabilities 1 and 0.
    """
    chosen, rejected = _rewards(pairs, 1.0)
    half = 1.0 / (2.0 * beta)
    return jnp.square(chosen - half) + jnp.square(rejected + half)


def apo_zero_loss(pairs: Pairs, *, beta: float) -> Float[Array, " P"]:
    """``1 − σ(r_c) + σ(r_r)``: for chosen replies better than the model's own.

    Source: APO-zero, https://arxiv.org/abs/2408.06266, Eq. 7.
    """
    chosen, rejected = _rewards(pairs, beta)
    return 1.0 - jax.nn.sigmoid(chosen) + jax.nn.sigmoid(rejected)


def apo_down_loss(pairs: Pairs, *, beta: float) -> Float[Array, " P"]:
    """``σ(r_c) + 1 − σ(r_c − r_r)``: for chosen replies worse than the model's own.

    Source: APO-down, https://arxiv.org/abs/2408.06266, Eq. 8.
    """
    chosen, rejected = _rewards(pairs, beta)
    return jax.nn.sigmoid(chosen) + 1.0 - jax.nn.sigmoid(chosen - rejected)


# ── losses without a reference ────────────────────────────────────────────────────────────────────


def simpo_loss(
    pairs: Pairs, *, beta: float, gamma: float, label_smoothing: float = 0.0
) -> Float[Array, " P"]:
    """``−log σ(β (log π(y_c)/|y_c| − log π(y_r)/|y_r|) − γ)``.

    Source: SimPO, https://arxiv.org/abs/2405.14734, Eq. 6.
    """
    chosen = pairs.chosen / pairs.chosen_length
    rejected = pairs.rejected / pairs.rejected_length
    return _smoothed_sigmoid(beta * (chosen - rejected) - gamma, label_smoothing)


def cpo_loss(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Float[Array, " P"]:
    """``−log σ(β (log π(y_c) − log π(y_r)))``; its NLL of the chosen reply is `nll_coef`.

    Source: CPO, https://arxiv.org/abs/2401.08417, Eq. 3.
    """
    return _smoothed_sigmoid(beta * (pairs.chosen - pairs.rejected), label_smoothing)


def orpo_loss(pairs: Pairs, *, beta: float) -> Float[Array, " P"]:
    """``−β log σ(log odds(y_c) − log odds(y_r))``, ``odds = p/(1 − p)``, p the geometric mean of
    the reply's token probabilities; its NLL of the chosen reply is `nll_coef`.

    Source: ORPO, https://arxiv.org/abs/2403.07691, Eqs. 4–7, λ written β.
    """
    chosen = pairs.chosen / pairs.chosen_length
    rejected = pairs.rejected / pairs.rejected_length
    odds = (chosen - _log1mexp(chosen)) - (rejected - _log1mexp(rejected))
    return -beta * jax.nn.log_sigmoid(odds)


# ── single replies ────────────────────────────────────────────────────────────────────────────────


def kto_loss(
    logratio: Float[Array, " P"],
    desirable: Bool[Array, " P"],
    kl: Float[Array, ""],
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Array, " P"]:
    """``λ_D (1 − σ(β(Δ − z)))`` of a desirable reply, ``λ_U (1 − σ(β(z − Δ)))`` of another one.

    Source: KTO, https://arxiv.org/abs/2402.01306, Eqs. 7 and 8.

    Args:
        logratio: ``Δ = log π(y|x) − log π_ref(y|x)`` of each reply.
        desirable: whether the reply is wanted.
        kl: z, the estimate of `kto_kl`; no gradient flows through it.
    """
    sign = jnp.where(desirable, 1.0, -1.0).astype(logratio.dtype)
    weight = jnp.where(desirable, desirable_weight, undesirable_weight).astype(logratio.dtype)
    z = jax.lax.stop_gradient(kl).astype(logratio.dtype)
    return weight * (1.0 - jax.nn.sigmoid(beta * sign * (logratio - z)))


def kto_kl(logratio: Float[Array, " P"], valid: Bool[Array, " P"]) -> Float[Array, ""]:
    """``z = max(0, mean Δ)`` over replies that belong to other prompts: the KL's estimate.

    Source: KTO, https://arxiv.org/abs/2402.01306, Section 3.3.
    """
    wide = widened(logratio)
    total = jnp.sum(jnp.where(valid, wide, 0.0))
    count = jnp.maximum(jnp.sum(valid), 1).astype(wide.dtype)
    return jnp.maximum(jax.lax.stop_gradient(total) / count, 0.0)


# ── pieces ────────────────────────────────────────────────────────────────────────────────────────


def slot_sums(
    values: Float[Array, "N T"], segment_ids: Int[Array, "N T"], slots: int
) -> Float[Array, "N slots"]:
    """The sum of each segment of each row: slot s holds segment s + 1, 0 where there is none.

    Source: Σ_t over a reply in DPO, https://arxiv.org/abs/2305.18290.
    """
    wide = widened(values)
    ids = jnp.arange(1, slots + 1, dtype=segment_ids.dtype)
    same = segment_ids[:, :, None] == ids[None, None, :]
    return jnp.sum(jnp.where(same, wide[:, :, None], jnp.zeros((), wide.dtype)), axis=1)


def _margin(pairs: Pairs, divergence: str, alpha: float):
    score = DIVERGENCES[divergence]
    chosen = score(pairs.chosen - pairs.ref_chosen, alpha)
    return chosen - score(pairs.rejected - pairs.ref_rejected, alpha)


def _rewards(pairs: Pairs, beta: float):
    return (
        beta * (pairs.chosen - pairs.ref_chosen),
        beta * (pairs.rejected - pairs.ref_rejected),
    )


def _smoothed_sigmoid(h, label_smoothing: float):
    return -(
        (1.0 - label_smoothing) * jax.nn.log_sigmoid(h) + label_smoothing * jax.nn.log_sigmoid(-h)
    )


def _log1mexp(x):
    """log(1 − eˣ) for x < 0, exact near 0 and far below; 0 itself is moved to the nearest below."""
    x = jnp.minimum(x, -(jnp.finfo(x.dtype).tiny ** 0.5))
    near = x > -math.log(2.0)
    # Each branch sees only arguments that are safe for it: the other's gradient would be NaN.
    close = jnp.log(-jnp.expm1(jnp.where(near, x, -1.0)))
    far = jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x)))
    return jnp.where(near, close, far)


@dataclasses.dataclass(frozen=True)
class LossRow:
    """A loss on pairs. Source: the survey of such losses, https://arxiv.org/abs/2410.15595.

    Attributes:
        function: (pairs, **settings) → one value per pair.
        settings: which settings it reads beside `beta`.
        reference: whether it compares with a reference policy.
        nll_coef: its usual weight of the NLL of chosen replies.
        per_token: its implicit reward is a mean over tokens.
    """

    function: Callable[..., Float[Array, " P"]]
    settings: tuple[str, ...] = ()
    reference: bool = True
    nll_coef: float = 0.0
    per_token: bool = False


_F = ("divergence", "alpha")
PREFERENCE_LOSSES: dict[str, LossRow] = {
    "dpo": LossRow(dpo_loss, ("label_smoothing", *_F)),
    "robust": LossRow(robust_dpo_loss, ("label_smoothing", *_F)),
    "hinge": LossRow(hinge_loss, _F),
    "ipo": LossRow(ipo_loss, per_token=True),
    "ipo_sum": LossRow(ipo_sum_loss),
    "dpo_norm": LossRow(normalized_dpo_loss, ("label_smoothing",), per_token=True),
    "exo": LossRow(exo_loss, ("label_smoothing",)),
    "nca": LossRow(nca_loss),
    "sppo": LossRow(sppo_loss),
    "apo_zero": LossRow(apo_zero_loss),
    "apo_down": LossRow(apo_down_loss),
    "simpo": LossRow(simpo_loss, ("gamma", "label_smoothing"), reference=False, per_token=True),
    "cpo": LossRow(cpo_loss, ("label_smoothing",), reference=False, nll_coef=1.0),
    "orpo": LossRow(orpo_loss, reference=False, nll_coef=1.0, per_token=True),
}
