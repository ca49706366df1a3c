# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Preference and reward losses against hand numbers, TRL's values and finite differences."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import read_golden

from jaxrl_llm.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    Pairs,
    kto_kl,
    kto_loss,
    slot_sums,
)
from jaxrl_llm.algorithms.reward_losses import bradley_terry_loss, calibration_error, step_loss

GOLDEN = read_golden("preference_losses.json")
MASK = np.array(GOLDEN["mask"], bool)
LOGP, REF = np.array(GOLDEN["logp"]), np.array(GOLDEN["ref"])
BETA = GOLDEN["beta"]


def one_pair(chosen=0.0, rejected=0.0, ref_chosen=0.0, ref_rejected=0.0, lengths=(1.0, 1.0)):
    values = (chosen, rejected, *lengths, ref_chosen, ref_rejected)
    return Pairs(*(jnp.array([value], jnp.float64) for value in values))


def pairs_of(logp):
    """TRL's batch, chosen rows first, as pairs; token log-probabilities may be traced."""
    total = slot_sums(jnp.where(MASK, logp, 0.0), jnp.ones(MASK.shape, jnp.int32), 1)[:, 0]
    ref, length = jnp.asarray(REF.sum(1)), jnp.asarray(MASK.sum(1).astype(np.float64))
    return Pairs(total[:4], total[4:], length[:4], length[4:], ref[:4], ref[4:])


def run(name, pairs, **settings):
    return PREFERENCE_LOSSES[name].function(pairs, beta=settings.pop("beta", BETA), **settings)


# ── by hand ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["dpo", "dpo_norm", "cpo"])
def test_at_margin_0_the_loss_is_ln_2(name):
    pair = one_pair(-3.0, -3.0, -3.0, -3.0, (2.0, 2.0))
    assert abs(float(run(name, pair)[0]) - math.log(2)) < 1e-15


def test_numbers_worked_by_hand():
    # h = (−1 + 2) − (−4 + 3) = 2; β = ½: βh = 1.
    pair = one_pair(-1.0, -4.0, -2.0, -3.0, (2.0, 4.0))
    sigma = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    log = math.log
    expected = {
        "dpo": (-log(sigma(1)), {}),
        "robust": ((-0.8 * log(sigma(1)) + 0.2 * log(sigma(-1))) / 0.6, {"label_smoothing": 0.2}),
        "hinge": (0.0, {}),
        # means: (1/2) − (−1/4) = 0.75; 1/(2β) = 1.
        "ipo": (0.0625, {}),
        "ipo_sum": (1.0, {}),
        "dpo_norm": (-log(sigma(0.375)), {}),
        "nca": (-log(sigma(0.5)) - 0.5 * log(sigma(-0.5)) - 0.5 * log(sigma(0.5)), {}),
        "sppo": (0.0 + 0.0, {}),
        "apo_zero": (1 - sigma(0.5) + sigma(-0.5), {}),
        "apo_down": (sigma(0.5) + 1 - sigma(1.0), {}),
        # means −0.5 and −1: β·0.5 − γ = 0.25 − 0.4.
        "simpo": (-log(sigma(-0.15)), {"gamma": 0.4}),
        "cpo": (-log(sigma(1.5)), {}),
        "orpo": (
            -0.5 * log(sigma((-0.5 - log(1 - math.exp(-0.5))) - (-1 - log(1 - math.exp(-1))))), {}
        ),
        "exo": (
            sigma(1) * (log(sigma(1)) - log(0.8)) + sigma(-1) * (log(sigma(-1)) - log(0.2)),
            {"label_smoothing": 0.2},
        ),
    }  # fmt: skip
    assert set(expected) == set(PREFERENCE_LOSSES)
    for name, (value, settings) in expected.items():
        got = float(run(name, pair, beta=0.5, **settings)[0])
        assert abs(got - value) < 1e-14, (name, got, value)


@pytest.mark.parametrize("name", ["dpo", "dpo_norm", "simpo", "cpo"])
def test_label_smoothing_is_applied(name):
    pair = one_pair(-1.0, -4.0, -2.0, -3.0, (2.0, 4.0))
    settings = {"gamma": 0.0} if name == "simpo" else {}
    plain = float(run(name, pair, **settings)[0])
    smoothed = float(run(name, pair, label_smoothing=0.3, **settings)[0])
    # −(1−ε)·log σ(x) − ε·log σ(−x) = −log σ(x) + ε·x.
    x = -math.log(math.expm1(plain))
    assert abs(smoothed - (plain + 0.3 * x)) < 1e-12 and smoothed - plain > 0.01


