# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from family_models import family_model
from tiny_model import tiny_model

from jaxrl_llm.checkpoint.adapters import load_adapter, save_adapter
from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.errors import ConfigError, ModelError
from jaxrl_llm.models.lora import (
    LoraConfig,
    adapter_shapes,
    attach,
    count_params,
    init_adapter,
    merge,
)
from jaxrl_llm.models.transformer import forward, logits
from jaxrl_llm.text.tokenizer import bytes_tokenizer

PLAIN = LoraConfig(rank=3, alpha=5.0)
VARIANTS = {
    "lora": PLAIN,
    "rslora": LoraConfig(rank=3, alpha=5.0, targets=("q", "down"), rslora=True),
    "dora": LoraConfig(rank=3, alpha=5.0, targets=("v", "o", "gate"), dora=True),
}


def marked(value):
    return pytest.param(value, marks=pytest.mark.full)


def trained_adapter(config, params, lora, dtype=jnp.float32):
    """An adapter whose B (and magnitudes) have moved."""
    draw = np.random.default_rng(5)
    adapter = init_adapter(config, lora, jax.random.key(0), params, dtype)
    moved = lambda x: x + jnp.asarray(0.1 * draw.standard_normal(x.shape), dtype)  # noqa: E731
    return {
        name: {part: x if part == "a" else moved(x) for part, x in parts.items()}
        for name, parts in adapter.items()
    }


def loss_of(params, config):
    draw = np.random.default_rng(2)
    tokens = jnp.asarray(draw.integers(0, config.vocab_size, (2, 9)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32)[None, :], tokens.shape)
    hidden = forward(params, config, tokens, positions, jnp.ones_like(tokens))
    return jnp.sum(hidden * jnp.asarray(draw.standard_normal(hidden.shape), hidden.dtype)), hidden


