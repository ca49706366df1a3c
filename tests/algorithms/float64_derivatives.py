# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Every preset's loss against its equation written again in NumPy, and the gradient against
central differences of that equation.

Each equation takes the log-probabilities twice: once as what is differentiated, once frozen for
what the paper holds constant.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_batch import ALL, loss_and_gradient, make, ragged_batch

BATCH, MODEL = ragged_batch(6, 7, seed=3)
MASK = np.asarray(BATCH.mask)
ADVANTAGES, OLD, SAMPLER, REF = (
    np.asarray(x) for x in (BATCH.advantages, BATCH.logp_old, BATCH.logp_sampler, BATCH.logp_ref)
)
LOGP = MODEL["logp"]
ENTROPY = MODEL["entropy"]


def clip(ratio, low, high):
    return -np.minimum(ratio * ADVANTAGES, np.clip(ratio, 1 - low, 1 + high) * ADVANTAGES)


def mean_of_rows(x):
    return (np.where(MASK, x, 0).sum(1) / MASK.sum(1))[:, None] * np.ones_like(x)


def sapo(ratio, positive, negative):
    tau = np.where(ADVANTAGES > 0, positive, negative)
    return -ADVANTAGES * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))


def gmpo(x, low, high):
    sign = np.sign(ADVANTAGES)
    cautious = sign * np.minimum(sign * x, sign * np.clip(x, -low, high))
    return -ADVANTAGES * np.exp(mean_of_rows(cautious))


def dppo_tv(logp, frozen):
    shift = np.exp(frozen) - np.exp(SAMPLER)
    dropped = np.where(ADVANTAGES > 0, shift > 0.15, shift < -0.15)
    return np.where(dropped, 0, -ADVANTAGES * np.minimum(np.exp(frozen - SAMPLER), 20) * logp)


def dppo_kl(logp, frozen):
    p, q = np.exp(SAMPLER), np.exp(frozen)
    divergence = p * np.log(p / q) + (1 - p) * np.log((1 - p + 1e-8) / (1 - q + 1e-8))
    dropped = (divergence > 0.05) & np.where(ADVANTAGES > 0, q > p, q < p)
    return np.where(dropped, 0, -ADVANTAGES * np.minimum(q / p, 20) * logp)


def covariances(frozen):
    return (frozen - frozen[MASK].mean()) * (ADVANTAGES - ADVANTAGES[MASK].mean())


def kl_cov(logp, frozen):
    top = covariances(frozen) >= np.sort(covariances(frozen)[MASK])[-6]
    return -ADVANTAGES * np.exp(logp - OLD) + np.where(top, np.abs(logp - OLD), 0)


EQUATIONS = {
    "pg": lambda logp, frozen: -ADVANTAGES * logp,
    "clip": lambda logp, frozen: clip(np.exp(logp - OLD), 0.2, 0.2),
    "dapo": lambda logp, frozen: clip(np.exp(logp - OLD), 0.2, 0.28),
    "gspo": lambda logp, frozen: clip(np.exp(mean_of_rows(logp - OLD)), 3e-4, 4e-4),
    "gspo_token": lambda logp, frozen: clip(
        np.exp(mean_of_rows(frozen - OLD) + logp - frozen), 3e-4, 4e-4
    ),
    "cispo": lambda logp, frozen: -np.clip(np.exp(frozen - OLD), 0, 5) * ADVANTAGES * logp,
    "aipo": lambda logp, frozen: -np.minimum(np.exp(frozen - SAMPLER), 2) * ADVANTAGES * logp,
    "sapo": lambda logp, frozen: sapo(np.exp(logp - OLD), 1.0, 1.05),
    "gmpo": lambda logp, frozen: gmpo(logp - OLD, 0.4, 0.4),
    "dppo": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": lambda logp, frozen: -ADVANTAGES * logp + 0.025 * (logp - SAMPLER) ** 2,
    "kl_cov": kl_cov,
    "decoupled_ppo": lambda logp, frozen: (
        np.exp(OLD - SAMPLER) * clip(np.exp(logp - OLD), 0.2, 0.2)
    ),
}
PG = ("rloo", "reinforce", "remax", "opo", "gpg")
SETTINGS = {"kl_cov": {"cov_fraction": 6.5 / MASK.sum()}}


