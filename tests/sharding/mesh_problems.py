# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""One step of each kind of training on any mesh, and on one device: `from mesh_problems import …`.

Run as a program (with `JAX_ENABLE_X64=1`) it prints the distances of one problem on several meshes
as JSON: ``python mesh_problems.py PROBLEM float64,float32 MESH …``, a mesh as "data=2,tensor=4".
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.presets import AlgoConfig, resolve
from jaxrl_llm.data.packing import PackedRows
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import sequence_logprobs
from jaxrl_llm.models.placement import Placement
from jaxrl_llm.models.score_heads import token_scores
from jaxrl_llm.models.shapes import param_shapes
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.trainers.learner import Bounds
from jaxrl_llm.trainers.preference import preference_counts, preference_loss
from jaxrl_llm.trainers.sft import sft_counts, sft_loss
from jaxrl_llm.trainers.supervised_settings import PreferenceSettings
from jaxrl_llm.types import Batch

ROWS, LENGTH, MICRO = 32, 16, 2  # rows of a batch, tokens of a row, micro-batches

# Every trait that has parameters of its own or differs between layers; 5 layers divide nothing.
RICH = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm="head",
    post_norms=True,
    sliding_window=4,
    window_layers=(True, False, True, True, False),
    local_rope_theta=100.0,
    logit_softcap=20.0,
)
PLAIN = ModelConfig(64, 32, 48, 4, 4, 2, 8, tie_word_embeddings=True)
# No weight has the shape of an activation, whole or split in two.
TELLING = dataclasses.replace(PLAIN, head_dim=12, intermediate_size=80)
EXPERTS = dataclasses.replace(
    PLAIN, qk_norm="all", num_experts=4, experts_per_token=2, expert_size=16
)


