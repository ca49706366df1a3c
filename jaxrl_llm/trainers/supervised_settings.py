# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of supervised runs: fine-tuning, reward models, preferences."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxrl_llm.algorithms.kl import KL_ESTIMATORS
from jaxrl_llm.algorithms.preference_losses import PREFERENCE_LOSSES
from jaxrl_llm.data.encode import Truncation
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.lora import LoraConfig
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.trainers.optimizers import OptimizerConfig
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
        row_tokens: length of a packed row; at least max_length, and twice that for pairs.
        chat_template: a template with generation marks in place of the model's own: "chatml",
            "smollm2", "plain", or a jinja file; None keeps the model's.
    """

    max_length: int = 512
    truncate: Truncation = "end"
    packed: bool = True
    row_tokens: int = 1024
    chat_template: str | None = None

    def __post_init__(self) -> None:
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
        if self.center_coef < 0:
            raise ConfigError("reward.center_coef is negative", got=self.center_coef)
        if self.kind == "steps" and (self.use_margin or self.center_coef):
            raise ConfigError("reward.use_margin and center_coef have no effect on steps")


LossName = Literal[
    "dpo", "robust", "hinge", "ipo", "ipo_sum", "dpo_norm", "exo", "nca", "sppo", "apo_zero",
    "apo_down", "simpo", "cpo", "orpo", "kto",
]  # fmt: skip
_DEFAULTS = {"label_smoothing": 0.0, "gamma": 0.5, "divergence": "reverse_kl", "alpha": 0.5}


@dataclasses.dataclass(frozen=True)
class PreferenceSettings:
    """What preference optimisation minimises: Σ weight·loss + nll_coef·NLL + kl_coef·KL.

    Attributes:
        loss: the loss, a row of `algorithms/preference_losses.py`.
        weights: further losses and their weights beside `loss`, whose weight is then the first
            number: weights=(0.8, 0.2), also=("ipo",). Empty: `loss` alone.
        also: the losses that the further weights belong to.
        beta: how strongly the reference holds; of simpo, cpo and orpo their own β.
        label_smoothing: the share of pairs that are thought to be the wrong way round.
        gamma: margin of simpo.
        divergence: of dpo, robust and hinge: reverse_kl, forward_kl, jensen_shannon or alpha.
        alpha: of the alpha divergence.
        nll_coef: weight of the chosen replies' mean nll per token; None is the loss's own (1 for
            orpo and cpo, else 0).
        kl_coef: λ of a penalty on the distance to the reference, a mean over the replies' tokens.
        kl_estimator: how that distance is told at each token of the data: a row of
            `algorithms/kl.py`. The replies are not the policy's own, so it is no estimate of its
            KL; "k2" and "k3" are ≥ 0 and hold the policy near the reference on these tokens.
        desirable_weight: of kto's wanted replies.
        undesirable_weight: of kto's other replies.
        reference: "live": a copy of the first policy stays in memory; "precomputed": its
            log-probabilities of all examples are computed before the first step.
        ref_update_every: steps after which the reference moves to the policy (TR-DPO,
            https://arxiv.org/abs/2404.09656); 0 never.
        ref_update_rate: how far it moves: 1 all the way.
    """

    loss: LossName = "dpo"
    weights: tuple[float, ...] = ()
    also: tuple[LossName, ...] = ()
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5
    divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon", "alpha"] = "reverse_kl"
    alpha: float = 0.5
    nll_coef: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference: Literal["live", "precomputed"] = "live"
    ref_update_every: int = 0
    ref_update_rate: float = 1.0

    def __post_init__(self) -> None:
        self._check_ranges()
        names = [name for name, _ in self.mixture]
        if "kto" in names:
            self._check_kto(names)
            return
        read = {setting for name in names for setting in PREFERENCE_LOSSES[name].settings}
        for setting, usual in _DEFAULTS.items():
            if getattr(self, setting) != usual and setting not in read:
                raise ConfigError(
                    f"preference.{setting} has no effect on {' + '.join(names)}",
                    got=getattr(self, setting),
                    hint=f"leave it at {usual}",
                )
        for name, least in (("robust", 0.0), ("exo", 1e-9)):
            if name in names and not least <= self.label_smoothing < 0.5:
                raise ConfigError(
                    f"preference.label_smoothing is out of the range of {name}",
                    got=self.label_smoothing,
                    expected="0 < ε < ½" if least else "0 ≤ ε < ½",
                )
        if not self.needs_reference:
            for setting, usual in (("reference", "live"), ("ref_update_every", 0)):
                if getattr(self, setting) != usual:
                    raise ConfigError(f"preference.{setting} has no effect: {names} use none")

    def _check_ranges(self) -> None:
        checks = {
            "beta": 0 < self.beta < float("inf"),
            "label_smoothing": 0 <= self.label_smoothing <= 1,
            "nll_coef": self.nll_coef is None or self.nll_coef >= 0,
            "kl_coef": self.kl_coef >= 0,
            "kl_estimator": self.kl_estimator in KL_ESTIMATORS,
            "ref_update_every": self.ref_update_every >= 0,
            "ref_update_rate": 0 < self.ref_update_rate <= 1,
            "weights": not self.weights or len(self.weights) == 1 + len(self.also),
            "also": bool(self.weights) or not self.also,
        }
        for setting, good in checks.items():
            if not good:
                raise ConfigError(
                    f"preference.{setting} is out of range", got=getattr(self, setting)
                )
        if self.reference == "precomputed" and (self.ref_update_every or self.kl_coef):
            raise ConfigError(
                "a precomputed reference can't move, and has no log-probabilities of single tokens",
                got=f"ref_update_every={self.ref_update_every}, kl_coef={self.kl_coef}",
                hint="--preference.reference=live",
            )

    def _check_kto(self, names: list[str]) -> None:
        if len(names) > 1 or self.reference == "precomputed" or self.kl_coef or self.nll_coef:
            raise ConfigError(
                "kto stands alone and needs a live reference: its KL is measured every step",
                got=f"losses {names}, reference={self.reference}, kl_coef={self.kl_coef}, "
                f"nll_coef={self.nll_coef}",
            )
        for setting, usual in _DEFAULTS.items():
            if getattr(self, setting) != usual:
                raise ConfigError(f"preference.{setting} has no effect on kto")

    @property
    def mixture(self) -> tuple[tuple[str, float], ...]:
        """(loss, weight) of every loss."""
        weights = self.weights or (1.0,)
        return tuple(zip((self.loss, *self.also), weights, strict=True))

    @property
    def needs_reference(self) -> bool:
        names = [name for name, _ in self.mixture]
        rows = any(name == "kto" or PREFERENCE_LOSSES[name].reference for name in names)
        return rows or self.kl_coef > 0

    @property
    def nll_weight(self) -> float:
        """The weight of the NLL of chosen replies."""
        if self.nll_coef is not None:
            return self.nll_coef
        usual = [PREFERENCE_LOSSES[n].nll_coef for n, _ in self.mixture if n != "kto"]
        return max(usual, default=0.0)


def _check_rows(rows: RowConfig, parts: int) -> None:
    if rows.packed and rows.row_tokens < parts * rows.max_length:
        raise ConfigError(
            "rows.row_tokens is too small for an example",
            got=f"row_tokens={rows.row_tokens}, max_length={rows.max_length}"
            + (" for each of two replies" if parts == 2 else ""),
            expected=f"at least {parts * rows.max_length}",
            hint=f"--rows.row_tokens={parts * rows.max_length}",
        )


def _check_data(data: Any) -> None:
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
        _check_data(self.data)
        _check_rows(self.rows, 1)


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
        _check_data(self.data)
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
        _check_data(self.data)
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
