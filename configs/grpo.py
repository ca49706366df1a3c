# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""GRPO on SmolLM2-135M-Instruct: adding a one-digit to a two-digit number, from two examples.

Command:    python -m jaxrl_llm.train --config=grpo.py
Hardware:   two CPU cores, 8 GiB of memory
Time:       about four minutes of training
Expect:     held-out accuracy from about 25 % to about 85 %; the gain is narrow (these sums only)
Overrides:  --train.steps=40
            --algo.name=dr_grpo
            --model.path=/path/to/a/hf/folder
"""

from jaxrl_llm.algorithms.presets import AlgoConfig
from jaxrl_llm.data.sources import ArithmeticTask
from jaxrl_llm.rewards.answer import leading_number, well_formed
from jaxrl_llm.trainers.optimizers import OptimizerConfig
from jaxrl_llm.trainers.settings import ModelSource, RLConfig, SamplerConfig, TrainConfig


def get_config() -> RLConfig:
    return RLConfig(
        model=ModelSource(path="smollm2-135m-instruct"),
        task=ArithmeticTask(first=(10, 99), second=(0, 9), shots=((75, 4), (21, 4)), heldout=150),
        rewards={"accuracy": (leading_number, 1.0), "well_formed": (well_formed, 0.0)},
        algo=AlgoConfig(name="grpo", reduction="token_mean", eps=1e-4),
        sampler=SamplerConfig(
            group_size=8, max_new_tokens=4, max_prompt_tokens=21, stop=("\n",), slots=64
        ),
        optimizer=OptimizerConfig(learning_rate=1e-5, b1=0.9, b2=0.99, max_grad_norm=1.0),
        train=TrainConfig(steps=20, prompts_per_step=8, eval_every=5),
    )
