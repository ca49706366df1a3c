# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What a supervised run shows: the rooms of `monitor`, with columns of its own."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.monitor.progress import Column, Progress, banner, emit, summary
from jaxrl_llm.monitor.report import write_report
from jaxrl_llm.monitor.writers import MetricsWriter, read_metrics
from jaxrl_llm.trainers.encoders import Encoded

# (header, width, metric, how to show it)
COLUMNS: tuple[Column, ...] = (
    ("loss", 7, "loss", lambda x: f"{x:.4f}"),
    ("held", 7, "eval/loss", lambda x: f"{x:.4f}"),
    ("acc", 6, "accuracy", lambda x: f"{x:.1%}"),
    ("acc", 6, "rewards/accuracies", lambda x: f"{x:.1%}"),
    ("margin", 7, "margin", lambda x: f"{x:.3f}"),
    ("margin", 7, "rewards/margins", lambda x: f"{x:.3f}"),
    ("hacc", 6, "eval/accuracy", lambda x: f"{x:.1%}"),
)


class SupervisedShow:
    """Console, metrics and report of one run.

    Args:
        run_dir: where files go.
        config: the run's settings.
        settings: the same as JSON values.
        model_config: for the banner.
        title: what the run does.
        data: its examples.
        seed: the run's seed.
    """

    def __init__(
        self,
        run_dir: pathlib.Path,
        config: Any,
        settings: Mapping[str, Any],
        model_config: ModelConfig,
        *,
        title: str,
        data: Encoded,
        seed: int,
    ):
        self.run_dir, self.config, self.title, self.data = run_dir, config, title, data
        self._model_config, self._seed = model_config, seed
        self._metrics = MetricsWriter(
            run_dir,
            tensorboard=config.monitor.tensorboard,
            wandb=config.monitor.wandb,
            trackio=config.monitor.trackio,
            config=settings,
        )
        columns = [c for c in COLUMNS if title != "sft" or c[2] != "eval/accuracy"]
        self._progress = Progress(config.train.steps, columns=columns)

    def start(self, step: int) -> None:
        """The run begins, or continues after `step`: rows of later steps are forgotten."""
        self._metrics.truncate(step if step else -1)
        devices = jax.devices()
        notes = ", ".join(f"{count} {reason}" for reason, count in self.data.notes.items())
        emit(
            banner(
                f"{self.title} · {self.config.train.steps} steps",
                model=self.config.model.path,
                num_params=self._model_config.num_params,
                devices=f"{len(devices)} × {devices[0].device_kind}",
                run_dir=self.run_dir,
                examples=f"{sum(map(len, self.data.train))}, {len(self.data.heldout)} held out",
                not_as_given=notes or None,
                seed=self._seed,
                resumed_after_step=step or None,
            )
        )

    def evaluation(self, step: int, metrics: Mapping[str, Any], samples: Sequence[Any]) -> None:
        """Held-out results before training, as a row of their own."""
        del samples
        if metrics:
            self._metrics.write(step, metrics)
            emit("held out, before training: " + _cells(metrics))

    def step(self, step: int, metrics: Mapping[str, Any], samples: Sequence[Any]) -> None:
        """One training step: a row and a line."""
        del samples
        self._metrics.write(step, metrics)
        self._progress.update(step, metrics)

    def stopped(self, step: int) -> None:
        write_report(self.run_dir)
        emit(f"stopped after step {step}, which is saved; the same command continues")

    def result(self, export: pathlib.Path) -> dict[str, Any]:
        """What result.json holds: held-out metrics before and after, steps, seconds."""
        rows = read_metrics(self.run_dir)
        evaluated = [row for row in rows if "eval/loss" in row]
        return {
            "steps": self.config.train.steps,
            "heldout_count": len(self.data.heldout),
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


def finished_text(run_dir: pathlib.Path, result: Mapping[str, Any]) -> str:
    """The summary of a finished run, also for a run that was finished earlier."""
    text = summary(run_dir, steps=result["steps"], seconds=result["train_seconds"])
    before, after = result["heldout_before"], result["heldout_after"]
    changes = [
        f"  held-out {name}: {before[name]:.4g} → {after[name]:.4g}"
        for name in ("loss", "perplexity", "accuracy", "rewards/margins", "calibration_error")
        if name in before and name in after
    ]
    first, *rest = text.splitlines()
    return "\n".join([first, *changes, *rest])


def heldout(row: Mapping[str, Any]) -> dict[str, Any]:
    """The held-out part of a metrics row, without its prefix."""
    return {k.removeprefix("eval/"): v for k, v in row.items() if k.startswith("eval/")}


def _cells(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{k.removeprefix('eval/')} {v:.3g}" for k, v in metrics.items())
