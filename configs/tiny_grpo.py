# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""GRPO on a tiny random model: it learns to write digits. For trying things out, and for the tests.

Command:    python -m jaxrl_llm.train --config=tiny_grpo.py
Hardware:   one CPU core
Time:       about a minute, most of it compiling
Expect:     the share of digits from about 4 % to more than half
Overrides:  --train.steps=30
            --algo.kl_coef=0.01
            --train.epochs=2
"""

from jaxrl_llm.algorithms.presets import AlgoConfig
from jaxrl_llm.data.sources import ArithmeticTask
from jaxrl_llm.trainers.optimizers import OptimizerConfig
from jaxrl_llm.trainers.settings import ModelSource, RLConfig, SamplerConfig, TrainConfig


def digits(rollouts):
    """The share of a completion's characters that are digits."""
    return [
        sum(char in "0123456789" for char in rollout.completion) / max(1, len(rollout.completion))
        for rollout in rollouts
    ]


def get_config() -> RLConfig:
    return RLConfig(
        model=ModelSource(path="tiny-random"),
        task=ArithmeticTask(first=(10, 39), second=(0, 9), shots=(), heldout=16),
        rewards={"digits": digits},
        algo=AlgoConfig(name="grpo"),
        sampler=SamplerConfig(group_size=8, max_new_tokens=8, max_prompt_tokens=16, slots=32),
        optimizer=OptimizerConfig(learning_rate=2e-2),
        train=TrainConfig(steps=12, prompts_per_step=4, eval_every=6, checkpoint_every=3),
    )
