# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""One optimiser update from packed rows: gradients of micro-batches added up, for any loss.

A loss is a function ``(params, rows, counts, coefs, bounds) → (contribution, metrics)``. Counts are
taken over the whole optimiser batch first, so the contributions of its micro-batches add up to its
loss whatever the split; metrics are (sum, count) pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import struct

from jaxrl_llm.data.packing import PackedRows
from jaxrl_llm.errors import NonFinite
from jaxrl_llm.models.placement import FREE, Place
from jaxrl_llm.sharding.reshard import fetch
from jaxrl_llm.trainers.state import (
    StateFunctions,
    TrainState,
    add_gradients,
    make_state_functions,
    put,
    take_step,
    taken,
)


class Bounds(NamedTuple):
    """Static sizes of a step.

    Attributes:
        targets: at least the learnt tokens of any row.
        slots: sequences that a row can hold.
    """

    targets: int
    slots: int


Join = Callable[[Any, Any], Any]
"""(what is trained, what stays) → the parameters that a loss reads."""


def as_is(trained: Any, frozen: Any) -> Any:
    """Everything is trained: the join without adapters."""
    del frozen
    return trained


Loss = Callable[[Any, PackedRows, Mapping[str, Any], Mapping[str, Any], Bounds], tuple[Any, dict]]


class LearnFunctions(NamedTuple):
    """Compiled programs: `accumulate` is (gradients, trained, frozen, rows, counts, coefs,
    bounds) → (gradients, (loss, metrics)); `measure` the same without gradients."""

    state: StateFunctions
    accumulate: Callable
    measure: Callable


@struct.dataclass
class LearnState:
    """What a checkpoint holds: parameters and optimiser, and a reference that moves."""

    train: TrainState
    ref: Any | None = None


def make_learn_functions(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    join: Join = as_is,
    place: Place = FREE,
) -> LearnFunctions:
    """Compile-on-call functions for one loss and one optimiser, over a model at `place`."""

    def measure(trained, frozen, rows, counts, coefs, bounds):
        return loss(join(trained, frozen), rows, counts, coefs, bounds)

    def accumulate(grads, trained, frozen, rows, counts, coefs, bounds):
        return add_gradients(
            lambda trained: measure(trained, frozen, rows, counts, coefs, bounds),
            grads,
            trained,
            place,
        )

    return LearnFunctions(
        state=make_state_functions(optimizer, place),
        accumulate=place.jit(accumulate, static_argnums=6, donate_argnums=0),
        measure=place.jit(measure, static_argnums=5),
    )


@dataclasses.dataclass
class Learner:
    """Learns from packed rows; holds everything that learning changes.

    Attributes:
        functions: compiled programs.
        put: moves rows of numpy arrays onto the mesh.
        current: what is trained (parameters, or an adapter), optimiser state, and a reference that
            moves.
        learning_rate: the schedule, by updates done.
        micro_rows: rows whose gradient is computed at once.
        frozen: the parameters under an adapter, or None.
        place: where the model lives.
    """

    functions: LearnFunctions
    put: Callable[[PackedRows], PackedRows]
    current: LearnState
    learning_rate: Callable[[int], Any]
    micro_rows: int
    frozen: Any | None = None
    place: Place = FREE

    @property
    def params(self) -> Any:
        """What is trained."""
        return self.current.train.params

    @property
    def state(self) -> LearnState:
        """Everything of the models that a checkpoint holds, as it holds it."""
        current = self.current
        return LearnState(train=taken(current.train, self.place), ref=self.place.take(current.ref))

    @state.setter
    def state(self, state: LearnState) -> None:
        self.current = LearnState(train=put(state.train, self.place), ref=self.place.put(state.ref))

    def measure(
        self, rows: PackedRows, counts: Mapping[str, Any], coefs: Mapping[str, Any], bounds: Bounds
    ) -> tuple[Any, dict[str, Any]]:
        """Loss and metrics of a micro-batch, without gradients."""
        return self.functions.measure(
            self.params, self.frozen, self.put(rows), counts, coefs, bounds
        )

    def update(
        self,
        rows: PackedRows,
        counts: Mapping[str, Any],
        coefs: Mapping[str, Any],
        bounds: Bounds,
        step: int,
    ) -> dict[str, float]:
        """One optimiser step; returns its metrics.

        Raises:
            NonFinite: a loss, a gradient or the parameters; nothing of this is saved.
        """
        functions, params = self.functions, self.params
        state, metrics = take_step(
            functions.state,
            self.current.train,
            micro_rows(rows, self.micro_rows),
            lambda grads, micro: functions.accumulate(
                grads, params, self.frozen, self.put(micro), counts, coefs, bounds
            ),
            step=step,
        )
        self.current = self.current.replace(train=state)
        metrics["learning_rate"] = float(self.learning_rate(int(state.updates) - 1))
        if not np.isfinite(float(functions.state.norm(state.params))):
            raise NonFinite(
                f"the parameters are not finite after step {step + 1}",
                hint="a lower learning rate",
            )
        return metrics


def micro_rows(rows: PackedRows, size: int) -> Iterator[PackedRows]:
    """The rows in consecutive pieces of `size`; the last one is filled up with empty rows."""
    total = rows.tokens.shape[0]
    for start in range(0, total, size):
        yield jax.tree.map(lambda x, start=start: _filled(x[start : start + size], size), rows)


def _filled(array: np.ndarray, size: int) -> np.ndarray:
    missing = size - array.shape[0]
    if not missing:
        return array
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])


def map_rows(
    function: Callable[[PackedRows], Any],
    rows: PackedRows,
    size: int,
    put: Callable[[PackedRows], PackedRows],
) -> Any:
    """`function` of the rows, a piece at a time, its arrays joined again on the host."""
    parts = [fetch(function(put(micro))) for micro in micro_rows(rows, size)]
    total = rows.tokens.shape[0]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[:total], *parts)
