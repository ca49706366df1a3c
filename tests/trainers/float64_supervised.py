# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Run by test_supervised.py with float64: how far losses and gradients of equal data are apart."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.data.encode import Part, Unit, ends_only
from jaxrl_llm.data.packing import best_fit, lay_out
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.score_heads import init_score_head
from jaxrl_llm.models.transformer import init_params
from jaxrl_llm.trainers.learner import Bounds, make_learn_functions, micro_rows
from jaxrl_llm.trainers.preference import preference_counts, preference_loss
from jaxrl_llm.trainers.reward import pair_reward_loss, step_reward_loss
from jaxrl_llm.trainers.sft import sft_counts, sft_loss
from jaxrl_llm.trainers.supervised_settings import PreferenceSettings

CONFIG = ModelConfig(61, 16, 24, 2, 4, 2, 8, tie_word_embeddings=True)


def part(rng, prompt, reply, steps=False):
    tokens = rng.integers(0, 61, prompt + reply).astype(np.int32)
    mask = np.arange(len(tokens)) >= prompt
    labels = np.where(mask, rng.integers(0, 2, len(tokens)), -1).astype(np.int32) if steps else None
    return Part(tokens, mask, labels)


def make_units(rng, parts, *, steps=False, ends=False):
    units = []
    for index in range(7):
        made = tuple(
            part(rng, int(rng.integers(1, 5)), int(rng.integers(1, 6)), steps) for _ in range(parts)
        )
        made = tuple(map(ends_only, made)) if ends else made
        units.append(Unit(made, tuple(rng.normal(size=parts)), index))
    return units


WIDTH, SLOTS, MICRO = 32, 8, 2


def laid(units, packed, reference):
    """Rows of the units, all of one shape, with made-up reference values by unit where wanted."""
    places = best_fit([unit.length for unit in units], WIDTH) if packed else [[i] for i in range(7)]
    rows = lay_out([[units[i] for i in row] for row in places], WIDTH, SLOTS)
    if reference:
        ref, tokens = np.zeros(rows.values.shape), np.zeros(rows.tokens.shape)
        for n, row in enumerate(places):
            names = [(i, k) for i in row for k in range(len(units[i].parts))]
            for slot, name in enumerate(names):
                at = rows.segment_ids[n] == slot + 1
                tokens[n, at] = -np.random.default_rng(name).exponential(3.0, at.sum())
                ref[n, slot] = tokens[n][at & rows.mask[n]].sum()
        rows = rows.replace(ref=ref, ref_tokens=tokens)
    return rows


def value_and_gradient(functions, params, rows, counts, coefs, size=MICRO):
    bounds = Bounds(WIDTH, SLOTS)
    grads, total = functions.state.zeros(params), 0.0
    for micro in micro_rows(rows, size):
        grads, (loss, _) = functions.accumulate(grads, params, None, micro, counts, coefs, bounds)
        total += float(loss)
    return total, grads


def distance(one, other):
    """Largest difference of loss and gradient over the largest entry."""
    pairs = zip(jax.tree.leaves(one[1]), jax.tree.leaves(other[1]), strict=True)
    largest = max(
        float(jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-12)) for a, b in pairs
    )
    return max(largest, abs(one[0] - other[0]) / abs(other[0]))


def compare(name, loss, params, units, count, coefs, reference):
    functions = make_learn_functions(loss, optax.sgd(0.1))

    def run(rows, size=MICRO):
        return value_and_gradient(functions, params, rows, count(rows), coefs, size)

    alone, packed = laid(units, False, reference), laid(units, True, reference)
    assert packed.tokens.shape[0] < alone.tokens.shape[0] - 1
    base, padding = run(alone), packed.segment_ids == 0
    poisoned = packed.replace(
        tokens=np.where(padding, 5, packed.tokens), positions=np.where(padding, 3, packed.positions)
    )
    result = {
        f"{name}: packed": distance(run(packed), base),
        f"{name}: other padding": distance(run(poisoned), base),
    }
    if name == "sft nll":
        result["sft nll: all rows at once"] = distance(run(alone, 7), base)
        # What must show a difference: segments that are not kept apart.
        mixed = packed.replace(segment_ids=np.where(padding, 0, 1))
        result["control"] = distance(run(mixed), base)
    return result


def cases(names):
    """(name, loss, parts of a unit, counts, coefficients, whether a reference is used)"""
    settings = {
        "dpo": PreferenceSettings(kl_coef=0.3, nll_coef=0.2, label_smoothing=0.1),
        "ipo": PreferenceSettings(loss="ipo", weights=(0.7, 0.3), also=("dpo",)),
        "simpo": PreferenceSettings(loss="simpo"),
        "orpo": PreferenceSettings(loss="orpo"),
        "kto": PreferenceSettings(loss="kto"),
    }
    for name in names:
        if name in settings:
            loss = preference_loss(CONFIG, settings[name], remat=False)
            coefs = {"kl": np.float64(0.3)} if name == "kto" else {}
            count = lambda rows: preference_counts(rows, 7)  # noqa: E731
            reference = settings[name].needs_reference
            yield name, loss, 1 if name == "kto" else 2, count, coefs, reference
        elif name == "reward":
            loss = pair_reward_loss(CONFIG, use_margin=True, center_coef=0.1, remat=False)
            yield name, loss, 2, lambda rows: {"pairs": np.float64(7)}, {}, False
        elif name == "steps":
            loss = step_reward_loss(CONFIG, remat=False)
            yield name, loss, 1, lambda rows: {"steps": np.float64(rows.mask.sum())}, {}, False
        else:
            kind = name.removeprefix("sft ")
            yield name, sft_loss(CONFIG, kind=kind, remat=kind == "dft"), 1, sft_counts, {}, False


def main(names) -> None:
    decoder = init_params(CONFIG, jax.random.key(0), jnp.float64)
    decoder = jax.tree.map(lambda x: x * 8.0 if x.ndim > 1 else x, decoder)
    results = {}
    for name, loss, parts, count, coefs, reference in cases(names):
        params, classes = decoder, {"reward": 1, "steps": 2}.get(name)
        if classes:
            head = init_score_head(CONFIG, classes, jax.random.key(1), jnp.float64)
            params = {"decoder": decoder, "score": head}
        rng = np.random.default_rng(2)
        units = make_units(rng, parts, steps=name == "steps", ends=name == "reward")
        results |= compare(name, loss, params, units, count, coefs, reference)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
