# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""GRPO on a procedural task of reasoning-gym, judged by its own scorer.

Command:    python -m jaxrl_llm.train --config=grpo_reasoning_gym.py
Hardware:   two CPU cores, 8 GiB of memory; pip install 'jaxrl_llm[reasoning-gym]'
Time:       about ten minutes of training
Expect:     held-out questions solved from 17 % to 29 % in the first 10 steps (seed 1)
Overrides:  --task.dataset=chain_sum
            --train.steps=60
            --algo.name=dr_grpo
"""

from jaxrl_llm.algorithms.presets import AlgoConfig
from jaxrl_llm.data.reasoning_gym import ReasoningGymTask
from jaxrl_llm.rewards.reasoning_gym import ReasoningGymScore
from jaxrl_llm.trainers.optimizers import OptimizerConfig
from jaxrl_llm.trainers.settings import ModelSource, RLConfig, SamplerConfig, TrainConfig

EXAMPLES = """\
State the final answer to the following arithmetic problem: 31 + 5 =
36
State the final answer to the following arithmetic problem: 60 + 24 =
84
{question}
"""


def get_config() -> RLConfig:
    return RLConfig(
        model=ModelSource(path="smollm2-135m-instruct"),
        task=ReasoningGymTask(
            dataset="chain_sum",
            options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
            train=1000,
            heldout=128,
            template=EXAMPLES,
        ),
        rewards={"score": (ReasoningGymScore(answer="line"), 1.0)},
        algo=AlgoConfig(name="grpo", reduction="token_mean", eps=1e-4),
        sampler=SamplerConfig(
            group_size=8, max_new_tokens=6, max_prompt_tokens=80, stop=("\n",), slots=64
        ),
        optimizer=OptimizerConfig(learning_rate=1e-5, b1=0.9, b2=0.99, max_grad_norm=1.0),
        train=TrainConfig(steps=30, prompts_per_step=8, eval_every=10),
    )
