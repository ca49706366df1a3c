# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The table: no two rows alike, no setting without effect, no mistake without a message."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_batch import (
    ALL,
    MASK,
    REWARDS,
    STORED,
    loss_key,
    make,
    stored_batch,
    stored_rollout,
)

from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES
from jaxrl_llm.algorithms.presets import EQUAL, PRESETS, AlgoConfig, readable, resolve
from jaxrl_llm.algorithms.requirements import ADVANTAGES, setting_defaults
from jaxrl_llm.errors import ConfigError

LOGP = jnp.asarray(STORED["log_prob"], jnp.float32)
ENTROPY = jnp.asarray(np.random.default_rng(0).uniform(0.1, 2.0, MASK.shape), jnp.float32)
STALENESS = jnp.asarray(np.arange(MASK.size).reshape(MASK.shape) % 4)

# A value other than any default for every setting that acts on the gradient.
OTHER = {
    "advantage": "length_weighted",
    "objective": "dro",
    "reduction": "sequence_mean",
    "ratio_level": "sequence",
    "ratio_base": "sampler",
    "proximal": "loglinear",
    "constant": 7.0,
    "kl_coef": 0.3,
    "kl_estimator": "abs",
    "kl_in": "reward",
    "kl_importance": "detached",
    "entropy_coef": 0.1,
    "top_entropy_fraction": 0.5,
    "correction": "truncate",
    "correction_level": "geometric",
    "correction_low": 0.9,
    "correction_high": 1.05,
    "rejection": "token_k2",
    "rejection_low": 0.95,
    "rejection_high": 1.01,
    "off_policy_delta": 0.01,
    "task_normalize": True,
    "ddof": 0,
    "eps": 0.5,
    "normalize_std": True,
    "pass_k": 1,
    "gpg_factor": "nonzero_rewards",
    "batch_normalize": "none",
    "reward_weights": (1.0, 3.0),
    "zero_tail": False,
    "gamma": 0.5,
    "lam": 0.5,
    "whiten": False,
    "clip_low": 0.01,
    "clip_high": 0.05,
    "dual_clip": 1.02,
    "ratio_cap": 1.01,
    "weight_max": 1.01,
    "gate_positive": 2.0,
    "gate_negative": 2.0,
    "divergence_low": 0.001,
    "divergence_high": 0.001,
    "dro_beta": 1.0,
    "cov_fraction": 0.1,
    "cov_low": 0.0,
    "cov_high": 0.0,
    "cov_kl_coef": 2.0,
}
# Where the default already is the other value.
SECOND = {"reduction": "token_mean", "objective": "pg", "ratio_level": "token",
          "ratio_base": "old", "kl_in": "loss", "correction": "mask", "task_normalize": False,
          "advantage": "group_mean", "pass_k": 2}  # fmt: skip
# What has to be switched on before a setting is read, or can matter on so small a batch.
CONTEXTS = [
    {},
    {"normalize_std": True},
    {"kl_coef": 0.1},
    {"correction": "icepop", "correction_low": 0.5, "correction_high": 2.0},
    {"rejection": "token_k1", "rejection_low": 0.5, "rejection_high": 2.0},
    {"reduction": "constant"},
]
NEEDED = {"clip_cov": {"cov_low": -1.0, "cov_fraction": 0.5}, "pass_at_k": {"pass_k": 1},
          "kl_cov": {"cov_fraction": 0.5}}  # fmt: skip
# A tight clip hides what else would change its few tokens.
WIDE = {"clip_low": 0.2, "clip_high": 0.2}
BASES = {**NEEDED, "gspo": WIDE, "gspo_token": WIDE}
# Settings that act between updates, on coefficients or epochs, or on the critic.
BETWEEN = {"kl_target", "kl_horizon", "entropy_target", "entropy_step", "entropy_maximum",
           "target_kl", "value_clip"}  # fmt: skip


@functools.cache
def advantages_of(key):
    algorithm = make(key[0], **dict(key[1]))
    return np.asarray(algorithm.advantages(REWARDS, MASK, **stored_rollout()))