def reduced(terms, how):
    terms = np.where(MASK, terms, 0.0)
    return {
        "token_mean": terms.sum() / MASK.sum(),
        "sequence_mean": (terms.sum(1) / MASK.sum(1)).mean(),
        "sequence_sum": terms.sum(1).mean(),
        "constant": terms.sum(1).mean() / 5,
    }[how]


def differences(function, at):
    """Central differences of a scalar function, entry by entry."""
    gradient = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[place] = 1e-6
        gradient[place] = (function(at + step) - function(at - step)) / 2e-6
    return gradient


def check(algorithm, equation, *, atol=1e-6):
    """Value to 1e-9; gradient to 1e-6 of its largest entry, where the equation is smooth."""
    value, (grad, entropy_grad), _ = loss_and_gradient(
        algorithm, LOGP, ENTROPY, BATCH, staleness=jnp.asarray(MODEL["staleness"])
    )
    np.testing.assert_allclose(value, equation(LOGP, LOGP), atol=1e-9)
    numeric = differences(lambda x: equation(x, LOGP), LOGP)
    scale = np.abs(numeric).max()
    assert scale > 1e-3
    np.testing.assert_allclose(grad, numeric, rtol=0, atol=atol * scale)
    return entropy_grad


@pytest.mark.parametrize("name", [name for name in ALL if name != "clip_cov"])
def test_preset_is_its_equation(name):
    algorithm = make(name, **SETTINGS.get(name, {}))
    terms = EQUATIONS.get(name) or EQUATIONS["pg" if name in PG else "clip"]
    check(algorithm, lambda x, f: reduced(terms(x, f), algorithm.settings["reduction"]))


def test_clip_cov_is_its_equation_whatever_it_draws():
    algorithm = make("clip_cov", cov_fraction=4.5 / MASK.sum(), cov_low=0.05)
    stats = algorithm.batch_stats(LOGP, ENTROPY, BATCH)
    _, metrics = algorithm.loss(
        jnp.asarray(LOGP), jnp.asarray(ENTROPY), BATCH, algorithm.counts(MASK), stats
    )
    scores = np.asarray(algorithm._arrays(jnp.asarray(LOGP), BATCH, None)["scores"])
    ratio = np.exp(LOGP - OLD)
    stopped = np.where(ADVANTAGES > 0, ratio > 1.2, ratio < 0.8)
    candidates = MASK & (covariances(LOGP) > 0.05) & (covariances(LOGP) < 5) & ~stopped
    assert candidates.sum() > 6
    drawn = candidates & (scores <= np.sort(scores[candidates])[3])
    assert drawn.sum() == 4 == metrics["clip_cov/mean"][0]
    check(
        algorithm,
        lambda x, f: reduced(np.where(drawn, 0, EQUATIONS["clip"](x, f)), "token_mean"),
    )


@pytest.mark.parametrize(
    ("settings", "terms"),
    [
        ({"dual_clip": 1.05}, lambda r: np.where(
            ADVANTAGES < 0, np.minimum(clip(r, 0.2, 0.2), -1.05 * ADVANTAGES), clip(r, 0.2, 0.2)
        )),
        ({"ratio_cap": 1.05}, lambda r: -np.minimum(
            np.minimum(r, 1.05) * ADVANTAGES, np.clip(r, 0.8, 1.2) * ADVANTAGES
        )),
    ],
)  # fmt: skip
def test_bounds_for_bad_tokens(settings, terms):
    algorithm = make("grpo", reduction="token_mean", **settings)
    check(algorithm, lambda x, f: reduced(terms(np.exp(x - OLD)), "token_mean"))


