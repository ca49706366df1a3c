# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The part of a completion in which a model thinks, and the answer after it.

Models of several families write ``<think>…</think>`` before they answer. Some chat templates open
the tag at the end of the prompt, so that the completion begins inside it; with thinking switched
off (`enable_thinking=False` as a variable of the template) Qwen3's template writes an empty pair.

A completion has at most one thought: it begins where the prompt opened it, or at the first opening
tag, and the first closing tag after that ends it. Tags in the answer are words.
"""

from __future__ import annotations

import bisect
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
    """Whether a rendered prompt opens a thought: ends with the opening tag and white space alone.

    A tag further up is a word of some message.
    """
    return prompt.rstrip().endswith(tags[0])


def split_thinking(
    completion: str, *, opened: bool = False, tags: tuple[str, str] = THINK
) -> Thought:
    """Thinking and answer of a completion; white space around both is dropped.

    A closing tag before any opening one ends a thought that the prompt opened, said or not. Text
    before an opening tag belongs to the answer.

    Args:
        opened: the prompt opened the tag (`opens_thinking`).
    """
    start, end = _places(completion.find(tags[0]), completion.find(tags[1]), opened)
    if start is None:
        return Thought(None, completion.strip(), True)
    before, thought = completion[:start], completion[start:end]
    answer = "" if end is None else completion[end + len(tags[1]) :]
    if not opened or thought.lstrip().startswith(tags[0]):
        thought = thought.lstrip().removeprefix(tags[0])
    return Thought(thought.strip(), (before + answer).strip(), end is not None)


def thinking_mask(
    tokens: Sequence[int],
    tokenizer: Tokenizer,
    *,
    opened: bool = False,
    tags: tuple[str, str] = THINK,
) -> np.ndarray:
    """bool [C]: which tokens of a completion are the thought of `split_thinking`, tags included.

    Where the vocabulary has the tags as tokens these decide; elsewhere the text does: a token
    counts if it holds any of the thought's or the tags' characters.
    """
    mask = np.zeros(len(tokens), bool)
    ids = [tokenizer.token_to_id(tag) for tag in tags]
    if None not in ids:
        found = [tokens.index(i) if i in tokens else -1 for i in ids]
        start, end = _places(*found, opened)
        if start is not None:
            mask[start : None if end is None else end + 1] = True
        return mask
    text = tokenizer.decode(tokens)
    start, end = _places(text.find(tags[0]), text.find(tags[1]), opened)
    if start is None:
        return mask
    first = _token_of(start, text, tokens, tokenizer)
    last = None if end is None else _token_of(end + len(tags[1]) - 1, text, tokens, tokenizer) + 1
    mask[first:last] = True
    return mask


def _places(opening: int, closing: int, opened: bool) -> tuple[int | None, int | None]:
    """Where the thought begins and where its closing tag stands; None: not at all.

    Args:
        opening, closing: place of the first tag of each kind, −1 if there is none.
    """
    if opened or (closing >= 0 and not 0 <= opening < closing):
        return 0, closing if closing >= 0 else None
    if opening < 0:
        return None, None
    return opening, closing if closing >= 0 else None


def _token_of(place: int, text: str, tokens: Sequence[int], tokenizer: Tokenizer) -> int:
    """The token that holds a character: the first with which the text up to there is whole."""
    whole = lambda count: tokenizer.decode(tokens[:count]).startswith(text[: place + 1])  # noqa: E731 - short
    return bisect.bisect_left(range(1, len(tokens)), True, key=whole)
