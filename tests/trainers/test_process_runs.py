# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of several processes take the steps of one, and survive the loss of any."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest
from process_group import free_port, killed_at_the_end, outputs

from jaxrl_llm.config import find_config

pytestmark = pytest.mark.full
SCRIPT = pathlib.Path(__file__).with_name("process_run.py")
ARGS = ["--train.seed=3", "--train.eval_every=0", "--train.steps=4", "--train.checkpoint_every=1"]
ARGS += ["--mesh.fsdp=2", "--monitor.tensorboard=False", "--lost-after=6"]
GRPO = ["--config=tiny_grpo.py", "--algo.kl_coef=0.05", "--filter.refill=prompts"]
SUPERVISED = ["--model.path=tiny-random", "--rows.chat_template=plain", "--train.batch=8"]
SUPERVISED += ["--train.micro_batch=4", "--rows.max_length=128", "--rows.row_tokens=256"]
SUPERVISED += ["--optimizer.learning_rate=1e-2"]
COMPARED = ("loss", "grad_norm", "kl", "entropy", "reward", "sampling/groups_dropped")


def slurm_variables(port, count, index):
    """What `srun` tells each of its tasks; JAX's port follows from the number of the job."""
    return {
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
    }


def running(folder, count, run, *, hang=(), only=None, slurm=False, base=GRPO, apart=False):
    """So many processes with four devices together; those of `hang` stop after two steps, those of
    `only` get arguments of their own. `apart`: each in a folder of its own, where `run` is."""
    cache = jax.config.jax_compilation_cache_dir
    port, group = free_port(), []
    for i in range(count):
        place = run if apart else folder / run
        args = [*base, *ARGS, f"--run-dir={place}", f"--devices=cpu:{4 // count}"]
        args += (only or {}).get(i, [])
        if count > 1 and not slurm:
            args += [f"--coordinator=localhost:{port}", f"--processes={count}", f"--process={i}"]
        told, last = str(folder / f"{pathlib.Path(run).name}.{i}"), "2" if i in hang else "-1"
        group.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), told, last, *args],
                env={
                    **os.environ,
                    "XLA_FLAGS": "--xla_backend_optimization_level=0",
                    "JAX_COMPILATION_CACHE_DIR": str(cache),
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
                    **(slurm_variables(port, count, i) if slurm else {}),
                },
                cwd=folder / str(i) if apart else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return killed_at_the_end(group)


def finish(folder, count, run, **how):
    """What each of the processes tells, once all are done."""
    with running(folder, count, run, **how) as group:
        outputs(group, 400)
    return [json.loads((folder / f"{run}.{i}").read_text()) for i in range(count)]


def rows(folder, run):
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "loss" in row]
    return [{k: row[k] for k in COMPARED if k in row} for row in steps]


def completions(folder, run):
    lines = (folder / run / "samples.jsonl").read_text().splitlines()
    return [(row["prompt_id"], row["completion"]) for row in map(json.loads, lines)]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, finish(folder, 1, "one"), finish(folder, 2, "two")


def assert_same_steps(folder, run, other):
    found, expected = rows(folder, run), rows(folder, other)
    assert len(found) == len(expected) == 4
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    assert completions(folder, run) == completions(folder, other)


def test_two_processes_train_as_one(both):
    folder, (alone,), (first, second) = both
    assert_same_steps(folder, "two", "one")
    assert alone["addressable"] and not first["addressable"] and not second["addressable"]
    # Every round of sampling is shared: together what one process samples.
    for whole, a, b in zip(alone["sampled"], first["sampled"], second["sampled"], strict=True):
        assert not set(a) & set(b)
        assert sorted(a + b) == sorted(whole)
        assert abs(len(a) - len(b)) <= 1


