# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The draw of prompts by difficulty and quota, over indices; see `curriculum` for what it is for.

Cells are the pairs (value of the quotas' column, easy | medium | hard). A draw of B prompts lays B
evenly spaced points over the cells' shares, shifted anew at each draw: a cell of share w gets ⌊B·w⌋
or ⌈B·w⌉ of them, B·w on average. Within a cell those drawn least often come first, in an order that
is new in each epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxrl_llm.data.pass_rates import PassRates

BUCKETS = ("easy", "medium", "hard")
REASONS = ("too_easy", "too_hard", "quota", "mixture")
_EASY, _MEDIUM, _HARD = range(3)
_ORDER, _SHIFT, _PLACES = range(3)  # what random numbers are for
_GOLDEN = (5.0**0.5 - 1.0) / 2.0


class Selection:
    """Which prompts have been drawn, and which are next.

    Args:
        prompts: how many there are, P.
        seed: of all draws.
        keep: band of pass rates, or None.
        recheck_epochs: epochs after which a prompt outside the band is due again; 0: never.
        decay: see `PassRates`.
        bounds: pass rates below the first are hard, above the second easy.
        kinds: the place in `quotas` of each prompt, −1 for those that are never drawn.
        quotas: shares of the kinds.

    Attributes:
        rates: the table of pass rates.
        drawn, dropped: how often each prompt was; their sum is `epoch`, and one more for prompts
            that the epoch under way has drawn.
        reasons: how many prompts were dropped for what, over all epochs.
        epoch, draws: epochs that are over, and calls of `draw`.
    """

    def __init__(
        self,
        prompts: int,
        *,
        seed: int,
        keep: tuple[int | float, int | float] | None,
        recheck_epochs: int,
        decay: int | float,
        bounds: tuple[int | float, int | float],
        kinds: Sequence[int],
        quotas: Sequence[int | float],
    ):
        self._seed, self._keep, self._recheck = int(seed), keep, recheck_epochs
        self._bounds = bounds
        self._kinds = np.array(kinds, np.int64)
        self._quotas = np.array(quotas, np.float64)
        self.rates = PassRates.unmeasured(prompts, decay)
        self.drawn = np.zeros(prompts, np.int64)
        self.dropped = np.zeros(prompts, np.int64)
        self.reasons = dict.fromkeys(REASONS, 0)
        self.epoch, self.draws = 0, 0
        self._used = np.zeros(prompts, bool)
        self._last_epoch = np.full(prompts, -1)  # the table was measured before the first
        self._step: int | None = None
        self._of_step = np.zeros(len(BUCKETS), np.int64)  # drawn in it, as they were then
        self._order: tuple[int, np.ndarray] | None = None

    # --- who may be drawn ---

    def in_band(self) -> Bool[np.ndarray, " P"]:
        """Pass rate within the band or unknown, or due to be looked at again."""
        if self._keep is None:
            return np.ones(len(self.drawn), bool)
        low, high = self._keep
        rates = self.rates.rates
        inside = np.isnan(rates) | ((rates >= low) & (rates <= high))
        if self._recheck:
            inside |= self.epoch - self._last_epoch >= self._recheck
        return inside

    def kept(self) -> Bool[np.ndarray, " P"]:
        """Within the band, and of a kind that has a quota."""
        return self.in_band() & (self._kinds >= 0)

    def buckets(self) -> Int[np.ndarray, " P"]:
        """0 easy, 1 medium, 2 hard; unmeasured prompts are medium."""
        rates = self.rates.rates
        hard, easy = self._bounds
        return np.where(rates > easy, _EASY, np.where(rates < hard, _HARD, _MEDIUM))

    # --- the draw ---

    def draw(
        self,
        count: int,
        mixture: tuple[int | float, int | float, int | float] | None,
        without: Iterable[int] = (),
        step: int | None = None,
    ) -> list[int]:
        """`count` different prompts that are not in `without`; `mixture` as in `mixture_at`.

        Draws with the same `step` are told together by `summary`; None is a step of its own.
        """
        taken = np.zeros(len(self.drawn), bool)
        taken[list(without)] = True
        assert int((~taken & (self._kinds >= 0)).sum()) >= count, "fewer prompts than are asked for"
        cells = self._cells(mixture)
        chosen, kept, shares, epoch = [], np.zeros(0), np.zeros(0), -1
        for point in self._points(count):
            if epoch != self.epoch:
                epoch, kept = self.epoch, self._enough(count - len(chosen), taken)
                shares = self._shares(kept, cells, mixture)
            index = self._take(kept & ~taken, cells, _cell_at(point, shares))
            self._used[index] = taken[index] = True
            self._last_epoch[index] = self.epoch
            self.drawn[index] += 1
            chosen.append(index)
        places = np.argsort(self._random(_PLACES, self.draws, count), kind="stable")
        self.draws += 1
        if step is None or step != self._step:
            self._of_step[:] = 0
        self._step = step
        self._of_step += np.bincount(self.buckets()[chosen], minlength=len(BUCKETS))
        return np.array(chosen, np.int64)[places].tolist()

    def _enough(self, needed: int, taken: np.ndarray) -> np.ndarray:
        """Those kept, or if they are too few also the prompts nearest to the band."""
        kept = self.kept()
        missing = needed - int((kept & ~taken).sum())
        if missing <= 0 or self._keep is None:
            return kept
        low, high = self._keep
        rates = self.rates.rates
        away = np.maximum(low - rates, rates - high)
        away[kept | taken | (self._kinds < 0)] = np.inf
        nearest = np.lexsort((self._ranks(), away))[:missing]
        kept[nearest[np.isfinite(away[nearest])]] = True
        return kept

    def _cells(self, mixture: Any) -> np.ndarray:
        """The cell of each prompt; without a mixture all are in the middle bucket."""
        buckets = self.buckets() if mixture is not None else np.full(len(self.drawn), _MEDIUM)
        return np.where(self._kinds < 0, -1, self._kinds * len(BUCKETS) + buckets)

    def _shares(self, kept: np.ndarray, cells: np.ndarray, mixture: Any) -> np.ndarray:
        """The share of each cell; what has no members gives its share to its neighbours."""
        members = np.bincount(cells[kept], minlength=len(self._quotas) * len(BUCKETS))
        members = members.reshape(-1, len(BUCKETS)).astype(np.float64)
        wanted = np.array(mixture if mixture is not None else (0.0, 1.0, 0.0))
        shares = np.where(members > 0, wanted, 0.0)
        # A kind whose wanted buckets are all empty gives what it has.
        shares = np.where(shares.sum(1, keepdims=True) > 0, shares, members)
        totals = shares.sum(1, keepdims=True)
        shares = shares / np.where(totals > 0, totals, 1.0) * self._quotas[:, None]
        return shares.ravel() / shares.sum()

    def _take(self, free: np.ndarray, cells: np.ndarray, cell: int) -> int:
        """A prompt of the cell; if all have been drawn, the epoch ends."""
        members = free & (cells == cell)
        if not members.any():  # the step has them all
            members = self._neighbours(free, cells, cell)
        if not (members & ~self._used).any():
            self._end_epoch()
        candidates = np.flatnonzero(members & ~self._used)
        first = np.lexsort((self._ranks()[candidates], self.drawn[candidates]))[0]
        return int(candidates[first])

    def _neighbours(self, free: np.ndarray, cells: np.ndarray, cell: int) -> np.ndarray:
        """Free prompts of the same kind and the nearest bucket, or else of any kind."""
        kind, bucket = divmod(cell, len(BUCKETS))
        for other in sorted(range(len(BUCKETS)), key=lambda b: abs(b - bucket)):
            members = free & (cells == kind * len(BUCKETS) + other)
            if members.any():
                return members
        return free

    def _end_epoch(self) -> None:
        left = ~self._used
        rates = self.rates.rates
        outside = left & ~self.in_band()
        self.dropped[left] += 1
        without_quota = left & (self._kinds < 0)
        outside &= ~without_quota
        too_hard = outside & (rates < (self._keep or (0.0, 1.0))[0])
        self.reasons["quota"] += int(without_quota.sum())
        self.reasons["too_hard"] += int(too_hard.sum())
        self.reasons["too_easy"] += int((outside & ~too_hard).sum())
        self.reasons["mixture"] += int((left & ~without_quota & ~outside).sum())
        self._used[:] = False
        self.epoch += 1

    # --- random numbers: Philox streams are the same in every version of NumPy ---

    def _random(self, purpose: int, number: int, count: int) -> np.ndarray:
        key = np.array([self._seed, number * 4 + purpose], np.uint64)
        return np.random.Philox(key=key).random_raw(count)

    def _points(self, count: int) -> np.ndarray:
        # Steps of the golden ratio spread over 0 … 1 faster than random ones: shares come out
        # right after few draws.
        first = float(self._random(_SHIFT, 0, 1)[0]) / 2.0**64
        return (np.arange(count) + (first + self.draws * _GOLDEN) % 1.0) / count

    def _ranks(self) -> np.ndarray:
        if self._order is None or self._order[0] != self.epoch:
            self._order = self.epoch, self._random(_ORDER, self.epoch, len(self.drawn))
        return self._order[1]

    # --- what is told and stored ---

    def summary(self) -> dict[str, float]:
        """Shares of the latest step's draws by the difficulty that each prompt had when it was
        drawn, and of prompts kept; what was dropped so far."""
        rates = self.rates.rates
        measured = self.rates.measured
        found = {"epoch": float(self.epoch), "kept": float(self.kept().mean())}
        found["measured"] = float(measured.mean())
        if measured.any():
            found["pass_rate"] = float(rates[measured].mean())
        if total := int(self._of_step.sum()):
            for name, count in zip(BUCKETS, self._of_step.tolist(), strict=True):
                found[f"drawn_{name}"] = count / total
        return found | {f"dropped_{name}": float(count) for name, count in self.reasons.items()}

    def get_state(self) -> dict[str, Any]:
        """Everything that the next draws depend on, as JSON values."""
        return {
            "passes": self.rates.passes.tolist(),
            "samples": self.rates.samples.tolist(),
            "drawn": self.drawn.tolist(),
            "dropped": self.dropped.tolist(),
            "used": np.flatnonzero(self._used).tolist(),
            "last_epoch": self._last_epoch.tolist(),
            "step": self._step,
            "of_step": self._of_step.tolist(),
            "reasons": dict(self.reasons),
            "epoch": self.epoch,
            "draws": self.draws,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where `get_state` was called."""
        self.rates.passes = np.array(state["passes"], np.float64)
        self.rates.samples = np.array(state["samples"], np.float64)
        self.drawn = np.array(state["drawn"], np.int64)
        self.dropped = np.array(state["dropped"], np.int64)
        self._used = np.zeros(len(self.drawn), bool)
        self._used[state["used"]] = True
        self._last_epoch = np.array(state["last_epoch"], np.int64)
        self._step = state["step"]
        self._of_step = np.array(state["of_step"], np.int64)
        self.reasons = {name: int(count) for name, count in state["reasons"].items()}
        self.epoch, self.draws = int(state["epoch"]), int(state["draws"])


def _cell_at(point: float, shares: np.ndarray) -> int:
    """The cell over which a point of [0, 1) lies."""
    ends = np.cumsum(shares)
    # The last end may round to below 1; a cell without a share is never hit.
    return int(min(np.searchsorted(ends, point, side="right"), np.flatnonzero(shares)[-1]))
