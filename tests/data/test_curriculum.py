# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts by pass rate: what is drawn is what the table predicts, each epoch is accounted for."""

from __future__ import annotations

import collections
import json

import numpy as np
import pytest

from jaxrl_llm.data.curriculum import CurriculumConfig, CurriculumStream, make_stream, mixture_at
from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.types import Prompt, Reward, Rollout


def source(length: int):
    return [
        {"id": f"r{i}", "prompt": "p" * (i % 7 + 1), "answer": i, "set": "abc"[i % 3]}
        for i in range(length)
    ]


def encode(prompt):
    return list(prompt.encode()), prompt


def make(length: int, batch: int, seed: int = 0, **settings) -> CurriculumStream:
    config = CurriculumConfig(enabled=True, **settings)
    stream = make_stream(source(length), encode, config, seed=seed, batch=batch)
    assert isinstance(stream, CurriculumStream)
    return stream


def write_table(path, rates, n=20):
    rows = [{"id": f"r{i}", "passes": round(rate * n), "n": n} for i, rate in enumerate(rates)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rollouts(prompt_id: str, values, parts=None):
    return [
        Rollout(
            prompt=Prompt(prompt_id, (1,), ""),
            sample=sample,
            tokens=np.zeros(1, np.int32),
            logp_sampler=np.zeros(1, np.float32),
            mask=np.ones(1, bool),
            weights_version=np.zeros(1, np.int32),
            finish_reason="stop",
            reward=None if value is None else Reward(float(value), parts or {}),
        )
        for sample, value in enumerate(values)
    ]


def visit(stream: CurriculumStream, rates, group: int = 20) -> None:
    """Samples of every prompt with these pass rates."""
    for index, rate in enumerate(rates):
        passes = round(rate * group)
        stream.update(rollouts(f"r{index}", [1.0] * passes + [0.0] * (group - passes)))


def indices(prompts) -> list[int]:
    return [int(prompt.id[1:]) for prompt in prompts]


def counts(stream, steps: int, length: int) -> np.ndarray:
    found = np.zeros(length, np.int64)
    for _ in range(steps):
        drawn = indices(stream.next())
        assert len(set(drawn)) == len(drawn)
        found[drawn] += 1
    return found


def check_epochs(stream: CurriculumStream) -> None:
    """Each prompt was drawn or dropped exactly once in every epoch that is over."""
    selection = stream.selection
    extra = selection.drawn + selection.dropped - selection.epoch
    assert np.isin(extra, (0, 1)).all(), extra
    assert sum(selection.reasons.values()) == selection.dropped.sum()


# --- off ------------------------------------------------------------------------------------------


def test_off_it_is_the_plain_stream():
    stream = make_stream(source(5), encode, CurriculumConfig(), seed=3, batch=2)
    plain = PromptStream(source(5), encode, seed=3, batch=2)
    assert isinstance(stream, PromptStream)
    assert [stream.next() for _ in range(7)] == [plain.next() for _ in range(7)]
    stream.update(rollouts("r0", [1.0]))
    assert stream.metrics() == {} and stream.get_state() == plain.get_state()


def test_the_plain_stream_leaves_out_what_the_step_has():
    for stop in range(4):
        stream = PromptStream(source(11), encode, seed=3, batch=4)
        flat = []
        for call in range(20):
            first = stream.next(count=3 + call % 2)
            more = stream.next(count=2, without=[prompt.id for prompt in first])
            drawn = indices([*first, *more])
            assert len(set(drawn)) == len(drawn) == 5 + call % 2
            flat += drawn
            if call % 4 == stop:
                state = json.loads(json.dumps(stream.get_state()))
                stream = PromptStream(source(11), encode, seed=3, batch=4)
                stream.set_state(state)
        times = np.bincount(flat, minlength=11)
        assert times.max() - times.min() <= 1


# --- the histogram of what is drawn ---------------------------------------------------------------


def test_the_histogram_of_draws_follows_the_pass_rates():
    """The issue's third proof: rates change, and the draws change as predicted."""
    length, rates = 60, np.full(60, 0.5)
    rates[:20] = 0.0
    rates[20:30] = 1.0
    stream = make(length, 6, recheck_epochs=0, decay=0.0)
    visit(stream, rates)
    # Predicted: the 30 prompts within the band, each equally often; the others never.
    found = counts(stream, 50, length)
    assert found[:30].sum() == 0 and (found[30:] == 10).all()
    # Those that never passed are learnt, the others are now always passed.
    rates = np.where(np.arange(length) < 20, 0.5, 1.0)
    visit(stream, rates)
    before = stream.selection.drawn.copy()
    found = counts(stream, 40, length)
    assert (found[:20] == 12).all() and found[20:].sum() == 0
    assert (stream.selection.drawn - before == found).all()
    check_epochs(stream)


def test_a_mixture_decides_how_many_of_each_difficulty_are_drawn(tmp_path):
    rates = [0.8] * 50 + [0.5] * 30 + [0.2] * 20 + [1.0] * 10 + [0.0] * 10
    table = write_table(tmp_path / "t.jsonl", rates)
    stream = make(120, 8, table=table, mixture=(1, 2, 1), recheck_epochs=0)
    for _ in range(30):
        drawn = np.array(indices(stream.next()))
        # 8 · (1/4, 1/2, 1/4) exactly, at every step
        shares = [(drawn < 50).sum(), ((drawn >= 50) & (drawn < 80)).sum(), (drawn >= 80).sum()]
        assert shares == [2, 4, 2] and drawn.max() < 100
    check_epochs(stream)
    # Half of the easy prompts become hard: the same share of hard draws, over 45 prompts.
    stream.selection.rates.decay = 0.0
    visit(stream, [0.2] * 25 + rates[25:])
    found = counts(stream, 100, 120)
    assert found[:25].sum() + found[80:100].sum() == 200
    assert found[25:50].sum() == 200 and found[50:80].sum() == 400 and found[100:].sum() == 0
    hard = np.concatenate([found[:25], found[80:100]])
    # Those that became hard had been drawn less often, and come first until they have caught up.
    total = np.concatenate([stream.selection.drawn[:25], stream.selection.drawn[80:100]])
    assert total.max() - total.min() <= 1 and hard.min() >= 3
    check_epochs(stream)


def test_uneven_shares_come_out_on_average(tmp_path):
    table = write_table(tmp_path / "t.jsonl", [0.8] * 40 + [0.5] * 40 + [0.2] * 40)
    for seed in range(2):
        stream = make(120, 5, seed=seed, table=table, mixture=(0.1, 0.33, 0.57))
        found = np.zeros(3)
        for _ in range(200):
            step = np.bincount(np.array(indices(stream.next())) // 40, minlength=3)
            assert (np.abs(step - 5 * np.array([0.1, 0.33, 0.57])) < 1).all()
            found += step
        assert np.abs(found / 1000 - [0.1, 0.33, 0.57]).max() < 0.003


def test_schedules():
    linear = CurriculumConfig(
        enabled=True, mixture=(8, 2, 0), mixture_end=(0.0, 0.2, 0.8), schedule="linear",
        schedule_steps=100,
    )  # fmt: skip
    for step, expected in (
        (0, (0.8, 0.2, 0.0)), (25, (0.6, 0.2, 0.2)), (50, (0.4, 0.2, 0.4)), (100, (0.0, 0.2, 0.8)),
        (1000, (0.0, 0.2, 0.8)),
    ):  # fmt: skip
        assert mixture_at(linear, step) == pytest.approx(expected)
    root = CurriculumConfig(**{**vars(linear), "schedule": "root"})
    assert mixture_at(root, 25) == pytest.approx((0.4, 0.2, 0.4))  # √¼ of the way
    assert mixture_at(CurriculumConfig(enabled=True), 5) is None


def test_from_easy_to_hard_over_the_steps(tmp_path):
    table = write_table(tmp_path / "t.jsonl", [0.8] * 100 + [0.2] * 100)
    settings = {
        "table": table, "mixture": (1, 0, 0), "mixture_end": (0, 0, 1), "schedule": "linear",
        "schedule_steps": 10,
    }  # fmt: skip
    stream = make(200, 10, **settings)
    hard = [sum(index >= 100 for index in indices(stream.next())) for _ in range(13)]
    assert hard == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10]
    stream = make(200, 10, **settings)  # a step may draw several times
    hard = [sum(i >= 100 for i in indices(stream.next(step=step))) for step in (0, 0, 0, 7, 7)]
    assert hard == [0, 0, 0, 7, 7]


def test_quotas_by_a_column(tmp_path):
    table = write_table(tmp_path / "t.jsonl", [0.8] * 60 + [0.2] * 60)
    stream = make(
        120, 10, table=table, quota_column="set", quotas=(("a", 0.7), ("c", 0.3)),
        mixture=(1, 0, 1),
    )  # fmt: skip
    found = collections.Counter()
    for _ in range(100):
        drawn = indices(stream.next())
        kinds = collections.Counter("abc"[index % 3] for index in drawn)
        assert kinds == {"a": 7, "c": 3}
        found.update(("abc"[index % 3], index >= 60) for index in drawn)
    assert abs(found["a", True] - 350) <= 5 and abs(found["c", True] - 150) <= 5
    assert (stream.selection.drawn[1::3] == 0).all() and stream.selection.reasons["quota"] > 0
    check_epochs(stream)


# --- what becomes of the others -------------------------------------------------------------------


@pytest.mark.parametrize("mixture", [None, (1, 1, 1), (0, 1, 3)])
@pytest.mark.parametrize(("length", "batch"), [(30, 7), (12, 11), (9, 9), (60, 3)])
def test_every_prompt_is_drawn_or_dropped_once_an_epoch(length, batch, mixture):
    """Ledger by hand: at each end of an epoch, drawn in it + dropped in it is 1 for every id."""
    draws = np.random.default_rng(length)
    stream = make(length, batch, mixture=mixture, recheck_epochs=3, decay=0.5)
    selection = stream.selection
    in_epoch = np.zeros(length, np.int64)
    ended = selection._end_epoch
    seen = []

    def end_epoch():
        dropped = selection.dropped.copy()
        ended()
        # What this step drew before the epoch ended counts too.
        in_epoch[:] = selection.drawn - drawn_before
        seen.append((in_epoch.copy(), selection.dropped - dropped))
        drawn_before[:] = selection.drawn

    drawn_before = selection.drawn.copy()
    selection._end_epoch = end_epoch
    for step in range(80):
        prompts = stream.next()
        assert len({prompt.id for prompt in prompts}) == batch
        for prompt in prompts:
            rate = draws.choice([0.0, 0.3, 0.6, 1.0], p=[0.3, 0.2, 0.2, 0.3])
            selection.rates.record(int(prompt.id[1:]), int(draws.binomial(8, rate)), 8)
        if step % 10 == 0:
            check_epochs(stream)
    assert len(seen) >= 3
    for drawn, dropped in seen:
        assert (drawn + dropped == 1).all()


def test_without_mixture_and_band_every_epoch_draws_every_prompt():
    stream = make(30, 4, keep=None, quota_column="set", quotas=(("a", 1), ("b", 1), ("c", 1)))
    counts(stream, 200, 30)
    assert np.ptp(stream.selection.drawn) <= 4
    stream = make(30, 4)  # nothing is measured: all are within the band
    found = counts(stream, 30, 30)
    assert (found == 4).all() and sum(stream.selection.reasons.values()) == 0


def test_a_prompt_outside_the_band_is_looked_at_again(tmp_path):
    table = write_table(tmp_path / "t.jsonl", [0.0] * 5 + [0.5] * 15 + [1.0] * 5)
    stream = make(25, 5, table=table, recheck_epochs=4)
    # Epochs 0, 1, 2 have 15 prompts; epoch 3 has all 25, the next such is four later.
    found = [counts(stream, 3, 25) for _ in range(3)]
    assert all((f[5:20] == 1).all() and f.sum() == 15 for f in found)
    assert (counts(stream, 5, 25) == 1).all()
    found = [counts(stream, 3, 25) for _ in range(3)]
    assert all((f[5:20] == 1).all() for f in found)
    assert (counts(stream, 5, 25) == 1).all()
    # One that passes now stays in.
    visit(stream, [0.5] + [0.0] * 4 + [0.5] * 15 + [1.0] * 5)
    assert counts(stream, 16, 25)[0] == 5
    assert stream.selection.reasons["too_hard"] > 0 < stream.selection.reasons["too_easy"]


def test_a_band_that_empties_is_filled_up_with_its_nearest(tmp_path):
    stream = make(20, 4, recheck_epochs=0)
    visit(stream, [1.0] * 10 + [0.95] * 2 + [0.0] * 8)
    drawn = {index for _ in range(30) for index in indices(stream.next())}
    # 0.95 lies 0.05 from the band; 0 and 1 both 0.1.
    assert {10, 11} <= drawn and all(len(set(indices(stream.next())) & {10, 11}) == 2 for _ in "ab")
    check_epochs(stream)


def test_more_prompts_for_the_same_step():
    stream = make(20, 6)
    for _ in range(30):
        first = stream.next()
        more = stream.next(count=9, without=[prompt.id for prompt in first])
        assert len({prompt.id for prompt in [*first, *more]}) == 15
    check_epochs(stream)


# --- exact resume ---------------------------------------------------------------------------------


def test_restored_at_any_draw_it_continues_exactly(tmp_path):
    table = write_table(tmp_path / "t.jsonl", [0.8] * 10 + [0.5] * 10 + [0.2] * 10 + [0.0] * 10)

    def fresh():
        return make(
            40, 6, seed=5, table=table, mixture=(3, 2, 1), mixture_end=(1, 2, 3),
            schedule="linear", schedule_steps=20, recheck_epochs=2,
        )  # fmt: skip

    def go(stream, first, last):
        """Rewards depend on the step and the prompt, as those of a policy would."""
        found = []
        for step in range(first, last):
            drawn = stream.next()
            draws = np.random.default_rng(step)
            for prompt in drawn:
                stream.update(rollouts(prompt.id, draws.random(2) < draws.random()))
            found.append((indices(drawn), stream.metrics()))
        return found

    straight_stream = fresh()
    straight = go(straight_stream, 0, 25)
    end = straight_stream.get_state()
    assert straight_stream.selection.epoch >= 3
    for stop in range(0, 25, 2):
        stream = fresh()
        go(stream, 0, stop)
        state = json.loads(json.dumps(stream.get_state(), allow_nan=False))
        go(stream, stop, stop + 2)  # a state is a value
        other = fresh()
        other.set_state(state)
        assert go(other, stop, 25) == straight[stop:]
        assert other.get_state() == end
    assert go(fresh(), 0, 5) != go(make(40, 6, seed=6, table=table, mixture=(3, 2, 1)), 0, 5)


def test_a_selection_is_a_function_of_seed_draw_and_table():
    first, second = make(50, 5), make(50, 5)
    for _ in range(7):
        first.next()
    assert [p.id for p in first.next()] != [p.id for p in second.next()]
    second.set_state(first.get_state())
    assert [p.id for p in first.next()] == [p.id for p in second.next()]
    # Philox streams are fixed: these are the same on every platform and version.
    assert indices(make(20, 9, seed=1).next()) == [7, 2, 3, 14, 5, 10, 16, 0, 9]


def test_a_state_of_other_prompts_is_refused():
    state = make(20, 4).get_state()
    for other in (make(21, 4), make(20, 4, seed=1)):
        with pytest.raises(DataError, match="not those of the checkpoint"):
            other.set_state(state)


# --- estimator and table --------------------------------------------------------------------------


def test_rates_by_hand():
    stream = make(4, 2, decay=0.5, pass_at=0.7)
    rates = stream.selection.rates
    stream.update([*rollouts("r0", [1.0, 0.7, 0.6, None]), *rollouts("r1", [None, None])])
    assert rates.rates[0] == 2 / 3 and np.isnan(rates.rates[1:]).all()
    stream.update(rollouts("r0", [0.0, 0.0]))
    assert rates.rates[0] == (0.5 * 2 + 0) / (0.5 * 3 + 2)
    stream.update(rollouts("r0", [None]))
    assert rates.rates[0] == 1 / 3.5 and rates.measured.tolist() == [True, False, False, False]
    stream = make(4, 2, pass_part="right")
    stream.update(rollouts("r2", [0.0, 0.0], {"right": 1.0}))
    assert stream.selection.rates.rates[2] == 1.0
    with pytest.raises(DataError, match=r"no part .* got right · expected wrong"):
        stream.update(rollouts("r2", [0.0], {"wrong": 1.0}))


def test_metrics_of_a_draw(tmp_path):
    table = write_table(tmp_path / "t.jsonl", [0.8] * 4 + [0.2] * 4 + [1.0] * 2)
    stream = make(12, 4, table=table, mixture=(1, 0, 1))
    stream.next()
    assert stream.metrics() == {
        "curriculum/epoch": 0.0,
        "curriculum/kept": pytest.approx(10 / 12),
        "curriculum/measured": pytest.approx(10 / 12),
        "curriculum/pass_rate": pytest.approx((4 * 0.8 + 4 * 0.2 + 2) / 10),
        "curriculum/drawn_easy": 0.5,
        "curriculum/drawn_medium": 0.0,
        "curriculum/drawn_hard": 0.5,
        "curriculum/dropped_too_easy": 0.0,
        "curriculum/dropped_too_hard": 0.0,
        "curriculum/dropped_quota": 0.0,
        "curriculum/dropped_mixture": 0.0,
    }


def test_metrics_tell_of_all_draws_of_a_step_as_the_prompts_were_then(tmp_path):
    table = write_table(tmp_path / "t.jsonl", [0.8] * 6 + [0.2] * 6)
    stream = make(12, 4, table=table, mixture=(1, 0, 1), keep=None)

    def told():
        return [stream.metrics()[f"curriculum/drawn_{name}"] for name in ("easy", "medium", "hard")]

    first = stream.next(step=0)
    more = stream.next(2, step=0, without=[prompt.id for prompt in first])
    assert told() == [0.5, 0.0, 0.5]
    for prompt in (*first, *more):  # what was easy is now hard, and what was hard easy
        stream.update(rollouts(prompt.id, [float(int(prompt.id[1:]) >= 6)] * 200))
    assert told() == [0.5, 0.0, 0.5]
    # A refill that took only hard ones tells of the whole step.
    stream.selection.draw(3, (1.0, 0.0, 0.0), step=1)
    stream.selection.draw(1, (0.0, 0.0, 1.0), step=1)
    assert told() == [0.75, 0.0, 0.25]
    state = json.loads(json.dumps(stream.get_state()))
    stream.next(step=2)
    stream.set_state(state)
    assert told() == [0.75, 0.0, 0.25]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "r0", "passes": 1', "line 1 of .* is no pass rate"),
        ('{"id": "r0", "passes": 3, "n": 2}', "is no pass rate"),
        ('{"id": "r0", "passes": 1.0, "n": 2}', "is no pass rate"),
        ('{"id": "r0", "passes": true, "n": 2}', "is no pass rate"),
        ('{"id": 4, "passes": 1, "n": 2}', "is no pass rate"),
        ("[" * 100_000, "is no pass rate"),
        (
            '{"id": "r0", "passes": 1, "n": 2}\n{"id": "r0", "passes": 1, "n": 2}',
            "repeats a prompt",
        ),
        ('{"id": "x0", "passes": 1, "n": 2}', "has no pass rate of any training prompt"),
        ("", "has no pass rate of any training prompt"),
    ],
)
def test_a_damaged_table_is_one_line(tmp_path, text, message):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        make(3, 2, table=str(path))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_table_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(DataError, match="can't read the pass rates"):
        make(3, 2, table=str(tmp_path / "none.jsonl"))
    (tmp_path / "t").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not text"):
        make(3, 2, table=str(tmp_path / "t"))


