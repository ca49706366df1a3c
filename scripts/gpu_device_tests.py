# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Device tests of `gpu_check.py`: what the device computes against what the CPU computes.

Each returns a line with what it measured, or raises.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the parts are.

    Attributes:
        shape: fields of `ModelConfig`.
        slots, group: of the sampler.
        prompt, new: tokens.
        rows, width: of a micro-batch.
    """

    shape: dict[str, int]
    slots: int
    group: int
    prompt: int
    new: int
    rows: int
    width: int
    dtype: str


SIZES = {
    "tiny": Size(
        dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4,
             num_kv_heads=2, head_dim=16),
        slots=16, group=4, prompt=16, new=16, rows=4, width=64, dtype="float32",
    ),
    "full": Size(
        dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_layers=24,
             num_heads=14, num_kv_heads=2, head_dim=64),
        slots=256, group=8, prompt=128, new=256, rows=8, width=1024, dtype="bfloat16",
    ),
}  # fmt: skip


def make_engine(config, params, size: Size):
    from jaxrl_llm.rollout.engine import Engine, EngineConfig

    return Engine(
        config,
        params,
        EngineConfig(
            max_prompt_tokens=size.prompt,
            max_new_tokens=size.new,
            slots=size.slots,
            group_size=size.group,
            prefill_tokens=min(1024, 16 * size.prompt),
        ),
    )


def requests(config, size: Size, prompts: int):
    import numpy as np

    from jaxrl_llm.rollout.engine import Request, SamplingParams
    from jaxrl_llm.types import Prompt

    rng = np.random.default_rng(1)
    tokens = rng.integers(0, config.vocab_size, (prompts, size.prompt)).tolist()
    params = SamplingParams(max_tokens=size.new, seed=0)
    return [
        Request(Prompt(str(i), tuple(row), ""), params, n=size.group, uid=i)
        for i, row in enumerate(tokens)
    ]


def small_model(experts: int = 0):
    import jax

    from jaxrl_llm.models.config import ModelConfig
    from jaxrl_llm.models.transformer import init_params

    config = ModelConfig(**SIZES["tiny"].shape)
    if experts:
        config = dataclasses.replace(
            config, num_experts=experts, experts_per_token=2, expert_size=64
        )
    params = init_params(config, jax.random.key(0))
    return config, jax.tree.map(lambda x: 3.0 * x if x.ndim > 1 else x, params)


def small_rows(config):
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (4, 48)).astype(np.int32)
    positions = np.tile(np.arange(24, dtype=np.int32), (4, 2))
    segments = np.repeat(np.array([[1, 2]], np.int32), 24, axis=1).repeat(4, axis=0)
    return tokens, positions, segments


def on_both(function: Callable, *arrays):
    """The function's results on the default device and on the CPU, products in full float32."""
    import jax

    def run():
        # A function of its own for each device: what it traces depends on the platform.
        return jax.device_get(jax.jit(lambda *args: function(*args))(*arrays))

    with jax.default_matmul_precision("highest"):
        here = run()
        with jax.default_device(jax.devices("cpu")[0]):
            return here, run()


def largest_gap(here, there, limit: float) -> str:
    """The largest difference over the largest entry.

    Raises:
        AssertionError: it is above the limit, or something is not finite.
    """
    import jax
    import numpy as np

    gaps = jax.tree.map(
        lambda a, b: float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)), here, there
    )
    worst = max(jax.tree.leaves(gaps))
    assert np.isfinite(worst) and worst <= limit, f"differs by {worst:.1e}, allowed {limit:.0e}"
    return f"differs from the CPU by {worst:.1e} of the largest entry (allowed {limit:.0e})"


def test_logits() -> str:
    from jaxrl_llm.models.transformer import forward, logits

    config, params = small_model()

    def run(params, *rows):
        return logits(params, forward(params, config, *rows), config)

    return largest_gap(*on_both(run, params, *small_rows(config)), 1e-4)


def test_gradients() -> str:
    import jax
    import jax.numpy as jnp

    from jaxrl_llm.models.heads import sequence_logprobs

    config, params = small_model()
    tokens, positions, segments = small_rows(config)
    mask = positions > 2

    def run(params):
        logp, entropy = sequence_logprobs(
            params, config, tokens, positions, segments, mask, num_targets=44, remat=True
        )
        return jnp.sum(logp) + jnp.sum(entropy)

    return largest_gap(*on_both(jax.grad(run), params), 1e-3)


def test_paged_attention() -> str:
    import jax
    import numpy as np

    from jaxrl_llm.models.paged_attention import paged_attention

    draw = lambda *shape: np.asarray(jax.random.normal(jax.random.key(len(shape)), shape))  # noqa: E731
    q, k, v = draw(4, 1, 4, 16), draw(33, 16, 2, 16), draw(33, 16, 2, 16) * 1.5
    tables = (1 + np.arange(32, dtype=np.int32)).reshape(4, 8)
    positions = np.array([[5], [17], [64], [127]], np.int32)
    return largest_gap(*on_both(paged_attention, q, k, v, tables, positions), 1e-4)