def gradient(name, advantages=None, **settings):
    """Gradients by log-probability and entropy on the stored batch, advantages included."""
    algorithm = make(name, **settings)
    if advantages is None:
        advantages = advantages_of((name, tuple(sorted(settings.items()))))
    batch = stored_batch(jnp.asarray(advantages, jnp.float32))
    counts = algorithm.counts(batch.mask, batch.segment_ids)
    stats = algorithm.batch_stats(LOGP, ENTROPY, batch, staleness=STALENESS)

    def loss(logp, entropy):
        return algorithm.loss(logp, entropy, batch, counts, stats, staleness=STALENESS)[0]

    return np.stack(jax.grad(loss, argnums=(0, 1))(LOGP, ENTROPY))


@functools.cache
def base_gradient(name, *settings):
    return gradient(name, **dict(settings))


def plain_gradient(name):
    return base_gradient(name, *NEEDED.get(name, {}).items())


def test_no_two_presets_are_alike_unless_the_table_says_so():
    for one, two in itertools.combinations(ALL, 2):
        difference = np.abs(plain_gradient(one) - plain_gradient(two)).max()
        told = EQUAL.get(frozenset({one, two}))
        # The stored batch has an observation, so the token baselines differ on it.
        if told and {one, two} != {"otb", "otb_tools"}:
            assert difference < 1e-7, (one, two, told)
        else:
            assert difference > 1e-5, (one, two)


def test_rows_that_are_equal_differ_when_their_condition_fails():
    ramp = np.linspace(-1, 1, MASK.size).reshape(MASK.shape)
    wide = {"clip_low": 0.5, "clip_high": 0.5}
    one, two = (gradient(name, ramp, **wide) for name in ("gspo", "gspo_token"))
    assert np.abs(one - two).max() > 1e-4
    rewards = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    one, two = (
        make(name).advantages(rewards, MASK) for name in ("reinforce_pp", "reinforce_pp_baseline")
    )
    assert np.abs(one - two).max() > 1e-2
    one, two = (
        gradient(name, divergence_low=0.01, divergence_high=0.01) for name in ("dppo", "dppo_kl")
    )
    assert np.abs(one - two).max() > 1e-2
    whole = np.arange(5)[None] < MASK.sum(1, keepdims=True)
    one, two = (
        make(name).advantages(REWARDS, whole, **stored_rollout()) for name in ("otb", "otb_tools")
    )
    np.testing.assert_allclose(one, two, atol=1e-6)


def fields():
    """(preset, context, setting): each setting of each preset, once for each distinct loss."""
    rollout = {"advantage", "task_normalize", "reward_weights"}
    rollout |= {s for function, _ in ADVANTAGES.values() for s in setting_defaults(function)}
    seen = set()
    for name, (number, context) in itertools.product(ALL, enumerate(CONTEXTS)):
        row = PRESETS[name]
        if number and not set(context) <= set(readable(row, context)):
            continue
        reads = set(readable(row, {**BASES.get(name, {}), **context}))
        if number:
            reads -= set(readable(row, {}))
        for setting in sorted(reads - BETWEEN):
            loss = loss_key(make(name, **BASES.get(name, {})))
            key = (name if setting in rollout else loss, setting)
            if key not in seen:
                seen.add(key)
                yield name, number, setting


def readers():
    """The same, once for each function that reads the setting."""
    seen = set()
    for name, number, setting in fields():
        row = PRESETS[name]
        objective, advantage = POLICY_LOSSES[row.objective][0], ADVANTAGES[row.advantage][0]
        reader = "shared"
        if setting in setting_defaults(objective):
            reader = row.objective
        elif setting in setting_defaults(advantage):
            reader = row.advantage
        if (reader, setting) not in seen:
            seen.add((reader, setting))
            yield name, number, setting


FIELDS, READERS = list(fields()), list(readers())


def test_every_setting_is_covered():
    names = {field.name for field in dataclasses.fields(AlgoConfig)} - {"name"}
    assert {setting for _, _, setting in FIELDS} == names - BETWEEN
    assert {setting for _, _, setting in READERS} == names - BETWEEN
    assert set(OTHER) == names - BETWEEN


