# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Whole runs of `configs/tiny_grpo.py` as a user starts them: same seed, kill, stop, change."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny_model import write_tiny_model

from jaxrl_llm.config import diff, find_config, load_config, to_dict
from jaxrl_llm.data.sources import JsonlTask
from jaxrl_llm.errors import DataError, RunDirectoryError
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.train import main
from jaxrl_llm.trainers.build import build_run
from jaxrl_llm.trainers.run_directory import open_together

BASE = ["--config=tiny_grpo.py", "--mesh.data=1", "--train.seed=3"]


def start(run_dir, *more):
    """A run in a process of its own, with the test session's devices and compilation cache.

    The number of CPU devices decides how XLA cuts work over threads, so last bits depend on it.
    """
    env = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    command = [sys.executable, "-m", "jaxrl_llm.train", *BASE, f"--run-dir={run_dir}", *more]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def metrics(run_dir):
    """The rows of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "time" not in k and "memory" not in k} for row in rows]


def final_arrays(run_dir):
    """Every array of the newest checkpoint."""
    with ocp.CheckpointManager((run_dir / "checkpoints").absolute()) as manager:
        restored = manager.restore(
            manager.latest_step(), args=ocp.args.Composite(arrays=ocp.args.StandardRestore())
        )
    return jax.tree.map(np.asarray, restored["arrays"])


def wait_for_steps(process, run_dir, count):
    """Until metrics.jsonl has the rows of `count` steps (step 0 is the evaluation before them)."""
    deadline = time.monotonic() + 300
    path = run_dir / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < count + 1:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run makes no steps"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def straight(tmp_path_factory):
    """A run from start to end without interruption."""
    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    assert main([*BASE, f"--run-dir={run_dir}"]) == 0
    return run_dir


def test_the_reward_rises_on_two_seeds_of_three(straight, tmp_path):
    def gain(run_dir):
        result = json.loads((run_dir / "result.json").read_text())
        return result["heldout_after"]["reward"] - result["heldout_before"]["reward"]

    gains = [gain(straight)]
    for seed in (4, 5):
        more = [f"--run-dir={tmp_path / str(seed)}", f"--train.seed={seed}"]
        assert main([*BASE, *more]) == 0
        gains.append(gain(tmp_path / str(seed)))
    assert sorted(gains)[1] > 0.3, gains


def test_a_run_leaves_everything_that_it_promises(straight):
    names = {path.name for path in straight.iterdir()}
    assert {
        "config.json", "command.txt", "versions.json", "metrics.jsonl", "samples.jsonl",
        "samples.txt", "tensorboard", "report.html", "checkpoints", "export", "result.json", "DONE",
    } <= names  # fmt: skip
    rows = metrics(straight)
    assert [row["step"] for row in rows] == list(range(13))
    expected = {
        "reward", "reward_std", "frac_reward_zero_std", "rewards/digits/mean",
        "completions/mean_length", "completions/clipped_ratio", "entropy", "clip_ratio/low_mean",
        "grad_norm", "learning_rate", "num_tokens", "sampling/sampling_logp_difference/mean",
        "sampling/sampling_logp_difference/max", "sampling/mismatch_k1", "sampling/mismatch_k3",
        "sampling/importance_sampling_ratio/max", "sampling/effective_sample_size",
    }  # fmt: skip
    assert expected <= set(rows[5])


def test_sampler_and_trainer_agree_over_the_whole_run(straight):
    rows = metrics(straight)[1:]
    assert np.mean([row["sampling/sampling_logp_difference/mean"] for row in rows]) <= 5e-6
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) <= 1e-4


def test_at_learning_rate_0_the_importance_ratio_is_1(tmp_path):
    more = ["--optimizer.learning_rate=0", "--train.steps=4", f"--run-dir={tmp_path / 'still'}"]
    assert main([*BASE, *more]) == 0
    rows = metrics(tmp_path / "still")[1:]
    ratios = [row["sampling/importance_sampling_ratio/mean"] for row in rows]
    assert np.abs(np.array(ratios) - 1.0).max() <= 1e-5, ratios


def test_the_same_seed_gives_the_same_metrics(straight, tmp_path):
    again = tmp_path / "again"
    assert main([*BASE, f"--run-dir={again}"]) == 0
    assert metrics(again) == metrics(straight)


def test_killed_and_restarted_it_ends_with_the_same_parameters(straight, tmp_path):
    run_dir = tmp_path / "killed"
    for steps in (5, 8):
        process = start(run_dir)
        wait_for_steps(process, run_dir, steps)
        process.kill()
        process.wait()
        assert not (run_dir / "DONE").exists()
    process = start(run_dir)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "resumed after step" in output
    assert metrics(run_dir) == metrics(straight)
    same = jax.tree.map(np.array_equal, final_arrays(run_dir), final_arrays(straight))
    assert all(jax.tree.leaves(same)), same


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_says_so(signum, tmp_path):
    run_dir = tmp_path / "stopped"
    process = start(run_dir, "--train.steps=4000", "--train.checkpoint_every=4000")
    wait_for_steps(process, run_dir, 3)
    process.send_signal(signum)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signum, errors
    last = metrics(run_dir)[-1]["step"]
    assert f"stopped after step {last}" in output
    assert (run_dir / "checkpoints" / str(last)).is_dir()


def test_eight_devices_give_the_losses_of_one(straight, tmp_path):
    run_dir = tmp_path / "eight"
    process = start(run_dir, "--devices=cpu:8", "--mesh.data=8")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("reward", 1e-9)):
        one = np.array([row[name] for row in metrics(straight)[1:4]])
        eight = np.array([row[name] for row in metrics(run_dir)[1:4]])
        np.testing.assert_allclose(eight, one, atol=tolerance, rtol=tolerance)


def test_a_finished_run_prints_its_result_and_trains_no_more(straight, capsys):
    before = (straight / "metrics.jsonl").read_bytes()
    assert main([*BASE, f"--run-dir={straight}"]) == 0
    assert "held-out reward" in capsys.readouterr().out
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_another_config_is_refused_with_its_differences(straight, capsys):
    assert main([*BASE, f"--run-dir={straight}", "--algo.kl_coef=0.1"]) == 2
    error = capsys.readouterr().err
    assert "algo.kl_coef: 0.0 → 0.1" in error and "--fresh" in error
    assert error.count("\n") == 1


def test_fresh_moves_the_old_run_aside_and_an_unset_seed_draws_another(tmp_path):
    run_dir, seeds, samples = tmp_path / "run", [], []
    for _ in range(2):
        more = [f"--run-dir={run_dir}", "--train.steps=1", "--train.seed=None", "--fresh"]
        assert main([*BASE, *more]) == 0
        seeds.append((run_dir / "seed.txt").read_text())
        samples.append((run_dir / "samples.jsonl").read_text())
    assert (tmp_path / "run.1" / "DONE").exists()
    assert seeds[0] != seeds[1] and samples[0] != samples[1]


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path, capsys):
    run_dir = tmp_path / "exploded"
    # A warm-up's first rate is 0: the first step is good, the second is not.
    more = ["--optimizer.learning_rate=1e38", "--optimizer.warmup_steps=3"]
    more += ["--train.checkpoint_every=1", f"--run-dir={run_dir}"]
    assert main([*BASE, *more]) == 2
    error = capsys.readouterr().err
    assert "not finite" in error and error.count("\n") == 1
    assert "intact" not in error
    assert "not finite" in (run_dir / "FAILED.txt").read_text()
    saved = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert saved == {"1"} and not (run_dir / "DONE").exists()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(final_arrays(run_dir)))


def test_parameters_that_are_not_finite_are_never_exported(tmp_path, capsys):
    run_dir = tmp_path / "exploded"
    more = ["--optimizer.learning_rate=1e38", "--train.steps=1", f"--run-dir={run_dir}"]
    assert main([*BASE, *more]) == 2
    assert "not finite" in capsys.readouterr().err
    assert not (run_dir / "DONE").exists() and not (run_dir / "export").exists()


def test_a_mistake_leaves_no_run_directory_and_fresh_moves_only_runs(straight, tmp_path, capsys):
    run_dir, thesis = tmp_path / "run", tmp_path / "thesis"
    assert main([*BASE, f"--run-dir={run_dir}", "--model.path=/no/such"]) == 2
    assert not run_dir.exists()
    thesis.mkdir()
    (thesis / "thesis.txt").write_text("all of it")
    for more in ([], ["--fresh"]):
        assert main([*BASE, f"--run-dir={thesis}", *more]) == 2
    assert [path.name for path in thesis.iterdir()] == ["thesis.txt"]
    bad = ["--fresh", "--train.prompts_per_step=10000"]
    assert main([*BASE, f"--run-dir={straight}", *bad]) == 2
    assert (straight / "DONE").exists()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_a_damaged_run_is_one_clear_line(name, straight, tmp_path, capsys):
    run_dir = tmp_path / "damaged"
    run_dir.mkdir()
    for file in ("config.json", "result.json", "DONE", "seed.txt"):
        if (straight / file).exists():
            (run_dir / file).write_bytes((straight / file).read_bytes())
    (run_dir / name).write_text("{")
    assert main([*BASE, f"--run-dir={run_dir}"]) == 2
    error = capsys.readouterr().err
    assert name in error and error.count("\n") == 1


def test_a_reward_is_never_called_without_rollouts_and_huge_ones_are_refused(tmp_path, capsys):
    config = tmp_path / "mine.py"
    config.write_text(
        "import dataclasses\n"
        "from tiny_grpo import get_config as tiny\n"
        "def mine(rollouts):\n"
        "    assert rollouts\n"
        "    return [1e20 * i for i, _ in enumerate(rollouts)]\n"
        "def get_config():\n"
        "    return dataclasses.replace(tiny(), rewards={'mine': mine})\n"
    )
    import jaxrl_llm.config

    (tmp_path / "tiny_grpo.py").write_bytes(
        (jaxrl_llm.config.packaged_configs() / "tiny_grpo.py").read_bytes()
    )
    more = ["--train.steps=1", f"--run-dir={tmp_path / 'run'}", "--mesh.data=1"]
    assert main([f"--config={config}", *more]) == 2
    assert "a reward is too large" in capsys.readouterr().err


def test_with_kl_the_reference_is_used_and_shown(tmp_path):
    run_dir = tmp_path / "kl"
    more = ["--algo.kl_coef=0.05", "--train.epochs=2", "--train.minibatches=2", "--train.steps=3"]
    assert main([*BASE, *more, f"--run-dir={run_dir}"]) == 0
    rows = metrics(run_dir)[1:]
    assert rows[0]["kl"] >= 0 and rows[2]["kl"] > 0
    assert rows[2]["clip_ratio/region_mean"] >= 0


@pytest.mark.full
def test_killed_at_ten_random_moments_it_ends_as_the_straight_run(tmp_path):
    more = ["--filter.refill=prompts", "--train.checkpoint_every=2", "--train.steps=40"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    process = start(straight, *more)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    draw, kills = np.random.default_rng(5), 0
    while kills < 10:
        process = start(killed, *more)
        try:
            process.wait(timeout=float(draw.uniform(4, 16)))
        except subprocess.TimeoutExpired:
            kills += 1
            process.kill()
        process.communicate()
        if process.returncode == 0:
            break  # it was faster than the kills
    process = start(killed, *more)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert kills >= 3, "the run is too short to be killed"
    assert metrics(killed) == metrics(straight)
    jax.tree.map(np.testing.assert_array_equal, final_arrays(killed), final_arrays(straight))


def test_other_held_out_prompts_are_not_gone_on_with(tmp_path):
    """A run whose held-out file has changed stops; one that noted nothing goes on."""
    for name, prompts in (("train", "ab"), ("heldout", "c")):
        lines = [json.dumps({"prompt": p}) for p in prompts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    _, config = load_config(find_config("tiny_grpo.py"))
    task = JsonlTask(str(tmp_path / "train.jsonl"), str(tmp_path / "heldout.jsonl"))
    train = dataclasses.replace(config.train, prompts_per_step=2, seed=1)
    config = dataclasses.replace(config, task=task, train=train, mesh=MeshConfig(data=1))
    settings = to_dict(config)
    directory = open_together(tmp_path / "run", settings, diff=diff, seed=1, fresh=False)
    state = build_run(config, directory, settings).data_state()
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "d"}')
    again = build_run(config, directory, settings)
    with pytest.raises(DataError, match="held-out prompts are not those of the checkpoint"):
        again.set_data_state(state)
    again.set_data_state({name: value for name, value in state.items() if name != "heldout"})


def test_another_critic_is_not_gone_on_with(tmp_path):
    critic, run = tmp_path / "critic", tmp_path / "run"
    write_tiny_model(critic, seed=1, max_position_embeddings=256)
    _, config = load_config(find_config("tiny_grpo.py"))
    algo = dataclasses.replace(config.algo, name="ppo")
    own = dataclasses.replace(config.critic, path=str(critic))
    config = dataclasses.replace(config, algo=algo, critic=own, mesh=MeshConfig(data=1))
    settings = to_dict(config)
    directory = open_together(run, settings, diff=diff, seed=1)
    build_run(config, directory, settings)
    directory.begin()
    directory._lock.close()
    shutil.rmtree(critic)
    write_tiny_model(critic, seed=2, max_position_embeddings=256)
    again = open_together(run, settings, diff=diff, seed=1)
    with pytest.raises(RunDirectoryError, match=r"the critic .*critic is not the one .*weights"):
        build_run(config, again, settings)


def test_a_refused_back_end_leaves_the_directory_to_the_next_run(tmp_path, capsys):
    args = [*BASE, f"--run-dir={tmp_path / 'run'}", "--train.steps=1"]
    assert main([*args, "--model.attention_backend=splash"]) == 2
    assert "splash can't serve this run" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()
    assert main(args) == 0