def test_divergences_by_hand():
    # Δ_c = 1, Δ_r = −1, β = 1.
    pair = one_pair(-1.0, -4.0, -2.0, -3.0)
    e, log, sigma = math.e, math.log, lambda x: 1 / (1 + math.exp(-x))
    forward = (1 - 1 / e) - (1 - e)
    js = log(2 * e / (1 + e)) - log(2 / e / (1 + 1 / e))
    square_root = (e**-0.5 - 1) / -0.5 - (e**0.5 - 1) / -0.5
    for divergence, alpha, h in (
        ("forward_kl", 1.0, forward),
        ("jensen_shannon", 1.0, js),
        ("alpha", 0.5, square_root),
        ("alpha", 0.0, forward),
        ("alpha", 1.0, 2.0),
    ):
        got = run("dpo", pair, beta=1.0, divergence=divergence, alpha=alpha)[0]
        assert abs(float(got) + log(sigma(h))) < 1e-14, divergence


def test_kto_by_hand_also_for_one_class():
    logratio = jnp.array([1.0, -2.0])
    sigma = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    kl = kto_kl(jnp.array([0.5, 0.3, 99.0]), jnp.array([True, True, False]))
    assert abs(float(kl) - 0.4) < 1e-15
    assert float(kto_kl(jnp.array([-0.5, 0.3]), jnp.ones(2, bool))) == 0.0
    loss = kto_loss(
        logratio, jnp.array([True, False]), kl, beta=0.5, desirable_weight=2.0,
        undesirable_weight=3.0,
    )  # fmt: skip
    np.testing.assert_allclose(loss, [2 * (1 - sigma(0.3)), 3 * (1 - sigma(1.2))], atol=1e-15)
    for one_class in (True, False):
        loss = kto_loss(logratio, jnp.full(2, one_class), kl, beta=0.5)
        assert np.isfinite(loss).all()


def test_rewards_by_hand():
    loss = bradley_terry_loss(jnp.array([1.0]), jnp.array([0.5]), jnp.array([0.25]))
    assert abs(float(loss[0]) - math.log1p(math.exp(-0.25))) < 1e-15
    logits = jnp.array([[[0.0, 1.0], [np.nan, 3.0], [2.0, 0.0]]])
    marks = jnp.array([[True, False, True]])
    loss = step_loss(logits, jnp.array([[1, -7, 1]]), marks)
    expected = [math.log1p(math.exp(-1)), 0.0, math.log1p(math.exp(2))]
    np.testing.assert_allclose(loss[0], expected, atol=1e-15)
    grad = jax.grad(lambda x: step_loss(x, jnp.array([[1, -7, 1]]), marks).sum())(logits)
    assert (grad[0, 1] == 0).all() and (grad[0, 0] != 0).all()


def test_calibration_error_by_hand():
    # Two claims at 0.9, one of them right; one at 0.6, wrong; one that does not count.
    p = jnp.array([0.9, 0.1, 0.4, 0.99])
    error = calibration_error(p, jnp.array([True, True, True, False]))
    assert abs(float(error) - (abs(1.8 - 1) + 0.6) / 3) < 1e-12
    assert abs(float(calibration_error(jnp.ones(3), jnp.ones(3, bool)))) < 1e-15


# ── TRL ───────────────────────────────────────────────────────────────────────────────────────────

OF_TRL = {
    "sigmoid": ("dpo", {}),
    "robust": ("robust", {"label_smoothing": 0.2}),
    "hinge": ("hinge", {}),
    "ipo": ("ipo", {}),
    "sigmoid_norm": ("dpo_norm", {}),
    "exo_pair": ("exo", {"label_smoothing": 0.2}),
    "nca_pair": ("nca", {}),
    "sppo_hard": ("sppo", {}),
    "apo_zero": ("apo_zero", {}),
    "apo_down": ("apo_down", {}),
    "forward_kl": ("dpo", {"divergence": "forward_kl"}),
    "js_divergence": ("dpo", {"divergence": "jensen_shannon"}),
    "alpha_divergence": ("dpo", {"divergence": "alpha", "alpha": 0.5}),
    "simpo": ("simpo", {"gamma": 0.4, "label_smoothing": 0.1}),
    "cpo": ("cpo", {"label_smoothing": 0.1}),
    "orpo": ("orpo", {}),
}


@pytest.mark.parametrize("theirs", OF_TRL)
def test_value_and_gradient_are_those_of_trl(theirs):
    name, settings = OF_TRL[theirs]
    golden = (GOLDEN["dpo"] | GOLDEN["pairs"])[theirs]
    value, grad = jax.value_and_grad(lambda x: run(name, pairs_of(x), **settings).mean())(
        jnp.asarray(LOGP)
    )
    # TRL holds these, or parts of them, in float32.
    tolerance = {"alpha_divergence": 1e-6, "exo_pair": 1e-7}.get(theirs, 1e-12)
    assert abs(float(value) - golden["loss"]) < tolerance
    theirs_grad = np.where(MASK[:, 1:], golden["grad"], 0.0)
    np.testing.assert_allclose(grad[:, 1:], theirs_grad, atol=tolerance, rtol=0)
    assert np.abs(theirs_grad).max() > 1e-3


