# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised losses: packed = alone, scores where they belong, references, settings."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import tiny_model

from jaxrl_llm.algorithms.preference_losses import PREFERENCE_LOSSES, Pairs
from jaxrl_llm.data.encode import Part, Unit, ends_only
from jaxrl_llm.data.packing import lay_out, pack_step
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.score_heads import init_score_head
from jaxrl_llm.models.transformer import forward, logits
from jaxrl_llm.trainers.learner import Bounds
from jaxrl_llm.trainers.preference import (
    host_slot_sums,
    mismatched,
    pairs_of,
    preference_loss,
    reply_logprobs,
    told_right,
)
from jaxrl_llm.trainers.reward import sequence_scores, step_reward_loss
from jaxrl_llm.trainers.settings import MonitorConfig
from jaxrl_llm.trainers.sft import sft_loss
from jaxrl_llm.trainers.supervised_settings import (
    FitConfig,
    PreferenceConfig,
    PreferenceSettings,
    RewardSettings,
    RowConfig,
    SFTConfig,
    SFTSettings,
)

CONFIG, PARAMS = tiny_model()
HIDDEN = jax.jit(
    lambda rows: forward(PARAMS, CONFIG, rows.tokens, rows.positions, rows.segment_ids)
)
SCORES = jax.jit(lambda params, rows: sequence_scores(params, CONFIG, rows, 1))


class NoData:
    """Data of a config that is only looked at."""

    def load(self, formats):
        raise AssertionError


def on_device(rows):
    return jax.tree.map(jnp.asarray, rows)


def unit(*texts, values=()):
    """Parts from (prompt, reply) texts, as bytes."""
    parts = []
    for prompt, reply in texts:
        tokens = np.frombuffer((prompt + reply).encode(), np.uint8).astype(np.int32)
        parts.append(Part(tokens, np.arange(len(tokens)) >= len(prompt.encode())))
    return Unit(tuple(parts), values)


