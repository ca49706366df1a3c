# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The values that cross the borders between rooms.

`Prompt` → (sampler) → `Rollout` → (rewards) → `Rollout` with a `Reward` → (batching) → `Batch`.
Tokens are the truth: text is rendered from tokens and never tokenised again on the way to training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from flax import struct


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One task for the policy.

    Attributes:
        id: a name that stays the same over epochs and restarts.
        tokens: the prompt as token ids, exactly as the model reads them.
        text: the prompt as a person reads it (after the chat template, if there is one).
        answer: what the verifiers compare with; None where the task has no answer.
        columns: every other column of the data source, handed to the rewards untouched.
    """

    id: str
    tokens: tuple[int, ...]
    text: str
    answer: Any = None
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Reward:
    """The verdict on one rollout: `value` is finite, `parts` are shown in curves and samples."""

    value: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One completion of one prompt; arrays have one entry per completion token.

    Attributes:
        prompt: the prompt that was completed.
        sample: index within the prompt's group, 0..G-1.
        tokens: int32 [C], the completion; the stop token that the policy chose is its last entry.
        logp_sampler: float32 [C], log-probability under softmax(logits/τ) as the sampler saw it
            (at τ = 0, greedy: under softmax(logits)).
        mask: bool [C], True on tokens that the policy chose.
        weights_version: int32 [C], the version of the weights that chose each token.
        finish_reason: "stop" (a stop id was chosen) or "length".
        completion: the completion as text, rendered from `tokens` without the stop token.
        reward: None until scored, or when no verdict could be formed.
        thinking: the part of it in which the model thinks (`text/thinking.py`); None: none.
        reply: what it says after that; all of a completion that does not think; without
            white space around it.
        top_tokens, top_logps: int32 and float32 [C, k], where asked for: the k likeliest tokens at
            each place, likeliest first, and their log-probabilities as for `logp_sampler`.
        prompt_logps: float32 [P − 1], where asked for: entry i is the log-probability of prompt
            token i + 1, given those before it, as for `logp_sampler`.
    """

    prompt: Prompt
    sample: int
    tokens: np.ndarray
    logp_sampler: np.ndarray
    mask: np.ndarray
    weights_version: np.ndarray
    finish_reason: Literal["stop", "length"]
    completion: str = ""
    reward: Reward | None = None
    thinking: str | None = None
    reply: str = ""
    top_tokens: np.ndarray | None = None
    top_logps: np.ndarray | None = None
    prompt_logps: np.ndarray | None = None


class Reach(NamedTuple):
    """Static bounds on what stands in a batch's rows: how far back attention must look.

    Attributes:
        segment: no segment has more tokens.
        prefix: nor has a prompt that completions share; 0: no prompt is shared.
    """

    segment: int
    prefix: int


# A pytree's leaves may be jax or numpy arrays, tracers, shapes or shardings.
Rows = Any


@struct.dataclass
class Batch:
    """Rows for the trainer. `x[n, t]` of every per-token array speaks of `tokens[n, t]` itself:
    `logp_sampler[n, t]` is the log-probability of `tokens[n, t]` given the tokens before it.

    Attributes:
        tokens: token ids; anything on padding.
        positions: position of each token within its sequence, from 0.
        segment_ids: 1, 2, … for the sequences in a row, 0 on padding; attention never crosses
            segments, but for `prefix_ids`.
        mask: True on the tokens that the policy chose and that are trained on.
        advantages: one advantage per token (constant over a sequence for group methods).
        logp_sampler: recorded by the sampler.
        logp_old: log-probability at the start of the update, or None for a single on-policy update
            (the ratio is then exactly 1, with its gradient).
        logp_ref: log-probability under the reference policy, or None when it is not used.
        values: what the critic expected before each token, and
        returns: what it should have expected; None without a critic.
        prefix_ids: the segment of the prompt that a completion follows and sees, 0 elsewhere; None
            where every sequence is one segment.
        sources: where in its row the token before each token stands; None: one to the left.
        reach: static; None: attention looks over whole rows.
    """

    tokens: Rows  # int [N, T]
    positions: Rows  # int [N, T]
    segment_ids: Rows  # int [N, T]
    mask: Rows  # bool [N, T]
    advantages: Rows  # float [N, T]
    logp_sampler: Rows  # float [N, T]
    logp_old: Rows | None = None  # float [N, T]
    logp_ref: Rows | None = None  # float [N, T]
    values: Rows | None = None  # float [N, T]
    returns: Rows | None = None  # float [N, T]
    prefix_ids: Rows | None = None  # int [N, T]
    sources: Rows | None = None  # int [N, T]
    reach: Reach | None = struct.field(pytree_node=False, default=None)