def test_two_sided_cap_is_dual_clip_above_the_upper_bound():
    results = [
        loss_and_gradient(make("grpo", clip_high=0.04, **kind), LOGP, ENTROPY, BATCH)
        for kind in ({"dual_clip": 1.1}, {"ratio_cap": 1.1})
    ]
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-12)
    np.testing.assert_allclose(results[0][1][0], results[1][1][0], atol=1e-12)


def weight(x, level):
    gap = {"token": OLD - SAMPLER, "geometric": mean_of_rows(OLD - SAMPLER)}
    sums = (np.where(MASK, OLD - SAMPLER, 0).sum(1, keepdims=True)) * np.ones_like(OLD)
    return np.exp({**gap, "sequence": sums}[level]) * x


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(
    ("correction", "function"),
    [
        ("plain", lambda w: w),
        ("truncate", lambda w: np.minimum(w, 1.1)),
        ("mask", lambda w: np.where(w <= 1.1, w, 0)),
        ("icepop", lambda w: np.where((w <= 1.1) & (w >= 0.9), w, 0)),
    ],
)
def test_corrections(correction, function, level):
    bounds = {"truncate": {"correction_high": 1.1}, "mask": {"correction_high": 1.1}}
    bounds["icepop"] = {"correction_high": 1.1, "correction_low": 0.9}
    algorithm = make(
        "dapo", correction=correction, correction_level=level, **bounds.get(correction, {})
    )
    weights = function(weight(1.0, level))
    assert len(np.unique(np.round(weights[MASK], 9))) > 1
    check(algorithm, lambda x, f: reduced(weights * EQUATIONS["dapo"](x, f), "token_mean"))


def statistic(name):
    gap = SAMPLER - OLD
    token = {"k1": gap, "k2": gap**2 / 2, "k3": np.exp(-gap) - 1 + gap}[name[-2:]]
    if name.startswith("token"):
        return token
    token = np.where(MASK, token, 0)
    if "mean" in name:
        return mean_of_rows(token)
    return (token.sum if "sum" in name else token.max)(axis=1, keepdims=True) + 0 * token


@pytest.mark.parametrize(
    "name",
    ["token_k1", "token_k2", "token_k3", "sequence_sum_k1", "sequence_sum_k2", "sequence_sum_k3",
     "sequence_mean_k1", "sequence_mean_k2", "sequence_mean_k3", "sequence_max_k2",
     "sequence_max_k3"],
)  # fmt: skip
def test_rejection(name):
    values = statistic(name)
    if name.endswith("k1"):
        low, high = np.exp(np.quantile(values[MASK], [0.3, 0.8]))
        kept = (values >= np.log(low)) & (values <= np.log(high))
        settings = {"rejection_low": float(low), "rejection_high": float(high)}
    else:
        settings = {"rejection_high": float(np.quantile(values[MASK], 0.6) + 1e-9)}
        kept = values <= settings["rejection_high"]
    assert 0 < kept[MASK].sum() < MASK.sum()
    algorithm = make("dapo", rejection=name, **settings)
    check(algorithm, lambda x, f: reduced(kept * EQUATIONS["dapo"](x, f), "token_mean"))


def test_off_policy_sequence_masking():
    drift = mean_of_rows(SAMPLER - LOGP)
    delta = float(np.median(np.unique(drift[MASK & (ADVANTAGES < 0)])))
    dropped = (ADVANTAGES < 0) & (drift > delta)
    assert 0 < dropped[MASK].sum() < (ADVANTAGES[MASK] < 0).sum()
    algorithm = make("grpo", off_policy_delta=delta)
    check(
        algorithm,
        lambda x, f: reduced(np.where(dropped, 0, EQUATIONS["clip"](x, f)), "sequence_mean"),
    )


