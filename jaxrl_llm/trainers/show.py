# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What a run shows: hands metrics and rendered rollouts to the rooms of `monitor`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.monitor.health import AlarmsWriter, Health, alarm_line, measure
from jaxrl_llm.monitor.progress import Progress, banner, emit, summary
from jaxrl_llm.monitor.report import write_report
from jaxrl_llm.monitor.samples import SamplesWriter
from jaxrl_llm.monitor.writers import MetricsWriter, read_metrics
from jaxrl_llm.trainers.settings import RLConfig, resolve_algorithm
from jaxrl_llm.types import Rollout


class Show:
    """Console, metrics, samples and report of one run.

    Args:
        run_dir: where files go.
        config: the run's settings.
        settings: the same as JSON values.
        model_config: for the banner.
        heldout_count: held-out prompts.
        seed: the run's seed.

    Attributes:
        health: what watches over the run.
    """

    def __init__(
        self,
        run_dir: pathlib.Path,
        config: RLConfig,
        settings: Mapping[str, Any],
        model_config: ModelConfig,
        *,
        heldout_count: int,
        seed: int,
    ):
        self.run_dir, self.config, self.heldout_count = run_dir, config, heldout_count
        self._model_config, self._seed = model_config, seed
        self._metrics = MetricsWriter(
            run_dir,
            tensorboard=config.monitor.tensorboard,
            wandb=config.monitor.wandb,
            trackio=config.monitor.trackio,
            config=settings,
        )
        self._samples = SamplesWriter(run_dir)
        self._alarms = AlarmsWriter(run_dir)
        compares = resolve_algorithm(config).compares_groups
        self.health = Health(config.health, () if compares else ("dead_groups",))
        self._progress = Progress(config.train.steps, evaluates=heldout_count > 0)

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint holds of what watches over the run."""
        return self.health.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where `get_state` was called."""
        self.health.set_state(state)

    def start(self, step: int) -> None:
        """The run begins, or continues after `step`: rows of later steps are forgotten."""
        last = step if step else -1
        self._metrics.truncate(last)
        self._samples.truncate(last)
        self._alarms.truncate(last)
        devices = jax.devices()
        emit(
            banner(
                f"{self.config.algo.name} · {self.config.train.steps} steps",
                model=self.config.model.path,
                num_params=self._model_config.num_params,
                devices=f"{len(devices)} × {devices[0].device_kind}",
                run_dir=self.run_dir,
                seed=self._seed,
                resumed_after_step=step or None,
            )
        )

    def evaluation(
        self, step: int, metrics: Mapping[str, Any], rollouts: Sequence[Rollout]
    ) -> None:
        """Held-out results; `metrics` are written as a row of their own if not empty."""
        if not rollouts:
            return
        if metrics:
            self._metrics.write(step, metrics)
            shown = {k.removeprefix("eval/"): v for k, v in metrics.items() if k != "eval/reward"}
            cells = ", ".join(f"{name} {value:.3g}" for name, value in shown.items())
            emit(f"held out, before training: {cells}")
        kept = rollouts[: self.config.monitor.samples_per_step]
        self._samples.write(step, [render(rollout, split="heldout") for rollout in kept])

    def step(self, step: int, metrics: Mapping[str, Any], rollouts: Sequence[Rollout]) -> None:
        """One training step: a row, a line, its alarms, some samples (whole groups first)."""
        metrics = {**metrics, **measure(rollouts)}
        self._metrics.write(step, metrics)
        self._progress.update(step, metrics)
        alarms = self.health.observe(step, metrics)
        self._alarms.write(alarms)
        for alarm in alarms:
            emit(alarm_line(alarm))
        kept = rollouts[: self.config.monitor.samples_per_step]
        self._samples.write(step, [render(rollout, split="train") for rollout in kept])

    def stopped(self, step: int) -> None:
        write_report(self.run_dir)
        emit(f"stopped after step {step}, which is saved; the same command continues")

    def result(self, export: pathlib.Path) -> dict[str, Any]:
        """What result.json holds: held-out metrics before and after, steps, seconds."""
        rows = read_metrics(self.run_dir)
        evaluated = [row for row in rows if "eval/reward" in row]
        return {
            "steps": self.config.train.steps,
            "heldout_count": self.heldout_count,
            "heldout_before": heldout(evaluated[0]) if evaluated else {},
            "heldout_after": heldout(evaluated[-1]) if evaluated else {},
            "train_seconds": sum(row.get("step_time", 0.0) for row in rows),
            "export": export.name,
        }

    def finished(self, result: Mapping[str, Any]) -> None:
        """The report and the summary."""
        write_report(self.run_dir)
        emit(finished_text(self.run_dir, result))

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        self._alarms.close()


def finished_text(run_dir: pathlib.Path, result: Mapping[str, Any]) -> str:
    """The summary of a finished run, also for a run that was finished earlier."""
    return summary(
        run_dir,
        steps=result["steps"],
        before={**result["heldout_before"], "count": result["heldout_count"]},
        after={**result["heldout_after"], "count": result["heldout_count"]},
        seconds=result["train_seconds"],
    )


def heldout(row: Mapping[str, Any]) -> dict[str, Any]:
    """The held-out part of a metrics row, without its prefix."""
    return {k.removeprefix("eval/"): v for k, v in row.items() if k.startswith("eval/")}


def render(rollout: Rollout, *, split: str) -> dict[str, Any]:
    """A rollout as a row of the sample table."""
    reward = rollout.reward
    return {
        "split": split,
        "prompt_id": rollout.prompt.id + (" (held out)" if split == "heldout" else ""),
        "sample": rollout.sample,
        "prompt": rollout.prompt.text,
        "completion": rollout.completion,
        "answer": rollout.prompt.answer,
        "reward": None if reward is None else reward.value,
        "parts": {} if reward is None else dict(reward.parts),
        "finish_reason": rollout.finish_reason,
        "length": len(rollout.tokens),
    }
