# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Units in rows: nothing lost, few shapes, the same order after a restart in mid-pack."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl_llm.data.encode import Part, Unit
from jaxrl_llm.data.packing import (
    PackedStream,
    UnitStream,
    best_fit,
    lay_out,
    pack_step,
    round_up,
    target_bound,
)
from jaxrl_llm.errors import ConfigError, DataError


def units(lengths, first=0, parts=1):
    made = []
    for index, length in enumerate(lengths):
        tokens = np.full(length, first + index, np.int32)
        mask = np.arange(length) >= length // 2
        made.append(Unit((Part(tokens, mask),) * parts, (0.5,) * parts, first + index))
    return made


def sequences(rows):
    """(tokens, mask) of every segment of every row, positions checked."""
    found = []
    for n in range(rows.tokens.shape[0]):
        for segment in range(1, rows.segment_ids[n].max(initial=0) + 1):
            at = rows.segment_ids[n] == segment
            assert (rows.positions[n][at] == np.arange(at.sum())).all()
            assert (np.diff(np.flatnonzero(at)) == 1).all()
            found.append((tuple(rows.tokens[n][at]), tuple(rows.mask[n][at])))
    assert not rows.mask[rows.segment_ids == 0].any()
    return found


def test_best_fit_by_hand():
    # 7 and 3 fill a row of 10; 6 and 4 another; 5 begins a third.
    assert best_fit([3, 7, 6, 5, 4], 10) == [[1, 0], [2, 4], [3]]


def test_a_step_holds_each_unit_once_and_only_whole_rows():
    made = units([5, 9, 3, 3, 8, 1], parts=2)
    rows, places = pack_step(made, row_tokens=20, packed=True, multiple=4)
    assert rows.tokens.shape == (4, 20)
    assert sorted(i for row in places for i in row) == list(range(6))
    expected = sorted((tuple(p.tokens), tuple(p.mask)) for u in made for p in u.parts)
    assert sorted(sequences(rows)) == expected
    for row, held in zip(rows.values, places, strict=True):
        assert (row != 0).sum() == 2 * len(held)
    alone, _ = pack_step(made, row_tokens=64, packed=False, multiple=1)
    assert alone.tokens.shape == (6, 32) and sorted(sequences(alone)) == expected
    with pytest.raises(DataError, match="does not fit"):
        pack_step(made, row_tokens=17, packed=True, multiple=1)


def test_row_sizes_are_few():
    assert [round_up(n, 500) for n in (1, 33, 49, 65, 97, 129, 385, 499)] == [
        32, 48, 64, 96, 128, 192, 500, 500,
    ]  # fmt: skip
    mask = np.zeros((2, 40), bool)
    mask[0, :11] = True
    assert target_bound(mask) == 20
    mask[:] = True
    assert target_bound(mask) == 40 and target_bound(np.zeros((1, 40), bool)) == 10


def test_packed_rows_lose_no_token_and_are_nearly_full():
    lengths = np.random.default_rng(0).integers(3, 40, 400).tolist()
    made = units(lengths)
    stream = PackedStream([made], [1.0], seed=3, row_tokens=64, bins=16)
    seen: dict[int, int] = {}
    used = total = 0
    for _ in range(20):
        rows = stream.next_rows(4)
        assert rows.tokens.shape == (4, 64) and rows.mask.dtype == bool
        for tokens, mask in sequences(rows):
            assert len(tokens) == lengths[tokens[0]] and sum(mask) == len(mask) - len(mask) // 2
            seen[tokens[0]] = seen.get(tokens[0], 0) + 1
        used, total = used + (rows.segment_ids > 0).sum(), total + rows.tokens.size
    assert used / total > 0.9
    # 80 rows hold less than an epoch: an example that came twice would have been drawn twice.
    assert max(seen.values()) == 1 and len(seen) > 200


@pytest.mark.parametrize("stop", [0, 1, 3, 7, 11])
def test_a_stream_continues_in_mid_pack(stop):
    made = units(np.random.default_rng(1).integers(3, 60, 50).tolist())
    more = units([4, 30, 17], first=50)

    def fresh():
        return PackedStream([made, more], [3.0, 1.0], seed=5, row_tokens=64, bins=8)

    straight = fresh()
    for _ in range(stop):
        straight.next_rows(3)
    state = json.loads(json.dumps(straight.get_state()))
    expected = [straight.next_rows(3) for _ in range(6)]
    resumed = fresh()
    resumed.next_rows(2)  # wherever it stood
    resumed.set_state(state)
    for rows in expected:
        again = resumed.next_rows(3)
        assert all((getattr(again, n) == getattr(rows, n)).all() for n in ("tokens", "mask"))


def test_tables_are_drawn_from_by_weight_and_each_example_once_an_epoch():
    stream = UnitStream([units([2] * 6), units([2] * 4, first=6)], [3.0, 1.0], seed=0)
    drawn = [unit.index for unit in stream.next(400)]
    assert abs(sum(i >= 6 for i in drawn) - 100) <= 2
    first = [i for i in drawn if i < 6]
    for start in range(0, 60, 6):
        assert sorted(first[start : start + 6]) == list(range(6))
    state = json.loads(json.dumps(stream.get_state()))
    expected = [unit.index for unit in stream.next(9)]
    stream.set_state(state)
    assert [unit.index for unit in stream.next(9)] == expected


def test_another_seed_or_other_data_are_refused():
    stream = UnitStream([units([2, 3])], [1.0], seed=0)
    judged = [dataclasses.replace(unit, values=(1.0,)) for unit in units([2, 3])]
    for other in (UnitStream([units([2, 3])], [1.0], seed=1),
                  UnitStream([units([2, 4])], [1.0], seed=0),
                  UnitStream([judged], [1.0], seed=0),
                  UnitStream([units([2, 3])], [1.0], seed=0, heldout=units([2]))):  # fmt: skip
        with pytest.raises(DataError, match="not those of the checkpoint"):
            other.set_state(stream.get_state())
    with pytest.raises(ConfigError, match="no example that fits"):
        UnitStream([[]], [1.0], seed=0)


@pytest.mark.parametrize("packed", [False, True])
def test_other_held_out_data_are_refused_unless_an_earlier_version_noted_none(packed):
    def stream(heldout):
        data, more = ([units([2, 3])], [1.0]), {"seed": 0, "heldout": heldout}
        return (
            PackedStream(*data, row_tokens=8, bins=2, **more)
            if packed
            else UnitStream(*data, **more)
        )

    state = stream(units([4])).get_state()
    stream(units([4])).set_state(state)
    with pytest.raises(DataError, match="not those of the checkpoint"):
        stream(units([5])).set_state(state)
    del state["source"]["heldout"]
    stream(units([5])).set_state(state)


def test_lay_out_by_hand():
    one = Unit((Part(np.array([7, 8], np.int32), np.array([False, True])),), (1.0,))
    rows = lay_out([[one, one], []], width=5, slots=2)
    assert rows.tokens.tolist() == [[7, 8, 7, 8, 0], [0] * 5]
    assert rows.segment_ids.tolist() == [[1, 1, 2, 2, 0], [0] * 5]
    assert rows.positions.tolist()[0][:4] == [0, 1, 0, 1]
    assert rows.values.tolist() == [[1.0, 1.0], [0.0, 0.0]] and rows.labels is None