def same_bits(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("variant", ["dora", *(marked(n) for n in ("lora", "rslora"))])
def test_side_by_side_equals_merged(variant):
    config, params = tiny_model()
    lora = VARIANTS[variant]
    adapter = trained_adapter(config, params, lora)
    run = jax.jit(loss_of, static_argnums=1)
    merged, beside = merge(params, adapter, lora), attach(params, adapter, lora)
    _, base = run(params, config)
    _, one = run(merged, config)
    _, two = run(beside, config)
    np.testing.assert_allclose(two, one, atol=2e-5)
    assert float(jnp.max(jnp.abs(one - base))) > 0.05
    shapes = jax.tree.map(lambda x: x.shape, adapter)
    assert shapes == adapter_shapes(config, lora)
    assert count_params(adapter) == sum(x.size for x in jax.tree.leaves(adapter))


@pytest.mark.parametrize("variant", ["lora", "dora", marked("rslora")])
@pytest.mark.parametrize("dtype", [jnp.float32, marked(jnp.bfloat16)])
def test_a_thousand_merges_of_a_fresh_adapter_leave_every_bit(variant, dtype):
    config, params = tiny_model(dtype=dtype)
    params["layers"]["q"] = params["layers"]["q"].at[0, 0, 0].set(-0.0)
    lora = VARIANTS[variant]
    adapter = init_adapter(config, lora, jax.random.key(1), params)
    # A step at learning rate 0, then a merge, again and again; the merge starts from the base.
    step = jax.jit(lambda adapter: jax.tree.map(lambda x: x - 0.0 * x, adapter))
    merge_jit = jax.jit(merge, static_argnums=2)
    for _ in range(1000):
        adapter = step(adapter)
        merged = merge_jit(params, adapter, lora)
    same_bits(merged, params)


def test_the_base_stays_where_it_is_and_the_adapter_learns():
    config, params = tiny_model()
    lora = VARIANTS["dora"]
    before = jax.tree.map(lambda x: x.unsafe_buffer_pointer(), params)
    copy = jax.tree.map(np.array, params)
    adapter = init_adapter(config, lora, jax.random.key(0), params)
    optimizer = optax.sgd(1e-3)
    state = optimizer.init(adapter)

    @jax.jit
    def step(adapter, state, params):
        loss = lambda adapter: loss_of(attach(params, adapter, lora), config)[0]  # noqa: E731
        value, grads = jax.value_and_grad(loss)(adapter)
        changes, state = optimizer.update(grads, state)
        return optax.apply_updates(adapter, changes), state, value

    values = []
    for _ in range(4):
        adapter, state, value = step(adapter, state, params)
        values.append(float(value))
    assert values == sorted(values, reverse=True) and values[-1] < values[0] - 0.1
    assert jax.tree.map(lambda x: x.unsafe_buffer_pointer(), params) == before
    same_bits(params, copy)


def test_no_gradient_reaches_the_base():
    config, params = tiny_model()
    adapter = trained_adapter(config, params, PLAIN)
    grads = jax.grad(lambda p: loss_of(attach(p, adapter, PLAIN), config)[0])(params)
    assert all(not np.any(g) for g in jax.tree.leaves(grads))


def test_several_adapters_over_one_base():
    config, params = tiny_model()
    first = trained_adapter(config, params, PLAIN)
    second = jax.tree.map(lambda x: -x, first)
    run = jax.jit(loss_of, static_argnums=1)
    with_first = attach(params, first, PLAIN)
    with_second = attach(params, second, LoraConfig(rank=3, alpha=10.0))
    assert with_first["layers"]["q"].base is not None
    outs = [float(run(p, config)[0]) for p in (params, with_first, with_second)]
    assert len(set(outs)) == 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_peft_folder_round_trip(variant, tmp_path):
    config, params = tiny_model()
    lora = VARIANTS[variant]
    adapter = trained_adapter(config, params, lora)
    save_adapter(tmp_path / "a", adapter, lora, config, base_model="base")
    again, settings = load_adapter(tmp_path / "a", config)
    assert settings == lora
    same_bits(again, adapter)


PEFT = """
import sys, numpy as np, torch, transformers, peft
base, adapter, stored = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(
    base, dtype=torch.float32, attn_implementation="eager")
model = peft.PeftModel.from_pretrained(model, adapter).eval()
data = np.load(stored)
with torch.no_grad():
    logits = model(torch.from_numpy(data["tokens"])).logits.numpy()
print(float(np.abs(logits - data["logits"]).max()), float(np.abs(logits - data["base"]).max()))
"""


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_peft_computes_the_same_from_our_folder(variant, tmp_path):
    """Needs JAXRL_LLM_PARITY_PYTHON: an interpreter with torch, transformers and peft."""
    python = os.environ.get("JAXRL_LLM_PARITY_PYTHON")
    probe = [python or sys.executable, "-c", "import peft, torch, transformers"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("JAXRL_LLM_PARITY_PYTHON names no interpreter with torch and peft")
    config, params = tiny_model()
    lora = VARIANTS[variant]
    adapter = trained_adapter(config, params, lora)
    tokenizer = bytes_tokenizer()
    base = save_folder(tmp_path / "base", params, config, tokenizer)
    save_adapter(tmp_path / "adapter", adapter, lora, config, base_model=str(base))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 9))

    def logits_of(params):
        rows = jnp.asarray(tokens, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32)[None, :], rows.shape)
        hidden = forward(params, config, rows, positions, jnp.ones_like(rows))
        return np.asarray(logits(params, hidden, config))

    stored = tmp_path / "stored.npz"
    ours = logits_of(attach(params, adapter, lora))
    np.savez(stored, tokens=tokens, logits=ours, base=logits_of(params))
    arguments = [str(base), str(tmp_path / "adapter"), str(stored)]
    done = subprocess.run(
        [probe[0], "-c", PEFT, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    gap, change = map(float, done.stdout.split())
    assert gap < 1e-4 < 0.05 < change


def test_what_has_no_form_is_refused():
    config, params = family_model("phi3")
    lora = LoraConfig(rank=2, targets=("q",))
    adapter = init_adapter(config, lora, jax.random.key(0), params)
    with pytest.raises(ModelError, match="no PEFT form"):
        save_adapter("nowhere", adapter, lora, config)
    config, _ = family_model("mixtral")
    with pytest.raises(ConfigError, match=r"experts.*--lora\.targets=q,k,v,o"):
        init_adapter(config, PLAIN, jax.random.key(0))
    with pytest.raises(ConfigError, match=r"unknown LoRA targets.*router"):
        LoraConfig(targets=("router",))
    with pytest.raises(ConfigError, match="twice"):
        LoraConfig(targets=("q", "q"))
    for alpha in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="alpha"):
            LoraConfig(alpha=alpha)


def test_gradients_equal_the_full_ones_restricted_in_float64():
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    here = pathlib.Path(__file__)
    environment["PYTHONPATH"] = os.pathsep.join([str(here.parent.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(here)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "compared in float64"


def compare_in_float64():
    """dL/dB = s·dL/dW·Aᵀ and dL/dA = s·Bᵀ·dL/dW, with dL/dW taken at the merged weights."""
    config, params = tiny_model(dtype=jnp.float64, num_layers=1)
    lora = LoraConfig(rank=3, alpha=5.0)
    adapter = trained_adapter(config, params, lora, jnp.float64)
    loss = jax.jit(jax.grad(lambda p: loss_of(p, config)[0]))
    full = loss(merge(params, adapter, lora))["layers"]
    found = jax.jit(jax.grad(lambda a: loss_of(attach(params, a, lora), config)[0]))(adapter)
    for name, parts in adapter.items():
        d_w = full[name]
        d_b = lora.scale * jnp.einsum("loi,lri->lor", d_w, parts["a"])
        d_a = lora.scale * jnp.einsum("lor,loi->lri", parts["b"], d_w)
        largest = float(jnp.max(jnp.abs(d_b)))
        assert largest > 0.1
        np.testing.assert_allclose(found[name]["b"], d_b, rtol=0, atol=1e-6 * largest)
        np.testing.assert_allclose(found[name]["a"], d_a, rtol=0, atol=1e-6 * largest)


if __name__ == "__main__":
    assert jnp.zeros(1).dtype == jnp.float64
    compare_in_float64()
    print("compared in float64")
