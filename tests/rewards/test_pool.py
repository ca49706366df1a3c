# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time

import numpy as np
import pytest

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards.answer import anchored_answer
from jaxrl_llm.rewards.base import score
from jaxrl_llm.rewards.code import CodeReward
from jaxrl_llm.rewards.format import Matches
from jaxrl_llm.rewards.pool import ScoringPool
from jaxrl_llm.rewards.process import ProcessRewardModel
from jaxrl_llm.rewards.reward_model import RewardModel
from jaxrl_llm.types import Prompt, Reward, Rollout


def _rollouts(*completions):
    none = np.zeros(0, np.int32)
    logp = np.zeros(0, np.float32)
    return [
        Rollout(Prompt("p", (1,), "p", "7"), i, none, logp, none > 0, none, "stop", text)
        for i, text in enumerate(completions)
    ]


def _score(rows, rollouts, **options):
    with ScoringPool(rows, workers=2, **options) as pool:
        for rollout in rollouts[:-1]:  # the last is scored where it is gathered
            pool.submit(rollout)
        return pool.gather(rollouts), pool.lost, pool.local


def alone(fn):
    """Says that a reward judges each rollout by itself."""
    fn.judges_alone = True
    return fn


def test_the_same_verdicts_as_in_one_process():
    factor = 3.0

    def lengthy(rollouts):
        return [
            Reward(factor * len(r.completion), {"n": 1.0}, {"pid": os.getpid()}) for r in rollouts
        ]

    rows = {
        "right": (anchored_answer, 2.0),
        "form": Matches("Answer.*"),
        "length": (alone(lengthy), 0.5),
        "maybe": (
            alone(lambda rollouts: [None if "8" in r.completion else 1 for r in rollouts]),
            0.0,
        ),
    }
    rollouts = _rollouts("Answer: 7", "7", "Answer: 8", "", "Answer: 7.0" * 3)
    verdicts, lost, local = _score(rows, rollouts)
    expected = score(rows, rollouts)
    assert [(r.value, r.parts) for r in verdicts] == [(r.value, r.parts) for r in expected]
    assert verdicts[0].info["length"]["pid"] != os.getpid()
    assert (lost, local) == (0, ("right", "form"))


def test_rewards_that_can_not_travel_or_compare_rollouts_stay_here():
    lock = threading.Lock()

    def holds_a_lock(rollouts):
        with lock:
            return [float(os.getpid()) for _ in rollouts]

    def best(rollouts):
        longest = max(len(r.completion) for r in rollouts)
        return [float(len(r.completion) == longest) for r in rollouts]

    rows = {"lock": (alone(holds_a_lock), 0.0), "right": anchored_answer, "best": best}
    verdicts, _, local = _score(rows, _rollouts("Answer: 7", "longer than that"))
    assert local == ("lock", "right", "best")
    assert [r.value for r in verdicts] == [1.0, 1.0]
    assert [r.parts["best"] for r in verdicts] == [0.0, 1.0]
    assert verdicts[0].parts["lock"] == os.getpid()


def test_a_model_stays_where_its_devices_are():
    model = RewardModel("folder")
    rows = {"model": model, "steps": ProcessRewardModel("folder"), "code": CodeReward(judge=model)}
    with ScoringPool(rows | {"right": anchored_answer}, workers=1) as pool:
        assert pool.local == (*rows, "right") and pool._workers is None
        # Yet of several processes each judges its own rollouts.
        assert list(pool.alone([])) == list(rows) and list(pool.together([])) == ["right"]


def test_functions_of_a_config_file_travel(tmp_path):
    path = tmp_path / "my_config.py"
    path.write_text(
        "BONUS = 2.0\n\ndef mine(rollouts):\n    return [BONUS for _ in rollouts]\n\n"
        "mine.judges_alone = True\n"
    )
    spec = importlib.util.spec_from_file_location("config_in_a_file", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["config_in_a_file"] = module
    try:
        spec.loader.exec_module(module)
        verdicts, _, local = _score({"mine": module.mine}, _rollouts("a"))
    finally:
        del sys.modules["config_in_a_file"]
    assert (verdicts[0].value, local) == (2.0, ())


def test_a_reward_that_hangs_or_dies_is_not_judged_and_the_others_are():
    def fragile(rollouts):
        (rollout,) = rollouts
        if rollout.completion == "hang":
            while True:
                pass
        if rollout.completion == "die":
            os._exit(1)
        return [1.0]

    rollouts = _rollouts("a", "hang", "b", "die", "c", "d")
    verdicts, lost, _ = _score({"fragile": alone(fragile)}, rollouts, cpu_s=1.0)
    assert [r and r.value for r in verdicts] == [1.0, None, 1.0, None, 1.0, 1.0]
    assert lost == 2


def test_mistakes_come_through_and_the_pool_goes_on():
    def raises(rollouts):
        return [1.0 if r.completion == "good" else {}["missing"] for r in rollouts]

    with ScoringPool({"mine": alone(raises)}, workers=1) as pool:
        rollouts = _rollouts("bad", "good")
        for rollout in rollouts:
            pool.submit(rollout)
        with pytest.raises(RewardError, match=r"'mine' raised KeyError · got 'missing' \(at "):
            pool.gather(rollouts)
        assert pool.gather([]) == []
        assert [r.value for r in pool.gather(_rollouts("good"))] == [1.0]
    with (
        ScoringPool({"mine": alone(lambda rs: [float("nan")])}, workers=1) as pool,
        pytest.raises(RewardError, match="not a finite number"),
    ):
        pool.gather(_rollouts("x"))


def test_no_process_is_started_for_rewards_that_stay():
    pool = ScoringPool({"right": anchored_answer}, workers=4)
    assert pool._workers is None and pool.gather(_rollouts("Answer: 7"))[0].value == 1.0
    pool = ScoringPool({"alone": alone(lambda rollouts: [1.0] * len(rollouts))}, workers=0)
    assert pool._workers is None and len(pool.gather(_rollouts("a", "b"))) == 2


@pytest.mark.full  # the times of a busy machine decide nothing in the default suite
def test_a_batch_of_512_is_scored_while_the_device_works():
    def padded(rollouts):
        time.sleep(0.01)
        return [1.0]

    rollouts = _rollouts(*["x"] * 512)
    device_s = 2.5
    with ScoringPool({"padded": alone(padded)}, workers=2) as pool:
        pool.gather(rollouts[:1])  # the workers have started
        begin = time.perf_counter()
        for rollout in rollouts:
            pool.submit(rollout)
        assert len(pool.gather(rollouts)) == 512
        scoring_s = time.perf_counter() - begin
        begin = time.perf_counter()
        for i, rollout in enumerate(rollouts):
            wait = begin + device_s * (i + 1) / 512 - time.perf_counter()
            time.sleep(max(0.0, wait))  # the device samples; this thread only waits for it
            pool.submit(rollout)
        sampled = time.perf_counter()
        assert len(pool.gather(rollouts)) == 512
        not_hidden_s = time.perf_counter() - sampled
        step_s = time.perf_counter() - begin
    assert step_s < 0.75 * (device_s + scoring_s), (step_s, device_s, scoring_s)
    assert not_hidden_s < 0.5 * scoring_s
