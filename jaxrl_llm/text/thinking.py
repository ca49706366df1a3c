# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The part of a completion in which a model thinks, and the answer after it.

Models of several families write ``<think>…</think>`` before they answer. Some chat templates open
the tag at the end of the prompt, so that the completion begins inside it; with thinking switched
off (`enable_thinking=False` as a variable of the template) Qwen3's template writes an empty pair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.text.tokenizer import Tokenizer

THINK = ("<think>", "</think>")


@dataclasses.dataclass(frozen=True)
class Thought:
    """A completion in two parts.

    Attributes:
        thinking: what stands between the tags, or after an opening one that is never closed; None
            if the completion does not think.
        answer: what stands after the closing tag; all of a completion that does not think; empty
            where the thinking never ends.
        closed: whether the thinking came to its end (True for a completion that does not think).
    """

    thinking: str | None
    answer: str
    closed: bool


def opens_thinking(prompt: str, tags: tuple[str, str] = THINK) -> bool:
    """Whether a rendered prompt ends inside an open tag, so that the completion begins there."""
    first, last = tags
    return prompt.rfind(first) > prompt.rfind(last)


def split_thinking(
    completion: str, *, opened: bool = False, tags: tuple[str, str] = THINK
) -> Thought:
    """Thinking and answer of a completion; white space around both is dropped.

    A closing tag without an opening one ends a thought that the prompt opened, said or not. Text
    before an opening tag belongs to the answer.

    Args:
        opened: the prompt opened the tag (`opens_thinking`).
    """
    first, last = tags
    start = completion.find(first)
    end = completion.find(last, max(start, 0))
    if end < 0 and start < 0:
        whole = completion.strip()
        return Thought(whole, "", False) if opened else Thought(None, whole, True)
    before = completion[:start] if start >= 0 else ""
    inside = start + len(first) if start >= 0 else 0
    if opened and before:
        inside, before = 0, ""  # a second opening tag is a word of the thought
    if end < 0:
        return Thought(completion[inside:].strip(), before.strip(), False)
    answer = before + completion[end + len(last) :]
    return Thought(completion[inside:end].strip(), answer.strip(), True)


def thinking_mask(
    tokens: Sequence[int],
    tokenizer: Tokenizer,
    *,
    opened: bool = False,
    tags: tuple[str, str] = THINK,
) -> np.ndarray:
    """bool [C]: which tokens of a completion are thinking, the tags included.

    Where the vocabulary has the tags as tokens these decide; elsewhere the text does: a token
    counts if the text up to its end has a tag that is still open, or that it just closed.
    """
    ids = [tokenizer.token_to_id(tag) for tag in tags]
    mask, inside = np.zeros(len(tokens), bool), opened
    if None not in ids:
        for index, token in enumerate(tokens):
            inside = inside or token == ids[0]
            mask[index] = inside
            inside = inside and token != ids[1]
        return mask
    for index in range(len(tokens)):
        text = tokenizer.decode(tokens[: index + 1])
        now = opens_thinking((tags[0] if opened else "") + text, tags)
        mask[index] = now or inside
        inside = now
    return mask
