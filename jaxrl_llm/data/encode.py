# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rows to tokens with exact masks of what is learnt.

Prompt tokens are those that the sampler would see: where the tokens of prompt and reply together do
not begin with the tokens of the prompt, the two are cut in token space and joined. Every reply ends
in its end-of-turn token, which is learnt. There is one BOS at most, where the model or its template
wants it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl_llm.data.formats import Row
from jaxrl_llm.errors import DataError, ModelError
from jaxrl_llm.text.chat import encode_prompt, render, render_with_spans
from jaxrl_llm.text.steps import encode_marked_steps
from jaxrl_llm.text.tokenizer import Tokenizer

Truncation = Literal["end", "prompt", "drop", "error"]
NO_LABEL = -1


@dataclasses.dataclass(frozen=True)
class Part:
    """One sequence.

    Attributes:
        tokens: int32 [T].
        mask: bool [T], True on tokens that are learnt (or, for scores, that are read).
        labels: int32 [T]: 0 or 1 at step marks, NO_LABEL elsewhere; None without steps.
    """

    tokens: np.ndarray
    mask: np.ndarray
    labels: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Unit:
    """What stays together in one row of a batch: a sequence, or the two of a pair, chosen first.

    Attributes:
        values: a number for each part: margin of a pair (at its first part), or 1 for a desirable
            reply.
        index: its place in the data, held-out examples behind the training ones.
    """

    parts: tuple[Part, ...]
    values: tuple[float, ...] = ()
    index: int = 0

    @property
    def length(self) -> int:
        return sum(len(part.tokens) for part in self.parts)


def encode_text(text: str, tokenizer: Tokenizer) -> Part:
    """All of a text is learnt, and that it ends."""
    tokens = _with_end(encode_prompt(text, tokenizer)[0], tokenizer)
    return _part(tokens, np.ones(len(tokens), bool))


