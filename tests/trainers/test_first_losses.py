# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The first loss of each trainer, from a file to the number it reports, against one worked out here
from the file's text: bytes as tokens (this model wants no BOS before plain text), one sequence at a
time, float64 arithmetic on its logits."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import tiny_model, write_tiny_model

from jaxrl_llm.data.preprocess import TableData
from jaxrl_llm.models.transformer import forward, logits
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.trainers.build_supervised import gather, make_trainer
from jaxrl_llm.trainers.optimizers import OptimizerConfig
from jaxrl_llm.trainers.settings import ModelSource
from jaxrl_llm.trainers.supervised_settings import (
    FitConfig,
    PreferenceConfig,
    PreferenceSettings,
    RewardConfig,
    RewardSettings,
    RowConfig,
    SFTConfig,
    SFTSettings,
)

CONFIG, PARAMS = tiny_model()
EOS = 257
FAST = OptimizerConfig(learning_rate=1e-3)
REPLIES = [("Say é:", " é!", "e"), ("2+2=", "4", " five"), ("Hi", " there, you", " no")]
STEPS = [("1+1?\n", ["1+1=2", "so 3"], [True, False]), ("Go\n", ["on", "and", "on"], [True] * 3)]
HIDDEN = jax.jit(lambda *rows: forward(PARAMS, CONFIG, *rows))


def hidden(tokens):
    """Final hidden states of one sequence that stands alone."""
    row = np.zeros((2, 64), np.int32)
    row[0, : len(tokens)] = tokens
    here = np.broadcast_to(np.arange(64) < len(tokens), (2, 64)).astype(np.int32)
    places = np.broadcast_to(np.arange(64), (2, 64)).astype(np.int32)
    return HIDDEN(*map(jnp.asarray, (row, places, here)))[0, : len(tokens)]


def tokens_of(prompt, reply):
    return [*prompt.encode(), *reply.encode(), EOS]


def reply_logps(prompt, reply):
    """Log-probability of each token of the reply, its end token included."""
    tokens = tokens_of(prompt, reply)
    scores = np.asarray(logits(PARAMS, hidden(tokens), CONFIG), np.float64)
    logp = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    first = max(1, len(prompt.encode()))  # the first of all follows nothing
    return np.array([logp[t - 1, tokens[t]] for t in range(first, len(tokens))])