def test_loglinear_proximal_policy():
    age = np.maximum(MODEL["staleness"], 1)

    def terms(logp, frozen):
        prox = SAMPLER + (age - 1) / age * (frozen - SAMPLER)
        return np.exp(prox - SAMPLER) * clip(np.exp(logp - prox), 0.2, 0.2)

    algorithm = make("decoupled_ppo", proximal="loglinear")
    check(algorithm, lambda x, f: reduced(terms(x, f), "token_mean"))


def test_top_entropy_fraction():
    threshold = np.quantile(ENTROPY[MASK], 0.7)
    high = threshold <= ENTROPY
    algorithm = make("dapo", top_entropy_fraction=0.3)
    entropy_grad = check(
        algorithm, lambda x, f: reduced(high * EQUATIONS["dapo"](x, f), "token_mean")
    )
    assert not np.asarray(entropy_grad).any()


def test_entropy_bonus_and_kl_in_the_loss():
    algorithm = make("dr_grpo", entropy_coef=0.3, kl_coef=0.2, kl_estimator="k3")

    def equation(logp, frozen):
        gap = logp - REF
        terms = EQUATIONS["clip"](logp, frozen) + 0.2 * (np.exp(-gap) - 1 + gap)
        return reduced(terms, "constant") - 0.3 * ENTROPY[MASK].mean()

    entropy_grad = check(algorithm, equation)
    np.testing.assert_allclose(entropy_grad, np.where(MASK, -0.3 / MASK.sum(), 0), atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("importance", ["detached", "full"])
def test_off_policy_kl(estimator, importance):
    def terms(logp, frozen):
        gap = logp - REF
        kl = {"k1": gap, "k2": gap**2 / 2, "k3": np.exp(-gap) - 1 + gap, "abs": np.abs(gap)}
        ratio = np.exp((frozen if importance == "detached" else logp) - SAMPLER)
        return EQUATIONS["clip"](logp, frozen) + 0.2 * ratio * kl[estimator]

    algorithm = make("grpo", kl_coef=0.2, kl_estimator=estimator, kl_importance=importance)
    check(algorithm, lambda x, f: reduced(terms(x, f), "sequence_mean"))


@pytest.mark.parametrize("clipped", [0.05, np.inf])
def test_value_loss(clipped):
    rng = np.random.default_rng(0)
    old, returns = rng.normal(size=(2, *MASK.shape))
    values = old + rng.normal(0, 0.1, MASK.shape)
    algorithm = make("ppo", value_clip=clipped)

    def equation(values):
        near = old + np.clip(values - old, -clipped, clipped)
        terms = np.maximum((values - returns) ** 2, (near - returns) ** 2) / 2
        return terms[MASK].mean()

    counts = algorithm.counts(MASK)
    arrays = jnp.asarray(old), jnp.asarray(returns), BATCH.mask
    value, grad = jax.value_and_grad(lambda v: algorithm.value_loss(v, *arrays, counts)[0])(
        jnp.asarray(values)
    )
    np.testing.assert_allclose(value, equation(values), atol=1e-12)
    np.testing.assert_allclose(grad, differences(equation, values), atol=1e-8)


def test_on_policy_update_has_ratio_one_and_its_gradient():
    alone = BATCH.replace(logp_old=None)
    same = BATCH.replace(logp_old=jnp.asarray(LOGP))
    for name in ("grpo", "gspo", "gmpo", "sapo", "kl_cov"):
        ours = loss_and_gradient(make(name), LOGP, ENTROPY, alone)
        given = loss_and_gradient(make(name), LOGP, ENTROPY, same)
        np.testing.assert_allclose(ours[0], given[0], atol=1e-12)
        np.testing.assert_allclose(ours[1][0], given[1][0], atol=1e-12)
        terms = np.where(MASK, -ADVANTAGES, 0)
        if name == "grpo":
            per_row = terms / MASK.sum(1, keepdims=True) / len(MASK)
            np.testing.assert_allclose(ours[1][0], per_row, atol=1e-12)
