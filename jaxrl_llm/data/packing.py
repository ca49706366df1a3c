# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Units of tokens to rows of a batch, in few shapes, and the endless order in which they come.

A packed row holds several units; segment ids and positions keep their sequences apart, so each is
computed as if it stood alone. `PackedStream` packs without end (Grain's best fit), for language
modelling; `pack_step` packs the units of one step, where a step must have so many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import struct

from jaxrl_llm.data.encode import NO_LABEL, Unit
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.models.attention import keys_read
from jaxrl_llm.types import Reach

Leaf = Any  # numpy or jax arrays
_WORTH = 0.8  # of the keys: for less another program is not compiled


@struct.dataclass
class PackedRows:
    """Rows of tokens; what is None is not used.

    Attributes:
        tokens, positions, segment_ids: as in `types.Batch`. The parts of a row's units have the
            segments 1, 2, … in order; slot s of an array [N, S] speaks of segment s + 1.
        mask: tokens that are learnt, or read.
        labels: 0 or 1 at step marks.
        values: the units' numbers, by slot.
        ref: log-probability of each part under the reference policy, by slot.
        ref_tokens: the same for each token.
        reach: as in `types.Batch`.
    """

    tokens: Leaf  # int [N, T]
    positions: Leaf  # int [N, T]
    segment_ids: Leaf  # int [N, T]
    mask: Leaf  # bool [N, T]
    labels: Leaf | None = None  # int [N, T]
    values: Leaf | None = None  # float [N, S]
    ref: Leaf | None = None  # float [N, S]
    ref_tokens: Leaf | None = None  # float [N, T]
    reach: Reach | None = struct.field(pytree_node=False, default=None)


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Which items share a row of `size`: longest first, each where it leaves the least room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [r for r in range(len(rows)) if room[r] >= lengths[item]]
        if fitting:
            row = min(fitting, key=lambda r: (room[r], r))
        else:
            row = len(rows)
            rows.append([])
            room.append(size)
        rows[row].append(item)
        room[row] -= lengths[item]
    return rows


def pack_step(
    units: Sequence[Unit], *, row_tokens: int, packed: bool, multiple: int
) -> tuple[PackedRows, list[list[int]]]:
    """The units of a step as rows, and which of them each row holds.

    Args:
        row_tokens: longest row; a single longer unit makes an error.
        packed: several units in a row; else one.
        multiple: empty rows are added until their number is a multiple of this.
    """
    lengths = [unit.length for unit in units]
    if max(lengths) > row_tokens:
        raise DataError(
            "an example does not fit a row",
            got=f"{max(lengths)} tokens",
            expected=f"at most {row_tokens}",
            hint="a larger row_tokens, or a smaller max_length",
        )
    places = best_fit(lengths, row_tokens) if packed else [[i] for i in range(len(units))]
    width = row_tokens if packed else round_up(max(lengths), row_tokens)
    slots = _power_of_two(max(sum(len(units[i].parts) for i in row) for row in places))
    places += [[] for _ in range(-len(places) % multiple)]
    return lay_out([[units[i] for i in row] for row in places], width, slots), places


def lay_out(rows: Sequence[Sequence[Unit]], width: int, slots: int) -> PackedRows:
    """Units side by side in rows of `width` tokens and `slots` sequences."""
    shape = (len(rows), width)
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    mask, labels = np.zeros(shape, bool), np.full(shape, NO_LABEL, np.int32)
    values = np.zeros((len(rows), slots), np.float32)
    labelled = False
    for n, units in enumerate(rows):
        place = slot = 0
        for unit in units:
            numbers = unit.values or (0.0,) * len(unit.parts)
            for part, number in zip(unit.parts, numbers, strict=True):
                at = slice(place, place + len(part.tokens))
                tokens[n, at], mask[n, at] = part.tokens, part.mask
                positions[n, at] = np.arange(len(part.tokens))
                segments[n, at] = slot + 1
                if part.labels is not None:
                    labels[n, at], labelled = part.labels, True
                values[n, slot] = number
                place, slot = at.stop, slot + 1
    return PackedRows(
        tokens,
        positions,
        segments,
        mask,
        labels=labels if labelled else None,
        values=values,
        reach=segments_reach(segments),
    )


def round_up(length: int, most: int, least: int = 32) -> int:
    """The next of least · (1, 1.5, 2, 3, 4, 6, …), at most `most`: two sizes for each doubling.

    A new shape is compiled for seconds to minutes, padding costs a sixth on average.
    """
    size = least
    while size < length:
        half = size + size // 2
        size = half if size < length <= half else 2 * size
    return min(size, most)


def row_reach(segment: int, prefix: int, width: int) -> Reach | None:
    """Bounds on segments and shared prompts of rows of `width`, rounded up to few values (each is
    compiled); None where attention would look over hardly fewer keys."""
    rounded = (_power_of_two(max(segment, 64)), prefix and _power_of_two(max(prefix, 32)))
    reach = Reach(*(min(size, width) for size in rounded))
    return reach if keys_read(width, reach) <= _WORTH * keys_read(width) else None


def segments_reach(segment_ids: np.ndarray) -> Reach | None:
    """`row_reach` of rows without shared prompts."""
    rows = np.arange(segment_ids.shape[0])[:, None]
    sizes = np.zeros((segment_ids.shape[0], int(segment_ids.max(initial=0)) + 1), np.int64)
    np.add.at(sizes, (rows, segment_ids), 1)
    return row_reach(int(sizes[:, 1:].max(initial=0)), 0, segment_ids.shape[1])


def target_bound(mask: np.ndarray) -> int:
    """A static bound on the learnt tokens of a row: a quarter, half, three quarters, or all."""
    width = mask.shape[1]
    most = max(1, int(mask.sum(axis=1).max(initial=0)))
    return min(width, -(-most * 4 // width) * -(-width // 4))


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


# ── order ─────────────────────────────────────────────────────────────────────────────────────────


class UnitStream:
    """Serves units for ever: each table in an order of its own that is new every epoch.

    Args:
        tables: the units of each table.
        weights: how often each table is drawn from.
        seed: of the orders.
        heldout: units that are not served, but that a run which goes on must find unchanged.

    Raises:
        ConfigError: a table is empty.
    """

    def __init__(
        self,
        tables: Sequence[Sequence[Unit]],
        weights: Sequence[float],
        *,
        seed: int,
        heldout: Sequence[Unit] = (),
    ):
        if not tables or not all(tables):
            raise ConfigError("a table has no example that fits", hint="a larger max_length")
        self.units = [unit for table in tables for unit in table]
        self._identity = {
            "seed": int(seed),
            "units": _fingerprint(self.units),
            "heldout": _fingerprint(heldout),
        }
        self._weights = list(weights)
        self._sizes = [len(table) for table in tables]
        self._iterator = self._start(seed)

    def _start(self, seed: int) -> Any:
        return iter(self._order(seed).to_iter_dataset(_read_options()))

    def _order(self, seed: int) -> Any:
        import grain

        orders, first = [], 0
        for number, size in enumerate(self._sizes):
            order = grain.MapDataset.range(first, first + size).seed(int(seed) + number)
            orders.append(order.shuffle().repeat())
            first += size
        total = sum(self._weights)
        shares = [weight / total for weight in self._weights]
        return grain.MapDataset.mix(orders, shares) if len(orders) > 1 else orders[0]

    def next(self, count: int) -> list[Unit]:
        """The next `count` units."""
        return [self.units[int(next(self._iterator))] for _ in range(count)]

    def get_state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON values."""
        return {"order": _plain(self._iterator.get_state()), "source": dict(self._identity)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where `get_state` was called.

        Raises:
            DataError: the state belongs to another seed or to other data, held out or not.
        """
        # Earlier versions did not note what was held out.
        if {"heldout": self._identity["heldout"], **state["source"]} != self._identity:
            raise DataError(
                "the data are not those of the checkpoint",
                got=self._identity,
                expected=dict(state["source"]),
                hint="restore the data, or start afresh with --fresh",
            )
        self._iterator.set_state(state["order"])


class PackedStream(UnitStream):
    """Serves full rows of `row_tokens` without end, packed by Grain's best fit.

    Args:
        bins: rows that are filled at the same time; more of them leave less padding.
    """

    def __init__(
        self,
        tables: Sequence[Sequence[Unit]],
        weights: Sequence[float],
        *,
        seed: int,
        row_tokens: int,
        bins: int,
        heldout: Sequence[Unit] = (),
    ):
        self._row_tokens, self._bins = row_tokens, bins
        super().__init__(tables, weights, seed=seed, heldout=heldout)

    def _start(self, seed: int) -> Any:
        from grain.experimental import BestFitPackIterDataset

        def features(index: Any) -> dict[str, np.ndarray]:
            (part,) = self.units[int(index)].parts
            return {"tokens": part.tokens, "mask": part.mask.astype(np.int8)}

        order = self._order(seed).map(features).to_iter_dataset(_read_options())
        return iter(
            BestFitPackIterDataset(
                order,
                length_struct={"tokens": self._row_tokens, "mask": self._row_tokens},
                num_packing_bins=self._bins,
                seed=int(seed),
                shuffle_bins=True,
            )
        )

    def next_rows(self, count: int) -> PackedRows:
        """The next `count` rows."""
        rows = [next(self._iterator) for _ in range(count)]
        stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        segment_ids = stacked["tokens_segment_ids"].astype(np.int32)
        return PackedRows(
            tokens=stacked["tokens"],
            positions=stacked["tokens_positions"].astype(np.int32),
            segment_ids=segment_ids,
            mask=stacked["mask"].astype(bool),
            reach=segments_reach(segment_ids),
        )


def in_batches(units: Sequence[Unit], size: int) -> Iterator[Sequence[Unit]]:
    """Consecutive groups of at most `size` units."""
    for start in range(0, len(units), size):
        yield units[start : start + size]


def _read_options() -> Any:
    import grain

    # Tokens are in memory: without read-ahead threads nothing is drawn before it is asked for.
    return grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def _plain(state: Any) -> Any:
    """The state with Python's own numbers, as JSON wants them."""
    if isinstance(state, Mapping):
        return {str(key): _plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_plain(value) for value in state]
    return state.item() if isinstance(state, np.generic) else state


def _fingerprint(units: Sequence[Unit]) -> str:
    digest = hashlib.sha256()
    for unit in units:
        digest.update(np.array(unit.values, np.float64).tobytes() + b"=")
        for part in unit.parts:
            digest.update(part.tokens.tobytes() + np.packbits(part.mask).tobytes() + b"|")
            digest.update(b"" if part.labels is None else part.labels.tobytes())
    return digest.hexdigest()[:16]
