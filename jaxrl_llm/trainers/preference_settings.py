# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of preference losses; one that nothing would read is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from jaxrl_llm.algorithms.kl import KL_ESTIMATORS
from jaxrl_llm.algorithms.preference_losses import PREFERENCE_LOSSES
from jaxrl_llm.errors import ConfigError

LossName = Literal[
    "dpo", "robust", "hinge", "ipo", "ipo_sum", "dpo_norm", "exo", "nca", "sppo", "apo_zero",
    "apo_down", "simpo", "cpo", "orpo", "kto",
]  # fmt: skip
# Settings that not every loss reads, and what some of them need beside the right loss.
_READ_BY_SOME = (
    "label_smoothing", "gamma", "divergence", "alpha", "weights", "kl_estimator",
    "desirable_weight", "undesirable_weight", "reference", "ref_update_every", "ref_update_rate",
)  # fmt: skip
_NEEDED = {
    "alpha": " without divergence=alpha",
    "kl_estimator": " without a kl_coef",
    "reference": ", which use none",
    "ref_update_every": ", which use no reference",
    "ref_update_rate": " without ref_update_every",
}


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
        for name, least in (("robust", 0.0), ("exo", 1e-9)):
            if name in names and not least <= self.label_smoothing < 0.5:
                raise ConfigError(
                    f"preference.label_smoothing is out of the range of {name}",
                    got=self.label_smoothing,
                    expected="0 < ε < ½" if least else "0 ≤ ε < ½",
                )
        if self.reference == "precomputed" and (self.ref_update_every or self.kl_coef):
            raise ConfigError(
                "a precomputed reference can't move, and has no log-probabilities of single tokens",
                got=f"ref_update_every={self.ref_update_every}, kl_coef={self.kl_coef}",
                hint="--preference.reference=live",
            )
        self._check_effects(names)

    def _check_ranges(self) -> None:
        checks = {
            "beta": 0 < self.beta < math.inf,
            "label_smoothing": 0 <= self.label_smoothing <= 1,
            "gamma": math.isfinite(self.gamma),
            "alpha": math.isfinite(self.alpha),
            "nll_coef": self.nll_coef is None or 0 <= self.nll_coef < math.inf,
            "kl_coef": 0 <= self.kl_coef < math.inf,
            "kl_estimator": self.kl_estimator in KL_ESTIMATORS,
            "desirable_weight": 0 <= self.desirable_weight < math.inf,
            "undesirable_weight": 0 <= self.undesirable_weight < math.inf,
            "ref_update_every": self.ref_update_every >= 0,
            "ref_update_rate": 0 < self.ref_update_rate <= 1,
            "weights": (not self.weights or len(self.weights) == 1 + len(self.also))
            and all(0 < weight < math.inf for weight in self.weights),
            "also": bool(self.weights) or not self.also,
        }
        for setting, good in checks.items():
            if not good:
                raise ConfigError(
                    f"preference.{setting} is out of range", got=getattr(self, setting)
                )

    def _check_kto(self, names: list[str]) -> None:
        other = len(names) > 1 or self.reference == "precomputed" or self.kl_coef
        if other or self.nll_coef is not None:
            raise ConfigError(
                "kto stands alone and needs a live reference: its KL is measured every step",
                got=f"losses {names}, reference={self.reference}, kl_coef={self.kl_coef}, "
                f"nll_coef={self.nll_coef}",
            )
        if not self.desirable_weight and not self.undesirable_weight:
            raise ConfigError("both weights of kto are 0: there is nothing to learn")

    def _check_effects(self, names: list[str]) -> None:
        """A setting that was changed and that nothing reads is an error."""
        rows = [PREFERENCE_LOSSES[name] for name in names if name != "kto"]
        read = {setting for row in rows for setting in row.settings}
        if "kto" in names:
            read |= {"desirable_weight", "undesirable_weight"}
        else:
            read |= {"weights"}
        if self.divergence != "alpha":
            read -= {"alpha"}
        if self.kl_coef:
            read |= {"kl_estimator"}
        if self.needs_reference:
            read |= {"reference", "ref_update_every"}
        if self.ref_update_every:
            read |= {"ref_update_rate"}
        for setting in _READ_BY_SOME:
            usual = getattr(type(self), setting)
            if getattr(self, setting) != usual and setting not in read:
                raise ConfigError(
                    f"preference.{setting} has no effect on {' + '.join(names)}"
                    f"{_NEEDED.get(setting, '')}",
                    got=getattr(self, setting),
                    hint=f"leave it at {usual}",
                )

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
