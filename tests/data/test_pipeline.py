# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import collections
import json

import pytest

from jaxrl_llm.data.pipeline import PromptStream, check_lengths, make_prompt
from jaxrl_llm.errors import DataError
from jaxrl_llm.types import Prompt


def _source(length):
    return [{"id": f"r{i}", "prompt": "p" * (i + 1), "answer": i, "x": [i]} for i in range(length)]


def _encode(prompt):
    return list(prompt.encode()), f"<{prompt}>"


def _stream(length, batch, seed=0, **options):
    return PromptStream(_source(length), _encode, seed=seed, batch=batch, **options)


def _ids(stream, steps):
    return [[prompt.id for prompt in stream.next()] for _ in range(steps)]


def test_prompt_carries_tokens_text_answer_and_columns():
    assert make_prompt({"id": "a", "prompt": "pq", "answer": 3, "x": 1, "y": 2}, _encode) == Prompt(
        "a", (112, 113), "<pq>", 3, {"x": 1, "y": 2}
    )


@pytest.mark.parametrize(
    ("length", "batch"), [(120, 40), (70, 30), (70, 50), (70, 70), (50, 40), (71, 70), (3, 2)]
)
def test_every_epoch_serves_every_prompt_once_and_no_step_a_prompt_twice(length, batch):
    steps = _ids(_stream(length, batch), 9)
    assert all(len(step) == len(set(step)) == batch for step in steps)
    flat = [name for step in steps for name in step]
    for begin in range(0, len(flat) - length + 1, length):
        assert sorted(flat[begin : begin + length]) == sorted(f"r{i}" for i in range(length))


def test_order_depends_on_seed_and_epoch():
    first, second = (_ids(_stream(50, 10), 10) for _ in range(2))
    assert first == second
    assert _ids(_stream(50, 10, seed=1), 10) != first
    assert first[:5] != first[5:] and first[:5] != [[f"r{i}" for i in range(50)]]
    # Neighbouring seeds must not serve each other's epochs.
    assert _ids(_stream(50, 10, seed=1), 5) != first[5:]
    assert _ids(_stream(6, 3, shuffle=False), 3) == [
        ["r0", "r1", "r2"],
        ["r3", "r4", "r5"],
        ["r0", "r1", "r2"],
    ]


@pytest.mark.parametrize(("length", "batch"), [(120, 40), (71, 30), (70, 50), (50, 40)])
def test_restored_anywhere_continues_exactly(length, batch):
    straight = _ids(_stream(length, batch, seed=3), 8)
    put_off = 0
    for stop in range(8):
        stream = _stream(length, batch, seed=3)
        _ids(stream, stop)
        state = json.loads(json.dumps(stream.get_state()))
        put_off += len(state["put_off"])
        _ids(stream, 2)  # a state is a value: going on does not change it
        restored = _stream(length, batch, seed=3)
        restored.set_state(state)
        assert _ids(restored, 8 - stop) == straight[stop:]
        stream.set_state(state)
        assert _ids(stream, 8 - stop) == straight[stop:]
    assert (put_off > 0) == (length % batch != 0)


def test_a_state_of_other_prompts_is_refused():
    state = _stream(7, 3).get_state()
    for other in (_stream(8, 3), _stream(7, 3, seed=1), _stream(7, 3, shuffle=False)):
        with pytest.raises(DataError, match="not those of the checkpoint"):
            other.set_state(state)
    renamed = [{**record, "id": record["id"] + "x"} for record in _source(7)]
    with pytest.raises(DataError, match="ids="):
        PromptStream(renamed, _encode, seed=0, batch=3).set_state(state)


def test_batches_that_cannot_be_served():
    for length, batch in ((3, 4), (0, 1), (3, 0), (3, -1)):
        with pytest.raises(DataError, match="a step takes"):
            _stream(length, batch)


def test_lengths():
    prompts = [Prompt("a", (1, 2), ""), Prompt("b", (1, 2, 3), "")]
    check_lengths(prompts, 3, 7, 10)
    check_lengths(prompts, None, 7, 10)
    for options, message in (
        ((2, 7, 10), "prompt b is too long · got 3 tokens"),
        ((None, 8, 10), r"prompt b and its completion .* got 3 \+ 8 tokens"),
        ((None, 10, 10), "no room"),
    ):
        with pytest.raises(DataError, match=message):
            check_lengths(prompts, *options)
    with pytest.raises(DataError, match="prompt c has no tokens"):
        check_lengths([Prompt("c", (), "")], None, 1, 10)


def test_prompts_that_a_step_holds_wait_for_one_turn_however_often_it_asks():
    stream = _stream(8, 7)
    served = collections.Counter()
    for step in range(40):
        held = {prompt.id for prompt in stream.next()}
        assert len(held) == 7
        served.update(held)
        for _ in range(5):  # the one that is left is dropped again and again
            (more,) = stream.next(1, without=held)
            assert more.id not in held
        waiting = stream.get_state()["put_off"]
        assert len(waiting) == len(set(waiting)) <= 8, step
    # Those that waited come first: none is left out for long.
    assert min(served.values()) >= 30


def test_a_refill_of_few_prompts_loses_no_turn():
    stream = _stream(30, 6)
    turns = collections.Counter()
    for _ in range(50):
        held = [prompt.id for prompt in stream.next()]
        more = [prompt.id for prompt in stream.next(3, without=held)]
        turns.update(held + more)
    assert sum(turns.values()) == 450 and set(turns.values()) == {15}
