# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny models of two other families learn by GRPO, through their folder, as a user's would."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from jaxrl_llm.checkpoint.huggingface import load_config, load_params, save_folder
from jaxrl_llm.checkpoint.pretrained import TINY_CONFIG
from jaxrl_llm.models.transformer import init_params
from jaxrl_llm.text.tokenizer import bytes_tokenizer
from jaxrl_llm.train import main

MODELS = {
    "qwen3": dataclasses.replace(TINY_CONFIG, family="qwen3", qk_norm="head"),
    "qwen3_moe": dataclasses.replace(
        TINY_CONFIG,
        family="qwen3_moe",
        qk_norm="head",
        num_experts=4,
        experts_per_token=2,
        expert_size=32,
    ),
}


def gain(folder, run_dir, seed):
    """How much the mean training reward rose from the first two to the last two steps."""
    settings = [
        "--config=tiny_grpo.py", "--mesh.data=1", f"--model.path={folder}", f"--run-dir={run_dir}",
        f"--train.seed={seed}", "--train.eval_every=0", "--train.checkpoint_every=100",
    ]  # fmt: skip
    assert main(settings) == 0
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row]
    return sum(rewards[-2:]) / 2 - sum(rewards[:2]) / 2


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_the_reward_rises_on_two_seeds_of_three(name, tmp_path):
    config = MODELS[name]
    params = init_params(config, jax.random.key(0))
    folder = save_folder(tmp_path / "model", params, config, bytes_tokenizer())
    gains = []
    for seed in (1, 2, 3):
        gains.append(gain(folder, tmp_path / str(seed), seed))
        if sum(g > 0.15 for g in gains) == 2:
            break
    assert sum(g > 0.15 for g in gains) == 2, gains
    export = tmp_path / "1" / "export"
    assert load_config(export) == config
    assert load_params(export, config)["layers"]["q_norm"].shape == (2, 8)