def draw_params(config: ModelConfig, dtype, seed: int = 0):
    """Weights with which softmaxes are far from uniform; drawn by numpy, so equal in any width."""
    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map_with_path(
        lambda path, shape: (
            ("norm" in jax.tree_util.keystr(path)) + 0.2 * rng.standard_normal(shape)
        ).astype(dtype),
        param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def draw_rows(config: ModelConfig, seed: int = 1) -> dict[str, np.ndarray]:
    """Rows with two sequences each, some padding, and prompts that are not trained on."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, LENGTH)
    first = rng.integers(5, 9, ROWS)[:, None]
    size = rng.integers(13, LENGTH + 1, ROWS)[:, None]
    column = np.arange(LENGTH)[None, :]
    segments = np.where(column < first, 1, 2) * (column < size)
    positions = np.where(column < first, column, column - first)
    return {
        "tokens": rng.integers(0, config.vocab_size, shape).astype(np.int32),
        "positions": positions.astype(np.int32),
        "segment_ids": segments.astype(np.int32),
        "mask": (segments > 0) & (positions > 1),
    }


def rl_problem(config: ModelConfig, dtype):
    rng = np.random.default_rng(2)
    rows = draw_rows(config)
    noise = lambda centre: rng.normal(centre, 0.5, (ROWS, LENGTH)).astype(dtype)  # noqa: E731
    batch = Batch(
        **rows,
        advantages=noise(0),
        logp_sampler=noise(-4),
        logp_old=noise(-4),
        logp_ref=noise(-4),
    )
    algorithm = resolve(AlgoConfig(name="grpo", kl_coef=0.1), group_size=4, max_tokens=LENGTH)
    counts = algorithm.counts(batch.mask, batch.segment_ids)

    def loss(params, batch, model):
        logp, entropy = sequence_logprobs(
            params,
            model,
            batch.tokens,
            batch.positions,
            batch.segment_ids,
            batch.mask,
            num_targets=LENGTH,
            temperature=0.8,
        )
        return algorithm.loss(logp, entropy, batch, counts, kl_coef=0.1)[0]

    return draw_params(config, dtype), batch, loss


def sft_problem(config: ModelConfig, dtype):
    rows = PackedRows(**draw_rows(config))
    counts = sft_counts(rows)

    def loss(params, rows, model):
        one = sft_loss(model, kind="nll", remat=True)
        return one(params, rows, counts, {}, Bounds(LENGTH, 2))[0]

    return draw_params(config, dtype), rows, loss


def preference_problem(config: ModelConfig, dtype):
    rng = np.random.default_rng(3)
    ref = rng.normal(-30, 3, (ROWS, 2)).astype(dtype)
    rows = PackedRows(**draw_rows(config), values=np.zeros((ROWS, 2), dtype), ref=ref)
    counts = preference_counts(rows, ROWS)

    def loss(params, rows, model):
        one = preference_loss(model, PreferenceSettings(), remat=False)
        return one(params, rows, counts, {}, Bounds(LENGTH, 2))[0]

    return draw_params(config, dtype), rows, loss


def critic_problem(config: ModelConfig, dtype):
    rows = PackedRows(**draw_rows(config))
    decoder = draw_params(config, dtype)
    decoder.pop("head", None)
    weight = np.random.default_rng(4).standard_normal((1, config.hidden_size)).astype(dtype)

    def loss(params, rows, model):
        scores = token_scores(params, model, rows.tokens, rows.positions, rows.segment_ids)
        return jnp.sum(jnp.where(rows.mask, jnp.square(scores[..., 0]), 0.0)) / 100.0

    return {"decoder": decoder, "score": {"weight": weight}}, rows, loss


PROBLEMS = {
    "rl": functools.partial(rl_problem, RICH),
    "rl_plain": functools.partial(rl_problem, PLAIN),
    "rl_telling": functools.partial(rl_problem, TELLING),
    "rl_experts": functools.partial(rl_problem, EXPERTS),
    "sft": functools.partial(sft_problem, PLAIN),
    "preference": functools.partial(preference_problem, PLAIN),
    "critic": functools.partial(critic_problem, PLAIN),
}
MODELS = {"rl": RICH, "rl_experts": EXPERTS, "rl_telling": TELLING}


def micro_batches(batch):
    each = ROWS // MICRO
    for start in range(0, ROWS, each):
        yield jax.tree.map(lambda x, s=start: x[s : s + each], batch)


def accumulator(loss, place: Placement | None):
    """Compiled (gradients, params, rows) → (gradients, loss), the gradients placed."""

    def accumulate(grads, params, rows):
        model = place.model if place else None
        value, new = jax.value_and_grad(loss)(params, rows, model)
        grads = jax.tree.map(jnp.add, grads, new)
        return (place.split(grads, "gradients") if place else grads), value

    return accumulate


@functools.cache
def alone(name: str, dtype: str):
    """Loss and gradients on one device, in numpy."""
    params, batch, loss = PROBLEMS[name](dtype)
    model = MODELS.get(name, PLAIN)
    step = jax.jit(accumulator(lambda p, b, _: loss(p, b, model), None))
    grads, total = jax.tree.map(np.zeros_like, params), 0.0
    for rows in micro_batches(batch):
        grads, value = step(grads, params, rows)
        total += float(value)
    return total, jax.device_get(grads)


def on_mesh(name: str, dtype: str, layout: MeshConfig):
    """Loss, gradients (placed), the placement and the compiled step on a mesh."""
    params, batch, loss = PROBLEMS[name](dtype)
    place = Placement.make(layout, MODELS.get(name, PLAIN))
    step = place.jit(accumulator(loss, place), donate_argnums=0)
    grads = place.put(jax.tree.map(np.zeros_like, params), "gradients")
    params, total = place.put(params), 0.0
    for rows in micro_batches(batch):
        rows = place.put_rows(rows)
        grads, value = step(grads, params, rows)
        total += float(value)
    return total, grads, place, functools.partial(step.lower, grads, params, rows)


def distances(name: str, dtype: str, layout: MeshConfig) -> dict[str, float]:
    """How far loss and gradients are from one device's, over the largest entry of each."""
    expected, expected_grads = alone(name, dtype)
    total, grads, place, _ = on_mesh(name, dtype, layout)
    for leaf, where in zip(
        jax.tree.leaves(grads), jax.tree.leaves(place.shardings(grads, "gradients")), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(where, leaf.ndim), (leaf.sharding, where)
    grads = jax.device_get(place.take(grads))
    far = {"loss": abs(total - expected) / abs(expected)}
    paths = jax.tree_util.tree_leaves_with_path(expected_grads)
    for (path, one), other in zip(paths, jax.tree.leaves(grads), strict=True):
        assert one.shape == other.shape, (path, one.shape, other.shape)
        assert np.abs(one).max() > 0, path
        difference = np.abs(one - other).max() / np.abs(one).max()
        far[jax.tree_util.keystr(path)] = float(difference)
    return far


def cache_variables() -> dict[str, str]:
    """The compilation cache of this process, for its children."""
    return {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }


def parse(text: str) -> MeshConfig:
    return MeshConfig(**{k: int(v) for k, v in (part.split("=") for part in text.split(","))})


if __name__ == "__main__":
    found = {}
    for dtype in sys.argv[2].split(","):
        for text in sys.argv[3:]:
            far = distances(sys.argv[1], dtype, parse(text))
            found[f"{dtype} {text}"] = max(far.items(), key=lambda pair: pair[1])
    print(json.dumps(found))
