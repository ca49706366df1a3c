# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The decoder against transformers' stored logits, and what must not change its output."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import read_golden, unpack
from safetensors.numpy import save_file
from tiny_model import tiny_model

from jaxrl_llm.checkpoint.huggingface import load_params
from jaxrl_llm.models.heads import token_logprobs
from jaxrl_llm.models.hf_config import config_from_hf
from jaxrl_llm.models.transformer import forward, logits, output_head, unstack_layers

forward_jit = jax.jit(forward, static_argnums=1)


def positions_like(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)


@pytest.mark.parametrize("name", ["mha_tied", "gqa_untied", "wide_heads"])
def test_logits_equal_those_of_transformers(name, tmp_path):
    golden = read_golden(f"llama_{name}_transformers.json")
    save_file({k: unpack(v) for k, v in golden["weights"].items()}, tmp_path / "model.safetensors")
    config = config_from_hf(golden["config"])
    params = load_params(tmp_path, config)
    tokens = jnp.asarray(golden["tokens"])
    hidden = forward_jit(params, config, tokens, positions_like(tokens), jnp.ones_like(tokens))
    expected = unpack(golden["logits"])
    assert np.std(expected) > 1  # the comparison below is with something
    assert np.max(np.abs(logits(params, hidden, config) - expected)) < 1e-4


def rows_of(config, lengths, seed=3):
    draw = np.random.default_rng(seed)
    return [jnp.asarray(draw.integers(0, config.vocab_size, n), jnp.int32) for n in lengths]


def run(params, config, tokens, positions, segments):
    return forward_jit(params, config, tokens[None], positions[None], segments[None])[0]


def test_packed_rows_are_as_alone():
    config, params = tiny_model()
    texts = rows_of(config, [7, 1, 12])
    alone = [run(params, config, t, jnp.arange(t.size), jnp.ones_like(t)) for t in texts]
    pad = jnp.full(4, 5)
    packed = run(
        params,
        config,
        jnp.concatenate([*texts, pad]),
        jnp.concatenate([*(jnp.arange(t.size) for t in texts), jnp.zeros_like(pad)]),
        jnp.concatenate(
            [*(jnp.full_like(t, i + 1) for i, t in enumerate(texts)), jnp.zeros_like(pad)]
        ),
    )
    np.testing.assert_allclose(packed[:20], jnp.concatenate(alone), atol=2e-6, rtol=0)
    assert not np.allclose(packed[8:20], run(params, config, *joined(texts))[8:20], atol=1e-2)


def joined(texts):
    """The same tokens as one text: what packing must not look like."""
    tokens = jnp.concatenate(texts)
    return tokens, jnp.arange(tokens.size), jnp.ones_like(tokens)


def loss_of(params, config, tokens, positions, segments, remat=False):
    hidden = forward(params, config, tokens, positions, segments, remat=remat)
    flat = hidden[:, :-1].reshape(-1, config.hidden_size)
    targets = tokens[:, 1:].reshape(-1)
    logp, entropy = token_logprobs(flat, output_head(params), targets, chunk=100)
    counted = (segments[:, 1:] > 0).reshape(-1)
    return jnp.sum(jnp.where(counted, logp + 0.1 * entropy, 0.0)) / 13.0, hidden


loss_and_grads = jax.jit(
    jax.value_and_grad(loss_of, has_aux=True), static_argnums=1, static_argnames="remat"
)


def padded(tokens, width, filler):
    extra = ((0, 0), (0, width - tokens.shape[1]))
    segments = jnp.pad(jnp.ones_like(tokens), extra)
    return jnp.pad(tokens, extra, constant_values=filler), segments


def test_right_padding_changes_neither_loss_nor_gradient():
    config, params = tiny_model()
    tokens = jnp.stack(rows_of(config, [11, 11]))
    rows, segments = padded(tokens, 11, 0)
    (loss, _), grads = loss_and_grads(params, config, rows, positions_like(rows), segments)
    for filler in (0, 77):
        rows, segments = padded(tokens, 22, filler)
        (again, hidden), more = loss_and_grads(params, config, rows, positions_like(rows), segments)
        np.testing.assert_allclose(again, loss, rtol=2e-6)
        largest = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(grads))
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(more), strict=True):
            assert float(jnp.max(jnp.abs(a - b))) <= 1e-5 * largest
        assert bool(jnp.all(jnp.isfinite(hidden)))  # on padding, too


NORMS_AND_WINDOWS = {
    "qk_norm": "head",
    "post_norms": True,
    "sliding_window": 20,
    "window_layers": (True, False),
}


@pytest.mark.parametrize(("traits", "length"), [({}, 11), (NORMS_AND_WINDOWS, 70)])
def test_recomputing_layers_changes_nothing(traits, length):
    config, params = tiny_model(**traits)
    tokens = jnp.stack(rows_of(config, [length, length]))
    args = (params, config, tokens, positions_like(tokens), jnp.ones_like(tokens))
    (loss, _), grads = loss_and_grads(*args)
    (again, _), more = loss_and_grads(*args, remat=True)
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(more), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_unstacked_layers_are_the_same_numbers():
    config, params = tiny_model()
    split = unstack_layers(params)
    assert len(split["layers"]) == config.num_layers
    for i, layer in enumerate(split["layers"]):
        for name, value in layer.items():
            np.testing.assert_array_equal(value, params["layers"][name][i])


def test_parameter_count_is_that_of_the_arrays():
    for tied in (True, False):
        config, params = tiny_model(tie_word_embeddings=tied)
        assert config.num_params == sum(x.size for x in jax.tree.leaves(params))


def largest_array(function, *args):
    """Elements of the largest array that the traced function ever names, in any inner program."""
    sizes = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            sizes.extend(math.prod(v.aval.shape) for v in eqn.outvars)
            for inner in jax.tree.leaves(
                eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                if hasattr(inner, "jaxpr"):
                    inner = inner.jaxpr
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return max(sizes)


def whole_logits_loss(params, config, tokens, positions, segments):
    hidden = forward(params, config, tokens, positions, segments)
    return jnp.sum(jax.nn.log_softmax(logits(params, hidden, config))[..., 0]), hidden


def test_no_array_of_all_logits_in_the_loss_forward_and_backward():
    config, params = tiny_model(vocab_size=4001)
    tokens = jnp.zeros((4, 32), jnp.int32)
    args = (params, tokens, positions_like(tokens), jnp.ones_like(tokens))
    size_of = lambda loss: largest_array(  # noqa: E731
        jax.value_and_grad(lambda p, *rest: loss(p, config, *rest)[0]), *args
    )
    assert size_of(whole_logits_loss) >= tokens.size * config.vocab_size
    head = config.vocab_size * config.hidden_size
    assert size_of(loss_of) <= head < tokens.size * config.vocab_size / 4