def distances_in_float64(*names):
    script = pathlib.Path(__file__).with_name("float64_supervised.py")
    done = subprocess.run(
        [sys.executable, str(script), *names],
        env={
            **os.environ,
            "JAX_ENABLE_X64": "1",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_packed_is_alone_in_float64():
    distances = distances_in_float64("sft nll", "dpo", "reward")
    assert distances.pop("control") > 1e-3
    assert len(distances) == 7 and max(distances.values()) < 1e-6, distances


@pytest.mark.full
def test_packed_is_alone_in_float64_for_every_other_loss():
    distances = distances_in_float64("sft dft", "ipo", "simpo", "orpo", "kto", "steps")
    assert len(distances) == 12 and max(distances.values()) < 1e-6, distances


def test_packed_logits_are_those_of_each_sequence_alone():
    units = [unit(("ab", "cdef")), unit(("q", "r")), unit(("hello ", "world"))]
    packed = on_device(lay_out([units], 32, 4))

    def run(rows):
        return logits(PARAMS, HIDDEN(rows), CONFIG)

    together = np.asarray(run(packed))[0]
    for segment, one in enumerate(units, start=1):
        alone = np.asarray(run(on_device(lay_out([[one], []], 16, 1))))[0, : one.length]
        at = packed.segment_ids[0] == segment
        np.testing.assert_allclose(together[at], alone, atol=1e-5 * np.abs(alone).max(), rtol=0)


def test_a_score_depends_neither_on_padding_nor_on_an_eos_inside_the_prompt():
    head = init_score_head(CONFIG, 1, jax.random.key(1))
    params = {"decoder": PARAMS, "score": head}

    def scores(width, *units):
        rows = on_device(lay_out([[u] for u in units], width, 1))
        return np.asarray(SCORES(params, rows))[:, 0]

    def ended(tokens):
        tokens = np.array(tokens, np.int32)
        return Unit((ends_only(Part(tokens, np.ones(len(tokens), bool))),))

    inside = ended([1, 257, 5, 6, 7, 257])  # an end token in the prompt, and one at the end
    short = scores(16, inside, inside)
    np.testing.assert_allclose(scores(48, inside, inside), short, atol=1e-6)
    # The whole sequence counts, not what stands before its first end token.
    other = scores(16, ended([1, 257, 5, 6, 8, 257]), ended([1, 257]))
    assert abs(other - short).min() > 1e-3
    rows = on_device(lay_out([[inside]] * 2, 16, 1))
    hidden = HIDDEN(rows)
    by_hand = np.asarray(hidden)[0, 5] @ np.asarray(head["weight"])[0]
    np.testing.assert_allclose(short[0], by_hand, atol=1e-6)


def test_a_process_reward_model_reads_only_at_step_marks():
    tokens = np.arange(10, 18, dtype=np.int32)
    mask = np.isin(np.arange(8), (3, 7))
    labels = np.where(mask, 1, -1).astype(np.int32)
    rows = on_device(lay_out([[Unit((Part(tokens, mask, labels),))]] * 2, 8, 1))
    params = {"decoder": PARAMS, "score": init_score_head(CONFIG, 2, jax.random.key(1))}
    loss = jax.jit(step_reward_loss(CONFIG, remat=False), static_argnums=4)
    counts = {"steps": np.float32(4)}
    value, metrics = loss(params, rows, counts, {}, Bounds(1, 1))
    hidden = HIDDEN(rows)
    scores = np.asarray(hidden, np.float64)[0] @ np.asarray(params["score"]["weight"]).T
    by_hand = np.mean([np.log(np.exp(s).sum()) - s[1] for s in scores[mask]])
    np.testing.assert_allclose(value, by_hand, rtol=1e-5)
    assert float(metrics["accuracy"][1]) == 4
    # What follows the last mark can't matter, and labels elsewhere don't.
    wild = rows.replace(labels=jnp.where(rows.mask, rows.labels, 7))
    assert float(loss(params, wild, counts, {}, Bounds(1, 1))[0]) == float(value)


@pytest.mark.parametrize("name", ["orpo", "dpo"])
def test_no_gradient_reaches_the_logits_of_prompt_tokens(name):
    """Through an untied head: a token that only prompts hold gets no gradient of its own logit
    beyond its share in the replies' softmax."""
    units = [unit(("ppp", "ab"), ("ppp", "cde"))]
    rows, _ = pack_step(units, row_tokens=32, packed=True, multiple=2)
    if name == "dpo":
        rows = rows.replace(ref=np.full(rows.values.shape, -5.0, np.float32))
    settings, rows = PreferenceSettings(loss=name), on_device(rows)

    def loss_of_logits(all_logits):
        logp = jax.nn.log_softmax(all_logits, axis=-1)
        chosen = jnp.take_along_axis(logp[:, :-1], rows.tokens[:, 1:, None], axis=2)[:, :, 0]
        token_logp = jnp.pad(chosen, ((0, 0), (1, 0)))
        pairs, valid = pairs_of(token_logp, rows, rows.values.shape[1])
        values = PREFERENCE_LOSSES[name].function(pairs, beta=settings.beta)
        nll = -jnp.sum(jnp.where(rows.mask & (rows.segment_ids % 2 == 1), token_logp, 0.0))
        return jnp.sum(jnp.where(valid, values, 0.0)) + settings.nll_weight * nll

    start = jnp.asarray(
        np.random.default_rng(0).normal(size=(*rows.tokens.shape, 259)), jnp.float32
    )
    grad = np.abs(np.asarray(jax.jit(jax.grad(loss_of_logits))(start))).sum(-1)
    predicts_reply = np.pad(rows.mask[:, 1:], ((0, 0), (0, 1)))
    assert (grad[~predicts_reply] == 0).all() and (grad[predicts_reply] > 0).all()


def test_preference_loss_is_its_parts_put_together():
    """The run's own loss, from token log-probabilities computed the long way."""
    units = [unit(("ab", "cd"), ("ab", "xyz")), unit(("q", "r"), ("q", "st"))]
    rows, _ = pack_step(units, row_tokens=32, packed=True, multiple=2)
    ref = np.linspace(-9, -12, rows.values.size).reshape(rows.values.shape).astype(np.float32)
    rows = rows.replace(ref=ref, ref_tokens=np.full(rows.tokens.shape, -4.0, np.float32))
    rows = on_device(rows)
    settings = PreferenceSettings(
        label_smoothing=0.3, weights=(0.7, 0.2), also=("ipo_sum",), nll_coef=0.5, kl_coef=0.3,
        kl_estimator="k2",
    )  # fmt: skip
    loss = jax.jit(preference_loss(CONFIG, settings, remat=False), static_argnums=4)
    counts = {"units": np.float32(2), "chosen_tokens": np.float32(3), "tokens": np.float32(8)}
    value, _ = loss(PARAMS, rows, counts, {}, Bounds(32, 4))
    found = logits(PARAMS, HIDDEN(rows), CONFIG)
    logp = np.asarray(jax.nn.log_softmax(found), np.float64)[0]
    token = np.array([logp[t - 1, rows.tokens[0, t]] if t else 0.0 for t in range(32)])
    token = np.where(rows.mask[0], token, 0.0)
    total = [token[rows.segment_ids[0] == s].sum() for s in (1, 2, 3, 4)]
    d = np.array(total) - np.asarray(ref)[0]
    h = np.array([d[0] - d[1], d[2] - d[3]])
    dpo = np.mean(0.7 * np.log1p(np.exp(-0.1 * h)) + 0.3 * np.log1p(np.exp(0.1 * h)))
    ipo = np.mean((h - 5.0) ** 2)
    nll = -sum(token[np.isin(rows.segment_ids[0], (1, 3))]) / 3
    kl = np.sum(np.where(rows.mask[0], (token + 4.0) ** 2 / 2, 0)) / 8
    by_hand = 0.7 * dpo + 0.2 * ipo + 0.5 * nll + 0.3 * kl
    np.testing.assert_allclose(value, by_hand, rtol=1e-5)
    assert min(abs(0.7 * dpo), 0.2 * ipo, 0.5 * nll, 0.3 * kl) > 1e-3 * by_hand


@pytest.mark.parametrize("name", ["dpo", "dpo_norm", "simpo", "ipo"])
def test_a_margin_of_rounding_noise_is_told_half_right(name):
    """Three pairs: a hair to either side, and one that is told right."""
    ref = jnp.array([-40.0, -40.0, -40.0])
    has_ref = PREFERENCE_LOSSES[name].reference
    pairs = Pairs(
        chosen=jnp.array([-40.0 - 4e-6, -40.0 + 4e-6, -39.9]),
        rejected=ref,
        chosen_length=jnp.full(3, 10.0),
        rejected_length=jnp.full(3, 10.0),
        ref_chosen=ref if has_ref else None,
        ref_rejected=ref if has_ref else None,
    )
    assert told_right(pairs, PreferenceSettings(loss=name)).tolist() == [0.5, 0.5, 1.0]
    swapped = pairs.replace(chosen=pairs.rejected, rejected=pairs.chosen)
    assert told_right(swapped, PreferenceSettings(loss=name)).tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_accuracy_is_half_while_the_policy_is_the_reference(name):
    """The reference's sums are the policy's own but for their last bits."""
    texts = [("ab", "cd"), ("ab", "xyz"), ("q", "r"), ("q", "st")]
    if name == "kto":
        units = [unit(text, values=(float(i == 0),)) for i, text in enumerate(texts)]
    else:
        units = [unit(*texts[:2]), unit(*texts[2:])]
    rows, _ = pack_step(units, row_tokens=32, packed=True, multiple=2)
    logp, _ = jax.jit(reply_logprobs(CONFIG, remat=False), static_argnums=2)(
        PARAMS, on_device(rows), Bounds(32, 4)
    )
    ref = host_slot_sums(np.asarray(logp), rows, 4)
    ref = np.nextafter(ref, np.where(np.arange(4) % 2 == 0, 0, -99).astype(np.float32))
    loss = jax.jit(
        preference_loss(CONFIG, PreferenceSettings(loss=name), remat=False), static_argnums=4
    )
    counts = {"units": np.float32(2), "chosen_tokens": np.float32(3), "tokens": np.float32(8)}
    coefs = {"kl": np.float32(0)} if name == "kto" else {}
    _, metrics = loss(PARAMS, on_device(rows.replace(ref=ref)), counts, coefs, Bounds(32, 4))
    hits, of = metrics["rewards/accuracies"]
    assert float(hits) / float(of) == 0.5


def test_fine_tuning_losses_by_hand():
    units = [unit(("ab", "cd")), unit(("q", "rst"))]
    rows = on_device(lay_out([units, []], 16, 2))
    logp = np.asarray(jax.nn.log_softmax(logits(PARAMS, HIDDEN(rows), CONFIG)), np.float64)[0]
    token = np.array([logp[t - 1, rows.tokens[0, t]] for t in np.flatnonzero(rows.mask[0])])
    assert len(token) == 5
    for kind, by_hand in (("nll", -token.mean()), ("dft", -(np.exp(token) * token).mean())):
        loss = jax.jit(sft_loss(CONFIG, kind=kind, remat=False), static_argnums=4)
        value, _ = loss(PARAMS, rows, {"tokens": np.float32(5)}, {}, Bounds(16, 1))
        np.testing.assert_allclose(value, by_hand, rtol=1e-5)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_kto_pairs_no_row_with_itself(count):
    units = [unit((f"p{i}", f"reply{i}")) for i in range(count)]
    moved = mismatched(units, 64)
    for i, one in enumerate(moved):
        text = bytes(one.parts[0].tokens.astype(np.uint8)).decode()
        assert text.startswith(f"p{i}reply") and text != f"p{i}reply{i}"
        assert one.parts[0].mask.sum() == 6


def test_kto_prefers_other_prompts_and_keeps_to_the_row():
    units = [unit(("same", "a")), unit(("same", "b")), unit(("else", "c" * 40))]
    moved = mismatched(units, 10)
    last = [bytes(u.parts[0].tokens.astype(np.uint8)).decode()[4] for u in moved]
    assert last == ["c", "c", "a"]
    assert max(u.length for u in moved) == 10
    # A row that comes twice is no other row; one that has nothing else beside it is left out.
    twice = [unit(("same", "a")), unit(("same", "a")), unit(("same", "b"))]
    moved = mismatched(twice, 64)
    assert [chr(u.parts[0].tokens[4]) for u in moved] == ["b", "b", "a"]
    assert mismatched(twice[:2], 64) == [] and mismatched(twice[:1], 64) == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PreferenceSettings(loss="ipo", label_smoothing=0.1), "no effect on ipo"),
        (lambda: PreferenceSettings(gamma=1.0), "no effect on dpo"),
        (lambda: PreferenceSettings(loss="robust", label_smoothing=0.5), "range of robust"),
        (lambda: PreferenceSettings(loss="exo"), "range of exo"),
        (lambda: PreferenceSettings(loss="simpo", reference="precomputed"), "use none"),
        (lambda: PreferenceSettings(reference="precomputed", kl_coef=0.1), "can't move"),
        (lambda: PreferenceSettings(loss="kto", kl_coef=0.1), "kto stands alone"),
        (lambda: PreferenceSettings(loss="kto", gamma=0.1), "no effect on kto"),
        (lambda: PreferenceSettings(loss="kto", weights=(2.0,)), "no effect on kto"),
        (lambda: PreferenceSettings(desirable_weight=2.0), "no effect on dpo"),
        (lambda: PreferenceSettings(alpha=0.2), "without divergence=alpha"),
        (lambda: PreferenceSettings(kl_estimator="k2"), "without a kl_coef"),
        (lambda: PreferenceSettings(ref_update_rate=0.5), "without ref_update_every"),
        (lambda: PreferenceSettings(loss="orpo", ref_update_every=2), "no reference"),
        (lambda: PreferenceSettings(gamma=float("nan"), loss="simpo"), "gamma is out of range"),
        (lambda: PreferenceSettings(weights=(1.0, -1.0), also=("ipo",)), "weights"),
        (lambda: RewardSettings(separator="|"), "no effect on pairs"),
        (lambda: RewardSettings(center_coef=float("inf")), "center_coef"),
        (lambda: PreferenceSettings(weights=(1.0, 2.0)), "weights"),
        (lambda: PreferenceSettings(beta=0.0), "beta"),
        (lambda: PreferenceSettings(kl_coef=0.1, kl_estimator="k9"), "kl_estimator"),
        (lambda: RewardSettings(kind="steps", center_coef=0.1), "no effect on steps"),
        (lambda: FitConfig(batch=0), "train.batch"),
        (lambda: RowConfig(max_length=1), "max_length"),
        (lambda: SFTConfig(data=None), "no data"),
        (
            lambda: SFTConfig(NoData(), rows=RowConfig(packed=False), sft=SFTSettings(pack_bins=4)),
            "pack_bins has no effect",
        ),
        (lambda: PreferenceSettings(loss="kto", nll_coef=0.0), "kto stands alone"),
        (
            lambda: SFTConfig(NoData(), rows=RowConfig(packed=False, row_tokens=4096)),
            "row_tokens has no effect",
        ),
        (
            lambda: PreferenceConfig(NoData(), rows=RowConfig(packed=False, row_tokens=512)),
            "row_tokens has no effect",
        ),
        (lambda: SFTConfig(NoData(), monitor=MonitorConfig(samples_per_step=2)), "no samples"),
    ],
)
def test_a_setting_that_can_not_be_meant_is_refused(make, words):
    with pytest.raises(ConfigError) as error:
        make()
    assert words in str(error.value)


def test_rows_that_are_not_packed_may_keep_the_least_row_tokens():
    for tokens in (RowConfig.row_tokens, 256):
        SFTConfig(NoData(), rows=RowConfig(max_length=256, packed=False, row_tokens=tokens))
        PreferenceConfig(NoData(), rows=RowConfig(max_length=128, packed=False, row_tokens=tokens))


def test_a_pair_must_fit_a_row_and_kto_needs_two():
    with pytest.raises(ConfigError, match="each of two replies"):
        PreferenceConfig(data=NoData(), rows=RowConfig(max_length=100, row_tokens=150))
    with pytest.raises(ConfigError, match="two or more"):
        PreferenceConfig(
            data=NoData(), preference=PreferenceSettings(loss="kto"), train=FitConfig(batch=1)
        )
