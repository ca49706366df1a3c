# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts and stored rollouts of a run in reinforcement learning, alike in all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl_llm.data.curriculum import CurriculumStream, make_stream
from jaxrl_llm.data.pass_rates import read_pass_rates
from jaxrl_llm.data.pipeline import PromptStream, check_lengths, content_digest, make_prompt
from jaxrl_llm.data.rollout_store import RolloutStore
from jaxrl_llm.data.stored_runs import RunIdentity, StoredConfig
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.sharding.processes import check_alike, several
from jaxrl_llm.text.chat import encode_prompt
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.trainers.settings import RLConfig
from jaxrl_llm.types import Prompt


def build_data(
    config: RLConfig, tokenizer: Tokenizer, model_config: ModelConfig, seed: int
) -> tuple[Sequence[Any], list[Prompt], PromptStream | CurriculumStream]:
    """Training records, held-out prompts and the prompt stream; all lengths checked."""
    train, heldout = config.task.load()
    if several():
        tables = ((train[i] for i in range(len(train))), heldout)
        check_alike("set of prompts", content_digest(tables), "the same files on all hosts")
        if config.curriculum.table is not None:
            rates = content_digest([sorted(read_pass_rates(config.curriculum.table).items())])
            check_alike("table of pass rates", rates, "the same files on all hosts")

    def encode(prompt):
        return encode_prompt(prompt, tokenizer)

    stream = make_stream(
        train, encode, config.curriculum, seed=seed, batch=config.train.prompts_per_step
    )
    heldout_prompts = [make_prompt(record, encode) for record in heldout]
    limits = (
        config.sampler.max_prompt_tokens,
        config.sampler.max_new_tokens,
        model_config.max_position_embeddings,
    )
    check_lengths((make_prompt(record, encode) for record in train), *limits)
    check_lengths(heldout_prompts, *limits)
    return train, heldout_prompts, stream


def open_stored(stored: StoredConfig, steps: int, identity: RunIdentity) -> RolloutStore:
    """Stored rollouts for so many steps, the same in all processes."""
    read = stored.open(steps, identity)
    if several():
        digests = [read.digest(step) for step in range(1, steps + 1)]
        check_alike("set of stored rollouts", digests, "the same files on all hosts")
    return read
