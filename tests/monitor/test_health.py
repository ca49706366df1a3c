# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Every alarm rings on a planted case and is silent on real runs that learnt."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import random

import numpy as np
import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.monitor.health import (
    Alarm,
    AlarmsWriter,
    Health,
    HealthConfig,
    alarm_line,
    measure,
    read_alarms,
)
from jaxrl_llm.monitor.health_checks import CHECKS
from jaxrl_llm.monitor.report import write_report
from jaxrl_llm.types import Prompt, Reward, Rollout

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "health_runs.json"
RUNS = json.loads(GOLDEN.read_text())


def healthy(step: int) -> dict[str, float]:
    """A step of a made-up run that is well: noisy, sharpening slowly, learning."""
    noise = random.Random(step).uniform(-1.0, 1.0)
    return {
        "reward": min(0.3 + step / 100, 0.8) + 0.05 * noise,
        "frac_reward_zero_std": 0.45 + 0.2 * noise,
        "groups/alike_reward": 0.5 + 0.4 * noise,
        "rewards/lowest": 0.0,
        "rewards/highest": 1.0,
        "rewards/not_judged_ratio": 0.0,
        "entropy": max(1.2 - step / 60, 0.4) + 0.1 * noise,
        "kl": 0.02 + 0.01 * noise,
        "grad_norm": 2.0 + 1.2 * noise,
        "completions/distinct_3": 0.8 + 0.1 * noise,
        "completions/mean_length": 100.0 + min(step / 2, 50.0) + 20.0 * noise,
        "completions/clipped_ratio": 0.1 + 0.08 * noise,
        "completions/clipped_reward": 0.0,
        "completions/clipped_reward_std": 0.0,
        "completions/finished_reward": 0.6,
        "sampling/sampling_logp_difference/mean": 0.008 + 0.003 * noise,
    } | ({"eval/accuracy": min(0.3 + step / 100, 0.8) + 0.03 * noise} if step % 10 == 0 else {})


def run(rows, config: HealthConfig | None = None) -> list[Alarm]:
    health = Health(config or HealthConfig())
    return [alarm for step, row in enumerate(rows, 1) for alarm in health.observe(step, row)]


def planted(change, since: int = 30, steps: int = 60):
    """The healthy run with `change(steps since it began)` on top."""
    return [
        healthy(step) | (change(step - since) if step >= since else {}) for step in range(1, steps)
    ]


CASES = {
    "dead_groups": lambda t: {"frac_reward_zero_std": 0.95, "groups/alike_reward": 0.02},
    "entropy_collapse": lambda t: {"entropy": 0.02},
    "repeated_replies": lambda t: {"completions/distinct_3": 0.12},
    "length_drift": lambda t: {"completions/mean_length": 100.0 + 15.0 * t},
    "truncation": lambda t: {"completions/clipped_ratio": 0.6},
    "sampler_gap": lambda t: {"sampling/sampling_logp_difference/mean": 0.08},
    "kl_blowup": lambda t: {"kl": 0.1 * 1.5**t},
    "heldout_falls": lambda t: {"eval/accuracy": 0.3} if t % 10 == 0 else {},
    "gradient_spike": lambda t: {"grad_norm": 60.0} if t == 3 else {},
    "not_judged": lambda t: {"rewards/not_judged_ratio": 0.2},
}


def test_there_is_a_planted_case_for_every_check():
    assert CASES.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", CASES)
def test_it_rings_on_its_planted_case_once_and_nothing_else_does(name):
    alarms = run(planted(CASES[name]))
    assert {alarm.name for alarm in alarms} == {name}
    # The window fills in ten steps, the third evaluation comes in twenty; growth is told again.
    assert 30 <= alarms[0].step <= 51
    # Told again at most once a window, and only at twice as bad.
    assert len(alarms) <= (3 if name == "kl_blowup" else 2), alarms
    assert all(b.step - a.step >= 10 for a, b in itertools.pairwise(alarms))
    assert "\n" not in alarms[0].message and " · try: " in alarms[0].message
    assert any(character.isdigit() for character in alarms[0].message)
    assert run(planted(CASES[name], since=10**9)) == []