CHOSEN = [reply_logps(prompt, chosen) for prompt, chosen, _ in REPLIES]
REJECTED = [reply_logps(prompt, rejected) for prompt, _, rejected in REPLIES]


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def trainer_of(config_type, rows, tmp_path, **settings):
    """The trainer of a config whose batch is all rows, and its parameters before the first step."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    packed = config_type is not SFTConfig  # packed fine-tuning has no step that is all rows once
    config = config_type(
        data=TableData(str(tmp_path / "data.jsonl")),
        model=ModelSource(path=str(write_tiny_model(tmp_path / "model"))),
        rows=RowConfig(max_length=64, row_tokens=128 if packed else 64, packed=packed),
        train=FitConfig(steps=1, batch=len(rows), micro_batch=2),
        mesh=MeshConfig(data=1),
        **settings,
    )
    pieces = gather(config, 0)
    start = jax.device_get(pieces.params)
    return make_trainer(pieces)[0], start


def first_loss(config_type, rows, tmp_path, **settings):
    """What the trainer of a config reports for its first step, and its parameters before it."""
    trainer, start = trainer_of(config_type, rows, tmp_path, **settings)
    metrics, _ = trainer.train_step()
    return metrics["loss"], start


@pytest.mark.parametrize("kind", ["nll", "dft"])
@pytest.mark.parametrize("completion_only", [True, False])
def test_fine_tuning(kind, completion_only, tmp_path):
    rows = [{"prompt": prompt, "completion": reply} for prompt, reply, _ in REPLIES]
    told, _ = first_loss(
        SFTConfig, rows, tmp_path, sft=SFTSettings(loss=kind, completion_only=completion_only)
    )
    prompts = [prompt if completion_only else "" for prompt, _, _ in REPLIES]
    logp = np.concatenate([
        reply_logps(prompt, whole.removeprefix(prompt))
        for prompt, whole in zip(prompts, (p + c for p, c, _ in REPLIES), strict=True)
    ])  # fmt: skip
    by_hand = -logp.mean() if kind == "nll" else -(np.exp(logp) * logp).mean()
    assert abs(told - by_hand) < 2e-5 * by_hand


def odds(logp):
    mean = logp.mean()
    return mean - np.log1p(-np.exp(mean))


PAIR_LOSSES = {
    # The policy is its own reference: all margins are 0.
    "dpo": lambda: np.log(2),
    "ipo": lambda: 25.0,
    "simpo": lambda: np.mean([
        -log_sigmoid(2 * (c.mean() - r.mean()) - 0.5)
        for c, r in zip(CHOSEN, REJECTED, strict=True)
    ]),
    "cpo": lambda: np.mean([
        -log_sigmoid(0.1 * (c.sum() - r.sum())) for c, r in zip(CHOSEN, REJECTED, strict=True)
    ]) - np.concatenate(CHOSEN).mean(),
    "orpo": lambda: np.mean([
        -0.1 * log_sigmoid(odds(c) - odds(r)) for c, r in zip(CHOSEN, REJECTED, strict=True)
    ]) - np.concatenate(CHOSEN).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_preferences(name, tmp_path):
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in REPLIES]
    settings = PreferenceSettings(loss=name, beta=2.0 if name == "simpo" else 0.1)
    told, _ = first_loss(PreferenceConfig, rows, tmp_path, preference=settings)
    by_hand = PAIR_LOSSES[name]()
    assert abs(told - by_hand) < 2e-5 * by_hand


def test_a_moving_reference_follows_by_its_rate(tmp_path):
    """TR-DPO: ``ref ← ref + α (policy − ref)`` after every so many steps."""
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in REPLIES]
    settings = PreferenceSettings(ref_update_every=2, ref_update_rate=0.25)
    trainer, start = trainer_of(
        PreferenceConfig, rows, tmp_path, preference=settings, optimizer=FAST
    )
    losses = [trainer.train_step()[0]["loss"] for _ in range(2)]
    assert abs(losses[0] - np.log(2)) < 1e-6 and losses[1] < losses[0]
    policy, ref = jax.device_get((trainer.updater.params, trainer.updater.state.ref))
    expected = jax.tree.map(lambda a, b: a + 0.25 * (b - a), start, policy)
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: abs(a - b).max(), ref, expected))) < 1e-7
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: abs(a - b).max(), ref, start))) > 1e-4
    trainer.train_step()
    same = jax.tree.map(np.array_equal, jax.device_get(trainer.updater.state.ref), ref)
    assert all(jax.tree.leaves(same))  # it stays until the next second step


def test_a_precomputed_reference_is_the_live_one(tmp_path):
    """Of every example, packed in other rows, and after the policy has moved away from it."""
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in REPLIES]
    found, metrics = {}, {}
    for kind in ("live", "precomputed"):
        (tmp_path / kind).mkdir()
        settings = PreferenceSettings(reference=kind)
        trainer, _ = trainer_of(
            PreferenceConfig, rows, tmp_path / kind, preference=settings, optimizer=FAST
        )
        metrics[kind] = [trainer.train_step()[0] for _ in range(2)]
        examples = sorted(trainer.next_units(), key=lambda unit: unit.index)
        found[kind] = np.concatenate([trainer.rows([unit])[0].ref[0] for unit in examples])
    by_hand = [x.sum() for pair in zip(CHOSEN, REJECTED, strict=True) for x in pair]
    for ref in found.values():
        np.testing.assert_allclose(ref, by_hand, rtol=1e-5)
    for name in ("loss", "rewards/margins", "grad_norm"):
        live, stored = (metrics[kind][0][name] for kind in ("live", "precomputed"))
        np.testing.assert_allclose(live, stored, rtol=1e-5, atol=1e-6)
    assert all(abs(both[1]["rewards/margins"]) > 1e-3 for both in metrics.values())


def test_single_replies(tmp_path):
    rows = [{"prompt": p, "completion": c, "label": True} for p, c, _ in REPLIES]
    settings = PreferenceSettings(loss="kto", desirable_weight=1.5)
    told, _ = first_loss(PreferenceConfig, rows, tmp_path, preference=settings)
    assert abs(told - 0.75) < 1e-6


def test_a_reward_model_with_margins_and_centring(tmp_path):
    rows = [
        {"prompt": p, "chosen": c, "rejected": r, "margin": 0.5 * i}
        for i, (p, c, r) in enumerate(REPLIES)
    ]
    told, start = first_loss(
        RewardConfig, rows, tmp_path, reward=RewardSettings(use_margin=True, center_coef=0.1)
    )
    weight = np.asarray(start["score"]["weight"], np.float64)[0]
    terms = []
    for i, (prompt, *replies) in enumerate(REPLIES):
        good, bad = (np.asarray(hidden(tokens_of(prompt, x)))[-1] @ weight for x in replies)
        terms.append(-log_sigmoid(good - bad - 0.5 * i) + 0.1 * (good + bad) ** 2)
    assert abs(told - np.mean(terms)) < 2e-5 * np.mean(terms)


def test_a_process_reward_model(tmp_path):
    rows = [{"prompt": p, "completions": s, "labels": right} for p, s, right in STEPS]
    told, start = first_loss(RewardConfig, rows, tmp_path, reward=RewardSettings(kind="steps"))
    terms = []
    for prompt, steps, labels in STEPS:
        tokens = [*prompt.encode()]
        for step, right in zip(steps, labels, strict=True):
            tokens += [*step.encode(), *b"\n"]
            scores = np.asarray(start["score"]["weight"], np.float64) @ np.asarray(
                hidden(tokens)[-1], np.float64
            )
            terms.append(np.log(np.exp(scores).sum()) - scores[int(right)])
    assert len(terms) == 5
    assert abs(told - np.mean(terms)) < 2e-5 * np.mean(terms)
