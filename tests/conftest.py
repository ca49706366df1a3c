# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Every test runs with 8 fake CPU devices, strict promotion and a persistent compilation cache."""

from __future__ import annotations

import os
import pathlib
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
# Devices that wait for each other in a collective hold a thread each: with no more threads than
# devices a second collective at the same time could wait for ever.
os.environ.setdefault("PJRT_NPROC", "32")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
_CACHE = os.environ.get("JAXRL_LLM_TEST_CACHE") or str(
    pathlib.Path(tempfile.gettempdir()) / f"jaxrl_llm-test-cache-{jax.__version__}"
)
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(scope="session")
def tiny_config():
    """A Llama small enough to compile in a blink; grouped-query attention, tied head."""
    from jaxrl_llm.models.config import ModelConfig

    return ModelConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="session")
def tiny_params(tiny_config):
    """Random weights large enough that softmaxes are far from uniform."""
    from jaxrl_llm.models.transformer import init_params

    params = init_params(tiny_config, jax.random.key(0))
    return jax.tree.map(lambda x: x * 5.0 if x.ndim > 1 else x, params)
