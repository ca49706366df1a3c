# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The examples of a supervised run as tokens: which formats each trainer takes, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.data.encode import (
    Part,
    Unit,
    encode_messages,
    encode_reply,
    encode_rows,
    encode_steps,
    encode_text,
    ends_only,
    everything,
)
from jaxrl_llm.data.formats import Row
from jaxrl_llm.data.pipeline import content_digest
from jaxrl_llm.data.preprocess import Examples
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.sharding.processes import check_alike, exchange, several
from jaxrl_llm.text.steps import single_steps
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.trainers.supervised_settings import PreferenceConfig, RewardConfig, SFTConfig

Encode = Callable[[Row], tuple[tuple[Part, ...], tuple[float, ...]]]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The data of a run.

    Attributes:
        train: the examples of each table; `index` counts through all of them.
        heldout: the held-out examples of all tables, indexed behind them.
        weights: how often each table is drawn from.
        notes: what was cut or left out → how many.
    """

    train: list[list[Unit]]
    heldout: list[Unit]
    weights: list[float]
    notes: dict[str, int]


def fitting_formats(config: Any) -> tuple[str, ...]:
    """The names of the formats that the trainer of a config takes."""
    if isinstance(config, SFTConfig):
        return ("text", "messages", "prompt_completion")
    if isinstance(config, RewardConfig) and config.reward.kind == "steps":
        return ("stepwise",)
    if isinstance(config, PreferenceConfig) and config.preference.loss == "kto":
        return ("unpaired",)
    return ("preference", "ranking")


def encode_examples(config: Any, tokenizer: Tokenizer) -> Encoded:
    """Load, check and tokenise all data of a run.

    Each of several processes tokenises its shard of every table, and gets what the others made:
    the order in which examples come, and so every step, is that of a single process.

    Raises:
        DataError, ModelError: what is wrong with data or template, naming the row.
        ConfigError: nothing is left of a table.
    """
    tables = config.data.load(fitting_formats(config))
    if several():
        rows = [rows for examples, _ in tables for rows in (examples.train, examples.heldout)]
        check_alike("set of examples", content_digest(rows), "the same files on all hosts")
    check_effects(config, [examples for examples, _ in tables])
    notes: dict[str, int] = {}
    train: list[list[Unit]] = []
    heldout: list[Unit] = []

    def units(rows: Sequence[Row], form: str, first: int) -> list[Unit]:
        def encode(rows: Sequence[Row], counts: dict[str, int]) -> list[Unit]:
            return encode_rows(
                rows,
                make_encoder(config, form, tokenizer),
                most=config.rows.max_length,
                rule=config.rows.truncate,
                bos_id=tokenizer.bos_id,
                counts=counts,
            )

        found = encode_together(rows, encode, notes)
        return [dataclasses.replace(unit, index=first + i) for i, unit in enumerate(found)]

    for examples, _ in tables:
        for reason, count in examples.left_out.items():
            notes[reason] = notes.get(reason, 0) + count
        train.append(units(examples.train, examples.format, sum(map(len, train))))
        if not train[-1]:
            raise ConfigError(
                "no example of a table fits", got=notes, hint="a larger rows.max_length"
            )
    for examples, _ in tables:
        first = sum(map(len, train)) + len(heldout)
        found = units(examples.heldout, examples.format, first)
        if examples.heldout and not found:
            raise ConfigError(
                "no held-out example of a table fits", got=notes, hint="a larger rows.max_length"
            )
        heldout += found
    return Encoded(train, heldout, [weight for _, weight in tables], notes)


def encode_together(
    rows: Sequence[Row],
    encode: Callable[[Sequence[Row], dict[str, int]], list[Unit]],
    notes: dict[str, int],
) -> list[Unit]:
    """`encode` of all rows, in order; each of several processes calls it with its shard.

    Args:
        encode: (rows, counts that it adds to) → units.
        notes: learns the counts of all.

    Raises:
        UserError: what is wrong with the first bad row, in all processes.
    """
    counts: dict[str, int] = {}
    try:
        outcome = encode(shard(rows), counts), counts, None
    except UserError as error:
        outcome = [], counts, error
    found: list[Unit] = []
    for units, told, error in exchange(outcome, "encoded examples"):
        if error is not None:
            raise error
        found += units
        for reason, count in told.items():
            notes[reason] = notes.get(reason, 0) + count
    return found


def shard(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows of this process: Grain's slice of one order, one run of rows after another's."""
    if not several():
        return rows
    import grain  # slow to import

    mine = grain.sharding.ShardByJaxProcess()
    first, last = (len(rows) * (mine.shard_index + i) // mine.shard_count for i in (0, 1))
    return list(grain.MapDataset.source(rows).slice(slice(first, last)))


def check_effects(config: Any, tables: Sequence[Examples]) -> None:
    """Raises ConfigError where a setting speaks of something that the data do not hold."""
    rows = [row for examples in tables for row in (*examples.train, *examples.heldout)]
    all_text = all(examples.format == "text" for examples in tables)
    usual = type(config.train).eval_every
    if config.train.eval_every not in (0, usual) and not any(e.heldout for e in tables):
        raise ConfigError(
            "train.eval_every has no effect: the data hold nothing out",
            got=config.train.eval_every,
            hint="--data.heldout=100, or --train.eval_every=0",
        )
    if isinstance(config, SFTConfig) and all_text and not config.sft.completion_only:
        raise ConfigError(
            "sft.completion_only=False has no effect: plain text is learnt whole in any case"
        )
    if isinstance(config, RewardConfig) and config.reward.use_margin:
        without = next((row for row in rows if "margin" not in row), None)
        if without is not None:
            raise ConfigError(
                "reward.use_margin needs a column margin in every row",
                got=f"none in the example {str(without)[:80]!r}",
            )


def make_encoder(config: Any, form: str, tokenizer: Tokenizer) -> Encode:
    """From a row of a format to the parts and numbers of a unit, for the trainer of a config."""
    encode = _ENCODERS[form]

    def named(row: Row) -> tuple[tuple[Part, ...], tuple[float, ...]]:
        try:
            return encode(row, tokenizer, config)
        except UserError as error:
            raise type(error)(f"{error} · in the example {str(row)[:80]!r}") from error

    return named


def _text(row: Row, tokenizer: Tokenizer, config: Any):
    return (encode_text(row["text"], tokenizer),), ()


def _messages(row: Row, tokenizer: Tokenizer, config: SFTConfig):
    part = encode_messages(row["messages"], tokenizer)
    return ((part if config.sft.completion_only else everything(part)),), ()


def _prompt_completion(row: Row, tokenizer: Tokenizer, config: SFTConfig):
    only = config.sft.completion_only
    part = encode_reply(row["prompt"], row["completion"], tokenizer, assistant_only=only)
    return ((part if only else everything(part)),), ()


def _preference(row: Row, tokenizer: Tokenizer, config: Any):
    scored = isinstance(config, RewardConfig)
    parts = tuple(
        encode_reply(row["prompt"], row[name], tokenizer, assistant_only=not scored)
        for name in ("chosen", "rejected")
    )
    if scored:
        parts = tuple(map(ends_only, parts))
    return parts, (float(row.get("margin", 0.0)), 0.0)


def _unpaired(row: Row, tokenizer: Tokenizer, config: Any):
    part = encode_reply(row["prompt"], row["completion"], tokenizer)
    return (part,), (float(row["label"]),)


def _stepwise(row: Row, tokenizer: Tokenizer, config: RewardConfig):
    separator = config.reward.separator
    steps = single_steps(row["completions"], separator)
    return (encode_steps(row["prompt"], steps, row["labels"], tokenizer, separator),), ()


_ENCODERS: dict[str, Callable] = {
    "text": _text,
    "messages": _messages,
    "prompt_completion": _prompt_completion,
    "preference": _preference,
    "unpaired": _unpaired,
    "stepwise": _stepwise,
}
