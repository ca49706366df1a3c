# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts that one run stores and another trains on."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.data.rollout_store import RolloutStore
from jaxrl_llm.train import main

BASE = ["--config=tiny_grpo.py", "--mesh.data=1", "--train.seed=3", "--train.eval_every=0"]
BASE += ["--train.steps=3"]


def weights(run):
    return load_file(run / "export" / "model.safetensors")


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A run that writes its rollouts."""
    folder = tmp_path_factory.mktemp("stored")
    args = [f"--rollouts.write={folder / 'store'}", f"--run-dir={folder / 'run'}"]
    assert main([*BASE, *args]) == 0
    return folder


def test_training_on_stored_rollouts_is_the_run_that_stored_them(stored, tmp_path):
    args = [f"--rollouts.read={stored / 'store'}", f"--run-dir={tmp_path / 'run'}"]
    assert main([*BASE, *args]) == 0
    assert same(weights(tmp_path / "run"), weights(stored / "run"))
    # Another learning rate learns something else from the same samples.
    other = [*args[:1], f"--run-dir={tmp_path / 'other'}", "--optimizer.learning_rate=1e-3"]
    assert main([*BASE, *other]) == 0
    assert not same(weights(tmp_path / "other"), weights(stored / "run"))


def test_a_run_without_updates_only_samples(stored, tmp_path):
    args = [f"--rollouts.write={tmp_path / 'store'}", "--rollouts.update=False"]
    assert main([*BASE, *args, f"--run-dir={tmp_path / 'run'}"]) == 0
    one, other = RolloutStore(tmp_path / "store"), RolloutStore(stored / "store")
    assert one.steps() == other.steps() == [1, 2, 3]
    first, second = one.read(1), other.read(1)
    assert [r.completion for r in first] == [r.completion for r in second]
    assert all(np.all(r.weights_version == step - 1) for step in (1, 2) for r in other.read(step))
    assert all(r.reward is not None for r in first)
    found = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert not any("loss" in row for row in found) and any("reward" in row for row in found)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--train.steps=4"], "does not hold the rollouts of every step"),
        (["--train.prompts_per_step=2"], "another number of rollouts"),
        (["--sampler.max_new_tokens=4"], "longer than this config allows"),
        (["--filter.refill=prompts"], "no effect"),
        (["--rollouts.write=x"], "can't be written"),
        (["--rollouts.update=False"], "can't be written or left alone"),
    ],
)
def test_what_does_not_fit_is_refused(stored, tmp_path, wrong, message, capsys):
    args = [f"--rollouts.read={stored / 'store'}", f"--run-dir={tmp_path / 'x'}"]
    assert main([*BASE, *args, *wrong]) == 2
    assert message in capsys.readouterr().err
