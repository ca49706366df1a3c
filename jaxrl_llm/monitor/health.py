# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Alarms with advice: a run tells what goes wrong with it, over how many steps, and what to try.

    health = Health(HealthConfig())
    metrics |= measure(rollouts)                 # a few more numbers about the step's replies
    for alarm in health.observe(step, metrics):  # [] on most steps of most runs
        emit(alarm_line(alarm))

What is looked at is in `health_checks.CHECKS`. An alarm is not repeated at every step: it comes
back after `repeat_after` steps, or after a window if it is `repeat_worse` times as bad.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl_llm.monitor.health_checks import CHECKS, HealthConfig
from jaxrl_llm.monitor.health_history import History
from jaxrl_llm.monitor.writers import JsonLines
from jaxrl_llm.types import Rollout

__all__ = [
    "Alarm", "AlarmsWriter", "Health", "HealthConfig", "alarm_line", "measure", "read_alarms",
]  # fmt: skip

ALARMS_FILE = "alarms.jsonl"
_NGRAM, _FEWEST_NGRAMS = 3, 64


@dataclasses.dataclass(frozen=True)
class Alarm:
    """One thing that is wrong.

    Attributes:
        name: of the check, a key of `health_checks.CHECKS`.
        severity: "critical": the run learns nothing, or something wrong; "warning": have a look.
        message: one line: what was seen, over how many steps, what to try.
        step: when.
    """

    name: str
    severity: Literal["warning", "critical"]
    message: str
    step: int


class Health:
    """Watches the metrics of a run; resumable, and the same for the same metrics.

    Args:
        config: limits.
        without: checks that say nothing of this run, keys of `health_checks.CHECKS`.
    """

    def __init__(self, config: HealthConfig, without: Collection[str] = ()):
        assert set(without) <= CHECKS.keys(), without
        self.config = config
        self._checks = {name: check for name, check in CHECKS.items() if name not in without}
        self._history = History(
            window=max(config.window, config.quick_window), baseline=config.baseline
        )
        self._told: dict[str, tuple[int, float]] = {}  # name → (step, how bad)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """The alarms to tell after this step, the worst kind first; [] if all is well.

        Args:
            step: the step's number; the evaluation before training may be given as step 0.
            metrics: numbers by name, as in metrics.jsonl, with those of `measure`. A check whose
                metrics are missing or not finite says nothing.
        """
        if not self.config.enabled:
            return []
        self._history.add(step, metrics)
        alarms = []
        for name, check in self._checks.items():
            finding = check(self._history, self.config)
            if finding is None or not self._is_news(name, step, finding.badness):
                continue
            self._told[name] = (step, finding.badness)
            text = " ".join(f"{finding.seen} · try: {finding.advice}".split())
            alarms.append(Alarm(name, finding.severity, text, step))
        return sorted(alarms, key=lambda alarm: alarm.severity != "critical")

    def _is_news(self, name: str, step: int, badness: float) -> bool:
        if name not in self._told:
            return True
        before, as_bad = self._told[name]
        waited, config = step - before, self.config
        if waited >= config.repeat_after:
            return True
        # Until the window holds the new state alone it only gets worse on the way to it.
        return waited >= config.window and badness >= config.repeat_worse * as_bad

    def get_state(self) -> dict[str, Any]:
        """What the next alarms depend on, as JSON values."""
        told = {name: list(told) for name, told in self._told.items()}
        return {"history": self._history.get_state(), "told": told}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `get_state` was called."""
        self._history.set_state(state["history"])
        self._told = {name: (int(step), float(bad)) for name, (step, bad) in state["told"].items()}


# --- what rollouts tell --------------------------------------------------------------------------


