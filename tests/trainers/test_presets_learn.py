# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Several algorithms learn: the reward of a tiny model rises under each, on two seeds of three."""

import json

import pytest

from jaxrl_llm.algorithms.presets import PRESETS
from jaxrl_llm.train import main

QUICK = ("dr_grpo", "ppo")
BY_MORE = (*QUICK, "gspo", "remax")
NOT_TRAINABLE_YET = {"otb", "otb_tools", "agentrl"}


def gain(run_dir, name, seed, *more):
    """How much the mean training reward rose from the first two to the last two steps."""
    settings = [
        "--config=tiny_grpo.py", "--mesh.data=1", f"--algo.name={name}", f"--train.seed={seed}",
        f"--run-dir={run_dir}", "--train.eval_every=0", "--train.checkpoint_every=100",
    ]  # fmt: skip
    assert main([*settings, *more]) == 0
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row]
    return sum(rewards[-2:]) / 2 - sum(rewards[:2]) / 2


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in BY_MORE]
)
def test_the_reward_rises(name, tmp_path):
    gains = sorted(gain(tmp_path / str(seed), name, seed) for seed in (1, 2, 3))
    assert gains[1] > 0.15, gains


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(PRESETS) - set(BY_MORE) - NOT_TRAINABLE_YET))
def test_the_reward_rises_under_every_other_row(name, tmp_path):
    gains = sorted(gain(tmp_path / str(seed), name, seed) for seed in (1, 2, 3))
    assert gains[1] > 0.05, gains


@pytest.mark.parametrize("name", sorted(NOT_TRAINABLE_YET))
def test_what_this_trainer_cannot_give_is_refused_by_name(name, tmp_path, capsys):
    assert (
        main(["--config=tiny_grpo.py", f"--algo.name={name}", f"--run-dir={tmp_path / 'x'}"]) == 2
    )
    assert "needs" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_kl_in_the_reward_adapts_its_coefficient_and_epochs_end_early(tmp_path):
    more = ["--algo.kl_coef=0.05", "--algo.kl_target=0.001", "--train.epochs=3"]
    more += ["--algo.target_kl=1e-9", "--train.steps=4"]
    gain(tmp_path / "kl", "reinforce_pp", 1, *more)
    rows = [json.loads(x) for x in (tmp_path / "kl" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    assert all(row["epochs"] < 3 for row in rows[1:]), [row["epochs"] for row in rows]


def test_the_critic_waits_for_no_one_and_the_policy_for_the_critic(tmp_path):
    more = ["--critic.warmup_steps=2", "--train.steps=4", "--train.minibatches=2"]
    gain(tmp_path / "ppo", "ppo", 1, *more)
    rows = [json.loads(x) for x in (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    assert ["loss" in row for row in rows] == [False, False, True, True]
    assert all(row["value/loss"] >= 0 and "value/explained_variance" in row for row in rows)
    # A critic whose head is 0 at first has explained nothing, and then learns the mean.
    assert rows[0]["value/mean"] == 0.0 and rows[3]["value/mean"] > 0.0


def test_dropped_groups_are_sampled_again_and_counted(tmp_path):
    more = ["--filter.refill=prompts", "--filter.max_rounds=3", "--train.mask_truncated=True"]
    gain(tmp_path / "dapo", "dapo", 1, *more, "--train.steps=3", "--sampler.max_new_tokens=1")
    rows = [json.loads(x) for x in (tmp_path / "dapo" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    assert any(row["sampling/groups_dropped"] > 0 for row in rows)
    assert all(1 <= row["sampling/rounds"] <= 3 for row in rows)


@pytest.mark.parametrize(
    "wrong",
    ["--critic.learning_rate=1", "--filter.reward=digits", "--filter.max_rounds=4"],
)
def test_settings_without_effect_are_refused(wrong, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert main(["--config=tiny_grpo.py", "--mesh.data=1", wrong, f"--run-dir={run_dir}"]) == 2
    assert "no effect" in capsys.readouterr().err and not run_dir.exists()


def test_a_filter_by_a_reward_that_is_not_there_is_refused(tmp_path, capsys):
    wrong = ["--filter.refill=prompts", "--filter.reward=right"]
    assert main(["--config=tiny_grpo.py", *wrong, f"--run-dir={tmp_path / 'run'}"]) == 2
    assert "names no reward" in capsys.readouterr().err
