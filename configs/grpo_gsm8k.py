# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""GRPO on word problems with worked solutions: GSM8K, or any file in its form.

Command:    python -m jaxrl_llm.train --config=grpo_gsm8k.py
Hardware:   an accelerator for GSM8K itself; two CPU cores and 12 GiB try it out on the small
            problems that come with it; pip install 'jaxrl_llm[math]'
Time:       about a minute a step on two CPU cores
Expect:     answers in the asked form first, then more right ones; not measured on GSM8K
Overrides:  --task.path=/path/to/gsm8k/train.jsonl
            --model.path=/path/to/a/larger/model
            --sampler.max_new_tokens=400
"""

import pathlib

from jaxrl_llm.algorithms.presets import AlgoConfig
from jaxrl_llm.data.sources import JsonlTask
from jaxrl_llm.rewards.answer import states_answer
from jaxrl_llm.rewards.format import stops
from jaxrl_llm.rewards.math import math_answer
from jaxrl_llm.trainers.optimizers import OptimizerConfig
from jaxrl_llm.trainers.settings import ModelSource, RLConfig, SamplerConfig, TrainConfig

PROBLEMS = pathlib.Path(__file__).parent / "data" / "word_problems.jsonl"
EXAMPLE = """\
Question: Tom has 12 plums, eats 2 and buys 5 more. How many plums does Tom have now?
12 - 2 = 10, and 10 + 5 = 15.
Answer: 15

Question: {prompt}
"""


def get_config() -> RLConfig:
    return RLConfig(
        model=ModelSource(path="smollm2-135m-instruct"),
        task=JsonlTask(
            path=str(PROBLEMS),
            heldout=64,
            prompt_column="question",
            answer_after="####",
            template=EXAMPLE,
        ),
        rewards={
            "accuracy": (math_answer, 1.0),
            "states_answer": (states_answer, 0.1),
            "stops": (stops, 0.0),
        },
        algo=AlgoConfig(name="grpo", reduction="token_mean"),
        sampler=SamplerConfig(
            group_size=8, max_new_tokens=48, max_prompt_tokens=160, stop=("\n\n",), slots=64
        ),
        optimizer=OptimizerConfig(learning_rate=1e-5, b1=0.9, b2=0.99, max_grad_norm=1.0),
        train=TrainConfig(steps=30, prompts_per_step=8, eval_every=10),
    )