def test_trl_ignores_label_smoothing_and_we_do_not():
    assert GOLDEN["label_smoothing_is_ignored_by_trl"] is True
    plain = run("dpo", pairs_of(LOGP)).mean()
    assert abs(float(run("dpo", pairs_of(LOGP), label_smoothing=0.3).mean() - plain)) > 1e-3


def test_the_mixture_of_trl():
    def mixture(logp):
        pairs = pairs_of(logp)
        nll = -jnp.where(MASK[:4], logp[:4], 0.0).sum() / float(MASK[:4].sum())
        return 0.8 * run("dpo", pairs).mean() + 0.2 * run("apo_zero", pairs).mean() + 0.5 * nll

    golden = GOLDEN["dpo"]["mixture"]
    value, grad = jax.value_and_grad(mixture)(jnp.asarray(LOGP))
    assert abs(float(value) - golden["loss"]) < 1e-12
    theirs = np.where(MASK[:, 1:], golden["grad"], 0.0)
    np.testing.assert_allclose(grad[:, 1:], theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("name", "weights"), [("kto", (1.2, 0.7)), ("kto_one_class", (1.0, 1.0))])
def test_kto_of_trl(name, weights):
    labels = np.array(GOLDEN["kto_labels"]) if name == "kto" else np.ones(8, bool)
    moved = jnp.asarray((np.roll(LOGP, 1, 0) - np.roll(REF, 1, 0)).sum(1))
    kl = kto_kl(moved, jnp.ones(8, bool))

    def loss(logp):
        logratio = jnp.where(MASK, logp - REF, 0.0).sum(1)
        return kto_loss(
            logratio, jnp.asarray(labels), kl, beta=BETA, desirable_weight=weights[0],
            undesirable_weight=weights[1],
        ).mean()  # fmt: skip

    value, grad = jax.value_and_grad(loss)(jnp.asarray(LOGP))
    golden = GOLDEN["kto"][name]
    assert abs(float(kl) - golden["kl"]) < 1e-12
    assert abs(float(value) - golden["loss"]) < 1e-12
    theirs = np.where(MASK[:, 1:], golden["grad"], 0.0)
    np.testing.assert_allclose(grad[:, 1:], theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("name", "margin", "center"), [("plain", False, 0.0), ("margin_centered", True, 0.05)]
)
def test_reward_losses_of_trl(name, margin, center):
    golden = GOLDEN["reward"]
    margins = jnp.array(golden["margin"]) if margin else None

    def loss(scores):
        return bradley_terry_loss(scores[:3], scores[3:], margins, center_coef=center).mean()

    value, grad = jax.value_and_grad(loss)(jnp.array(golden["scores"]))
    assert abs(float(value) - golden[name]["loss"]) < 1e-12
    np.testing.assert_allclose(grad, golden[name]["grad"], atol=1e-12)


# ── derivatives ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_gradients_by_finite_differences(name):
    settings = {key: {"label_smoothing": 0.2, "gamma": 0.3}[key]
                for key in PREFERENCE_LOSSES[name].settings
                if key in ("label_smoothing", "gamma")}  # fmt: skip

    def loss(logp):
        return run(name, pairs_of(logp), **settings).sum()

    grad = np.asarray(jax.grad(loss)(jnp.asarray(LOGP)))
    step, call = 1e-6, jax.jit(loss)
    for row, column in zip(*np.nonzero(MASK), strict=True):
        up, down = LOGP.copy(), LOGP.copy()
        up[row, column] += step
        down[row, column] -= step
        slope = (float(call(up)) - float(call(down))) / (2 * step)
        assert abs(slope - grad[row, column]) < 1e-7, (row, column)
    assert np.abs(grad[MASK]).max() > 1e-3
    # Nothing flows to what is not of the reply: the prompt's tokens and padding.
    assert (grad[~MASK] == 0).all()


def test_extreme_log_probabilities_stay_finite():
    for chosen, rejected in ((-1e-12, -400.0), (-400.0, -1e-12), (0.0, -1.0), (-900.0, -900.0)):
        for name, row in PREFERENCE_LOSSES.items():
            settings = {"label_smoothing": 0.1} if "label_smoothing" in row.settings else {}
            settings |= {"gamma": 0.1} if "gamma" in row.settings else {}

            def loss(c, r, name=name, settings=settings):
                pair = one_pair(0, 0, -5.0, -5.0, (3.0, 2.0)).replace(chosen=c, rejected=r)
                return run(name, pair, **settings).sum()

            grads = jax.grad(loss, (0, 1))(jnp.array([chosen]), jnp.array([rejected]))
            assert np.isfinite(jnp.concatenate(grads)).all(), (name, chosen, rejected)
