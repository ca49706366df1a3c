# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""GRPO on one-line Python functions, judged by unit tests that run in a sandbox.

Command:    python -m jaxrl_llm.train --config=grpo_code.py
Hardware:   two CPU cores, 8 GiB of memory, Linux with bubblewrap (apt-get install bubblewrap)
Time:       about fifteen minutes of training
Expect:     held-out reward from 0.57 to 0.76 in the first 5 steps (seed 1)
Overrides:  --task.path=/path/to/tasks.jsonl
            --train.steps=60
            --algo.name=dr_grpo
"""

import pathlib

from jaxrl_llm.algorithms.presets import AlgoConfig
from jaxrl_llm.data.sources import JsonlTask
from jaxrl_llm.rewards.code import CodeReward, CodeWeights, continued_function
from jaxrl_llm.rewards.sandbox import Limits
from jaxrl_llm.trainers.optimizers import OptimizerConfig
from jaxrl_llm.trainers.settings import ModelSource, RLConfig, SamplerConfig, TrainConfig

TASKS = pathlib.Path(__file__).parent / "data" / "code_tasks.jsonl"
EXAMPLES = """\
def solve(x):
    # x plus 15
    return x + 15

def solve(xs):
    # the smallest of xs
    return min(xs)

{prompt}"""


def get_config() -> RLConfig:
    return RLConfig(
        model=ModelSource(path="smollm2-135m-instruct"),
        task=JsonlTask(path=str(TASKS), heldout=64, template=EXAMPLES),
        rewards={
            "code": (
                CodeReward(
                    weights=CodeWeights(format=0.0, compiles=0.1, public=0.45, hidden=0.45),
                    extract=continued_function,
                    limits=Limits(cpu_s=1.0, idle_s=1.0),
                ),
                1.0,
            )
        },
        algo=AlgoConfig(name="grpo", reduction="token_mean", eps=1e-4),
        sampler=SamplerConfig(
            group_size=8, max_new_tokens=16, max_prompt_tokens=96, stop=("\n",), slots=64
        ),
        optimizer=OptimizerConfig(learning_rate=1e-5, b1=0.9, b2=0.99, max_grad_norm=1.0),
        train=TrainConfig(steps=30, prompts_per_step=8, eval_every=10),
    )
