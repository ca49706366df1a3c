# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Stored rollouts come back equal in every bit; files that are cut or hostile are one line."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from jaxrl_llm.data.rollout_store import RolloutStore, read_rollouts, read_run, write_rollouts
from jaxrl_llm.errors import DataError, RunDirectoryError
from jaxrl_llm.types import Prompt, Reward, Rollout

PROMPTS = [
    Prompt("a", (5, 0, 96), "1+1=\n\ud800é", "2", {"set": "x", "n": 3}),
    Prompt("b", (7,), "", None),
    Prompt(
        "c", (1, 2), "list",
        (1, [2.5, (3,)], {"$tuple": [1]}, {1: "one", (2,): None}, True, 10**30),
        {"$odd": 1e-320, "empty": {}, "inf": float("inf"), "unit": ()},
    ),
]  # fmt: skip


def rollout(prompt: Prompt, sample: int, length: int, reward: Reward | None, end="stop"):
    draws = np.random.default_rng(length)
    return Rollout(
        prompt=prompt,
        sample=sample,
        tokens=draws.integers(0, 97, length).astype(np.int32),
        logp_sampler=-(draws.random(length).astype(np.float32) ** 9) * np.float32(1e3),
        mask=draws.random(length) < 0.7,
        weights_version=draws.integers(0, 9, length).astype(np.int32),
        finish_reason=end,
        completion=f"text {length}\x00\u2028",
        reward=reward,
    )


def sample_rollouts():
    third = Reward(1 / 3, {"right": 0.1 + 0.2, "whole": 1}, {"note": ("a", [1]), "time": 0.25})
    return [
        rollout(PROMPTS[0], 0, 5, third),
        rollout(PROMPTS[0], 1, 1, None, end="length"),
        rollout(PROMPTS[1], 0, 0, Reward(-5e-324)),
        rollout(PROMPTS[2], 3, 40, Reward(2.0, {"x": float("nan")})),
    ]


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype and x.tobytes() == y.tobytes()
            else:  # repr tells 1 from 1.0 and True, a list from a tuple, NaN equals NaN
                assert repr(x) == repr(y)


def test_round_trip_is_exact(tmp_path):
    store, rollouts = RolloutStore(tmp_path / "new" / "rollouts"), sample_rollouts()
    assert store.steps() == []
    path = store.write(12, rollouts)
    store.write(3, [])
    assert store.steps() == [3, 12] and store.read(3) == []
    back = store.read(12, vocab_size=97)
    assert_same(rollouts, back)
    assert back[0].prompt is back[1].prompt
    back[0].tokens[0] += 1  # arrays are the reader's own
    assert_same(rollouts, store.read(12))
    store.write(12, back[:2])  # over the old one, and again and again the same
    first = path.read_bytes()
    store.write(12, store.read(12))
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".part"] == []


def test_a_run_writes_over_its_own_steps_and_no_other_ones(tmp_path):
    own, other = RolloutStore(tmp_path, {"seed": 1}), RolloutStore(tmp_path, {"seed": 7})
    for step in (1, 2, 3):
        own.write(step, sample_rollouts())
    own.check_own()
    own.write(2, sample_rollouts()[:1])  # as a resumed run does, with later steps there
    assert read_run(own.path(2)) == {"seed": 1}
    for foreign in (other, RolloutStore(tmp_path)):
        with pytest.raises(DataError, match="holds rollouts of another run · got step-00000001"):
            foreign.check_own()
        with pytest.raises(DataError, match="holds rollouts of another run · got step-00000002"):
            foreign.write(2, sample_rollouts())
    assert len(own.read(2)) == 1
    _write(tmp_path / "x", metadata={"format": "jaxrl_llm rollouts 1", "run": "[" * 100_000})
    with pytest.raises(DataError, match="does not hold rollouts"):
        read_run(tmp_path / "x")


