# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++, advantages whitened over the batch, on the sums of grpo.py.

Command:    python -m jaxrl_llm.train --config=reinforce_pp.py
Hardware:   two CPU cores, 8 GiB of memory
Time:       about four minutes of training
Expect:     held-out accuracy rises as with grpo.py; not measured on this model
Overrides:  --train.steps=40
            --algo.kl_coef=0.01
            --train.epochs=2
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
        algo=AlgoConfig(name="reinforce_pp"),
        sampler=SamplerConfig(
            group_size=8, max_new_tokens=4, max_prompt_tokens=21, stop=("\n",), slots=64
        ),
        optimizer=OptimizerConfig(learning_rate=1e-5, b1=0.9, b2=0.99, max_grad_norm=1.0),
        train=TrainConfig(steps=20, prompts_per_step=8, eval_every=5),
    )