def check_that_settings_matter(name, chosen):
    for number, setting in chosen:
        base = {**BASES.get(name, {}), **CONTEXTS[number]}
        if PRESETS[name].defaults.get("ratio_base") == "sampler" and "correction" in base:
            base["ratio_base"] = "old"
        current = make(name, **base).settings[setting]
        value = OTHER[setting] if OTHER[setting] != current else SECOND[setting]
        if (name, setting) == ("gspo_token", "ratio_level"):
            value = "token"  # at level "sequence" it is gspo, as EQUAL says
        changed = repaired(name, setting, {**base, setting: value})
        difference = np.abs(gradient(name, **changed) - base_gradient(name, *base.items())).max()
        assert difference > 1e-6, (name, setting, base, value)


@pytest.mark.parametrize("name", sorted({name for name, _, _ in READERS}))
def test_every_setting_changes_a_gradient(name):
    check_that_settings_matter(name, [(n, s) for preset, n, s in READERS if preset == name])


@pytest.mark.full
@pytest.mark.parametrize("name", ALL)
def test_every_setting_that_a_preset_reads_changes_its_gradient(name):
    check_that_settings_matter(name, [(n, s) for preset, n, s in FIELDS if preset == name])


def repaired(name, setting, changed):
    """Drops what the changed choice no longer reads, and adds what it needs."""
    if setting == "correction" and PRESETS[name].defaults.get("ratio_base") == "sampler":
        changed["ratio_base"] = "old"
    if setting == "ratio_base" and changed[setting] == "sampler":
        changed |= {"correction": "none"} if "correction" not in PRESETS[name].required else {}
    reads = readable(PRESETS[name], changed)
    return {k: v for k, v in changed.items() if k in reads}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("grpo", {"kl_coef": float("inf")}),
        ("grpo", {"eps": float("inf")}),
        ("grpo", {"dual_clip": float("inf")}),
        ("dr_grpo", {"constant": float("inf")}),
        ("clip_cov", {"cov_low": float("nan")}),
        ("grpo", {"clip_high": float("nan")}),
    ],
)
def test_what_is_not_finite_is_refused(name, setting):
    with pytest.raises(ConfigError, match="not finite"):
        make(name, **setting)


def test_infinity_can_stand_for_no_bound():
    make("ppo", value_clip=float("inf"))
    make("grpo", clip_high=float("inf"))


