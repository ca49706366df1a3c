# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""GRPO on SmolLM2-135M-Instruct: adding two two-digit numbers; harder than grpo.py.

Command:    python -m jaxrl_llm.train --config=grpo_add2.py
Hardware:   two CPU cores, 8 GiB of memory
Time:       about eight minutes of training
Expect:     held-out accuracy well above its start (16 % → 58 % after 8 steps in a pilot)
Overrides:  --train.steps=60
            --algo.name=dr_grpo
            --optimizer.learning_rate=5e-6
"""

import dataclasses

from grpo import get_config as one_digit

from jaxrl_llm.data.sources import ArithmeticTask
from jaxrl_llm.trainers.settings import RLConfig


def get_config() -> RLConfig:
    base = one_digit()
    return dataclasses.replace(
        base,
        task=ArithmeticTask(
            first=(10, 99), second=(10, 99), shots=((75, 14), (21, 34)), heldout=150
        ),
        sampler=dataclasses.replace(base.sampler, max_prompt_tokens=24),
        train=dataclasses.replace(base.train, steps=30),
    )
