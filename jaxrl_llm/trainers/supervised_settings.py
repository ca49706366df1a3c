# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of supervised runs: fine-tuning, reward models, preferences."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from jaxrl_llm.data.encode import Truncation
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.lora import LoraConfig
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.text.files import settled_path
from jaxrl_llm.text.templates import CHAT_TEMPLATES
from jaxrl_llm.trainers.optimizers import OptimizerConfig
from jaxrl_llm.trainers.preference_settings import PreferenceSettings
from jaxrl_llm.trainers.settings import ModelSource, MonitorConfig


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """How long, in which portions, and what is kept.

    Attributes:
        steps: optimiser updates.
        batch: rows of an update in fine-tuning; pairs or single replies in the other trainers.
        micro_batch: rows whose gradient is computed at once; changes memory and speed, never
            the result.
        seed: of the data's order; None draws one and keeps it in the run directory.
        eval_every: steps between held-out evaluations; 0 evaluates before and after only.
        checkpoint_every: steps between checkpoints; the last step is always saved.
        keep_checkpoints: how many of the latest checkpoints stay on disk.
    """

    steps: int = 100
    batch: int = 8
    micro_batch: int = 4
    seed: int | None = None
    eval_every: int = 20
    checkpoint_every: int = 20
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        least = {"eval_every": 0, "seed": 0}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < least.get(field.name, 1):
                raise ConfigError(
                    f"train.{field.name} is too small",
                    got=value,
                    expected=f"≥ {least.get(field.name, 1)}",
                )
        if self.seed is not None and self.seed >= 2**31:
            raise ConfigError("train.seed is too large", got=self.seed, expected="below 2³¹")


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """From examples to rows of tokens.

    Attributes:
        max_length: most tokens of a sequence, prompt and reply.
        truncate: what happens to longer ones: "end" cuts the end; "prompt" cuts the beginning of
            the prompt first; "drop" leaves them out; "error" stops.
        packed: several sequences share a row, each as if alone; changes speed, never a sequence's
            loss.
        row_tokens: length of a packed row; at least max_length, and twice that for pairs. Rows
            that are not packed are as long as their batch needs.
        chat_template: a template with generation marks in place of the model's own: "chatml",
            "smollm2", "plain", or a jinja file; None keeps the model's.
    """

    max_length: int = 512
    truncate: Truncation = "end"
    packed: bool = True
    row_tokens: int = 1024
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if self.chat_template is not None and self.chat_template not in CHAT_TEMPLATES:
            object.__setattr__(self, "chat_template", settled_path(self.chat_template))
        if self.max_length < 2:
            raise ConfigError("rows.max_length is too small", got=self.max_length, expected="≥ 2")


@dataclasses.dataclass(frozen=True)
class SFTSettings:
    """What fine-tuning minimises.

    Attributes:
        loss: "nll", or "dft": each token's nll times its probability, which carries no gradient
            (https://arxiv.org/abs/2508.05629).
        completion_only: learn only what the assistant says; False learns prompts too. Plain text
            is learnt whole in any case.
        pack_bins: rows that are packed at the same time; more of them leave less padding.
    """

    loss: Literal["nll", "dft"] = "nll"
    completion_only: bool = True
    pack_bins: int = 32

    def __post_init__(self) -> None:
        if self.pack_bins < 1:
            raise ConfigError("sft.pack_bins is too small", got=self.pack_bins, expected="≥ 1")


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """What a reward model learns.

    Attributes:
        kind: "pairs": one score for a reply, from preferences or rankings (Bradley–Terry).
            "steps": whether each step is right, from labelled steps (cross-entropy).
        use_margin: the chosen reply must win by the column `margin` (rankings: the difference of
            their scores).
        center_coef: draws the scores of a pair towards a sum of 0.
        separator: text that ends each step; its last token is where the step is judged.
    """

    kind: Literal["pairs", "steps"] = "pairs"
    use_margin: bool = False
    center_coef: float = 0.0
    separator: str = "\n"

    def __post_init__(self) -> None:
        if not 0 <= self.center_coef < math.inf:
            raise ConfigError("reward.center_coef is out of range", got=self.center_coef)
        if self.kind == "steps" and (self.use_margin or self.center_coef):
            raise ConfigError("reward.use_margin and center_coef have no effect on steps")
        if self.kind == "pairs" and self.separator != type(self).separator:
            raise ConfigError(
                "reward.separator has no effect on pairs",
                got=repr(self.separator),
                hint="--reward.kind=steps",
            )
        if not self.separator:
            raise ConfigError("reward.separator is empty", expected="the text that ends each step")