def test_row_kernels() -> str:
    """Each kernel of attention over rows against XLA's form on the same device."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_llm.models.attention import attend_rows, causal_segments
    from jaxrl_llm.models.config import ModelConfig
    from jaxrl_llm.models.kernels.rows import ROW_KERNELS

    shape = SIZES["tiny"].shape | dict(num_heads=4, num_kv_heads=2, head_dim=64)
    segments = np.repeat(np.array([1, 2, 0], np.int32), [200, 90, 10])[None].repeat(2, axis=0)
    positions = np.concatenate([np.arange(200), np.arange(90), np.zeros(10)]).astype(np.int32)
    allowed = causal_segments(positions[None].repeat(2, axis=0), segments, None)

    def outcome(name: str, dtype: str):
        config = ModelConfig(**shape, attention_backend=name, attention_scale=0.2)
        draw = lambda seed, heads: jax.random.normal(  # noqa: E731 - short
            jax.random.key(seed), (2, 300, heads, 64), jnp.dtype(dtype)
        )

        def total(*arrays):
            traits = {"windowed": False, "shared": False}
            out = attend_rows(*arrays, allowed, jnp.asarray(segments), config, **traits)
            return jnp.sum(out.astype(jnp.float32) * draw(3, 4)), out

        run = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
        (_, out), grads = run(draw(0, 4), draw(1, 2), draw(2, 2))
        return jax.tree.map(lambda x: np.asarray(x, np.float32), (out, grads))

    return kernels_against_xla(outcome, ROW_KERNELS, {"bfloat16": 4e-2, "float32": 2e-2})


def test_page_kernels() -> str:
    """Each kernel of decoding over pages against XLA's form on the same device."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_llm.models.paged_attention import PAGE_KERNELS, attend_pages

    tables = (1 + np.random.default_rng(0).permutation(128).astype(np.int32)).reshape(4, 32)
    positions = np.array([[0], [15], [16], [511]], np.int32)

    def outcome(name: str, dtype: str):
        draw = lambda seed, *shape: jax.random.normal(  # noqa: E731 - short
            jax.random.key(seed), (*shape, 128), jnp.dtype(dtype)
        )
        pages = draw(1, 129, 16, 4), draw(2, 129, 16, 4)
        run = jax.jit(functools.partial(attend_pages, backend=name, window=300, softcap=20.0))
        return np.asarray(run(draw(0, 4, 1, 16), *pages, tables, positions), np.float32)

    return kernels_against_xla(outcome, PAGE_KERNELS, {"bfloat16": 2e-2, "float32": 1e-4})


def kernels_against_xla(outcome: Callable, names, limits: dict[str, float]) -> str:
    """The gap of every kernel that this device has, for each dtype that it takes."""
    import jax

    from jaxrl_llm.errors import ConfigError

    told = []
    for name in names:
        for dtype, limit in limits.items():
            try:
                got = outcome(name, dtype)
            except ConfigError:  # not this device's, or not this dtype
                continue
            with jax.default_matmul_precision("highest"):
                want = outcome("xla", dtype)
            gap = largest_gap(got, want, limit).replace("the CPU", "XLA")
            told.append(f"{name} in {dtype} {gap}")
    platform = jax.devices()[0].platform
    return "; ".join(told) or f"nothing to compare: there is no kernel for a {platform}"


def test_experts() -> str:
    import jax
    import jax.numpy as jnp

    from jaxrl_llm.models.transformer import forward

    config, params = small_model(experts=4)
    rows = small_rows(config)

    def run(params):
        return jnp.sum(jnp.square(forward(params, config, *rows)))

    return largest_gap(*on_both(jax.grad(run), params), 1e-3)


def test_sampler_agrees() -> str:
    """Log-probabilities that the sampler recorded against the trainer's own, in float32."""
    import jax
    import numpy as np

    from jaxrl_llm.models.heads import sequence_logprobs

    config, params = small_model()
    tiny = SIZES["tiny"]
    with jax.default_matmul_precision("highest"):
        rollouts = list(make_engine(config, params, tiny).generate(requests(config, tiny, 4)))
        gap = 0.0
        for rollout in rollouts:
            prompt = len(rollout.prompt.tokens)
            tokens = np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int32)[None]
            positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
            logp, _ = jax.jit(
                functools.partial(sequence_logprobs, config=config, num_targets=tiny.new)
            )(
                params,
                tokens=tokens,
                positions=positions,
                segment_ids=np.ones_like(tokens),
                mask=positions >= prompt,
            )
            gap = max(gap, float(np.max(np.abs(logp[0, prompt:] - rollout.logp_sampler))))
    assert gap <= 1e-3, f"log-probabilities differ by {gap:.1e}"
    return f"log-probabilities of {len(rollouts)} completions differ by at most {gap:.1e} nats"


DEVICE_TESTS: list[tuple[str, Callable]] = [
    ("test: logits", test_logits),
    ("test: gradients", test_gradients),
    ("test: paged attention", test_paged_attention),
    ("test: kernels over rows", test_row_kernels),
    ("test: kernels over pages", test_page_kernels),
    ("test: experts", test_experts),
    ("test: sampler and trainer", test_sampler_agrees),
]
