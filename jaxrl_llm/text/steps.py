# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Reasoning in steps as tokens, with the mark at which each step is judged."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_llm.errors import ConfigError, DataError
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


def split_steps(text: str, separator: str) -> list[str]:
    """The pieces of a text between separators, without empty ones."""
    return [step for step in text.split(separator) if step.strip()]


def single_steps(steps: Sequence[str], separator: str) -> list[str]:
    """Steps as `split_steps` finds them in what they make together, each with `separator` behind:
    separators around a step are left out.

    Raises:
        DataError: what is one step here would be several there, or none.
    """
    found = split_steps("".join(step + separator for step in steps), separator)
    for step in steps:
        if len(split_steps(step, separator)) != 1:
            raise DataError(
                "a step is not one step where reasoning is cut at the separator",
                got=f"{step!r:.80}, cut at {separator!r}",
                expected="text without the separator in it",
                hint="another reward.separator",
            )
    if found != (expected := [split_steps(step, separator)[0] for step in steps]):
        raise DataError(
            "steps are not what they are cut into at the separator",
            got=f"{found!r:.80}, cut at {separator!r}",
            expected=f"{expected!r:.80}",
            hint="another reward.separator",
        )
    return found
