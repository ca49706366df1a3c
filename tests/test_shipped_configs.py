# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Every config that is shipped loads, explains each of its fields, and says what to expect."""

import pathlib

import pytest

from jaxrl_llm.config import fields, help_text, load_config
from jaxrl_llm.train import main

CONFIGS = sorted((pathlib.Path(__file__).parents[1] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_loads_and_explains_itself(path):
    doc, config = load_config(path)
    for word in ("Command:", f"--config={path.name}", "Time:", "Expect:", "Overrides:"):
        assert word in doc, word
    assert [field.name for field in fields(config) if not field.meaning] == []
    assert "--optimizer.learning_rate" in help_text(config, doc)


def test_a_dry_run_shows_sizes_prompts_and_rewards_and_trains_nothing(tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert main(["--config=tiny_grpo.py", "--dry-run", f"--run-dir={run_dir}"]) == 0
    shown = capsys.readouterr().out
    for text in ("parameters", "key/value pages", "prompt 1", "reward of the canned answer"):
        assert text in shown, text
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algo.kl_coeff=1"], ["algo.kl_coeff", "Did you mean algo.kl_coef?"]),
        (["--train.steps=many"], ["train.steps", "many"]),
        (["--sampler.group_size=1"], ["group size of 1"]),
        (["--train.minibatches=3"], ["do not divide", "--train.minibatches="]),
        (["--train.layout=padded", "--train.row_tokens=64"], ["row_tokens", "no effect"]),
        (["--sampler.top_p=0.9"], ["top_p", "can't be trained on"]),
        (["--sampler.temperature=0"], ["temperature", "greedy"]),
        (["--algo.kl_estimator=k1"], ["kl_estimator"]),
        (["--optimizer.learning_rate=inf"], ["learning_rate"]),
        (["--sampler.stop=never ever"], ["single token"]),
        (["--sampler.max_prompt_tokens=3"], ["too long"]),
        (["--sampler.max_new_tokens=300"], ["context"]),
        (["--model.path=/no/such/folder"], ["no such model"]),
        (["--train.target_kl=1"], ["unknown config field", "algo.target_kl"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, words, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert main(["--config=tiny_grpo.py", "--mesh.data=1", f"--run-dir={run_dir}", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error
    assert not run_dir.exists()


def test_a_run_directory_that_cannot_be_written_is_one_line(capsys):
    assert main(["--config=tiny_grpo.py", "--mesh.data=1", "--run-dir=/proc/run"]) == 2
    assert "can't be written" in capsys.readouterr().err
