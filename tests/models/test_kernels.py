# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention kernels, interpreted on the CPU, against the XLA forms; and which one is chosen."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import paged_attention as pages
from jaxrl_llm.models.attention import causal_attention, causal_segments, within_window
from jaxrl_llm.models.kernels import choice, mosaic, rows
from jaxrl_llm.models.kernels.choice import Case, Choice, choose_pages, choose_rows
from jaxrl_llm.models.kernels.cudnn import cudnn_attention
from jaxrl_llm.models.kernels.mosaic import mosaic_attention
from jaxrl_llm.models.kernels.shards import on_shards
from jaxrl_llm.models.kernels.splash import splash_attention
from jaxrl_llm.models.kernels.triton import triton_attention, triton_rows
from jaxrl_llm.models.paged_attention import paged_attention
from jaxrl_llm.models.transformer import forward
from jaxrl_llm.rollout.engine import Engine, EngineConfig, Request, SamplingParams
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.types import Prompt

PAGES = {"mosaic": mosaic_attention, "triton": triton_attention}


def packed_rows(length):
    """Segments of one token, of several, padding at the end; and a row without padding."""
    positions, segments = np.zeros((2, length), np.int32), np.zeros((2, length), np.int32)
    cuts = [0, 1, length // 3, length // 3 + 1, length - 7]
    for index, (start, end) in enumerate(itertools.pairwise(cuts)):
        segments[0, start:end], positions[0, start:end] = index + 1, np.arange(end - start)
    segments[1], positions[1] = 1, np.arange(length)
    return jnp.asarray(positions), jnp.asarray(segments)


def draw(seed, length, heads, width=16):
    return jax.random.normal(jax.random.key(seed), (2, length, heads, width))


def outcome(attend, length):
    """Output, and the gradients of a weighted sum of it."""

    def total(q, k, v):
        out = attend(q, k, v)
        return jnp.sum(draw(3, length, 4) * out), out

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
    (_, out), grads = run(draw(0, length, 4), draw(1, length, 2), draw(2, length, 2))
    return out, *grads


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize(
    ("length", "traits"),
    [
        (150, {}),
        (260, {"window": 20, "scale": 0.7, "softcap": 2.0}),
        pytest.param(33, {"window": 40}, marks=pytest.mark.full),  # longer than the row
    ],
    ids=str,
)
def test_splash_equals_attention_over_rows(length, traits):
    positions, segments = packed_rows(length)
    allowed = causal_segments(positions, segments)
    others = {name: value for name, value in traits.items() if name != "window"}
    plain = functools.partial(causal_attention, allowed=allowed, **others)
    if "window" in traits:
        allowed &= within_window(positions, traits["window"])
    reference = functools.partial(causal_attention, allowed=allowed, **others)
    kernel = functools.partial(splash_attention, segment_ids=segments, interpret=True, **traits)
    want = outcome(reference, length)
    assert_equal(outcome(kernel, length), want)
    q, k, v = draw(0, length, 4), draw(1, length, 2), draw(2, length, 2)
    changed = jnp.abs(plain(q, k, v) - want[0]).max()
    assert (changed > 1e-2) == (traits.get("window", 1000) < length)


@pytest.mark.parametrize("scale", [pytest.param(None, marks=pytest.mark.full), 0.7])
def test_triton_equals_attention_over_rows(scale):
    length = 150
    positions, segments = packed_rows(length)
    allowed = causal_segments(positions, segments)
    reference = functools.partial(causal_attention, allowed=allowed, scale=scale)
    kernel = functools.partial(triton_rows, segment_ids=segments, scale=scale, interpret=True)
    assert_equal(outcome(kernel, length), outcome(reference, length))


def test_what_surrounds_cudnn_equals_attention_over_rows():
    """cuDNN's kernel itself runs on a GPU alone: XLA stands in for it."""
    length = 151
    positions, segments = packed_rows(length)
    prefixes = jnp.where(segments == 3, 2, 0)
    positions = jnp.where(segments == 3, positions + 50, positions)
    allowed = causal_segments(positions, segments, prefixes)
    assert bool(jnp.any(allowed & (segments[:, :, None] != segments[:, None, :])))
    reference = functools.partial(causal_attention, allowed=allowed, scale=0.7)
    kernel = functools.partial(cudnn_attention, allowed=allowed, scale=0.7, implementation="xla")
    assert_equal(outcome(kernel, length), outcome(reference, length))


def pool(page, heads=2, width=16):
    """Shuffled pages of five sequences of 192 tokens, and a null page."""
    rng = np.random.default_rng(page)
    per_row = 192 // page
    shape = (1 + 5 * per_row, page, heads, width)
    tables = rng.permutation(np.arange(1, shape[0])).reshape(5, per_row).astype(np.int32)
    pages = [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in "kv"]
    return rng, *pages, jnp.asarray(tables)


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(
    ("page", "heads", "traits"),
    [
        (16, 6, {}),
        (8, 2, {"window": 7}),
        (64, 4, {"window": 64, "softcap": 2.0, "scale": 1.0}),
        pytest.param(16, 4, {"window": 1}, marks=pytest.mark.full),
        pytest.param(16, 6, {"softcap": 0.5}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_paged_kernels_equal_attention_over_pages(name, page, heads, traits, monkeypatch):
    """Sequences of one token, at, before and past a page's border, and at the table's end."""
    monkeypatch.setattr(mosaic, "_TOKENS", 64)  # several blocks each
    rng, k, v, tables = pool(page)
    positions = jnp.asarray([0, page - 1, page, 101, 191], jnp.int32)
    q = jnp.asarray(rng.normal(size=(5, heads, 16)), jnp.float32)

    def reference(**traits):
        return paged_attention(q[:, None], k, v, tables, positions[:, None], **traits)[:, 0]

    got = PAGES[name](q, k, v, tables, positions, interpret=True, **traits)
    want = reference(**traits)
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert not traits or float(jnp.abs(want - reference()).max()) > 1e-2  # every trait matters


@pytest.mark.parametrize("name", PAGES)
def test_paged_kernels_sum_bfloat16_in_float32(name):
    """Large scores, which bfloat16 would round by several hundredths: their softmax would show it.

    Interpreting runs copies at once: that a kernel waits for its own can't be seen here."""
    rng, k, v, tables = pool(16)
    positions = jnp.asarray([20, 60, 101, 150, 191], jnp.int32)
    q = jnp.asarray(rng.normal(size=(5, 4, 16)), jnp.float32)
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    got = PAGES[name](q, k, v, tables, positions, interpret=True, scale=4.0)
    assert got.dtype == jnp.bfloat16
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    want = paged_attention(q[:, None], k, v, tables, positions[:, None], scale=4.0)[:, 0]
    error = float(jnp.abs(got.astype(jnp.float32) - want).mean())
    assert error < 1.2e-3  # 7e-4 is what rounding weights and output gives


@pytest.mark.parametrize("name", PAGES)
def test_what_lies_beyond_a_sequence_changes_no_bit(name):
    rng, k, v, tables = pool(16)
    positions = jnp.asarray([0, 15, 16, 101, 130], jnp.int32)
    q = jnp.asarray(rng.normal(size=(5, 4, 16)), jnp.float32)
    kernel = jax.jit(functools.partial(PAGES[name], interpret=True))
    first = kernel(q, k, v, tables, positions)
    beyond = np.zeros(k.shape[:2], bool)
    for row, last in zip(tables, positions, strict=True):
        for at in range(int(last) + 1, 192):
            beyond[row[at // 16], at % 16] = True
    k, v = (jnp.where(beyond[:, :, None, None], 1e3, pages) for pages in (k, v))
    second = kernel(q, k, v, tables, positions)
    np.testing.assert_array_equal(first, second)


def test_kernels_run_on_each_devices_own_rows_and_heads():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    length = 40
    positions, segments = (jnp.concatenate([x, x]) for x in packed_rows(length))
    q, k, v = (jnp.concatenate([x, x + 1]) for x in (draw(0, length, 4), *[draw(1, length, 2)] * 2))
    reference = causal_attention(q, k, v, causal_segments(positions, segments))
    seen = []

    def kernel(q, k, v, segments):
        seen.append((q.shape, k.shape))
        return splash_attention(q, k, v, segments, interpret=True)

    axes = [("rows", None, name, None) for name in ("heads", "kv_heads", "kv_heads")]
    with jax.set_mesh(mesh):
        out = jax.jit(on_shards(kernel, [*axes, ("rows", None)], axes[0]))(q, k, v, segments)
    np.testing.assert_allclose(out, reference, atol=5e-6)
    assert seen[0] == ((1, length, 2, 16), (1, length, 1, 16))


def interpreted(monkeypatch, platform):
    """Kernels of a platform run here, interpreted; of cuDNN's, what it is told."""
    monkeypatch.setattr(choice, "current_platform", lambda: platform)
    for name, kernel, how in (
        ("splash_attention", splash_attention, {"interpret": True}),
        ("triton_rows", triton_rows, {"interpret": True}),
        ("cudnn_attention", cudnn_attention, {"implementation": "xla"}),
    ):
        monkeypatch.setattr(rows, name, functools.partial(kernel, **how))
    kernels = {name: functools.partial(kernel, interpret=True) for name, kernel in PAGES.items()}
    monkeypatch.setattr(pages, "PAGE_KERNELS", kernels)


WINDOWS = {"sliding_window": 8, "window_layers": (True, False)}


@pytest.mark.parametrize(
    ("platform", "name", "traits", "meshed"),
    [
        ("tpu", "splash", WINDOWS | {"attention_softcap": 5.0}, False),
        ("tpu", "splash", WINDOWS | {"attention_softcap": 5.0}, True),
        ("gpu", "cudnn", WINDOWS, False),
        ("gpu", "triton", {}, False),
    ],
    ids=str,
)
def test_a_decoder_of_unlike_layers_by_kernels_is_the_same_decoder(
    tiny_config, tiny_params, monkeypatch, platform, name, traits, meshed
):
    """A windowed layer and one that sees all, a soft cap, a scale, layers computed again."""
    config = dataclasses.replace(tiny_config, attention_scale=0.4, **traits)
    positions, segments = (jnp.concatenate([x, x]) for x in packed_rows(40))
    tokens = jax.random.randint(jax.random.key(0), positions.shape, 0, config.vocab_size)

    def run(params, backend):
        chosen = dataclasses.replace(config, attention_backend=backend)
        out = forward(params, chosen, tokens, positions, segments, remat=True)
        return jnp.sum(jnp.where((segments > 0)[:, :, None], jnp.sin(out), 0.0))

    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2) if meshed else MeshConfig(data=1))
    with jax.set_mesh(mesh):
        grad = jax.jit(jax.value_and_grad(run), static_argnums=1)
        want = grad(tiny_params, "xla")
        interpreted(monkeypatch, platform)
        # What a device would refuse is no matter here.
        monkeypatch.setitem(choice._ROWS, name, lambda case: iter(()))
        got = grad(tiny_params, name)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (got[1], want[1])), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize(("platform", "name"), [("tpu", "mosaic"), ("gpu", "triton")])
def test_an_engine_by_kernels_draws_the_same_tokens(
    tiny_config, tiny_params, monkeypatch, platform, name
):
    config = dataclasses.replace(
        tiny_config, sliding_window=8, window_layers=(True, False), attention_softcap=5.0
    )
    sizes = EngineConfig(12, 6, slots=4, page_size=4, decode_steps=4, attention="pages")
    asked = [Request(Prompt(str(i), (5, 6, 7 + i), ""), SamplingParams(6), uid=i) for i in range(3)]

    def drawn(backend):
        chosen = dataclasses.replace(sizes, attention_backend=backend)
        rollouts = list(Engine(config, tiny_params, chosen).generate(asked))
        return sorted((r.prompt.id, r.tokens.tolist(), r.logp_sampler.tolist()) for r in rollouts)

    want = drawn("xla")
    # Widths that a device would refuse are no matter to an interpreter.
    monkeypatch.setitem(choice._PAGES, name, lambda case: iter(()))
    interpreted(monkeypatch, platform)
    got = drawn(name)
    assert [row[:2] for row in got] == [row[:2] for row in want]
    np.testing.assert_allclose([r[2] for r in got], [r[2] for r in want], atol=2e-6)


BIG = Case(platform="tpu", dtype="bfloat16", heads=32, kv_heads=8, head_dim=128)


def case(**changes):
    return Case(**{**BIG.__dict__, **changes})


def test_the_platform_chooses():
    assert choose_rows("auto", case()) == Choice("splash")
    assert choose_rows("auto", case(platform="gpu")) == Choice("cudnn")
    assert choose_rows("auto", case(platform="gpu", dtype="float32")) == Choice("triton")
    assert choose_rows("auto", case(platform="cpu")) == Choice("xla", "no kernel for cpu")
    assert choose_pages("auto", case()) == Choice("mosaic")
    assert choose_pages("auto", case(platform="gpu")) == Choice("triton")
    assert choose_rows("xla", case()) == Choice("xla")


@pytest.mark.parametrize(
    ("choose", "wanted", "changes", "why"),
    [
        (choose_rows, "splash", {"shared": True}, "share prompts"),
        (choose_rows, "splash", {"kv_heads": 2, "tensor": 4}, "not split over 4 devices"),
        (choose_rows, "splash", {"pipeline": 2}, "pipeline"),
        (choose_rows, "splash", {"platform": "cpu"}, "on a TPU, this is a CPU"),
        (choose_rows, "cudnn", {"platform": "gpu", "dtype": "float32"}, "not float32"),
        (choose_rows, "cudnn", {"platform": "gpu", "head_dim": 256}, "up to 128, not 256"),
        (choose_rows, "cudnn", {"platform": "gpu", "softcap": True}, "soft cap"),
        (choose_rows, "cudnn", {"platform": "gpu", "cudnn": False}, "cuDNN is not found"),
        (choose_rows, "triton", {"platform": "gpu", "window": True}, "window"),
        (choose_rows, "triton", {"platform": "gpu", "shared": True}, "share prompts"),
        (choose_pages, "mosaic", {"head_dim": 64}, "multiples of 128, not 64"),
        (choose_pages, "mosaic", {"page_size": 1}, "multiple of 16, not 8"),
        (choose_pages, "mosaic", {"kv_heads": 6, "tensor": 2}, "multiple of 8, not 3"),
        (choose_pages, "mosaic", {"platform": "gpu"}, "on a TPU, this is a GPU"),
        (choose_pages, "triton", {"platform": "gpu", "head_dim": 96}, "powers of 2, not 96"),
        (choose_pages, "triton", {"platform": "gpu", "page_size": 12}, "powers of 2, not 12"),
    ],
)
def test_what_a_kernel_cannot_serve_is_an_error_by_name_and_a_reason_under_auto(
    choose, wanted, changes, why
):
    with pytest.raises(ConfigError, match=f"{wanted} can't serve this run: .*{why}") as raised:
        choose(wanted, case(**changes))
    assert "\n" not in str(raised.value)
    if changes.get("platform") not in ("cpu",) and "this is" not in why:
        chosen = choose("auto", case(**changes))
        assert chosen.name != wanted
        assert chosen.name != "xla" or why in chosen.reason


def test_an_unknown_back_end_is_refused():
    with pytest.raises(ConfigError, match="expected auto, xla, splash, cudnn, triton"):
        choose_rows("flash", case())
