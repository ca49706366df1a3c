# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Models and workloads for the tests of `plan`."""

from __future__ import annotations

import dataclasses

from golden_files import read_golden

from jaxrl_llm.algorithms.presets import AlgoConfig
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_config import config_from_hf
from jaxrl_llm.plan.workload import Workload
from jaxrl_llm.rollout.settings import EngineConfig
from jaxrl_llm.trainers.optimizers import OptimizerConfig

LLAMA = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
)
FAMILIES = {
    "llama": LLAMA,
    "qwen3": dataclasses.replace(LLAMA, qk_norm="head", tie_word_embeddings=True),
    "gemma2": dataclasses.replace(
        LLAMA,
        post_norms=True,
        norm_offset=True,
        activation="gelu_tanh",
        attention_softcap=50.0,
        logit_softcap=30.0,
        sliding_window=8,
        window_layers=(True, False) * 2,
        tie_word_embeddings=True,
    ),
}


def public(name: str) -> ModelConfig:
    """A public model's traits."""
    return config_from_hf(read_golden("model_configs.json")["models"][name]["config"])


def workload(model: ModelConfig, **changes) -> Workload:
    """Eight rows of GRPO in two micro-batches, with a sampler."""
    usual = Workload(
        method="grpo",
        model=model,
        dtype="bfloat16",
        remat=False,
        optimizer=OptimizerConfig(),
        steps=10,
        updates=10,
        tokens=16 * 64,
        rows=16,
        width=64,
        micro=8,
        targets=48,
        sequences=32,
        prompt_tokens=16,
        new_tokens=48,
        sampler=EngineConfig(max_prompt_tokens=16, max_new_tokens=48, slots=32, group_size=8),
        algo=AlgoConfig(name="grpo"),
        group_size=8,
    )
    return dataclasses.replace(usual, **changes)
