# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What the alarms look at: one pure function of a run's recent metrics for each; see `health`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Literal

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.monitor.health_history import HELDOUT, History


@dataclasses.dataclass(frozen=True)
class HealthConfig:
    """When a run is unwell. Every limit may be raised; `enabled=False` looks at nothing.

    Attributes:
        enabled: look at the metrics of every step.
        window: steps that a slow trend is averaged over.
        quick_window: steps that suffice for a fault that ruins a run soon.
        baseline: first steps of the run, which later ones are compared with.
        repeat_after: steps after which an alarm that lasts is told again.
        repeat_worse: or after a window, if it is this many times as bad as when it was told.
        dead_groups: share of groups whose samples all have the same reward. At 0.8 a fifth of the
            sampled tokens teach; DAPO (https://arxiv.org/abs/2503.14476, Fig. 3b) trains well
            with half of them.
        entropy_share: of the entropy at the start. Reward is bought with entropy
            (https://arxiv.org/abs/2505.22617, Eq. 1): at a tenth little is left to buy with.
        distinct: distinct 3-grams among all 3-grams of one reply to each prompt (distinct-n,
            https://arxiv.org/abs/1510.03055). Prose has 0.8 and more, loops have less than 0.2.
        distinct_share: the same, of its value at the start.
        length_factor: mean length against the start, in either direction. Lengths of correct
            replies stay put under an unbiased loss (Dr. GRPO, https://arxiv.org/abs/2503.20783).
        length_tokens: and at least so many tokens: 3 tokens that become 7 are no drift.
        truncated: share of replies that are cut off and score less for it. Above a quarter the
            update mostly learns to be short (DAPO, Section 3.4).
        sampler_gap: mean |log-probability in the trainer − in the sampler|, nats a token. Same
            weights in float32 differ by 1e-5, in bfloat16 by about 0.01; at 0.05 the ratio of a
            sequence of 100 tokens is typically off by a factor e^0.5 or more.
        kl: KL to the reference, nats a token. At 0.5 a reply of 100 tokens is e^50 times as
            likely as under the reference.
        heldout_fall: fall of the held-out result below its best, as a share of the range of
            rewards, at two evaluations in a row, while the training reward rises.
        grad_spike: gradient norm against its median over the window. Norms of a healthy run vary
            by a factor of three.
        not_judged: share of rollouts that no reward could judge.
    """

    enabled: bool = True
    window: int = 10
    quick_window: int = 3
    baseline: int = 5
    repeat_after: int = 100
    repeat_worse: int | float = 2.0
    dead_groups: int | float = 0.8
    entropy_share: int | float = 0.1
    distinct: int | float = 0.2
    distinct_share: int | float = 0.5
    length_factor: int | float = 2.0
    length_tokens: int = 32
    truncated: int | float = 0.25
    sampler_gap: int | float = 0.05
    kl: int | float = 0.5
    heldout_fall: int | float = 0.1
    grad_spike: int | float = 10.0
    not_judged: int | float = 0.05

    def __post_init__(self) -> None:
        above_one = {"repeat_worse", "length_factor", "grad_spike"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool):
                continue
            least = 1 if field.name in above_one or isinstance(field.default, int) else 0
            if not value >= least or (least == 0 and value == 0):
                raise ConfigError(
                    f"health.{field.name} is out of range",
                    got=value,
                    expected=f"≥ {least}" if least else "above 0",
                )
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        if not self.enabled and len(changed) > 1:
            raise ConfigError(
                f"health.{changed[1]} has no effect without health.enabled",
                hint="--health.enabled=True",
            )


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check saw. `badness` is 1 at the limit and grows; see `HealthConfig.repeat_worse`."""

    severity: Literal["warning", "critical"]
    badness: float
    seen: str
    advice: str


# --- the checks ----------------------------------------------------------------------------------


def dead_groups(history: History, config: HealthConfig) -> Finding | None:
    """Nearly all groups have one reward, so no advantage; all right and all wrong told apart."""
    share = history.mean("frac_reward_zero_std", config.window)
    if share is None or share < config.dead_groups:
        return None
    seen = (
        f"in {share:.0%} of the groups of the last {config.window} steps all samples had the same "
        "reward, so they taught nothing"
    )
    badness = (1.0 - config.dead_groups + 0.01) / (1.0 - share + 0.01)
    values, range_ = history.latest("groups/alike_reward", config.window), history.reward_range
    if range_ == 0:
        seen += f"; every reward of the run so far was {history.highest:g}"
        advice = "read samples.txt: the reward may not find the answers, or the task is too hard"
        return Finding("critical", badness, seen, advice)
    if not values or range_ is None:
        advice = "prompts of medium difficulty, or more samples a prompt (--sampler.group_size)"
        return Finding("warning", badness, seen, advice)
    right = (statistics.fmean(values) - history.lowest) / range_
    if right >= 0.5:
        advice = (
            "the task is nearly solved: stop here, give it harder prompts, or keep easy ones out "
            "(--curriculum.enabled=True)"
        )
        return Finding("warning", badness, f"{seen}; most were all right", advice)
    advice = (
        "easier prompts (--curriculum.enabled=True), more samples a prompt "
        "(--sampler.group_size), examples in the prompt, or supervised training first"
    )
    return Finding("critical", badness, f"{seen}; most were all wrong", advice)


def entropy_collapse(history: History, config: HealthConfig) -> Finding | None:
    """The policy has become nearly deterministic, compared with its start."""
    start, now = history.start("entropy"), history.mean("entropy", config.window)
    if start is None or now is None or start < _LEAST_ENTROPY:
        return None
    share = max(now / start, 0.0)
    if share >= config.entropy_share:
        return None
    return Finding(
        "warning",
        config.entropy_share / max(share, config.entropy_share / 4),
        f"the entropy fell from {start:.3g} to {now:.3g} nats a token (mean of the last "
        f"{config.window} steps): samples of a prompt hardly differ any more",
        "a lower learning rate, --algo.clip_high=0.28, or --algo.entropy_coef=0.001",
    )


_LEAST_ENTROPY = 0.01  # nats: a policy that starts out deterministic can't collapse


def repeated_replies(history: History, config: HealthConfig) -> Finding | None:
    """Replies loop, or are the same whatever the prompt."""
    name = "completions/distinct_3"
    now, start = history.mean(name, config.window), history.start(name)
    if now is None:
        return None
    limit = max(config.distinct, config.distinct_share * (start or 0.0))
    if now >= limit:
        return None
    before = f"{start:.2f} at the start, " if start is not None else ""
    return Finding(
        "critical" if now < config.distinct else "warning",
        limit / max(now, 0.01),
        f"of all runs of 3 tokens in replies to different prompts only {now:.0%} were distinct "
        f"({before}mean of the last {config.window} steps): replies loop, or are all the same",
        "read samples.txt; a lower learning rate, a reward that repetition can't satisfy, or "
        "--algo.kl_coef=0.01",
    )


def length_drift(history: History, config: HealthConfig) -> Finding | None:
    """Replies have become much longer or shorter than at the start."""
    name = "completions/mean_length"
    start, now = history.start(name), history.mean(name, config.window)
    if start is None or now is None or abs(now - start) < config.length_tokens:
        return None
    factor = max(now, 1.0) / max(start, 1.0)
    factor = max(factor, 1.0 / factor)
    if factor < config.length_factor:
        return None
    first, last = history.start("reward"), history.mean("reward", config.window)
    rewards = f", reward {first:.3g} → {last:.3g}" if None not in (first, last) else ""
    if now > start:
        advice = (
            "if the reward did not rise with it: --algo.name=dr_grpo, or a penalty on length; a "
            "reward model may simply like long replies"
        )
    else:
        advice = "read samples.txt: does the reward pay for short replies, or punish long ones?"
    return Finding(
        "warning",
        factor / config.length_factor,
        f"replies went from {start:.0f} to {now:.0f} tokens (mean of the last {config.window} "
        f"steps{rewards})",
        advice,
    )


def truncation(history: History, config: HealthConfig) -> Finding | None:
    """Many replies are cut off, and score less for it.

    Where cut replies earn as much as those that ended, or are told apart by their rewards, being
    cut off is part of the task and no fault.
    """
    share = history.mean("completions/clipped_ratio", config.window)
    if share is None or share < config.truncated:
        return None
    cut, spread, ended = (
        history.latest(f"completions/{name}", config.window)
        for name in ("clipped_reward", "clipped_reward_std", "finished_reward")
    )
    range_ = history.reward_range
    if cut and range_ is not None:
        mean = statistics.fmean(cut)
        alike = statistics.fmean(spread) <= 0.05 * range_ if spread else True
        low = range_ == 0 or mean - history.lowest < 0.5 * range_
        # A few that ended early say little about what the others would have earned.
        less = bool(ended) and share <= 0.9 and statistics.fmean(ended) - mean > 0.1 * range_
        if not less and not (alike and low):
            return None
    return Finding(
        "critical" if share > 0.9 else "warning",
        share / config.truncated,
        f"{share:.0%} of the replies of the last {config.window} steps were cut off at the longest "
        "length, and score less for it",
        "a larger --sampler.max_new_tokens, a prompt that asks for less, or a stop string",
    )


def sampler_gap(history: History, config: HealthConfig) -> Finding | None:
    """Sampler and trainer disagree about the probabilities of the sampled tokens."""
    gap = history.mean("sampling/sampling_logp_difference/mean", config.quick_window)
    if gap is None or gap < config.sampler_gap:
        return None
    return Finding(
        "critical" if gap >= 4 * config.sampler_gap else "warning",
        gap / config.sampler_gap,
        f"log-probabilities of sampler and trainer differ by {gap:.3g} nats a token (mean of the "
        f"last {config.quick_window} steps): the samples are not the policy's own",
        "--algo.correction=truncate, a sampler in float32, or fewer epochs and minibatches",
    )


def kl_blowup(history: History, config: HealthConfig) -> Finding | None:
    """The policy has left the reference behind."""
    kl = history.mean("kl", config.quick_window)
    if kl is None or kl < config.kl:
        return None
    return Finding(
        "critical" if kl >= 4 * config.kl else "warning",
        kl / config.kl,
        f"the KL to the reference is {kl:.3g} nats a token (mean of the last "
        f"{config.quick_window} steps)",
        "a lower learning rate, a larger --algo.kl_coef, or an earlier checkpoint",
    )


def heldout_falls(history: History, config: HealthConfig) -> Finding | None:
    """The training reward rises while the held-out result falls: what is learnt is not the task."""
    if len(history.evaluations) < 3 or not history.fresh & set(HELDOUT):
        return None
    (best_step, best, then), *last = history.evaluations
    range_ = history.reward_range or 1.0
    start = history.start("reward")
    then, now = start if then is None else then, last[-1][2]
    fall = min(best - value for _, value, _ in last)
    if then is None or now is None or now - then < _LEAST_RISE * range_:
        return None
    if fall < config.heldout_fall * range_:
        return None
    return Finding(
        "critical",
        fall / (config.heldout_fall * range_),
        f"the training reward rose from {then:.3g} to {now:.3g} while the held-out result fell "
        f"from {best:.3g} (step {best_step}) to {last[0][1]:.3g} and {last[1][1]:.3g} "
        f"(steps {last[0][0]} and {last[1][0]})",
        f"the checkpoint of step {best_step}, a stricter reward, more prompts, or "
        "--algo.kl_coef=0.01",
    )


_LEAST_RISE = 0.02  # of the range of rewards: less is noise


def gradient_spike(history: History, config: HealthConfig) -> Finding | None:
    """One gradient is far larger than those before it."""
    *before, now = history.latest("grad_norm", config.window + 1) or [0.0]
    before = [norm for norm in before if norm > 0]  # dead groups alone give zeros
    if "grad_norm" not in history.fresh or len(before) < config.baseline:
        return None
    usual = statistics.median(before)
    if now < config.grad_spike * usual:
        return None
    return Finding(
        "warning",
        now / usual / config.grad_spike,
        f"the gradient norm is {now:.3g}, {now / usual:.0f} times the median of the "
        f"{len(before)} steps before",
        "a smaller --optimizer.max_grad_norm or learning rate, and a look at this step's samples",
    )


def not_judged(history: History, config: HealthConfig) -> Finding | None:
    """Rewards could not be formed for many rollouts, which are then left out."""
    share = history.mean("rewards/not_judged_ratio", config.quick_window)
    if share is None or share < config.not_judged:
        return None
    return Finding(
        "critical" if share >= 0.5 else "warning",
        share / config.not_judged,
        f"{share:.0%} of the rollouts of the last {config.quick_window} steps could not be judged "
        "and were left out",
        "look why the reward returns None: a time limit, a sandbox or service that is down",
    )


CHECKS: dict[str, Callable[[History, HealthConfig], Finding | None]] = {
    "dead_groups": dead_groups,
    "entropy_collapse": entropy_collapse,
    "repeated_replies": repeated_replies,
    "length_drift": length_drift,
    "truncation": truncation,
    "sampler_gap": sampler_gap,
    "kl_blowup": kl_blowup,
    "heldout_falls": heldout_falls,
    "gradient_spike": gradient_spike,
    "not_judged": not_judged,
}
