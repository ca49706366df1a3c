# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""How often each prompt is passed: a table that a file starts and training keeps up to date.

The file has one JSON object a line, `{"id": "gsm8k:17", "passes": 5, "n": 16, …}`; further keys
are for people. `python -m jaxrl_llm.cli.pass_rate` writes it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_llm.data.records import clip
from jaxrl_llm.errors import DataError
from jaxrl_llm.types import Rollout

_BINS = 10
_BAR = 40  # characters


@dataclasses.dataclass
class PassRates:
    """Counts of each prompt, by its index in the source.

    A visit of a prompt, k passes of n samples, is added with exponential forgetting:

        passes ← decay · passes + k,    samples ← decay · samples + n,    rate = passes / samples

    which is the mode of a Beta posterior with a flat prior whose older evidence fades: a visit
    counts `decay`^m as much as m visits later. 1 never forgets, 0 knows the last visit only.

    Attributes:
        passes, samples: float64, one entry a prompt.
        decay: 0 … 1.
    """

    passes: np.ndarray  # float64 [P]
    samples: np.ndarray  # float64 [P]
    decay: int | float

    @classmethod
    def unmeasured(cls, prompts: int, decay: int | float) -> PassRates:
        """A table that knows nothing yet."""
        return cls(np.zeros(prompts), np.zeros(prompts), decay)

    def record(self, index: int, passes: int | float, samples: int | float) -> None:
        """One visit of one prompt; a visit without a judged sample changes nothing."""
        assert 0 <= passes <= samples, (passes, samples)
        if samples:
            self.passes[index] = self.decay * self.passes[index] + passes
            self.samples[index] = self.decay * self.samples[index] + samples

    @property
    def measured(self) -> Bool[np.ndarray, " P"]:
        """Which prompts have been judged at least once."""
        return self.samples > 0

    @property
    def rates(self) -> Float[np.ndarray, " P"]:
        """Pass rates, 0 … 1; NaN where nothing is known."""
        known = self.measured
        return np.where(known, self.passes / np.where(known, self.samples, 1.0), np.nan)


def count_passes(
    rollouts: Sequence[Rollout], *, part: str | None, pass_at: int | float
) -> dict[str, tuple[int, int]]:
    """(passes, judged samples) of every prompt of the rollouts, by id.

    Args:
        part: the part of the reward that decides, or None for the reward itself.
        pass_at: a rollout passes with at least this.

    Raises:
        DataError: the rewards have no such part.
    """
    found: dict[str, tuple[int, int]] = {}
    for rollout in rollouts:
        passes, samples = found.get(rollout.prompt.id, (0, 0))
        if rollout.reward is not None:
            if part is not None and part not in rollout.reward.parts:
                raise DataError(
                    "the reward has no part by which passes are counted",
                    got=part,
                    expected=", ".join(rollout.reward.parts) or "None: the reward itself",
                )
            reward = rollout.reward
            value = reward.value if part is None else reward.parts[part]
            passes, samples = passes + int(value >= pass_at), samples + 1
        found[rollout.prompt.id] = passes, samples
    return found


# --- the file ------------------------------------------------------------------------------------


def read_pass_rates(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The rows of a table by prompt id.

    Raises:
        DataError: the file is missing or not text, a line is no row, or an id occurs twice.
    """
    rows: dict[str, dict[str, Any]] = {}
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(
            f"can't read the pass rates in {path}",
            got=error.strerror or error,
            hint="python -m jaxrl_llm.cli.pass_rate --config=… makes them",
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text", got=f"byte {error.start} is not UTF-8") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _row(line)
        if row is None:
            raise DataError(
                f"line {number} of {path} is no pass rate",
                got=clip(line),
                expected='{"id": "…", "passes": 5, "n": 16} with 0 ≤ passes ≤ n',
            )
        if row["id"] in rows:
            raise DataError(
                f"line {number} of {path} repeats a prompt",
                got=clip(repr(row["id"])),
                expected="one line a prompt",
            )
        rows[row["id"]] = row
    return rows


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        return None
    counts = row.get("passes"), row.get("n")
    whole = all(isinstance(count, int) and not isinstance(count, bool) for count in counts)
    return row if whole and 0 <= counts[0] <= counts[1] < 2**53 else None


def drop_half_line(path: str | os.PathLike[str]) -> None:
    """Cuts off what a kill left after the last whole line; nothing if there is no file."""
    path = pathlib.Path(path)
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            text = file.read()
            if not text.endswith(b"\n"):
                file.truncate(text.rfind(b"\n") + 1)


def histogram(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """How many prompts have which pass rate, as lines of text; never (0) and always (1) apart."""
    rates = [row["passes"] / row["n"] for row in rows.values() if row["n"]]
    labels = ["never", *(f"{10 * i:>3}–{10 * i + 10}%" for i in range(_BINS)), "always"]
    counts = [0] * len(labels)
    for rate in rates:
        inner = 1 + min(int(rate * _BINS), _BINS - 1)
        counts[0 if rate == 0 else -1 if rate == 1 else inner] += 1
    most = max(counts, default=0) or 1
    lines = [f"pass rates of {len(rates)} prompts, mean {np.mean(rates) if rates else 0:.1%}"]
    for label, count in zip(labels, counts, strict=True):
        bar = "█" * round(_BAR * count / most)
        lines.append(f"  {label:>8} {count:>7}  {bar}".rstrip())
    unjudged = len(rows) - len(rates)
    return "\n".join(lines + ([f"  not judged: {unjudged}"] if unjudged else []))
