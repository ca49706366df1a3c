# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Whole supervised runs as a user starts them: they learn, resume exactly, and export."""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxrl_llm.checkpoint.score_folder import load_score_folder
from jaxrl_llm.rewards.process import ProcessRewardModel
from jaxrl_llm.rewards.reward_model import RewardModel
from jaxrl_llm.train import main
from jaxrl_llm.trainers.evaluate_model import pass_at_k
from jaxrl_llm.types import Prompt, Rollout

TINY = [
    "--model.path=tiny-random", "--mesh.data=1", "--rows.max_length=256", "--rows.row_tokens=512",
    "--rows.chat_template=plain", "--train.seed=3", "--optimizer.learning_rate=1e-2",
    "--optimizer.warmup_steps=0", "--monitor.tensorboard=False",
]  # fmt: skip
SFT = ["--config=sft.py", *TINY, "--train.steps=8", "--train.batch=3", "--train.micro_batch=2",
       "--train.checkpoint_every=3", "--train.eval_every=0"]  # fmt: skip
DPO = ["--config=dpo.py", *TINY, "--train.steps=6", "--train.checkpoint_every=4",
       "--train.eval_every=0", "--data.heldout=32"]  # fmt: skip
REWARD = ["--config=reward.py", *TINY, "--train.steps=6", "--train.eval_every=0"]


