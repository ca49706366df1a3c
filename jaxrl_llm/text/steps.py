# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Reasoning in steps as tokens, with the mark at which each step is judged."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.text.chat import encode_prompt
from jaxrl_llm.text.tokenizer import Tokenizer


def encode_marked_steps(
    prompt: str, steps: Sequence[str], tokenizer: Tokenizer, separator: str
) -> tuple[list[int], list[int]]:
    """Tokens of a prompt and of steps that each end in `separator`, and the place of the last token
    of each: its mark. Steps are tokenised one by one, so that marks never shift.

    Raises:
        ConfigError: the separator has no tokens.
    """
    tokens, _ = encode_prompt(prompt, tokenizer)
    end = tokenizer.encode(separator)
    if not end:
        raise ConfigError("the separator of steps has no tokens", got=repr(separator))
    marks = []
    for step in steps:
        tokens = tokens + tokenizer.encode(step) + end
        marks.append(len(tokens) - 1)
    return tokens, marks