def encode_messages(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> Part:
    """A conversation of which the assistant's words are learnt, by the template's own marks.

    Raises:
        ModelError: the template has no marks, or a marked span is not followed by an end token.
        DataError: the assistant says nothing.
    """
    text, spans = render_with_spans(messages, tokenizer)
    if not spans:
        raise DataError("the assistant says nothing in a conversation", got=f"{messages!r:.100}")
    return _spoken(text, spans, tokenizer)


def _spoken(text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer) -> Part:
    """A text of which the spans and the end tokens behind them are learnt, cut after the last."""
    edges = [edge for span in spans for edge in span]
    pieces = _pieces(text, edges, tokenizer)
    tokens = [token for piece in pieces for token in piece]
    mask, place = np.zeros(len(tokens), bool), 0
    for number, piece in enumerate(pieces):
        start, place = place, place + len(piece)
        if number % 2 == 0:
            continue
        stop = place
        if tokens[stop - 1] not in tokenizer.eos_ids:
            if tokens[stop : stop + 1] and tokens[stop] in tokenizer.eos_ids:
                stop += 1  # the mark ends just before the end of the turn
            else:
                raise ModelError(
                    "what the chat template marks as the assistant's does not end in an end token",
                    got=repr(tokenizer.decode(tokens[max(start, stop - 4) : stop + 2])),
                    expected=" or ".join(repr(tokenizer.decode([i])) for i in tokenizer.eos_ids),
                    hint="a template that marks the end of turn too",
                )
        mask[start:stop] = True
    last = int(np.flatnonzero(mask)[-1])
    return _part(tokens[: last + 1], mask[: last + 1])


def encode_reply(
    prompt: Any, reply: Any, tokenizer: Tokenizer, *, assistant_only: bool = True
) -> Part:
    """A prompt and a reply to it, both texts or both messages; the reply is learnt.

    A reply of several messages may hold others' words, which are not learnt: those of a user or a
    tool, and the beginnings of turns. They are told apart by the template's own marks.

    Args:
        assistant_only: False where others' words in a reply may be marked too, because the mask is
            not what is learnt: no marks are needed then.

    Raises:
        ModelError: the template does not continue its own prompt, writes no end token, or has no
            marks where a reply is of several messages.
        DataError: a reply does not begin and end with what the assistant says.
    """
    if isinstance(prompt, str):
        start, _ = encode_prompt(prompt, tokenizer)
        whole, _ = encode_prompt(prompt + reply, tokenizer)
        if whole[: len(start)] != start:
            whole = start + tokenizer.encode(reply)
        tokens = _with_end(whole, tokenizer)
    else:
        _check_speaker(reply)
        before, after = render(prompt, tokenizer), render(prompt + reply, tokenizer, False)
        if not after.startswith(before):
            raise ModelError(
                "the chat template writes a prompt differently when its reply follows",
                got=repr(after[: len(before)][-60:]),
                expected=repr(before[-60:]),
                hint="messages with a template that has generation marks",
            )
        if assistant_only and len(reply) > 1:
            _, spans = render_with_spans(prompt + reply, tokenizer)
            later = [span for span in spans if span[1] > len(before)]
            if not later:
                raise DataError("the assistant says nothing in a reply", got=f"{reply!r:.100}")
            return _spoken(after, [(len(before), later[0][1]), *later[1:]], tokenizer)
        start, rest = _pieces(after, [len(before)], tokenizer)
        ends = [place for place, token in enumerate(rest) if token in tokenizer.eos_ids]
        if not ends:
            raise ModelError(
                "the chat template writes no end token after a reply",
                got=repr(after[-40:]),
                expected=" or ".join(repr(tokenizer.decode([i])) for i in tokenizer.eos_ids),
            )
        tokens = start + rest[: ends[-1] + 1]
    mask = np.zeros(len(tokens), bool)
    mask[len(start) :] = True
    return _part(tokens, mask)


def _check_speaker(reply: Sequence[dict[str, Any]]) -> None:
    other = next((m for m in (reply[0], reply[-1]) if m["role"] != "assistant"), None)
    if other is not None:
        raise DataError(
            "a reply does not begin and end with what the assistant says",
            got=f"a message of the role {other['role']!r:.60}",
            expected="'assistant'",
            hint="what is said before in the prompt, and nothing behind",
        )


def encode_steps(
    prompt: str,
    steps: Sequence[str],
    labels: Sequence[bool] | None,
    tokenizer: Tokenizer,
    separator: str,
) -> Part:
    """A prompt and steps, each followed by `separator`, whose last token is the step's mark."""
    tokens, marks = encode_marked_steps(prompt, steps, tokenizer, separator)
    mask, kinds = np.zeros(len(tokens), bool), np.full(len(tokens), NO_LABEL, np.int32)
    mask[marks] = True
    kinds[marks] = 0 if labels is None else np.array(labels, np.int32)
    return Part(np.array(tokens, np.int32), mask, kinds)


def ends_only(part: Part) -> Part:
    """The part with only its last token marked: where a reward model reads its score."""
    mask = np.zeros(len(part.tokens), bool)
    mask[-1] = True
    return dataclasses.replace(part, mask=mask)


def everything(part: Part) -> Part:
    """The part with its prompt learnt too; the first token follows nothing and can't be."""
    return _part(part.tokens.tolist(), np.ones(len(part.tokens), bool))


def _part(tokens: Sequence[int], mask: np.ndarray) -> Part:
    mask = mask.copy()
    mask[:1] = False
    return Part(np.array(tokens, np.int32), mask)


def _with_end(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    if not tokenizer.eos_ids:
        raise ModelError("the model has no end-of-text token, so a reply can't learn to end")
    return tokens if tokens[-1:] and tokens[-1] in tokenizer.eos_ids else [
        *tokens, tokenizer.eos_ids[0]
    ]  # fmt: skip


def _pieces(text: str, edges: Sequence[int], tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens between the edges: of the whole text where each piece is what its beginning gives
    when it stands alone, and of the pieces one by one where not."""
    whole = tokenizer.encode(text)
    places = [0]
    for edge in edges:
        start = tokenizer.encode(text[:edge])
        if whole[: len(start)] != start:
            borders = [0, *edges, len(text)]
            return [tokenizer.encode(text[a:b]) for a, b in itertools.pairwise(borders)]
        places.append(len(start))
    return [whole[a:b] for a, b in zip(places, [*places[1:], len(whole)], strict=True)]


# ── lengths ───────────────────────────────────────────────────────────────────────────────────────


def cut(part: Part, most: int, rule: Truncation, bos_id: int | None) -> Part | None:
    """A part of at most `most` tokens, or None where it is to be left out.

    Args:
        rule: "end" cuts the end; "prompt" cuts the beginning of what stands before the first
            learnt token (a BOS stays), and the end if that is not enough; "drop" leaves it out.
        bos_id: the token that must stay first.
    """
    length = len(part.tokens)
    if length <= most:
        return part if part.mask.any() else None
    if rule == "drop":
        return None
    assert rule != "error", "refused by encode_rows"
    keep = np.arange(length)
    if rule == "prompt":
        first = int(np.flatnonzero(part.mask)[0]) if part.mask.any() else 0
        stays = int(bos_id is not None and part.tokens[0] == bos_id)
        gone = min(length - most, max(0, first - max(stays, 1)))  # one stays to follow
        keep = np.concatenate([keep[:stays], keep[stays + gone :]])
    keep = keep[:most]
    mask = part.mask[keep]
    labels = None if part.labels is None else part.labels[keep]
    return Part(part.tokens[keep], mask, labels) if mask.any() else None


def encode_rows(
    rows: Sequence[Row],
    encode: Callable[[Row], tuple[tuple[Part, ...], tuple[float, ...]]],
    *,
    most: int,
    rule: Truncation,
    bos_id: int | None,
    counts: dict[str, int],
    first_index: int = 0,
) -> list[Unit]:
    """Rows as units, cut to length; `counts` learns how many were cut or left out.

    Args:
        most: tokens of a part.

    Raises:
        DataError: a row is too long and the rule is "error"; names it.
    """
    units = []
    for row in rows:
        parts, values = encode(row)
        longest = max(len(part.tokens) for part in parts)
        if rule == "error" and longest > most:
            raise DataError(
                "an example is too long",
                got=f"{longest} tokens in {str(row)[:80]!r}",
                expected=f"≤ {most}",
                hint="a larger rows.max_length, or another rows.truncate",
            )
        fitted = [cut(part, most, rule, bos_id) for part in parts]
        if any(part is None for part in fitted):
            reason = "too many tokens" if longest > most else "nothing to learn"
            counts[reason] = counts.get(reason, 0) + 1
            continue
        if any(len(new.tokens) < len(old.tokens) for new, old in zip(fitted, parts, strict=True)):
            counts["cut"] = counts.get("cut", 0) + 1
        units.append(Unit(tuple(fitted), values, first_index + len(units)))
    return units