def test_what_json_can_not_hold_is_refused_by_name(tmp_path):
    for prompt, message in (
        (Prompt("q", (1,), "", {1, 2}), "the answer of prompt q can't be stored · got a set"),
        (Prompt("q", (1,), "", 1, {"x": [b"1"]}), "the column x of prompt q .* got a bytes"),
        (Prompt("q", (1,), "", np.float32(1)), "got a float32"),
    ):
        with pytest.raises(DataError, match=message):
            write_rollouts(tmp_path / "x", [rollout(prompt, 0, 3, None)])
    assert not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="can't write"):
        RolloutStore(tmp_path / "file").write(1, [])


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path):
    path = RolloutStore(tmp_path).write(1, sample_rollouts())
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 9, *range(50, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="does not hold rollouts") as caught:
            read_rollouts(path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    with pytest.raises(DataError, match="no such file"):
        read_rollouts(tmp_path / "none")


def test_damaged_bytes_never_give_anything_but_rollouts_or_one_line(tmp_path):
    path = RolloutStore(tmp_path).write(1, sample_rollouts())
    whole = path.read_bytes()
    draws = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for place in draws.integers(0, len(whole), 3):
            damaged[place] = draws.integers(0, 256)
        path.write_bytes(damaged)
        try:
            for found in read_rollouts(path):
                assert isinstance(found, Rollout) and len(found.tokens) == len(found.mask)
        except DataError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 100


def _write(path, change_arrays=None, change_table=None, metadata=None):
    """The good file with something changed."""
    write_rollouts(path, sample_rollouts())
    arrays = load_file(path)
    table = json.loads(arrays["table"].tobytes())
    if change_table:
        table = change_table(table) or table
    arrays["table"] = np.frombuffer(json.dumps(table).encode(), np.uint8)
    if change_arrays:
        change_arrays(arrays)
    path.write_bytes(save(arrays, metadata or {"format": "jaxrl_llm rollouts 1"}))


def _set(*keys, value):
    def change(tree):
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("lengths", value=np.array([1, 2, 3, 41])), "differ"),
        (_set("lengths", value=np.array([-1, 5, 2, 40])), "differ"),
        (_set("lengths", value=np.array([2**62, 2**62, 2**62, 2**62 + 46])), "differ"),
        (_set("lengths", value=np.array([46])), "rollouts and lengths differ"),
        (_set("lengths", value=np.array([5, 1, 0, 40], np.int32)), "lengths is int32"),
        (_set("tokens", value=np.zeros((46, 1), np.int32)), r"tokens is int32\(46, 1\)"),
        (_set("tokens", value=np.full(46, 97, np.int32)), "token 97, but .* 97"),
        (_set("tokens", value=np.full(46, -1, np.int32)), "negative id"),
        (_set("logp_sampler", value=np.full(46, np.nan, np.float32)), "NaN"),
        (_set("mask", value=np.full(46, 2, np.uint8).view(bool)), "mask has other values"),
        (_set("more", value=np.zeros(1)), "other arrays"),
        (lambda arrays: arrays.pop("mask"), "other arrays"),
    ],
)
def test_arrays_that_contradict_each_other(tmp_path, change, message):
    _write(tmp_path / "x", change_arrays=change)
    with pytest.raises(DataError, match=message):
        read_rollouts(tmp_path / "x", vocab_size=97)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("rollouts", 0, "prompt", value=3), "no prompt 3"),
        (_set("rollouts", 0, "prompt", value=-1), "no prompt -1"),
        (_set("rollouts", 0, "prompt", value=True), "no prompt True"),
        (_set("rollouts", 0, "sample", value=1.5), "no sample"),
        (_set("rollouts", 0, "end", value="abort"), "unknown end"),
        (_set("rollouts", 0, "completion", value=None), "no text"),
        (_set("rollouts", 0, "reward", "value", value="1"), "a reward is no number"),
        (_set("rollouts", 0, "reward", "value", value=float("inf")), "a reward is inf"),
        (_set("rollouts", 0, "reward", "value", value=10**400), "OverflowError"),
        (_set("rollouts", 0, "reward", value=[]), "TypeError"),
        (_set("rollouts", 0, value=None), "TypeError"),
        (_set("rollouts", value=[]), "rollouts and lengths differ"),
        (_set("prompts", 0, "id", value=5), "a prompt is no text"),
        (_set("prompts", 0, "columns", value=[]), "AttributeError"),
        (_set("prompts", 0, "answer", value={"$dict": [[[], 1]]}), "TypeError"),
        (_set("prompts", value={}), "prompts and lengths differ"),
        (lambda table: [table], "TypeError"),
    ],
)
def test_tables_of_another_shape(tmp_path, change, message):
    _write(tmp_path / "x", change_table=change)
    with pytest.raises(DataError, match=message) as caught:
        read_rollouts(tmp_path / "x")
    assert "\n" not in str(caught.value)


def test_deep_nesting_and_other_kinds_of_files(tmp_path):
    deep = np.frombuffer(b"[" * 100_000, np.uint8)
    _write(tmp_path / "x", change_arrays=_set("table", value=deep))
    with pytest.raises(DataError, match=r"RecursionError|JSONDecodeError"):
        read_rollouts(tmp_path / "x")
    _write(tmp_path / "x", metadata={"format": "pt"})
    with pytest.raises(DataError, match="another kind of file"):
        read_rollouts(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"\x80\x04\x95" + b"\0" * 100)
    with pytest.raises(DataError, match="does not hold rollouts"):
        read_rollouts(tmp_path / "x")
    _write(tmp_path / "x")  # and the helper itself writes a good one
    assert len(read_rollouts(tmp_path / "x")) == 4
