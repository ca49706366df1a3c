# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What a request must be for an engine to serve it, pages apart."""

from __future__ import annotations

import math

from jaxrl_llm.errors import RequestError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.rollout.sampling import is_integer
from jaxrl_llm.rollout.scheduler import Request
from jaxrl_llm.rollout.settings import EngineConfig


def check_request(
    request: Request, config: EngineConfig, model: ModelConfig, *, reads_text: bool
) -> None:
    """Raises RequestError for what no engine of these sizes can serve.

    Args:
        reads_text: whether the engine can look for stop strings.
    """
    name = f"request {request.uid} ({request.prompt.id!r})"
    tokens, vocabulary = request.prompt.tokens, model.vocab_size
    request.params.check()
    if not is_integer(request.uid, 0, 2**32 - 1):
        raise RequestError("bad uid", got=repr(request.uid), expected="in 0 .. 2³² − 1")
    if not is_integer(request.n, 1, 2**31 - 1):
        raise RequestError(
            f"{name} asks for no samples", got=repr(request.n), expected="an integer n ≥ 1"
        )
    if len(tokens) == 0:
        raise RequestError(f"{name} has an empty prompt", expected="at least one token")
    wrong = [token for token in tokens if not is_integer(token, 0, vocabulary - 1)]
    if wrong:
        raise RequestError(
            f"{name} has a token outside the vocabulary",
            got=repr(wrong[0]),
            expected=f"0 .. {vocabulary - 1}",
        )
    _check_biases(request, name, vocabulary)
    if request.params.stop_strings and not reads_text:
        raise RequestError(
            f"{name} has stop strings, but the engine can't read tokens",
            hint="Engine(…, decode_text=tokenizer.decode)",
        )
    _check_lengths(request, name, config, model.max_position_embeddings)


def _check_biases(request: Request, name: str, vocabulary: int) -> None:
    params = request.params
    biased = [token for token, _ in params.logit_bias]
    if biased and max(biased) >= vocabulary:
        raise RequestError(f"{name} biases a token outside the vocabulary", got=max(biased))
    banned = {token for token, value in params.logit_bias if value == -math.inf}
    if params.min_tokens:
        banned |= {token for token in params.stop_ids if token < vocabulary}
    if len(banned) >= vocabulary:
        raise RequestError(f"{name} bans every token", got=f"{len(banned)} of {vocabulary}")


def _check_lengths(request: Request, name: str, config: EngineConfig, context: int) -> None:
    length, new = len(request.prompt.tokens), request.params.max_tokens
    for what, got, most, hint in (
        ("a prompt that is too long", length, config.max_prompt_tokens, "max_prompt_tokens"),
        ("too many max_tokens", new, config.max_new_tokens, "max_new_tokens"),
        ("more prompt and new tokens than the model's context", length + new, context, None),
    ):
        if got > most:
            hint = f"a larger {hint}" if hint else "a shorter prompt or fewer max_tokens"
            raise RequestError(
                f"{name} has {what}", got=f"{got} tokens", expected=f"at most {most}", hint=hint
            )