def test_a_setting_of_another_row_is_refused():
    with pytest.raises(ConfigError, match=r"algo\.gate_positive is set, but grpo.*sapo"):
        make("grpo", gate_positive=1.0)
    with pytest.raises(ConfigError, match=r"algo\.eps is set, but dr_grpo does not use it"):
        make("dr_grpo", eps=1e-4)
    with pytest.raises(ConfigError, match=r"kl_estimator.*kl_coef is 0"):
        make("grpo", kl_estimator="k1")
    with pytest.raises(ConfigError, match=r"kl_horizon"):
        make("grpo", kl_coef=0.1, kl_horizon=10.0)
    with pytest.raises(ConfigError, match=r"constant.*dr_grpo"):
        make("grpo", constant=5.0)
    with pytest.raises(ConfigError, match=r"correction_low.*correction=truncate"):
        make("grpo", correction="truncate", correction_low=0.5)
    with pytest.raises(ConfigError, match=r"grpo with these other settings does not use it"):
        make("grpo", objective="pg", clip_low=0.1)
    with pytest.raises(ConfigError, match=r"ratio_level.*gmpo"):
        make("gmpo", ratio_level="sequence")
    with pytest.raises(ConfigError, match="proximal"):
        make("aipo", proximal="loglinear")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "grpoo"}, "try: algo.name=grpo"),
        ({"clip_low": 0.0}, "more than 0"),
        ({"clip_low": 1.5}, "at most 1"),
        ({"dual_clip": 1.0}, "more than 1"),
        ({"ddof": 2}, "one of 0, 1"),
        ({"kl_coef": -0.1}, "at least 0"),
        ({"kl_coef": 0.1, "kl_estimator": "k4"}, "one of k1, k2"),
        ({"reduction": "mean"}, "one of token_mean"),
        ({"top_entropy_fraction": 1.5}, "at most 1"),
        ({"rejection": "token_k1", "rejection_low": 3.0, "rejection_high": 2.0}, "above"),
        ({"rejection": "token_k1", "rejection_high": 0.5}, "rejection_high drops"),
        ({"rejection": "sequence_sum_k1", "rejection_high": 0.9}, "at least 1"),
        ({"rejection": "token_k1", "rejection_low": 1.1}, "at most 1"),
        ({"correction": "mask", "correction_high": 0.9}, "at least 1"),
        ({"correction": "icepop", "correction_low": 3.0}, "correction_low drops"),
        ({"correction": "icepop", "correction_high": 0.9}, "at least 1"),
        ({"name": "aipo", "correction": "truncate"}, "twice"),
        ({"name": "gdpo", "kl_coef": 0.1, "kl_in": "reward"}, "would be lost"),
        ({"name": "decoupled_ppo", "correction": "none"}, "silently lose its behaviour weight"),
    ],
)
def test_mistakes_are_told(settings, words):
    with pytest.raises(ConfigError) as caught:
        make(**settings)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_bounds_that_reach_a_ratio_of_one():
    make("grpo", correction="icepop", correction_low=1.0, correction_high=1.0)
    make("grpo", correction="truncate", correction_high=0.5)  # a cap scales, it drops nothing
    make("grpo", rejection="token_k3", rejection_high=0.01)  # in nats: 0 at a ratio of 1
    make("grpo", rejection="token_k1", rejection_low=1.0, rejection_high=1.0)


def test_which_rows_compare_the_samples_of_a_group():
    assert make("grpo").compares_groups and make("gdpo").compares_groups
    assert not make("ppo").compares_groups and not make("remax").compares_groups
    assert make("ppo", advantage="group_std").compares_groups


def test_groups_of_one():
    for name, row in PRESETS.items():
        if row.advantage in ("greedy_baseline", "gae", "reinforce", "reinforce_pp"):
            resolve(AlgoConfig(name), group_size=1, max_tokens=8)
        else:
            with pytest.raises(ConfigError, match="at least 2 samples"):
                resolve(AlgoConfig(name), group_size=1, max_tokens=8)
    with pytest.raises(ConfigError, match="pass_k"):
        resolve(AlgoConfig("pass_at_k", pass_k=5), group_size=4)


def test_the_constant_is_the_longest_completion_unless_set():
    assert resolve(AlgoConfig("dr_grpo"), max_tokens=64).settings["constant"] == 64.0
    assert resolve(AlgoConfig("dr_grpo", constant=9.0), max_tokens=64).settings["constant"] == 9.0
    with pytest.raises(ConfigError, match=r"needs algo\.constant"):
        resolve(AlgoConfig("dr_grpo"))


def test_what_each_row_needs():
    needs = {
        "needs_values": {"ppo"},
        "needs_greedy_baseline": {"remax"},
        "needs_reward_parts": {"gdpo"},
        "needs_sum_pi_squared": {"otb", "otb_tools"},
        "needs_rollout_logp": {"otb", "otb_tools"},
        "needs_tasks": {"agentrl"},
        "needs_batch_stats": {"clip_cov", "kl_cov"},
        "needs_ref": set(),
        "needs_staleness": set(),
        "needs_entropy_gradient": set(),
    }
    for flag, rows in needs.items():
        assert {name for name in ALL if getattr(make(name), flag)} == rows, flag
    without = {"rloo", "reinforce", "remax", "opo", "gpg", "dppo", "dppo_kl", "aipo", "dro"}
    assert {name for name in ALL if not make(name).needs_old_logp} == without
    assert make("grpo", kl_coef=0.1).needs_ref
    assert not make("grpo", kl_coef=0.1).needs_rollout_logp
    assert make("rloo", kl_coef=0.1).needs_rollout_logp
    assert make("rloo", correction="truncate").needs_old_logp
    guessed = make("decoupled_ppo", proximal="loglinear")
    assert guessed.needs_staleness and not guessed.needs_old_logp
    assert make("grpo", top_entropy_fraction=0.2).needs_batch_stats
    assert make("grpo", entropy_target=0.5).needs_entropy_gradient


