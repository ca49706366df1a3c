# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens from logits: frequencies, log-probabilities, the top-p set, greedy, independence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import RequestError
from jaxrl_llm.rollout.sampling import (
    Filters,
    SamplingParams,
    edit_logits,
    kept_set,
    position_uniforms,
    sample_tokens,
    sequence_keys,
    top_k_set,
    top_p_set,
)


def filters(count: int, **values) -> Filters:
    """The same for every row; what is not named is off."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    dtypes = {"top_k": jnp.int32}
    return Filters(
        **{
            name: jnp.full(count, value, dtypes.get(name, jnp.float32))
            for name, value in {**defaults, **values}.items()
        }
    )


def smallest_set(p: np.ndarray, top_p: float) -> set[int]:
    """By sorting: most likely first, ties by lower id, until the sum reaches top_p."""
    order = np.argsort(-p, kind="stable")
    cumulative = np.cumsum(p[order])
    return set(order[: int(np.argmax(cumulative >= top_p * cumulative[-1])) + 1].tolist())


def draw(logits: np.ndarray, uniform: np.ndarray, temperature=1.0, top_p=1.0, **more):
    """Many uniforms on the same row of logits."""
    count = len(uniform)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[None, :], (count, len(logits)))
    how = filters(count, temperature=temperature, top_p=top_p, **more)
    token, logp = jax.jit(sample_tokens)(rows, jnp.asarray(uniform, jnp.float32), how)
    return np.asarray(token), np.asarray(logp)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("vocab", [5, 256, 700])
def test_inverse_cdf_is_exact_on_a_grid(vocab, temperature):
    """20,000 uniforms on a grid fall on each token as often as its probability says."""
    logits = np.random.default_rng(vocab).normal(size=vocab) * 2
    grid = (np.arange(20_000) + 0.5) / 20_000
    token, logp = draw(logits, grid, temperature)
    p = np.exp(logits / temperature - np.logaddexp.reduce(logits / temperature))
    counts = np.bincount(token, minlength=vocab)
    np.testing.assert_allclose(counts, p * 20_000, atol=1.5)
    np.testing.assert_allclose(logp, np.log(p)[token], atol=2e-5)
    assert (np.diff(token) >= 0).all()


def test_frequencies_match_softmax():
    """Chi-square over 20,000 positions, 11 degrees of freedom: 31.3 is the 0.1 % point."""
    logits = np.random.default_rng(3).normal(size=12)
    count = 20_000
    word = lambda value: jnp.full(count, value, jnp.uint32)  # noqa: E731
    keys = sequence_keys(word(5), word(1), word(2))
    uniform = np.asarray(position_uniforms(keys, jnp.arange(count, dtype=jnp.int32)))
    token, _ = draw(logits, uniform)
    expected = count * np.exp(logits - np.logaddexp.reduce(logits))
    chi2 = ((np.bincount(token, minlength=12) - expected) ** 2 / expected).sum()
    assert chi2 < 31.3, chi2


def test_draws_depend_on_seed_uid_sample_and_position():
    base = np.array([7, 3, 2, 11])
    cases = np.vstack([base, base + np.eye(4, dtype=int), base])
    keys = sequence_keys(*(jnp.asarray(cases[:, i], jnp.uint32) for i in range(3)))
    uniform = np.asarray(position_uniforms(keys, jnp.asarray(cases[:, 3], jnp.int32)))
    assert len(set(uniform[:5].tolist())) == 5
    assert uniform[5] == uniform[0]
    assert ((uniform >= 0) & (uniform < 1)).all()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_keeps_exactly_the_smallest_set(top_p):
    rng = np.random.default_rng(0)
    logits = np.concatenate([rng.normal(size=(6, 301)) * 3, np.zeros((1, 301))])
    weights = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float32)
    kept = np.asarray(top_p_set(jnp.asarray(weights), jnp.full(7, top_p, jnp.float32)))
    for row in range(7):  # the last row is all ties: the lowest ids stay
        expected = smallest_set(weights[row].astype(np.float64), float(np.float32(top_p)))
        assert set(np.flatnonzero(kept[row]).tolist()) == expected


@pytest.mark.parametrize("top_k", [1, 3, 300, 301, 2**31 - 1])
def test_top_k_keeps_exactly_the_likeliest(top_k):
    rng = np.random.default_rng(1)
    weights = np.concatenate([rng.uniform(size=(5, 301)), np.ones((1, 301))]).astype(np.float32)
    kept = np.asarray(top_k_set(jnp.asarray(weights), jnp.full(6, top_k, jnp.int32)))
    for row in range(6):  # the last row is all ties: the lowest ids stay
        order = np.argsort(-weights[row], kind="stable")[:top_k]
        assert set(np.flatnonzero(kept[row])) == set(order.tolist())


def test_top_k_and_min_p_come_before_top_p():
    """Weights 1, 0.8, 0.6, 0.4, 0.2: three are left by top-k 4 and min-p 0.5; of their sum 2.4 the
    share 0.7 is reached by two."""
    weights = jnp.asarray([[0.2, 1.0, 0.6, 0.8, 0.4]], jnp.float32)
    kept = lambda **values: np.flatnonzero(kept_set(weights, filters(1, **values))[0]).tolist()  # noqa: E731
    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=4) == [1, 2, 3, 4]
    assert kept(min_p=0.5) == [1, 2, 3]
    assert kept(top_k=2, min_p=0.5) == [1, 3]
    assert kept(top_k=4, min_p=0.5, top_p=0.7) == [1, 3]
    assert kept(top_p=0.7) == [1, 2, 3]  # of 3.0


def test_edited_logits_change_the_draw_and_not_the_logp():
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(3, 300)), jnp.float32)
    ids = jnp.asarray([[7, -1], [-1, -1], [9, 8]], jnp.int32)
    biases = jnp.asarray([[100.0, 5.0], [1.0, 1.0], [-np.inf, 2.0]], jnp.float32)
    banned = jnp.asarray([[-1], [3], [8]], jnp.int32)
    edited = np.asarray(edit_logits(logits, ids, biases, banned))
    expected = np.array(logits)
    expected[0, 7] += 100
    expected[1, 3] = expected[2, 8] = expected[2, 9] = -np.inf
    np.testing.assert_array_equal(edited, expected)
    uniform = jnp.full(3, 0.4, jnp.float32)
    token, logp = sample_tokens(logits, uniform, filters(3), jnp.asarray(edited))
    assert token[0] == 7
    full = jax.nn.log_softmax(logits, axis=-1)
    np.testing.assert_allclose(logp, full[jnp.arange(3), token], atol=1e-5)


def test_top_p_restricts_the_draw_and_not_the_logp():
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1]))
    grid = (np.arange(3000) + 0.5) / 3000
    token, logp = draw(logits, grid, top_p=0.7)
    np.testing.assert_allclose(np.bincount(token, minlength=4), [2000, 1000, 0, 0], atol=1.5)
    np.testing.assert_allclose(logp, logits[token], atol=1e-6)


def test_rows_with_and_without_top_p_do_not_disturb_each_other():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(4, 500)), jnp.float32)
    uniform = jnp.asarray(rng.uniform(size=4), jnp.float32)
    off = filters(4)
    plain, plain_logp = sample_tokens(logits, uniform, off)
    mixed, mixed_logp = sample_tokens(logits, uniform, off.replace(top_p=off.top_p.at[1].set(1e-6)))
    np.testing.assert_array_equal(np.delete(mixed, 1), np.delete(plain, 1))
    np.testing.assert_array_equal(np.delete(mixed_logp, 1), np.delete(plain_logp, 1))
    assert mixed[1] == logits[1].argmax()


def test_greedy_takes_the_largest_logit_whatever_the_uniform():
    logits = np.array([0.0, 3.0, -2.0, 3.0])
    token, logp = draw(logits, np.linspace(0, 0.999, 7), temperature=0.0, top_p=0.3)
    assert (token == 1).all()
    np.testing.assert_allclose(logp, 3.0 - np.logaddexp.reduce(logits), atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24])
def test_tokens_without_probability_are_never_drawn(uniform):
    """Also at both ends of the uniform, where rounding could step over the edge."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        logits = rng.normal(size=600) * 4
        dead = rng.permutation(600)[:400]
        logits[dead] = -1e9
        logits[[0, 599]] = -1e9
        token, logp = draw(logits, np.array([uniform, uniform]))
        assert logits[token[0]] > -1e9 and np.isfinite(logp).all()


def test_a_tiny_temperature_stays_finite():
    token, logp = draw(np.array([1.0, 2.0, 3.0]), np.array([0.3, 0.999]), temperature=1e-6)
    assert (token == 2).all() and (logp == 0.0).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"stop_ids": tuple(range(9))},
        {"stop_ids": (-1,)},
        {"seed": 2**32},
        {"top_k": -1},
        {"min_p": 1.5},
        {"min_tokens": 5},
        {"stop_strings": ("",)},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
        {"logit_bias": ((1, float("nan")),)},
    ],
)
def test_bad_params_are_refused(bad):
    with pytest.raises(RequestError):
        SamplingParams(**{"max_tokens": 4, **bad}).check()
    SamplingParams(max_tokens=4).check()