def test_a_long_healthy_run_is_silent():
    assert run([healthy(step) for step in range(1, 400)]) == []


@pytest.mark.parametrize("name", RUNS)
def test_real_runs_that_learnt_are_silent(name):
    rows = RUNS[name]
    health = Health(HealthConfig())
    assert [alarm for row in rows for alarm in health.observe(row["step"], row)] == []
    # They are no empty proof: each check but those of absent metrics had a full window to look at.
    assert len(rows) >= 12 and rows[-1]["eval/reward"] > rows[0]["eval/reward"] + 0.1
    for metric in ("frac_reward_zero_std", "entropy", "completions/clipped_ratio", "grad_norm"):
        assert sum(metric in row for row in rows) >= 12


@pytest.mark.parametrize(
    ("alike", "low", "high", "words", "severity"),
    [
        (0.97, 0.0, 1.0, "most were all right", "warning"),
        (0.05, 0.0, 1.0, "most were all wrong", "critical"),
        (-4.9, -5.0, 5.0, "most were all wrong", "critical"),
        (0.0, 0.0, 0.0, "every reward of the run so far was 0", "critical"),
    ],
)
def test_dead_groups_tells_right_from_wrong(alike, low, high, words, severity):
    row = {"frac_reward_zero_std": 0.9, "groups/alike_reward": alike}
    row |= {"rewards/lowest": low, "rewards/highest": high}
    (alarm,) = run([row] * 20)
    assert words in alarm.message and alarm.severity == severity and alarm.step == 10
    assert "90% of the groups of the last 10 steps" in alarm.message
    (alarm,) = run([{"frac_reward_zero_std": 0.9}] * 20)  # no rollouts were looked at
    assert "right" not in alarm.message and "wrong" not in alarm.message


def test_lengths_may_also_shrink_and_small_changes_are_no_drift():
    def rows(start, end):
        return [{"completions/mean_length": float(start if i < 10 else end)} for i in range(30)]

    (alarm,) = run(rows(100, 40))
    assert "from 100 to" in alarm.message and "pay for short replies" in alarm.message
    assert run(rows(3, 20)) == [] and run(rows(100, 180)) == []


def test_cut_replies_that_are_judged_on_their_merit_are_no_fault():
    cut = {"completions/clipped_ratio": 1.0, "rewards/lowest": 0.0, "rewards/highest": 1.0}
    merit = cut | {"completions/clipped_reward": 0.4, "completions/clipped_reward_std": 0.3}
    solved = cut | {"completions/clipped_reward": 1.0, "completions/clipped_reward_std": 0.0}
    lost = cut | {"completions/clipped_reward": 0.0, "completions/clipped_reward_std": 0.0}
    assert run([merit] * 20) == [] and run([solved] * 20) == []
    assert [alarm.severity for alarm in run([lost] * 20)] == ["critical"]
    half = merit | {"completions/clipped_ratio": 0.5, "completions/finished_reward": 0.9}
    assert [alarm.severity for alarm in run([half] * 20)] == ["warning"]
    assert len(run([{"completions/clipped_ratio": 0.5}] * 20)) == 1


