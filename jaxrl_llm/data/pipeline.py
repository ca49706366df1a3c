# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The endless, restartable order in which prompts are served (Grain)."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxrl_llm.data.records import Record, Source
from jaxrl_llm.errors import DataError
from jaxrl_llm.types import Prompt, Rollout

Encode = Callable[[Any], tuple[Sequence[int], str]]


def make_prompt(record: Record, encode: Encode) -> Prompt:
    """A record as a `Prompt`.

    Args:
        record: `{"id", "prompt", "answer", **columns}`.
        encode: from the prompt (text or messages) to (token ids, text as the model reads it).
    """
    tokens, text = encode(record["prompt"])
    columns = {key: value for key, value in record.items() if key not in ("id", "prompt", "answer")}
    return Prompt(record["id"], tuple(map(int, tokens)), text, record.get("answer"), columns)


def check_lengths(
    prompts: Iterable[Prompt], max_prompt: int | None, max_new: int, context: int
) -> None:
    """Checks that every prompt can be completed within the model's context.

    Args:
        prompts: the prompts as the model will read them.
        max_prompt: most prompt tokens, or None for as many as the context leaves.
        max_new: most completion tokens.
        context: tokens that the model can attend to, prompt and completion together.

    Raises:
        DataError: names the first prompt that has no tokens or too many.
    """
    if max_new >= context:
        raise DataError(
            "no room for a prompt beside the completion",
            got=f"{max_new} new tokens and a context of {context}",
            hint="fewer new tokens",
        )
    for prompt in prompts:
        length = len(prompt.tokens)
        if length == 0:
            raise DataError(f"prompt {prompt.id} has no tokens", expected="at least one")
        if max_prompt is not None and length > max_prompt:
            raise DataError(
                f"prompt {prompt.id} is too long",
                got=f"{length} tokens",
                expected=f"at most {max_prompt}",
                hint="shorten or drop it, or allow longer prompts",
            )
        if length + max_new > context:
            raise DataError(
                f"prompt {prompt.id} and its completion don't fit the model's context",
                got=f"{length} + {max_new} tokens",
                expected=f"at most {context}",
                hint="a shorter prompt or fewer new tokens",
            )


class PromptStream:
    """Serves `batch` different prompts a step, for ever, each prompt once an epoch.

    Every epoch has a new order that depends on (seed, epoch) alone. A step may straddle two epochs;
    a prompt of the new epoch that the step already holds is then put off to the next step, so no
    step has a prompt twice and no epoch drops one. Where a step asks for more and more prompts that
    it does not hold yet, the order goes round while those that it holds wait; a prompt waits for
    one turn at most, and its further turns lapse.

    Args:
        source: records, see `jaxrl_llm.data.sources`.
        encode: from a record's prompt to (token ids, text).
        seed: of the order.
        batch: prompts a step; at most `len(source)`.
        shuffle: False serves the source's order.

    Raises:
        DataError: the source is empty, or holds fewer prompts than a step takes.
    """

    def __init__(
        self, source: Source, encode: Encode, *, seed: int, batch: int, shuffle: bool = True
    ):
        if not 1 <= batch <= len(source):
            raise DataError(
                "a step takes more prompts than there are"
                if batch > 0
                else "a step takes no prompts",
                got=f"{batch} a step, {len(source)} prompts",
                hint="a smaller batch or more prompts",
            )
        self._source, self._encode, self._batch = source, encode, batch
        self._identity = {
            "seed": int(seed),
            "shuffle": bool(shuffle),
            "prompts": len(source),
            "ids": fingerprint(source),
        }
        self._order = _endless_order(len(source), seed, shuffle)
        self._put_off: list[int] = []

    def next(
        self, count: int | None = None, *, step: int | None = None, without: Collection[str] = ()
    ) -> list[Prompt]:
        """The next prompts, no two the same.

        Args:
            count: how many; a step's own number by default.
            step: of no account here; see `jaxrl_llm.data.curriculum`.
            without: ids that the step already has: their turn is put off.
        """
        count = self._batch if count is None else count
        assert count + len(without) <= len(self._source), "fewer prompts than are asked for"
        waiting = self._put_off
        put_off: dict[int, None] = {}  # in order
        chosen: list[int] = []
        queue = itertools.chain(waiting, self._order)
        turn = 0  # of those that waited, all come before the order goes on
        while len(chosen) < count or turn < len(waiting):
            index, turn = int(next(queue)), turn + 1
            known = index in chosen or (without and self._source[index]["id"] in without)
            if known or len(chosen) == count:
                put_off[index] = None
            else:
                chosen.append(index)
        self._put_off = list(put_off)
        return [make_prompt(self._source[index], self._encode) for index in chosen]

    def update(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing: this order does not depend on rewards."""

    def metrics(self) -> dict[str, float]:
        """Nothing to tell of this order."""
        return {}

    def get_state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON-able values."""
        return {
            "order": dict(self._order.get_state()),
            "put_off": list(self._put_off),
            "source": dict(self._identity),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where `get_state` was called.

        Raises:
            DataError: the state belongs to another seed or to other prompts.
        """
        check_same_prompts(self._identity, state["source"])
        self._order.set_state(dict(state["order"]))
        self._put_off = [int(index) for index in state["put_off"]]


def _endless_order(length: int, seed: int, shuffle: bool):
    """A Grain iterator over indices: a permutation of 0..length-1 for each epoch."""
    import grain  # slow to import, and needed only where a run is fed

    order = grain.MapDataset.range(length).seed(int(seed))
    if shuffle:
        order = order.shuffle()
    # Indices are cheap: without read-ahead threads nothing is drawn before it is asked for.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(order.repeat().to_iter_dataset(options))


def check_same_prompts(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raises DataError if a checkpoint's stream was over other prompts, or had another seed."""
    if dict(there) != dict(here):
        differ = [key for key, value in here.items() if there.get(key) != value]
        raise DataError(
            "the prompts are not those of the checkpoint",
            got=", ".join(f"{key}={here[key]}" for key in differ),
            expected=", ".join(f"{key}={there.get(key)}" for key in differ),
            hint="restore the prompt file, or start afresh with --fresh",
        )


def check_same_heldout(here: str, there: str | None) -> None:
    """Raises DataError if a checkpoint's run held out other prompts; the digests of both.

    Earlier versions noted none: None agrees with any.
    """
    if there is not None and there != here:
        raise DataError(
            "the held-out prompts are not those of the checkpoint",
            got=here,
            expected=there,
            hint="restore the held-out file, or start afresh with --fresh",
        )


def content_digest(tables: Iterable[Iterable[Any]]) -> str:
    """A short hash of everything in some tables of records."""
    digest = hashlib.sha256()
    for table in tables:
        for record in table:
            digest.update(repr(record).encode("utf-8", "surrogatepass") + b"\0")
        digest.update(b"\1")
    return digest.hexdigest()[:16]


def fingerprint(source: Source) -> str:
    """A short hash of the ids of a source, in their order."""
    digest = hashlib.sha256()
    for index in range(len(source)):
        digest.update(source[index]["id"].encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]