def test_coefficients_between_updates():
    fixed = make("grpo", kl_coef=0.2, entropy_coef=0.1)
    assert fixed.next_kl_coef(0.2, 9.0, 64) == 0.2
    assert fixed.next_entropy_coef(0.1, 0.0) == (0.1, 0.1)
    assert not fixed.stops_epochs(1e9)
    moving = make("grpo", kl_coef=0.2, kl_target=0.1, kl_horizon=640.0, entropy_target=0.5,
                  entropy_step=0.25, entropy_maximum=0.3, target_kl=0.01)  # fmt: skip
    assert moving.next_kl_coef(0.2, 0.3, 64) == pytest.approx(0.2 * 1.02)
    assert moving.next_entropy_coef(0.0, 0.4) == (0.25, 0.25)
    assert moving.next_entropy_coef(0.25, 0.4) == (0.3, 0.3)
    assert moving.next_entropy_coef(0.25, 0.6) == (0.0, 0.0)
    assert moving.next_entropy_coef(0.3, 0.6) == (pytest.approx(0.05), 0.0)
    assert moving.stops_epochs(0.02) and not moving.stops_epochs(0.01)


def test_adaptive_coefficients_reach_the_loss():
    batch = stored_batch(jnp.asarray(STORED["advantages_used_in_losses"], jnp.float32))
    algorithm = make("grpo", kl_coef=0.2, entropy_coef=0.1)
    counts = algorithm.counts(batch.mask)

    def loss(**coefficients):
        return float(algorithm.loss(LOGP, ENTROPY, batch, counts, **coefficients)[0])

    step = make("grpo", kl_coef=0.4, entropy_coef=0.3)
    expected = float(step.loss(LOGP, ENTROPY, batch, counts)[0])
    assert loss(kl_coef=0.4, entropy_coef=0.3) == pytest.approx(expected, abs=1e-6)
    assert abs(loss() - expected) > 1e-3


def test_kl_in_the_reward():
    rollout = stored_rollout()
    algorithm = make("rloo", kl_coef=0.5)
    gap = np.where(MASK, rollout["logp"] - rollout["logp_ref"], 0.0).sum(1).reshape(2, 3)
    shaped = REWARDS - 0.5 * gap
    expected = make("rloo").advantages(shaped, MASK)
    ours = algorithm.advantages(REWARDS, MASK, **rollout)
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    more = algorithm.advantages(REWARDS, MASK, kl_coef=0.0, **rollout)
    np.testing.assert_allclose(more, make("rloo").advantages(REWARDS, MASK), atol=1e-6)
    batch = stored_batch(ours)
    counts = algorithm.counts(batch.mask)
    loss, metrics = algorithm.loss(LOGP, ENTROPY, batch, counts)
    plain, _ = make("rloo").loss(LOGP, ENTROPY, batch, counts)
    assert float(loss) == float(plain) and "kl" in metrics


def test_metric_names():
    batch = stored_batch(jnp.asarray(STORED["advantages_used_in_losses"], jnp.float32))
    algorithm = make("grpo", kl_coef=0.1, correction="truncate")
    _, metrics = algorithm.loss(LOGP, ENTROPY, batch, algorithm.counts(batch.mask))
    assert set(metrics) == {
        "approx_kl", "clip_ratio/high_mean", "clip_ratio/low_mean", "clip_ratio/region_mean",
        "correction/changed_mean", "correction/ratio_mean", "entropy", "kl",
    }  # fmt: skip
    assert all(float(count) == MASK.sum() for _, count in metrics.values())
    total, count = metrics["entropy"]
    np.testing.assert_allclose(total / count, np.asarray(ENTROPY)[MASK].mean(), rtol=1e-5)
