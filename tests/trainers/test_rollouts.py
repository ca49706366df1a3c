# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts that one run stores and another trains on."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.config import apply_overrides, find_config, load_config
from jaxrl_llm.data.curriculum import CurriculumConfig
from jaxrl_llm.data.rollout_store import RolloutStore
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.train import main
from jaxrl_llm.trainers.collect import GroupFilter
from jaxrl_llm.trainers.rollouts import check_groups, check_stored_rewards
from jaxrl_llm.trainers.settings import check_overrides
from jaxrl_llm.types import Prompt, Reward, Rollout

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
        (["--sampler.temperature=0.5"], "another sampler.temperature · got 1.0"),
        (["--sampler.group_size=4", "--train.prompts_per_step=8"], "another sampler.group_size"),
        (["--filter.refill=prompts"], "no effect"),
        (["--rollouts.write=x"], "can't be written"),
        (["--rollouts.update=False"], "can't be written or left alone"),
    ],
)
def test_what_does_not_fit_is_refused(stored, tmp_path, wrong, message, capsys):
    args = [f"--rollouts.read={stored / 'store'}", f"--run-dir={tmp_path / 'x'}"]
    assert main([*BASE, *args, *wrong]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--optimizer.learning_rate=1e-3"],
        ["--algo.kl_coef=0.1"],
        ["--algo.name=ppo", "--critic.warmup_steps=1"],
        ["--train.epochs=2"],
        ["--lora.rank=4"],
    ],
)
def test_what_a_run_that_only_samples_never_reads_is_refused(tmp_path, wrong, capsys):
    args = [f"--rollouts.write={tmp_path / 'store'}", "--rollouts.update=False", "--dry-run"]
    assert main([*BASE, *args, *wrong]) == 2
    assert "has no effect: nothing is trained" in capsys.readouterr().err


def test_what_decides_whether_a_config_is_accepted_has_an_effect():
    file = load_config(find_config("tiny_grpo.py"))[1]
    only_samples = ["--rollouts.write=x", "--rollouts.update=False"]
    for args in (["--sampler.group_size=1", "--algo.name=reinforce"], ["--train.epochs=1"]):
        check_overrides(file, apply_overrides(file, [*only_samples, *args]))
    check_overrides(file, apply_overrides(file, ["--train.epochs=2"]))


def test_a_store_of_dynamic_sampling_is_read_as_the_error_says():
    by_rates = CurriculumConfig(
        enabled=True, keep=(0.2, 0.8), pass_at=0.25, quota_column="x", quotas=(("a", 1.0),)
    )
    rule = GroupFilter(refill="prompts", max_rounds=3)
    file = load_config(find_config("tiny_grpo.py"))[1]
    file, args = dataclasses.replace(file, filter=rule, curriculum=by_rates), []
    for _ in range(2):
        with pytest.raises(ConfigError, match="read, not sampled") as caught:
            apply_overrides(file, [*args, "--rollouts.read=x"])
        args += str(caught.value).partition("try: ")[2].split()
    apply_overrides(file, [*args, "--rollouts.read=x"])


OTHER_REWARDS = '''"""The tiny run with other rewards."""
import dataclasses
from jaxrl_llm.config import find_config, load_config

def letters(rollouts):
    return [float(len(rollout.completion)) for rollout in rollouts]

def get_config():
    config = load_config(find_config("tiny_grpo.py"))[1]
    return dataclasses.replace(config, rewards=config.rewards | {"letters": letters})
'''


def test_rewards_of_another_config_are_refused(stored, tmp_path, capsys):
    (tmp_path / "other.py").write_text(OTHER_REWARDS)
    args = [f"--config={tmp_path / 'other.py'}", *BASE[1:], f"--run-dir={tmp_path / 'x'}"]
    assert main([*args, f"--rollouts.read={stored / 'store'}"]) == 2
    assert "not this config's" in capsys.readouterr().err


def test_a_folder_holds_the_rollouts_of_one_run(stored, tmp_path, capsys):
    store = stored / "store"
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    # Neither another seed's nor a second run of the very same settings.
    for number, seed in enumerate((7, 3)):
        run = f"--run-dir={tmp_path / str(number)}"
        args = [f"--rollouts.write={store}", f"--train.seed={seed}", run]
        assert main([*BASE, *args]) == 2
        assert "holds rollouts of another run" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before
    # Of two runs in one folder, however it came to be, nothing is read.
    mixed = RolloutStore(tmp_path / "mixed", {"seed": 7})
    mixed.write(1, RolloutStore(store).read(1))
    for step in (2, 3):
        mixed.path(step).write_bytes(before[mixed.path(step).name])
    args = [f"--rollouts.read={mixed.folder}", f"--run-dir={tmp_path / 'y'}"]
    assert main([*BASE, *args]) == 2
    assert "rollouts of several runs" in capsys.readouterr().err


def rollout(prompt, sample, reward=None):
    none = np.zeros(0, np.int32)
    logp, prompt = none.astype(np.float32), Prompt(prompt, (1,), "")
    return Rollout(prompt, sample, none, logp, none > 0, none, "stop", "", reward)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([("a", 0), ("a", 1), ("a", 2), ("a", 3)], "a in several groups"),
        ([("a", 0), ("a", 1), ("b", 2), ("b", 3)], r"the samples \[2, 3\] of b"),
        ([("a", 0), ("a", 0)], r"the samples \[0, 0\] of a"),
        ([("a", 0), ("b", 1)], "a, b in one group"),
    ],
)
def test_groups_of_another_size_are_refused(batch, message):
    rollouts = [rollout(prompt, sample) for prompt, sample in batch]
    with pytest.raises(DataError, match=message):
        check_groups(pathlib.Path("x"), rollouts, 2)
    whole = [rollout(prompt, sample) for prompt in "ab" for sample in (0, 1)]
    check_groups(pathlib.Path("x"), whole, 2)


def test_stored_rewards_are_the_sum_of_the_parts_that_count():
    def check(value, parts, weights):
        judged = [rollout("a", 0), rollout("a", 1, Reward(value, parts))]
        check_stored_rewards(pathlib.Path("x"), judged, weights)

    parts = {"right": 0.1, "short": 0.7, "shown": 9.0}
    for weights in ({"right": 1.0, "short": 0.2}, {"short": 0.2, "right": 1.0}):
        check(0.1 + 0.2 * 0.7, parts, weights)
    for weights in ({"right": 1.0}, {"right": 1.0, "short": 0.3}, {"right": 1.0, "long": 0.2}):
        with pytest.raises(DataError, match="not this config's"):
            check(0.1 + 0.2 * 0.7, parts, weights)
    with pytest.raises(DataError, match="no parts"):
        check(0.0, {}, {"right": 1.0})
