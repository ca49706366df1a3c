# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which prompts the next step gets, by how often they are passed.

    stream = make_stream(source, encode, config, seed=1, batch=8)
    prompts = stream.next()        # B different prompts
    …                              # sample and score them
    stream.update(rollouts)        # the table of pass rates learns from them

Prompts whose pass rate lies outside a band teach nothing (all samples right, or all wrong) and are
left out; the others are mixed by difficulty, on a schedule, and by quotas of a column. A selection
is a pure function of (seed, draw, table); all that changes is in `get_state`.

In every epoch each prompt is either drawn or counted as dropped, exactly once. An epoch ends when
the mixture asks for a kind of prompt of which all have been drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jaxrl_llm.data.pass_rates import count_passes, read_pass_rates
from jaxrl_llm.data.pipeline import (
    Encode,
    PromptStream,
    check_same_prompts,
    fingerprint,
    make_prompt,
)
from jaxrl_llm.data.records import Source, clip
from jaxrl_llm.data.selection import BUCKETS, Selection
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.types import Prompt, Rollout

Mixture = tuple[int | float, int | float, int | float]
Schedule = Literal["constant", "linear", "root"]


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    """Which prompts are trained on, and when. Off by default: every prompt once an epoch.

    Attributes:
        enabled: choose prompts by their pass rates.
        table: pass rates measured before training, a file of `python -m jaxrl_llm.cli.pass_rate`.
            A prompt that is not in it counts as of medium difficulty until it has been sampled.
        keep: lowest and highest pass rate that is trained on; None keeps all. If fewer prompts than
            a step takes are left, those nearest to the band fill it up.
        recheck_epochs: a prompt outside the band is drawn again after so many epochs, for the
            policy may have learnt or forgotten it; 0 never does.
        decay: what earlier visits of a prompt count when it is visited again, see `PassRates`.
        pass_part: the part of the reward that tells whether a sample passes; None: the reward.
        pass_at: the least of it that passes.
        mixture: shares of easy, medium and hard prompts in a step; None takes them as they come.
        mixture_end: shares at the end of the schedule.
        schedule: constant; linear: from mixture to mixture_end evenly; root: the same, but fast at
            first (https://arxiv.org/abs/1903.09848, Eq. 7 with p = 2).
        schedule_steps: steps of the schedule; afterwards mixture_end stays.
        hard_below: a prompt with a lower pass rate is hard.
        easy_above: a prompt with a higher pass rate is easy.
        quota_column: a column of the prompts whose values have shares of their own.
        quotas: (value, share) pairs; prompts with other values are dropped.
    """

    enabled: bool = False
    table: str | None = None
    keep: tuple[int | float, int | float] | None = (0.1, 0.9)
    recheck_epochs: int = 4
    decay: int | float = 0.5
    pass_part: str | None = None
    pass_at: int | float = 0.5
    mixture: Mixture | None = None
    mixture_end: Mixture | None = None
    schedule: Schedule = "constant"
    schedule_steps: int | None = None
    hard_below: int | float = 0.35
    easy_above: int | float = 0.65
    quota_column: str | None = None
    quotas: tuple[tuple[str, int | float], ...] = ()

    def __post_init__(self) -> None:
        self._check_values()
        needs = {
            "mixture_end": ("schedule", self.schedule != "constant"),
            "schedule_steps": ("schedule", self.schedule != "constant"),
            "hard_below": ("mixture", self.mixture is not None),
            "easy_above": ("mixture", self.mixture is not None),
            "quotas": ("quota_column", self.quota_column is not None),
            "recheck_epochs": ("keep", self.keep is not None),
        }
        by_rate = self.keep is not None or self.mixture is not None
        for field in ("table", "decay", "pass_part", "pass_at"):
            needs[field] = "keep or curriculum.mixture", by_rate
        for field in dataclasses.fields(self):
            if field.name == "enabled" or getattr(self, field.name) == field.default:
                continue
            needed, there = needs.get(field.name, ("", True))
            if not self.enabled:
                needed, there = "enabled", False
            if not there:
                raise ConfigError(
                    f"curriculum.{field.name} has no effect without curriculum.{needed}",
                    got=getattr(self, field.name),
                    hint="--curriculum.enabled=True" if not self.enabled else None,
                )
        if self.schedule != "constant":
            for name in ("mixture", "mixture_end", "schedule_steps"):
                if getattr(self, name) is None:
                    raise ConfigError(
                        f"curriculum.schedule={self.schedule} needs curriculum.{name}"
                    )
        if self.quota_column is not None and not self.quotas:
            raise ConfigError("curriculum.quota_column needs curriculum.quotas")
        if self.enabled and not by_rate and not self.quotas:
            raise ConfigError(
                "curriculum.enabled has no effect without a band, a mixture or quotas",
                hint="--curriculum.keep 0.1 0.9",
            )

    def _check_values(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise ConfigError(
                "unknown curriculum.schedule",
                got=self.schedule,
                expected=", ".join(get_args(Schedule)),
            )
        if self.keep is not None and not 0 <= self.keep[0] <= self.keep[1] <= 1:
            raise ConfigError(
                "curriculum.keep is no band of pass rates",
                got=self.keep,
                expected="0 ≤ low ≤ high ≤ 1",
            )
        if not 0 <= self.hard_below <= self.easy_above <= 1:
            raise ConfigError(
                "the bounds of hard and easy prompts are out of order",
                got=f"hard_below={self.hard_below}, easy_above={self.easy_above}",
                expected="0 ≤ curriculum.hard_below ≤ curriculum.easy_above ≤ 1",
            )
        for name in ("mixture", "mixture_end"):
            shares = getattr(self, name)
            if shares is not None and not _are_shares(shares):
                raise ConfigError(
                    f"curriculum.{name} are no shares", got=shares, expected="≥ 0, not all 0"
                )
        values = [value for value, _ in self.quotas]
        if self.quotas and not (
            _are_shares([share for _, share in self.quotas], 0.0)
            and len(set(values)) == len(values)
        ):
            raise ConfigError(
                "curriculum.quotas are no shares of different values",
                got=self.quotas,
                expected='(("gsm8k", 0.7), ("math", 0.3)), each above 0',
            )
        least = {"recheck_epochs": 2, "schedule_steps": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low and not (name == "recheck_epochs" and value == 0):
                raise ConfigError(f"curriculum.{name} is too small", got=value, expected=f"≥ {low}")
        if not 0 <= self.decay <= 1:
            raise ConfigError("curriculum.decay is out of range", got=self.decay, expected="0 … 1")
        if not np.isfinite(self.pass_at):
            raise ConfigError("curriculum.pass_at is not finite", got=self.pass_at)


def _are_shares(shares: Sequence[int | float], above: float | None = None) -> bool:
    finite = all(np.isfinite(share) and share >= 0 for share in shares)
    return finite and sum(shares) > 0 and (above is None or min(shares) > above)


# How far a schedule has come, 0 … 1, from the share of its steps that are done.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 0.0,
    "linear": lambda done: done,
    "root": lambda done: done**0.5,
}


def mixture_at(config: CurriculumConfig, step: int) -> Mixture | None:
    """Shares of easy, medium and hard prompts at a step, adding up to 1; None: as they come.

    ``(1 − f) · mixture + f · mixture_end`` with f from `SCHEDULES`, both scaled to 1 before.
    """
    if config.mixture is None:
        return None
    start = np.array(config.mixture, np.float64) / sum(config.mixture)
    if config.mixture_end is None or config.schedule_steps is None:
        return tuple(start.tolist())
    end = np.array(config.mixture_end, np.float64) / sum(config.mixture_end)
    done = SCHEDULES[config.schedule](min(max(step, 0) / config.schedule_steps, 1.0))
    return tuple(((1.0 - done) * start + done * end).tolist())


class CurriculumStream:
    """Serves different prompts a step, by their pass rates; has the methods of `PromptStream`.

    Args:
        source, encode, seed, batch: as for `PromptStream`.
        config: what is chosen.

    Raises:
        DataError: fewer prompts than a step takes are within band and quotas, the table is
            damaged or speaks of none of the prompts, or a prompt lacks the quotas' column.
    """

    def __init__(
        self,
        source: Source,
        encode: Encode,
        config: CurriculumConfig,
        *,
        seed: int,
        batch: int,
    ):
        assert config.enabled
        self._source, self._encode, self._config, self._batch = source, encode, config, batch
        self._ids = [record["id"] for record in source]
        self._index = {name: index for index, name in enumerate(self._ids)}
        self._identity = {"seed": int(seed), "prompts": len(source), "ids": fingerprint(source)}
        self.selection = Selection(
            len(source),
            seed=seed,
            keep=config.keep,
            recheck_epochs=config.recheck_epochs,
            decay=config.decay,
            bounds=(config.hard_below, config.easy_above),
            kinds=_kinds(source, config),
            quotas=[share for _, share in config.quotas] or [1.0],
        )
        if config.table is not None:
            self._read_table(config.table)
        if (left := int(self.selection.kept().sum())) < batch:
            raise DataError(
                "a step takes more prompts than the curriculum leaves",
                got=f"{batch} a step, {left} of {len(source)} prompts within band and quotas",
                hint="a wider --curriculum.keep, a smaller batch, or more prompts",
            )

    def _read_table(self, path: str) -> None:
        rows = read_pass_rates(path)
        for name in rows.keys() & self._index.keys():
            row = rows[name]
            self.selection.rates.record(self._index[name], row["passes"], row["n"])
        if not self.selection.rates.measured.any():
            raise DataError(
                f"{path} has no pass rate of any training prompt",
                got=f"ids such as {clip(repr(next(iter(rows), 'none')))}",
                expected=f"such as {clip(repr(self._ids[0]))}",
                hint="measure this task: python -m jaxrl_llm.cli.pass_rate",
            )

    def next(
        self, count: int | None = None, *, step: int | None = None, without: Collection[str] = ()
    ) -> list[Prompt]:
        """The next prompts, no two the same.

        Args:
            count: how many; a step's own number by default.
            step: where the schedule stands; the number of earlier draws by default.
            without: ids that the step already has.
        """
        count = self._batch if count is None else count
        taken = [self._index[name] for name in without if name in self._index]
        mixture = mixture_at(self._config, self.selection.draws if step is None else step)
        chosen = self.selection.draw(count, mixture, taken, step)
        return [make_prompt(self._source[index], self._encode) for index in chosen]

    def update(self, rollouts: Sequence[Rollout]) -> None:
        """The pass rates learn from scored rollouts, all of a prompt as one visit.

        Raises:
            DataError: the rewards lack the part that decides.
        """
        config = self._config
        counts = count_passes(rollouts, part=config.pass_part, pass_at=config.pass_at)
        for name, (passes, samples) in counts.items():
            self.selection.rates.record(self._index[name], passes, samples)

    def metrics(self) -> dict[str, float]:
        """What the last step's draws took, and what is left: `curriculum/…`."""
        return {f"curriculum/{name}": value for name, value in self.selection.summary().items()}

    def get_state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON-able values."""
        return {"source": dict(self._identity), "selection": self.selection.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where `get_state` was called.

        Raises:
            DataError: the state belongs to another seed or to other prompts.
        """
        check_same_prompts(self._identity, state["source"])
        self.selection.set_state(state["selection"])


def _kinds(source: Source, config: CurriculumConfig) -> list[int]:
    """The place in `quotas` of each prompt's value, −1 where it has none; 0 without quotas."""
    column = config.quota_column
    if column is None:
        return [0] * len(source)
    places = {value: place for place, (value, _) in enumerate(config.quotas)}
    kinds = []
    for record in source:
        if column not in record:
            raise DataError(
                f"prompt {record['id']} has no column for curriculum.quota_column",
                got=", ".join(key for key in record if key != "prompt"),
                expected=column,
            )
        kinds.append(places.get(str(record[column]), -1))
    for value, place in places.items():
        if place not in kinds:
            raise DataError(
                f"no prompt has the value {value!r} of curriculum.quotas in its column {column!r}",
                expected=clip(", ".join(sorted({str(record[column]) for record in source}))),
            )
    return kinds


def make_stream(
    source: Source, encode: Encode, config: CurriculumConfig, *, seed: int, batch: int
) -> PromptStream | CurriculumStream:
    """The prompts of a run: in a shuffled order, or chosen by their pass rates.

    Raises:
        DataError: as the stream's own constructor.
    """
    if not config.enabled:
        return PromptStream(source, encode, seed=seed, batch=batch)
    return CurriculumStream(source, encode, config, seed=seed, batch=batch)


__all__ = ["BUCKETS", "CurriculumConfig", "CurriculumStream", "make_stream", "mixture_at"]
