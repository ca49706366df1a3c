# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""KTO on SmolLM2-135M-Instruct: single replies, each wanted or not.

Command:    python -m jaxrl_llm.train --config=kto.py
Hardware:   two CPU cores, 8 GiB of memory
Time:       about six minutes on one busy core, 45 s a step
Expect:     first loss 0.5; after five steps held-out loss from 0.5 to 0.29, accuracy from 50 % to
            100 %
Overrides:  --preference.undesirable_weight=0.8
            --train.batch=32
            --train.steps=40
"""

import pathlib

from jaxrl_llm.data.preprocess import TableData
from jaxrl_llm.trainers.optimizers import OptimizerConfig
from jaxrl_llm.trainers.settings import ModelSource
from jaxrl_llm.trainers.supervised_settings import (
    FitConfig,
    PreferenceConfig,
    PreferenceSettings,
    RowConfig,
)

DATA = pathlib.Path(__file__).parent / "data"


def get_config() -> PreferenceConfig:
    return PreferenceConfig(
        model=ModelSource(path="smollm2-135m-instruct"),
        data=TableData(path=str(DATA / "judged_replies.jsonl"), heldout=32),
        preference=PreferenceSettings(loss="kto", beta=0.1),
        rows=RowConfig(max_length=128, row_tokens=256, truncate="prompt"),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        train=FitConfig(steps=8, batch=8, micro_batch=4, eval_every=0),
    )