def start(run_dir, arguments):
    """A run in a process of its own, with the test session's compilation cache."""
    env = {
        **os.environ,
        "XLA_FLAGS": "",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    command = [sys.executable, "-m", "jaxrl_llm.train", *arguments, f"--run-dir={run_dir}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, **pipes)


def metrics(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "time" not in k and "memory" not in k} for row in rows]


def result(run_dir):
    return json.loads((run_dir / "result.json").read_text())


def final_arrays(run_dir):
    with ocp.CheckpointManager((run_dir / "checkpoints").absolute()) as manager:
        restored = manager.restore(
            manager.latest_step(), args=ocp.args.Composite(arrays=ocp.args.StandardRestore())
        )
    return jax.tree.map(np.asarray, restored["arrays"])


def assert_killed_is_straight(straight, run_dir, arguments, steps):
    """A run killed after `steps` metrics rows and started again ends as the undisturbed one."""
    process = start(run_dir, arguments)
    path, deadline = run_dir / "metrics.jsonl", time.monotonic() + 300
    while not path.exists() or path.read_text().count("\n") < steps + 1:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (run_dir / "DONE").exists()
    process = start(run_dir, arguments)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert metrics(run_dir) == metrics(straight)
    same = jax.tree.map(np.array_equal, final_arrays(run_dir), final_arrays(straight))
    assert all(jax.tree.leaves(same)), output


@pytest.fixture(scope="session")
def sft_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("supervised") / "sft"
    # In a process of its own, as the one that is killed: other devices add up in other orders.
    process = start(run_dir, SFT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return run_dir


@pytest.fixture(scope="session")
def reward_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("supervised") / "reward"
    assert main([*REWARD, f"--run-dir={run_dir}"]) == 0
    return run_dir


@pytest.fixture(scope="session")
def dpo_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("supervised") / "dpo"
    assert main([*DPO, f"--run-dir={run_dir}"]) == 0
    return run_dir


def test_fine_tuning_lowers_the_held_out_loss(sft_run):
    told = result(sft_run)
    before, after = told["heldout_before"]["loss"], told["heldout_after"]["loss"]
    # A random byte model begins near ln 259.
    assert abs(before - np.log(259)) < 0.3 and after < before - 1.0, told
    rows = metrics(sft_run)[1:]
    assert {"loss", "nll", "entropy", "padding", "grad_norm", "num_tokens"} <= set(rows[0])
    assert np.mean([row["padding"] for row in rows]) < 0.15
    assert (sft_run / "report.html").exists() and (sft_run / "export" / "config.json").exists()


def test_killed_in_mid_pack_it_ends_with_the_same_parameters(sft_run, tmp_path):
    assert_killed_is_straight(sft_run, tmp_path / "killed", SFT, 5)


def test_a_reward_model_is_right_on_held_out_pairs(reward_run):
    told = result(reward_run)
    assert told["heldout_before"]["accuracy"] < 0.8
    assert told["heldout_after"]["accuracy"] > 0.9, told
    assert 0 <= told["heldout_after"]["calibration_error"] <= 0.5


def rollout(prompt, completion, finish="stop"):
    tokens = np.frombuffer(completion.encode(), np.uint8).astype(np.int32)
    tokens = np.append(tokens, 257).astype(np.int32) if finish == "stop" else tokens
    return Rollout(
        prompt=Prompt("p", (256, *prompt.encode()), "<bos>" + prompt),
        sample=0,
        tokens=tokens,
        logp_sampler=np.zeros(len(tokens), np.float32),
        mask=np.ones(len(tokens), bool),
        weights_version=np.zeros(len(tokens), np.int32),
        finish_reason=finish,
        completion=completion,
    )


def test_an_exported_reward_model_scores_rollouts_alike_in_any_batch(reward_run):
    prompt = "user: Anna has 3 cups and buys 4 more. How many cups are that?\nassistant: "
    replies = ["Anna has 7 cups.", "It depends on how one counts.", "", "I am not sure. " * 9]
    rollouts = [rollout(prompt, text) for text in replies]
    folder = str(reward_run / "export")
    by_text, by_tokens = RewardModel(folder), RewardModel(folder, same_tokens=True, rows=2)
    scores = by_text(rollouts)
    np.testing.assert_allclose(by_tokens(rollouts), scores, atol=1e-5)
    alone = [by_text([one])[0] for one in rollouts]
    np.testing.assert_allclose(alone, scores, atol=1e-5)
    assert scores[0] > scores[1]
    unfinished = by_text([rollout(prompt, replies[0], "length")])[0]
    assert abs(unfinished - scores[0]) > 1e-4  # it has no end token


def test_an_exported_reward_model_is_a_hugging_face_classifier(reward_run, tmp_path):
    from jaxrl_llm.errors import ModelError

    folder = reward_run / "export"
    attributes = json.loads((folder / "config.json").read_text())
    assert attributes["architectures"] == ["LlamaForSequenceClassification"]
    assert attributes["id2label"] == {"0": "reward"} and attributes["pad_token_id"] == 258
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert "score.weight" in index and "lm_head.weight" not in index
    model = load_score_folder(folder)
    trained = final_arrays(reward_run)["train"]["params"]
    same = jax.tree.map(np.array_equal, jax.device_get(model.params), trained)
    assert all(jax.tree.leaves(same))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no reward model"):
        load_score_folder(tmp_path)


def test_preference_optimisation_raises_margin_and_held_out_accuracy(dpo_run):
    rows, told = metrics(dpo_run), result(dpo_run)
    assert abs(rows[1]["loss"] - np.log(2)) < 1e-6  # at step 0 policy and reference are the same
    assert abs(told["heldout_before"]["rewards/margins"]) < 1e-5
    assert told["heldout_after"]["rewards/margins"] > 0.1
    assert told["heldout_after"]["accuracy"] > 0.9, told


@pytest.mark.full
def test_a_precomputed_reference_stays_that_of_the_first_policy_after_a_resume(tmp_path):
    more = [*DPO, "--preference.reference=precomputed"]
    straight = tmp_path / "straight"
    process = start(straight, more)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert_killed_is_straight(straight, tmp_path / "killed", more, 5)


@pytest.mark.full
def test_a_moving_reference_is_saved_and_resumed(tmp_path):
    more = [*DPO, "--preference.ref_update_every=2", "--preference.ref_update_rate=0.5"]
    straight = tmp_path / "straight"
    process = start(straight, more)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    arrays = final_arrays(straight)
    moved = jax.tree.map(np.array_equal, arrays["ref"], arrays["train"]["params"])
    assert not all(jax.tree.leaves(moved))
    assert_killed_is_straight(straight, tmp_path / "killed", more, 5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["kto", "ipo", "simpo", "orpo"])
def test_every_preference_config_learns(name, tmp_path):
    run_dir = tmp_path / name
    more = [f"--config={name}.py", *TINY, "--train.steps=8", "--data.heldout=32"]
    assert main([*more, f"--run-dir={run_dir}"]) == 0
    told = result(run_dir)
    assert told["heldout_after"]["accuracy"] > 0.85, told


@pytest.mark.full
def test_a_process_reward_model_learns_its_examples_by_heart(tmp_path):
    """16 sums of 48 steps, of which 36 are right: always "right" would be 75 %."""
    lines = (pathlib.Path(__file__).parents[2] / "configs/data/judged_steps.jsonl").read_text()
    data, run_dir = tmp_path / "sums.jsonl", tmp_path / "prm"
    data.write_text("\n".join(lines.splitlines()[:16]) + "\n")
    more = ["--config=prm.py", *TINY[:4], *TINY[5:], f"--data.path={data}", "--data.heldout=0",
            "--train.steps=100", "--train.batch=16"]  # fmt: skip
    assert main([*more, f"--run-dir={run_dir}"]) == 0
    rows = [row for row in metrics(run_dir) if "grad_norm" in row]
    assert rows[0]["accuracy"] <= 0.75 and rows[0]["loss"] > 0.5
    assert rows[-1]["accuracy"] == 1.0 and rows[-1]["loss"] < 0.01


@pytest.mark.full
def test_a_process_reward_model_trains_exports_and_judges_steps(tmp_path):
    run_dir = tmp_path / "prm"
    more = ["--config=prm.py", *TINY[:4], *TINY[5:], "--train.steps=3"]
    assert main([*more, f"--run-dir={run_dir}"]) == 0
    folder = str(run_dir / "export")
    attributes = json.loads((run_dir / "export" / "config.json").read_text())
    assert attributes["architectures"] == ["LlamaForTokenClassification"]
    rollouts = [rollout("Add up 1 + 2.\n", text) for text in ("1 + 2 = 3\n4 + 4 = 8", "1 = 1", "")]
    verdicts = {
        name: ProcessRewardModel(folder, name)(rollouts) for name in ("min", "mean", "last")
    }
    steps = verdicts["min"][0].info["steps"]
    assert len(steps) == 2 and all(0 < p < 1 for p in steps)
    for name, expected in (("min", min(steps)), ("mean", np.mean(steps)), ("last", steps[1])):
        assert abs(verdicts[name][0].value - expected) < 1e-4
        assert verdicts[name][2].value == 0.0


def test_pass_at_k_by_hand():
    assert pass_at_k(0, 5, 2) == 0 and pass_at_k(5, 5, 1) == 1
    # Two of four right, two drawn: 1 − C(2,2)/C(4,2) = 5/6.
    assert abs(pass_at_k(2, 4, 2) - 5 / 6) < 1e-15
    # Unbiased: the mean over all ways to draw k of n.
    import itertools

    right = [True, False, False, True, False]
    draws = list(itertools.combinations(right, 3))
    assert abs(pass_at_k(2, 5, 3) - np.mean([any(draw) for draw in draws])) < 1e-12


def test_the_evaluation_command_tells_what_the_run_told(sft_run, dpo_run, reward_run, capsys):
    from jaxrl_llm.cli.eval import main as evaluate

    for run_dir, arguments, names in (
        (sft_run, SFT, ("loss", "perplexity")),
        (dpo_run, DPO, ("accuracy", "rewards/margins")),
        (reward_run, REWARD, ("accuracy", "calibration_error")),
    ):
        target = run_dir.parent / "numbers.json"
        assert evaluate([str(run_dir / "export"), *arguments, f"--json={target}"]) == 0
        told, numbers = result(run_dir)["heldout_after"], json.loads(target.read_text())
        for name in names:
            assert abs(numbers[name] - told[name]) < 1e-4 * max(1, abs(told[name])), name
    assert evaluate(["/no/such", *SFT]) == 2
    assert "no such model" in capsys.readouterr().err


def test_the_evaluation_command_samples_for_configs_of_reinforcement_learning(tmp_path, capsys):
    """pass@k, reward and its parts on the held-out prompts, of several samples or of a greedy
    one."""
    from jaxrl_llm.cli.eval import main as evaluate

    config = tmp_path / "mine.py"
    config.write_text(JUDGED)
    target = tmp_path / "numbers.json"
    start = ["tiny-random", f"--config={config}", f"--json={target}"]
    assert evaluate([*start, "--samples=4", "--pass-at=1,2,4", "--correct=low"]) == 0
    told = json.loads(target.read_text())
    assert 0 < told["pass@1"] < told["pass@2"] < told["pass@4"] <= 1
    assert abs(told["pass@1"] - told["low"]) < 1e-9  # each sample is right or not
    assert abs(told["reward"] - (told["low"] + 0.5 * told["length"])) < 1e-6
    assert abs(told["mean_length"] - told["length"] * 8) < 1e-6
    shown = capsys.readouterr().out
    assert all(name in shown for name in told)
    assert evaluate([*start, "--correct=low"]) == 0  # greedy: one sample a prompt
    greedy = json.loads(target.read_text())
    assert "pass@1" not in greedy and greedy["low"] * 12 == round(greedy["low"] * 12)
    for words, message in (
        (["--samples=2", "--pass-at=4"], "needs k samples"),
        (["--pass-at=1,x"], "not a list of numbers"),
        (["--correct=lo", "--pass-at=1"], "no such reward"),
        (["--task.heldout=0"], "holds nothing out"),
    ):
        assert evaluate([*start, *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*SFT, "--data.path=/no/such.jsonl"], ["no file"]),
        ([*SFT, "--rows.chat_template=None"], ["no chat template"]),
        ([*SFT, "--rows.max_length=600"], ["row_tokens"]),
        ([*SFT, "--rows.max_length=400", "--rows.row_tokens=400"], ["context"]),
        ([*SFT, "--sft.lossy=nll"], ["unknown config field"]),
        ([*DPO, "--data.path=DATA/conversations.jsonl"], ["no columns", "chosen, rejected"]),
        ([*DPO, "--preference.gamma=1"], ["no effect"]),
        ([*REWARD, "--reward.kind=steps"], ["no columns", "labels"]),
        ([*SFT, "--train.steps=1", "--optimizer.warmup_steps=2"], ["--optimizer.warmup_steps=0"]),
        ([*SFT, "--data.path=BAD"], ["bad.jsonl:1", '{"messages": …}']),
        ([*DPO, "--mesh.data=8"], ["micro-batch", "--train.micro_batch=8"]),
        (
            [*SFT, "--train.micro_batch=6", "--mesh.pipeline=2", "--mesh.microbatches=5"],
            ["1 × 5 parts", "try: --mesh.microbatches=3"],
        ),
        (
            [*SFT, "--dry-run", "--mesh.pipeline=2", "--mesh.microbatches=999"],
            ["1 × 999 parts", "try: --mesh.microbatches=2"],
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments, words, tmp_path, capsys):
    data = pathlib.Path(__file__).parents[2] / "configs" / "data"
    bad = tmp_path / "bad.jsonl"
    bad.write_text("[1]\n")
    arguments = [word.replace("DATA", str(data)).replace("BAD", str(bad)) for word in arguments]
    assert main([*arguments, f"--run-dir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error
    assert not (tmp_path / "run").exists()


def test_a_dry_run_marks_what_is_learnt(capsys, tmp_path):
    assert main([*SFT, "--dry-run", f"--run-dir={tmp_path / 'run'}"]) == 0
    shown = capsys.readouterr().out
    assert "training examples" in shown and "assistant: ⟦" in shown and "<eos>⟧" in shown
    assert not (tmp_path / "run").exists()


JUDGED = """
from jaxrl_llm.config import find_config, load_config
import dataclasses
def low(rollouts):
    return [float(r.tokens[0] < 60) for r in rollouts]
def length(rollouts):
    return [len(r.tokens) / 8 for r in rollouts]
def get_config():
    config = load_config(find_config("tiny_grpo.py"))[1]
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, heldout=12),
        sampler=dataclasses.replace(config.sampler, max_new_tokens=8),
        rewards={"low": (low, 1.0), "length": (length, 0.5)},
    )
"""

LORA = """
import dataclasses
from jaxrl_llm.config import find_config, load_config
from jaxrl_llm.models.lora import LoraConfig
def get_config():
    config = load_config(find_config("{name}.py"))[1]
    return dataclasses.replace(config, lora=LoraConfig(rank=4, alpha=16))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "arguments"), [("sft", SFT), ("dpo", DPO), ("reward", REWARD), ("kto", DPO)]
)
def test_adapters_learn_and_are_merged_at_export(name, arguments, tmp_path):
    """The export is plain parameters, the checkpoint holds the adapter alone, and for dpo and kto
    the base is the reference."""
    config, run_dir = tmp_path / "mine.py", tmp_path / "run"
    config.write_text(LORA.format(name=name))
    assert main([f"--config={config}", *arguments[1:], f"--run-dir={run_dir}"]) == 0
    rows, told = metrics(run_dir)[1:], result(run_dir)
    assert told["heldout_after"]["loss"] < told["heldout_before"]["loss"] - 0.05
    if name == "dpo":
        assert abs(rows[0]["loss"] - np.log(2)) < 1e-6
    trained = final_arrays(run_dir)["train"]["params"]
    assert sum(x.size for x in jax.tree.leaves(trained)) < 15_000  # of 25,000 parameters
    from jaxrl_llm.cli.eval import main as evaluate

    target = tmp_path / "numbers.json"
    more = [f"--config={name}.py", *arguments[1:], f"--json={target}"]
    assert evaluate([str(run_dir / "export"), *more]) == 0
    numbers = json.loads(target.read_text())
    assert abs(numbers["loss"] - told["heldout_after"]["loss"]) < 1e-4


@pytest.mark.full
def test_two_devices_give_the_losses_of_one(sft_run, tmp_path):
    run_dir = tmp_path / "two"
    process = start(run_dir, [*SFT[:2], "--mesh.data=2", *SFT[3:], "--devices=cpu:2"])
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-3)):
        pairs = [[row[name] for row in metrics(d)[1:6]] for d in (run_dir, sft_run)]
        np.testing.assert_allclose(*pairs, rtol=tolerance)


# The loss of the first step, in float32 on a CPU: on random bytes, and on the embedded model. Those
# of sft are what transformers 5.24 computes of the same conversations, each by itself.
FIRST_LOSS_TINY = {
    "sft": 5.54799, "dpo": math.log(2), "kto": 0.5, "ipo": 25.0, "simpo": 0.97216, "orpo": 5.61651,
    "reward": 0.69897, "prm": 1.09467,
}  # fmt: skip
FIRST_LOSS = {"sft": 2.00657, "dpo": math.log(2), "kto": 0.5, "prm": 2.02064}


def first_steps(name, run_dir, *more):
    """The losses of two steps of a shipped config."""
    arguments = [f"--config={name}.py", "--train.steps=2", "--train.seed=1", "--train.eval_every=0"]
    arguments += ["--data.heldout=4", "--optimizer.warmup_steps=0", "--mesh.data=1"]
    assert main([*arguments, *more, f"--run-dir={run_dir}"]) == 0
    return [row["loss"] for row in metrics(run_dir)[1:]]


@pytest.mark.full
@pytest.mark.parametrize("name", FIRST_LOSS_TINY)
def test_every_config_trains_two_steps_and_its_first_loss_is_known(name, tmp_path):
    template = "None" if name == "prm" else "plain"
    more = ["--model.path=tiny-random", "--rows.max_length=256", "--rows.row_tokens=512"]
    losses = first_steps(name, tmp_path / name, *more, f"--rows.chat_template={template}")
    assert abs(losses[0] - FIRST_LOSS_TINY[name]) < 1e-4, losses
    assert np.isfinite(losses[1])


@pytest.mark.full
@pytest.mark.parametrize("name", FIRST_LOSS)
def test_the_first_loss_on_the_embedded_model_is_known(name, tmp_path):
    losses = first_steps(name, tmp_path / name)
    assert abs(losses[0] - FIRST_LOSS[name]) < 1e-4, losses
    assert losses[1] < losses[0]


def test_a_refused_back_end_leaves_no_config_in_the_directory(tmp_path, capsys):
    args = [*SFT, f"--run-dir={tmp_path / 'run'}", "--model.attention_backend=splash"]
    assert main(args) == 2
    assert "splash can't serve this run" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()