def measure(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Numbers about the replies of a step that the checks need beside the step's own metrics.

    Returns (what can't be told is left out):
        "completions/distinct_3": distinct 3-grams / all 3-grams of chosen tokens, pooled over one
            reply to each prompt, averaged over the samples. Pooling samples of *different* prompts
            leaves out that right answers to one prompt are alike.
        "completions/clipped_reward", "…/clipped_reward_std", "…/finished_reward": of replies that
            were cut off and of those that ended.
        "groups/alike_reward": mean reward of the groups whose samples all have the same one.
        "rewards/lowest", "rewards/highest", "rewards/not_judged_ratio".
    """
    if not rollouts:
        return {}
    judged = [rollout for rollout in rollouts if rollout.reward is not None]
    found = {"rewards/not_judged_ratio": 1.0 - len(judged) / len(rollouts)}
    found |= _distinct(rollouts)
    if not judged:
        return found
    values = np.array([rollout.reward.value for rollout in judged if rollout.reward], np.float64)
    cut = np.array([rollout.finish_reason == "length" for rollout in judged])
    found |= {"rewards/lowest": float(values.min()), "rewards/highest": float(values.max())}
    if cut.any():
        found["completions/clipped_reward"] = float(values[cut].mean())
        found["completions/clipped_reward_std"] = float(values[cut].std())
    if not cut.all():
        found["completions/finished_reward"] = float(values[~cut].mean())
    groups: dict[str, list[float]] = {}
    for rollout, value in zip(judged, values.tolist(), strict=True):
        groups.setdefault(rollout.prompt.id, []).append(value)
    alike = [group[0] for group in groups.values() if len(group) > 1 and len(set(group)) == 1]
    if alike:
        found["groups/alike_reward"] = float(np.mean(alike))
    return found


def _distinct(rollouts: Sequence[Rollout]) -> dict[str, float]:
    pools: dict[int, list[np.ndarray]] = {}
    for rollout in rollouts:
        tokens = np.asarray(rollout.tokens)[np.asarray(rollout.mask, bool)]
        if len(tokens) >= _NGRAM:
            grams = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.int64), _NGRAM)
            pools.setdefault(rollout.sample, []).append(grams)
    shares = []
    for pool in pools.values():
        grams = np.ascontiguousarray(np.concatenate(pool))
        if len(grams) >= _FEWEST_NGRAMS:
            whole = grams.view([("", np.int64)] * _NGRAM).ravel()
            shares.append(len(np.unique(whole)) / len(grams))
    return {"completions/distinct_3": float(np.mean(shares))} if shares else {}


# --- how alarms are shown ------------------------------------------------------------------------


def alarm_line(alarm: Alarm) -> str:
    """The line under the step's line in a terminal."""
    mark = "!!" if alarm.severity == "critical" else "! "
    return f"  {mark} {alarm.name}: {alarm.message}"


class AlarmsWriter:
    """Keeps the alarms of a run in `alarms.jsonl`, one object a line."""

    def __init__(self, run_dir: str | os.PathLike[str]):
        self._lines = JsonLines(pathlib.Path(run_dir) / ALARMS_FILE)

    def write(self, alarms: Sequence[Alarm]) -> None:
        """Adds alarms; none, no file."""
        if alarms:
            self._lines.append([dataclasses.asdict(alarm) for alarm in alarms])

    def truncate(self, after_step: int) -> None:
        """Forgets the alarms after a step: a resumed run calls this before it writes."""
        self._lines.truncate(after_step)

    def close(self) -> None:
        self._lines.close()


def read_alarms(run_dir: str | os.PathLike[str]) -> list[Alarm]:
    """The alarms of a run in order; lines that are none are left out."""
    return list(_alarms(JsonLines(pathlib.Path(run_dir) / ALARMS_FILE).read()))


def _alarms(rows: Sequence[Mapping[str, Any]]) -> Iterator[Alarm]:
    for row in rows:
        name, severity, message = (row.get(key) for key in ("name", "severity", "message"))
        if isinstance(name, str) and isinstance(message, str):
            kind: Literal["warning", "critical"] = "warning"
            if severity == "critical":
                kind = "critical"
            yield Alarm(name, kind, message, row["step"])