@pytest.mark.parametrize("config", ["sft.py", "dpo.py"])
def test_supervised_runs_too(tmp_path, config):
    base = [f"--config={config}", *SUPERVISED]
    (alone,) = finish(tmp_path, 1, "one", base=base)
    both = finish(tmp_path, 2, "two", base=base)
    assert not any(told["addressable"] for told in both)
    # Each tokenises a disjoint half of every table, and holds a disjoint half of every micro-batch.
    assert len(alone["read"]) == 2  # training and held-out examples of one table
    for whole, a, b in zip(alone["read"], *(told["read"] for told in both), strict=True):
        assert a + b == whole and abs(len(a) - len(b)) <= 1
    for whole, *parts in zip(alone["rows"], *(told["rows"] for told in both), strict=True):
        a, b = ({row for first, last, _ in part for row in range(first, last)} for part in parts)
        assert not a & b and sorted(a | b) == list(range(whole[0][2]))
    for row, wanted in zip(rows(tmp_path, "two"), rows(tmp_path, "one"), strict=True):
        assert row.keys() >= {"loss", "grad_norm"} and row == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    "lost, told",
    [
        (1, "process 1 of 2 is lost or late · got no sign of life for 6.0 s"),
        # It held the service by which processes know of each other: JAX notices at once.
        (0, "process 0 of 2 is lost · got no answer at "),
    ],
)
def test_a_killed_process_ends_the_others_and_all_resume(both, tmp_path, lost, told):
    with running(tmp_path, 2, "run", hang=(lost,)) as group:
        while not (tmp_path / "run" / "checkpoints" / "2").exists():
            assert all(process.poll() is None for process in group), group[0].communicate()
            time.sleep(0.2)
        time.sleep(2.0)  # the other one waits for this one's share of the third step
        os.kill(group[lost].pid, signal.SIGKILL)
        _, errors = group[1 - lost].communicate(timeout=100)
        assert group[1 - lost].returncode != 0
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, errors[-2000:]
    assert told in lines[0]
    finish(tmp_path, 2, "run")
    folder = both[0]
    assert rows(tmp_path, "run") == [
        pytest.approx(row, rel=1e-6, abs=1e-9) for row in rows(folder, "two")
    ]


def test_all_see_the_same_data_and_directory(tmp_path):
    rows = [{"prompt": f"{i} plus {i} is", "completion": f" {2 * i}"} for i in range(40)]
    for index in range(2):
        (tmp_path / str(index)).mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in rows[index:])
        (tmp_path / str(index) / "rows.jsonl").write_text(lines)
    base = ["--config=sft.py", *SUPERVISED, "--data.path=rows.jsonl"]
    for run, told in (
        (tmp_path / "run", "process 1 has another set of examples than process 0"),
        ("run", "process 1 does not see the run directory of process 0"),
    ):
        with running(tmp_path, 2, run, base=base, apart=True) as group:
            texts = [process.communicate(timeout=200)[1] for process in group]
        assert [process.returncode for process in group] == [2, 2], texts
        assert all(told in text for text in texts), texts
        assert not list(tmp_path.glob("*/run")) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "other, told",
    [
        ("--train.steps=5", "process 1 was started with other settings than process 0"),
        ("--devices=cpu:1", "got process 0: 2, process 1: 1"),
        ("--dry-run", "process 1 has another command than process 0"),
        ("--fresh", "process 1 has another command than process 0"),
        ("--config=other.py", "process 1 has another command than process 0"),
    ],
)
def test_all_are_started_alike(tmp_path, monkeypatch, other, told):
    monkeypatch.chdir(tmp_path)
    text = find_config("tiny_grpo.py").read_text()
    (tmp_path / "other.py").write_text(text + "# of another host\n")
    with running(tmp_path, 2, "run", slurm=True, only={1: [other]}) as group:
        texts = [process.communicate(timeout=200)[1] for process in group]
    assert [process.returncode for process in group] == [2, 2], texts
    assert all(told in text for text in texts), texts
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_all_is_one(tmp_path):
    with running(tmp_path, 2, "run", only={i: ["--dry-run"] for i in range(2)}) as group:
        outputs(group, 200)
    assert not (tmp_path / "run").exists()