def _check_rows(rows: RowConfig, parts: int) -> None:
    # What a packed row must hold at least says nothing that max_length doesn't.
    silent = (RowConfig.row_tokens, parts * rows.max_length)
    if not rows.packed and rows.row_tokens not in silent:
        raise ConfigError(
            "rows.row_tokens has no effect without rows.packed",
            got=rows.row_tokens,
            hint=f"--rows.row_tokens={parts * rows.max_length}",
        )
    if rows.packed and rows.row_tokens < parts * rows.max_length:
        raise ConfigError(
            "rows.row_tokens is too small for an example",
            got=f"row_tokens={rows.row_tokens}, max_length={rows.max_length}"
            + (" for each of two replies" if parts == 2 else ""),
            expected=f"at least {parts * rows.max_length}",
            hint=f"--rows.row_tokens={parts * rows.max_length}",
        )


def _check_shared(data: Any, monitor: MonitorConfig, mesh: MeshConfig) -> None:
    mesh.check()
    if monitor.samples_per_step != MonitorConfig().samples_per_step:
        raise ConfigError(
            "monitor.samples_per_step has no effect: a supervised run draws no samples",
            got=monitor.samples_per_step,
        )
    if not callable(getattr(data, "load", None)):
        raise ConfigError(
            "the data of the config are no data",
            got=repr(data),
            expected="TableData(…), Mixture(…), or an object with load(formats)",
        )


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning.

    Attributes:
        data: `TableData` or `Mixture` with text, messages, or prompt and completion.
        lora: train low-rank adapters over the model in place of its own parameters; the export
            has them merged in.
    """

    data: Any
    model: ModelSource = ModelSource()
    sft: SFTSettings = SFTSettings()
    lora: LoraConfig | None = None
    rows: RowConfig = RowConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    train: FitConfig = FitConfig()
    mesh: MeshConfig = MeshConfig()
    monitor: MonitorConfig = MonitorConfig()

    def __post_init__(self) -> None:
        _check_shared(self.data, self.monitor, self.mesh)
        _check_rows(self.rows, 1)
        if not self.rows.packed and self.sft.pack_bins != SFTSettings().pack_bins:
            raise ConfigError(
                "sft.pack_bins has no effect without rows.packed", got=self.sft.pack_bins
            )


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """A reward model or a process reward model.

    Attributes:
        data: `TableData` or `Mixture` with preferences or rankings, or with steps.
        lora: train low-rank adapters over the model in place of its own parameters; the export
            has them merged in.
    """

    data: Any
    model: ModelSource = ModelSource()
    reward: RewardSettings = RewardSettings()
    lora: LoraConfig | None = None
    rows: RowConfig = RowConfig(truncate="prompt")
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    train: FitConfig = FitConfig()
    mesh: MeshConfig = MeshConfig()
    monitor: MonitorConfig = MonitorConfig()

    def __post_init__(self) -> None:
        _check_shared(self.data, self.monitor, self.mesh)
        _check_rows(self.rows, 2 if self.reward.kind == "pairs" else 1)


@dataclasses.dataclass(frozen=True)
class PreferenceConfig:
    """Preference optimisation: DPO and its family on pairs, KTO on single replies.

    Attributes:
        data: `TableData` or `Mixture` with preferences (or rankings); for kto with a label for
            each reply.
        lora: train low-rank adapters over the model in place of its own parameters; the export
            has them merged in.
    """

    data: Any
    model: ModelSource = ModelSource()
    preference: PreferenceSettings = PreferenceSettings()
    lora: LoraConfig | None = None
    rows: RowConfig = RowConfig(truncate="prompt")
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6)
    train: FitConfig = FitConfig()
    mesh: MeshConfig = MeshConfig()
    monitor: MonitorConfig = MonitorConfig()

    def __post_init__(self) -> None:
        _check_shared(self.data, self.monitor, self.mesh)
        if self.lora is not None and self.preference.ref_update_every:
            raise ConfigError(
                "under an adapter the reference is the base, which does not move",
                got=f"preference.ref_update_every={self.preference.ref_update_every}",
                hint="--preference.ref_update_every=0, or no lora",
            )
        kto = self.preference.loss == "kto"
        _check_rows(self.rows, 1 if kto else 2)
        if kto and self.train.batch < 2:
            raise ConfigError(
                "kto measures its KL on replies of other prompts, so it needs two or more a step",
                got=f"train.batch={self.train.batch}",
                expected="≥ 2",
            )
