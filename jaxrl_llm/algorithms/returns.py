# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages per token: returns, GAE, whitening, token baselines.

Rows are one sequence each. `mask` is True on the tokens that the policy chose and that are trained
on; gaps (observations, tool output) carry values and returns across without decay. Statistics
are those of all rows handed over, i.e. of the whole rollout batch. Results are 0 off the mask.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms.advantages import divided, group_advantages, mean_advantages
from jaxrl_llm.algorithms.reductions import on_mask, widened


def terminal_rewards(rewards: Float[Array, " N"], mask: Bool[Array, "N T"]) -> Float[Array, "N T"]:
    """Each answer's reward on the last token that the policy chose, end-of-sequence or not.

    Source: PPO for language models, https://arxiv.org/abs/1909.08593, Section 2.

    A row without a chosen token has no place for its reward.
    """
    rewards = widened(rewards)
    later = jnp.cumsum(mask[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
    last = mask & (later == 1)
    return jnp.where(last, rewards[:, None], jnp.zeros((), rewards.dtype))


def discounted_returns(
    token_rewards: Float[Array, "N T"], mask: Bool[Array, "N T"], *, gamma: float = 1.0
) -> Float[Array, "N T"]:
    """``G_t = r_t + γ G_{t+1}`` over chosen tokens: REINFORCE's reward to go.

    Source: REINFORCE, https://link.springer.com/article/10.1007/BF00992696.
    """
    rewards = on_mask(token_rewards, mask)

    def step(after, now):
        reward, chosen = now
        here = jnp.where(chosen, reward + gamma * after, after)
        return here, here

    start = jnp.zeros(rewards.shape[0], rewards.dtype)
    _, returns = jax.lax.scan(step, start, (rewards.T, mask.T), reverse=True)
    return on_mask(returns.T, mask)


def generalized_advantages(
    token_rewards: Float[Array, "N T"],
    values: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float[Array, "N T"], Float[Array, "N T"]]:
    """GAE and the critic's targets: ``A_t = δ_t + γλ A_{t+1}``, returns = A + V.

    ``δ_t = r_t + γ V_{t+1} − V_t``, where t + 1 is the next *chosen* token: an observation between
    two chosen tokens decays nothing. After the last one, V and A are 0.

    Source: GAE, https://arxiv.org/abs/1506.02438, Eq. 16.
    """
    rewards, values = on_mask(token_rewards, mask), on_mask(values, mask)

    def step(after, now):
        value_after, advantage_after = after
        reward, value, chosen = now
        delta = reward + gamma * value_after - value
        advantage = jnp.where(chosen, delta + gamma * lam * advantage_after, advantage_after)
        return (jnp.where(chosen, value, value_after), advantage), advantage

    zeros = jnp.zeros(rewards.shape[0], rewards.dtype)
    _, advantages = jax.lax.scan(step, (zeros, zeros), (rewards.T, values.T, mask.T), reverse=True)
    advantages = on_mask(advantages.T, mask)
    return advantages, on_mask(advantages + values, mask)


def gae_advantages(
    token_rewards: Float[Array, "N T"],
    values: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> tuple[Float[Array, "N T"], Float[Array, "N T"]]:
    """`generalized_advantages`, whitened over the trained tokens of the rollout batch, and returns.

    The returns, the critic's targets, belong to the advantages before whitening.

    Source: PPO, https://arxiv.org/abs/1707.06347; GAE, https://arxiv.org/abs/1506.02438, Eq. 16;
    whitening, https://arxiv.org/abs/2005.12729.
    """
    advantages, returns = generalized_advantages(token_rewards, values, mask, gamma=gamma, lam=lam)
    return (whitened(advantages, mask) if whiten else advantages), returns


def whitened(
    values: Float[Array, "N T"], mask: Bool[Array, "N T"], *, ddof: int = 1, eps: float = 1e-8
) -> Float[Array, "N T"]:
    """``(x − mean) / √(var + eps)`` over the mask, 0 elsewhere; all 0 if the values are equal.

    Source: advantage whitening, https://arxiv.org/abs/2005.12729.
    """
    values = on_mask(values, mask)
    count = jnp.sum(mask, dtype=values.dtype)
    mean = jnp.sum(values) / jnp.maximum(count, 1.0)
    low = jnp.min(jnp.where(mask, values, jnp.inf))
    high = jnp.max(jnp.where(mask, values, -jnp.inf))
    centred = jnp.where(mask & (high > low), values - mean, jnp.zeros_like(values))
    variance = jnp.sum(jnp.square(centred)) / jnp.maximum(count - ddof, 1.0)
    return divided(centred, jnp.sqrt(variance + eps))


def reinforce_advantages(
    token_rewards: Float[Array, "N T"], mask: Bool[Array, "N T"], *, gamma: float = 1.0
) -> Float[Array, "N T"]:
    """``A_t = G_t``: plain reward to go, no baseline.

    Source: REINFORCE, https://link.springer.com/article/10.1007/BF00992696.
    """
    return discounted_returns(token_rewards, mask, gamma=gamma)


def reinforce_plus_plus_advantages(
    token_rewards: Float[Array, "N T"], mask: Bool[Array, "N T"], *, gamma: float = 1.0
) -> Float[Array, "N T"]:
    """Reward to go (with the KL in the reward), whitened over the rollout batch.

    Source: REINFORCE++, https://arxiv.org/abs/2501.03262.
    """
    return whitened(discounted_returns(token_rewards, mask, gamma=gamma), mask)


def reinforce_plus_plus_baseline_advantages(
    rewards: Float[Array, "B G"], valid: Bool[Array, "B G"], mask: Bool[Array, "N T"]
) -> Float[Array, "N T"]:
    """Reward minus the group's mean, then whitened over the trained tokens of the rollout batch.

    Source: REINFORCE++-baseline, https://arxiv.org/abs/2501.03262.
    """
    return whitened(spread(mean_advantages(rewards, valid), mask), mask)


def decoupled_reward_advantages(
    reward_parts: Float[Array, "B G P"],
    valid: Bool[Array, "B G"],
    mask: Bool[Array, "N T"],
    reward_weights: Float[Array, " P"],
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    batch_normalize: Literal["sequences", "tokens", "none"] = "sequences",
) -> Float[Array, "N T"]:
    """Each reward normalised within its group, summed with weights, then normalised over the batch.

    ``A_p = (r_p − mean_g r_p)/(std_g r_p + eps)``, ``A = Σ_p w_p A_p``, then
    ``(A − mean)/(std + eps)`` over the sequences of the rollout batch (the paper), or whitened over
    its trained tokens (as verl does), or left as it is.

    Source: GDPO, https://arxiv.org/abs/2601.05242.
    """
    total = jnp.zeros(reward_parts.shape[:2], widened(reward_parts).dtype)
    for part in range(reward_parts.shape[2]):
        one = group_advantages(reward_parts[:, :, part], valid, ddof=ddof, eps=eps)
        total = total + reward_weights[part].astype(total.dtype) * one
    if batch_normalize == "tokens":
        return whitened(spread(total, mask), mask)
    if batch_normalize == "sequences":
        flat, judged = total.reshape(1, -1), valid.reshape(1, -1)
        total = group_advantages(flat, judged, ddof=ddof, eps=eps).reshape(total.shape)
    return spread(total, mask)


def token_baseline_advantages(
    token_rewards: Float[Array, "N T"],
    logp: Float[Array, "N T"],
    sum_pi_squared: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    valid: Bool[Array, "B G"],
    weights: Float[Array, "N T"] | None = None,
    *,
    zero_tail: bool = True,
    eps: float = 1e-8,
) -> Float[Array, "N T"]:
    """The optimal token baseline: at step t the returns of the group, weighted by their energy.

    ``A_t = G_t − B_t``, ``B_t = Σ_g G_t W_t / (Σ_g W_t + eps)``, ``W_t = Σ_{s≤t} w_s`` and
    ``w_s = 1 − 2 π_s + Σ_v π_v²``, the squared norm of the score. Steps are columns: for answers
    in one piece. A group with one judged row gets 0.

    Source: https://arxiv.org/abs/2602.07078.

    Args:
        logp: log-probability of the chosen tokens.
        sum_pi_squared: Σ_v π_v² of each token's distribution.
        weights: importance weights, squared into w_s; 1 if None.
        zero_tail: the only longest row of a group has no baseline beyond the second longest.
    """
    returns = discounted_returns(token_rewards, mask)
    energy = _score_energy(logp, sum_pi_squared, mask, weights)
    judged = mask & valid.reshape(-1, 1)
    baseline = _group_baseline(returns, energy, judged, valid.shape, zero_tail, eps)
    company = jnp.broadcast_to(jnp.sum(valid, axis=1, keepdims=True) > 1, valid.shape)
    return on_mask(returns - baseline, judged & company.reshape(-1, 1))


def tool_token_baseline_advantages(
    token_rewards: Float[Array, "N T"],
    logp: Float[Array, "N T"],
    sum_pi_squared: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    valid: Bool[Array, "B G"],
    weights: Float[Array, "N T"] | None = None,
    *,
    zero_tail: bool = True,
    eps: float = 1e-8,
) -> Float[Array, "N T"]:
    """`token_baseline_advantages` for answers with tool output in between.

    Step t of a row is its t-th chosen token, wherever observations lie.

    Source: https://arxiv.org/abs/2602.07078 (tool-integrated form).
    """
    judged = mask & valid.reshape(-1, 1)
    order = jnp.argsort(~judged, axis=1, stable=True)
    back = jnp.argsort(order, axis=1)

    def pack(values):
        return jnp.take_along_axis(values, order, axis=1)

    packed = token_baseline_advantages(
        pack(on_mask(token_rewards, judged)),
        pack(on_mask(logp, judged)),
        pack(on_mask(sum_pi_squared, judged)),
        pack(judged),
        valid,
        None if weights is None else pack(on_mask(weights, judged)),
        zero_tail=zero_tail,
        eps=eps,
    )
    return on_mask(jnp.take_along_axis(packed, back, axis=1), judged)


def task_normalized(
    advantages: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    tasks: Int[Array, " N"],
    *,
    ddof: int = 0,
    eps: float = 1e-8,
) -> Float[Array, "N T"]:
    """``(A − mean)/(std + eps)`` over all trained tokens of a task in the rollout batch.

    Source: AgentRL, https://arxiv.org/abs/2510.04206, Eq. 1.

    Args:
        tasks: which task each row belongs to, any integers.
    """
    advantages = on_mask(advantages, mask)
    same = tasks[:, None] == tasks[None, :]
    zero = jnp.zeros((), advantages.dtype)

    def over_task(values):
        rows = jnp.sum(values, axis=1)
        return jnp.sum(jnp.where(same, rows[None, :], zero), axis=1, keepdims=True)

    def most_over_task(values):
        rows = jnp.max(jnp.where(mask, values, -jnp.inf), axis=1)
        return jnp.max(jnp.where(same, rows[None, :], -jnp.inf), axis=1, keepdims=True)

    count = over_task(mask.astype(advantages.dtype))
    mean = over_task(advantages) / jnp.maximum(count, 1.0)
    differs = most_over_task(advantages) > -most_over_task(-advantages)
    centred = on_mask(advantages - mean, mask & differs)
    variance = over_task(jnp.square(centred)) / jnp.maximum(count - ddof, 1.0)
    return divided(centred, jnp.sqrt(variance) + eps)


def spread(advantages: Float[Array, "B G"], mask: Bool[Array, "N T"]) -> Float[Array, "N T"]:
    """One advantage per sequence on all of its trained tokens.

    Source: GRPO, https://arxiv.org/abs/2402.03300, Section 4.1.2.
    """
    return on_mask(jnp.broadcast_to(advantages.reshape(-1, 1), mask.shape), mask)


def _score_energy(logp, sum_pi_squared, mask, weights):
    logp, squares = on_mask(logp, mask), on_mask(sum_pi_squared, mask)
    energy = 1.0 - 2.0 * jnp.exp(logp) + squares
    if weights is not None:
        energy = energy * jnp.square(on_mask(weights, mask))
    return jnp.cumsum(on_mask(energy, mask), axis=1)


def _group_baseline(returns, energy, judged, layout, zero_tail, eps):
    groups = (*layout, returns.shape[1])
    alive = judged.reshape(groups)
    returns, energy = returns.reshape(groups), energy.reshape(groups)
    weight = jnp.where(alive, energy, jnp.zeros_like(energy))
    top = jnp.sum(returns * weight, axis=1, keepdims=True)
    bottom = jnp.sum(weight, axis=1, keepdims=True)
    baseline = jnp.broadcast_to(divided(top, bottom + eps), groups)
    if zero_tail and groups[1] > 1:
        lengths = jnp.sum(alive, axis=2)
        second = jnp.sort(lengths, axis=1)[:, -2]
        longest = (lengths > second[:, None])[:, :, None]
        steps = jnp.arange(groups[2])[None, None, :]
        tail = longest & (steps >= second[:, None, None])
        baseline = jnp.where(tail, jnp.zeros_like(baseline), baseline)
    return baseline.reshape(judged.shape)


# name → (function, the arrays it reads). The function's keyword-only parameters are its settings.
_TOKEN_BASELINE = ("token_rewards", "logp", "sum_pi_squared", "mask", "valid")
TOKEN_ADVANTAGES = {
    "gae": (gae_advantages, ("token_rewards", "values", "mask")),
    "reinforce": (reinforce_advantages, ("token_rewards", "mask")),
    "reinforce_pp": (reinforce_plus_plus_advantages, ("token_rewards", "mask")),
    "reinforce_pp_baseline": (
        reinforce_plus_plus_baseline_advantages,
        ("rewards", "valid", "mask"),
    ),
    "decoupled_rewards": (
        decoupled_reward_advantages,
        ("reward_parts", "valid", "mask", "reward_weights"),
    ),
    "token_baseline": (token_baseline_advantages, _TOKEN_BASELINE),
    "tool_token_baseline": (tool_token_baseline_advantages, _TOKEN_BASELINE),
}