def test_heldout_may_fall_with_the_reward_or_once():
    def rows(rewards, results):
        return [
            {"reward": reward} | ({"eval/accuracy": results[i // 10]} if i % 10 == 9 else {})
            for i, reward in enumerate(rewards)
        ]

    rising = [0.3 + i / 100 for i in range(50)]
    (alarm,) = run(rows(rising, [0.4, 0.6, 0.45, 0.4, 0.4]))
    assert alarm.step == 40 and "from 0.6 (step 20) to 0.45 and 0.4" in alarm.message
    assert run(rows(rising, [0.4, 0.6, 0.45, 0.6, 0.45])) == []
    assert run(rows(rising[::-1], [0.4, 0.6, 0.45, 0.4, 0.4])) == []
    assert run(rows([0.5] * 50, [0.4, 0.6, 0.45, 0.4, 0.4])) == []


def test_it_comes_back_when_it_is_worse_or_after_a_while():
    gap = "sampling/sampling_logp_difference/mean"
    rows = [{gap: 0.06}] * 30 + [{gap: 0.11}] * 30 + [{gap: 0.13}] * 200
    steps = [alarm.step for alarm in run(rows)]
    # Told at the third step, when its mean of three steps has doubled, and every 100 steps.
    assert steps == [3, 62, 162]
    quick = dataclasses.replace(HealthConfig(), repeat_after=20, repeat_worse=1000.0)
    assert [alarm.step for alarm in run([{gap: 0.06}] * 50, quick)] == [3, 23, 43]


def test_a_state_continues_exactly_at_any_step():
    cases = [CASES[name] for name in ("kl_blowup", "heldout_falls", "gradient_spike")]
    rows = planted(lambda t: {k: v for case in cases for k, v in case(t).items()})
    straight = run(rows)
    assert len({alarm.name for alarm in straight}) == 3
    for stop in range(0, len(rows), 7):
        first = Health(HealthConfig())
        alarms = [a for step, row in enumerate(rows[:stop], 1) for a in first.observe(step, row)]
        second = Health(HealthConfig())
        second.set_state(json.loads(json.dumps(first.get_state(), allow_nan=False)))
        for step, row in enumerate(rows[stop:], stop + 1):
            alarms += second.observe(step, row)
        assert alarms == straight


def test_metrics_that_are_missing_or_not_numbers_are_skipped():
    rows = planted(CASES["sampler_gap"])
    holes = [
        {key: value for i, (key, value) in enumerate(row.items()) if (i + step) % 3}
        | {"entropy": float("nan"), "kl": float("inf"), "unknown": 1.0}
        for step, row in enumerate(rows)
    ]
    assert {alarm.name for alarm in run(holes)} == {"sampler_gap"}
    assert run([{}] * 30) == []
    off = HealthConfig(enabled=False)
    assert run(rows, off) == []


def test_settings_out_of_range_or_without_effect():
    for field, value in (
        ("window", 0), ("kl", 0.0), ("dead_groups", -1.0), ("length_factor", 0.5),
        ("entropy_share", float("nan")),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"health.{field} is out of range"):
            HealthConfig(**{field: value})
    with pytest.raises(ConfigError, match="kl has no effect"):
        HealthConfig(enabled=False, kl=1.0)


# --- what rollouts tell ---------------------------------------------------------------------------


def rollout(prompt: str, sample: int, tokens, reward: float | None, end="stop", mask=None):
    tokens = np.asarray(tokens, np.int32)
    return Rollout(
        prompt=Prompt(prompt, (1, 2), prompt),
        sample=sample,
        tokens=tokens,
        logp_sampler=np.zeros(len(tokens), np.float32),
        mask=np.ones(len(tokens), bool) if mask is None else mask,
        weights_version=np.zeros(len(tokens), np.int32),
        finish_reason=end,
        reward=None if reward is None else Reward(float(reward)),
    )


def test_measures_by_hand():
    found = measure(
        [
            rollout("a", 0, [1, 2], 1.0),
            rollout("a", 1, [1, 2], 1.0),
            rollout("b", 0, [3], 0.0, end="length"),
            rollout("b", 1, [4], 0.5, end="length"),
            rollout("c", 0, [4], None, end="length"),
            rollout("c", 1, [4], -1.0),
            rollout("d", 0, [4], 0.25),
            rollout("d", 1, [4], 0.25),
        ]
    )
    assert found == {
        "rewards/not_judged_ratio": 0.125,
        "rewards/lowest": -1.0,
        "rewards/highest": 1.0,
        "completions/clipped_reward": 0.25,
        "completions/clipped_reward_std": 0.25,
        "completions/finished_reward": pytest.approx(0.3),
        "groups/alike_reward": 0.625,
    }
    assert measure([]) == {}
    assert measure([rollout("a", 0, [1], None)]) == {"rewards/not_judged_ratio": 1.0}


def test_distinct_is_pooled_over_prompts_not_over_samples_of_one():
    draws = np.random.default_rng(0)
    texts = [draws.integers(0, 1000, 40) for _ in range(4)]
    alike_in_group = [rollout(f"p{b}", g, texts[b], 1.0) for b in range(4) for g in range(4)]
    assert measure(alike_in_group)["completions/distinct_3"] == pytest.approx(1.0, abs=0.01)
    same_everywhere = [rollout(f"p{b}", g, texts[g], 1.0) for b in range(4) for g in range(4)]
    assert measure(same_everywhere)["completions/distinct_3"] == pytest.approx(0.25, abs=0.01)
    loops = [rollout(f"p{b}", 0, [b, 7, 9] * 14, 1.0) for b in range(4)]
    assert measure(loops)["completions/distinct_3"] == pytest.approx(12 / 160)
    # Tokens of a tool were not chosen; few tokens say nothing.
    mask = np.arange(42) < 3
    assert "completions/distinct_3" not in measure(
        [rollout(f"p{b}", 0, [b, 7, 9] * 14, 1.0, mask=mask) for b in range(4)]
    )


def test_looping_rollouts_ring():
    draws = np.random.default_rng(0)

    def step(loop: bool):
        return measure(
            [
                rollout(f"p{b}", g, [5, 6] * 20 if loop else draws.integers(0, 50, 40), g % 2)
                for b in range(4)
                for g in range(2)
            ]
        )

    assert run([step(False) for _ in range(30)]) == []
    alarms = run([step(step_ >= 15) for step_ in range(40)])
    assert {alarm.name for alarm in alarms} == {"repeated_replies"}


# --- how they are shown ---------------------------------------------------------------------------


def test_alarms_are_a_line_a_file_and_a_list_on_the_page(tmp_path):
    writer = AlarmsWriter(tmp_path)
    writer.write([])
    assert not (tmp_path / "alarms.jsonl").exists()
    alarms = [
        Alarm("kl_blowup", "critical", "the KL is 3 · try: less", 4),
        Alarm("truncation", "warning", "<b>{{data}}</b>", 9),
    ]
    writer.write(alarms)
    assert read_alarms(tmp_path) == alarms
    assert alarm_line(alarms[0]) == "  !! kl_blowup: the KL is 3 · try: less"
    page = write_report(tmp_path).read_text()
    assert "2 alarms" in page and "step 4 · kl_blowup" in page
    assert "&lt;b&gt;{{data}}&lt;/b&gt;" in page and page.index("step 9") < page.index("step 4")
    writer.truncate(4)  # a resumed run
    writer.write([Alarm("truncation", "warning", "again", 5)])
    assert [alarm.step for alarm in read_alarms(tmp_path)] == [4, 5]
    writer.close()


def test_a_page_without_alarms_has_no_list_of_them(tmp_path):
    assert "alarms</summary>" not in write_report(tmp_path).read_text()
    (tmp_path / "alarms.jsonl").write_text('{"step": 1}\nnot json\n{"step": 2, "name": 3}\n')
    assert read_alarms(tmp_path) == []


def test_a_check_that_says_nothing_of_a_run_is_left_out():
    rows = [{"frac_reward_zero_std": 1.0}] * 20
    for without, rings in (((), True), (("dead_groups",), False)):
        health = Health(HealthConfig(), without)
        told = [alarm for step, row in enumerate(rows, 1) for alarm in health.observe(step, row)]
        assert bool(told) is rings