def test_too_few_prompts_within_the_band(tmp_path):
    table = write_table(tmp_path / "t.jsonl", [0.0, 0.5, 0.5, 1.0])
    with pytest.raises(DataError, match="got 3 a step, 2 of 4 prompts within band"):
        make(4, 3, table=table)
    with pytest.raises(DataError, match="no prompt has the value 'z'"):
        make(4, 2, quota_column="set", quotas=(("a", 1), ("z", 1)))
    with pytest.raises(DataError, match="prompt r0 has no column"):
        make(4, 2, quota_column="kind", quotas=(("a", 1),))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enabled": False, "decay": 0.4}, "decay has no effect without curriculum.enabled"),
        ({"mixture_end": (1, 1, 1)}, "mixture_end has no effect without curriculum.schedule"),
        ({"schedule_steps": 5}, "schedule_steps has no effect"),
        ({"hard_below": 0.3}, "hard_below has no effect without curriculum.mixture"),
        ({"quotas": (("a", 1.0),)}, "quotas has no effect without curriculum.quota_column"),
        ({"quota_column": "set"}, "quota_column needs curriculum.quotas"),
        ({"keep": None}, "enabled has no effect"),
        ({"keep": None, "recheck_epochs": 3, "mixture": (1, 1, 1)}, "recheck_epochs has no effect"),
        (
            {"keep": None, "decay": 0.1, "quota_column": "set", "quotas": (("a", 1.0),)},
            "decay has no effect without curriculum.keep or curriculum.mixture",
        ),
        ({"schedule": "linear"}, "schedule=linear needs curriculum.mixture"),
        ({"schedule": "linear", "mixture": (1, 1, 1)}, "needs curriculum.mixture_end"),
        ({"keep": (0.9, 0.1)}, "keep is no band"),
        ({"mixture": (0, 0, 0)}, "mixture are no shares"),
        ({"mixture": (1, -1, 1)}, "mixture are no shares"),
        ({"quota_column": "s", "quotas": (("a", 0.0), ("b", 1))}, "quotas are no shares"),
        ({"quota_column": "s", "quotas": (("a", 1), ("a", 1))}, "quotas are no shares"),
        ({"recheck_epochs": 1}, "recheck_epochs is too small"),
        ({"decay": 1.5}, "decay is out of range"),
        ({"pass_at": float("nan")}, "pass_at is not finite"),
        ({"hard_below": 0.7, "mixture": (1, 1, 1)}, "out of order"),
    ],
)
def test_settings_that_are_wrong_or_without_effect(settings, message):
    with pytest.raises(ConfigError, match=message):
        CurriculumConfig(**{"enabled": True, **settings})
