# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""`cli.pass_rate` as a user runs it: the table, its resumption after kill -9, its errors."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import jax
import pytest

from jaxrl_llm.cli.pass_rate import main
from jaxrl_llm.data.curriculum import CurriculumConfig, make_stream
from jaxrl_llm.data.pass_rates import histogram, read_pass_rates
from jaxrl_llm.data.sources import ArithmeticTask

CONFIG = '''"""Pass rates of a tiny random model."""
import os, time
from jaxrl_llm.data.sources import ArithmeticTask
from jaxrl_llm.trainers.settings import ModelSource, RLConfig, SamplerConfig, TrainConfig

def low(rollouts):
    time.sleep(float(os.environ.get("SLOW", 0)))
    return [None if r.tokens[0] == 7 else float(r.tokens[0] % 4 == len(r.prompt.id) % 4)
            for r in rollouts]

def get_config():
    return RLConfig(
        model=ModelSource(path="tiny-random"),
        task=ArithmeticTask(first=(8, 12), second=(0, 9), shots=(), heldout=6),
        rewards={"low": low},
        sampler=SamplerConfig(group_size=4, max_new_tokens=4, max_prompt_tokens=16, slots=16),
        train=TrainConfig(prompts_per_step=4, seed=11),
    )
'''
TASK = ArithmeticTask(first=(8, 12), second=(0, 9), shots=(), heldout=6)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("pass_rate") / "rates_config.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def straight(config):
    out = config.with_name("straight.jsonl")
    assert main([f"--config={config}", "--samples=8", str(out)]) == 0
    return out


def test_the_table_has_every_training_prompt_once(straight):
    rows = read_pass_rates(straight)
    assert list(rows) == [record["id"] for record in TASK.load()[0]]
    assert all(0 <= row["passes"] <= row["n"] <= 8 for row in rows.values())
    # The reward is 0 or 1 and passes at ½, so the mean reward is the pass rate.
    for row in rows.values():
        assert row["mean_reward"] == pytest.approx(row["passes"] / row["n"], abs=1e-12)
    assert 0.1 < sum(r["passes"] for r in rows.values()) / sum(r["n"] for r in rows.values()) < 0.5
    assert len({row["passes"] for row in rows.values()}) > 2


def test_a_curriculum_reads_it(straight):
    train, _ = TASK.load()
    settings = CurriculumConfig(enabled=True, table=str(straight), recheck_epochs=0)
    stream = make_stream(train, lambda text: ([1], text), settings, seed=0, batch=4)
    rows = read_pass_rates(straight)
    kept = {name for name, row in rows.items() if 0.1 <= row["passes"] / row["n"] <= 0.9}
    drawn = {prompt.id for _ in range(len(train)) for prompt in stream.next()}
    assert drawn == kept and 4 <= len(kept) < len(rows)


def test_killed_and_started_again_it_writes_the_same(config, straight):
    out = config.with_name("killed.jsonl")
    command = [sys.executable, "-m", "jaxrl_llm.cli.pass_rate", f"--config={config}"]
    command += ["--samples=8", str(out)]
    env = {
        **os.environ,
        "XLA_FLAGS": "",
        "SLOW": "0.3",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not out.exists() or out.read_text().count("\n") < 10:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    written = out.read_text()
    assert written.count("\n") < straight.read_text().count("\n")
    out.write_text(written + '{"id": "half a li')  # as a kill within a write would leave it
    assert main([f"--config={config}", "--samples=8", str(out)]) == 0
    assert out.read_text() == straight.read_text()
    before = out.stat().st_mtime_ns
    assert main([f"--config={config}", "--samples=8", str(out)]) == 0  # nothing is left to do
    assert out.stat().st_mtime_ns == before


def test_a_place_that_can_not_be_written_is_told_before_anything_is_sampled(
    config, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("jaxrl_llm.trainers.pass_rate.load", lambda *_: pytest.fail("too late"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "x.jsonl", tmp_path):
        assert main([f"--config={config}", str(out)]) == 2
        told = capsys.readouterr().err
        assert "can't " in told and "run_dir" not in told


def test_what_passes_can_be_set(config, straight, monkeypatch):
    seen = []

    def measure(config, path, *, samples, show):
        seen.append(config.curriculum)
        return read_pass_rates(straight)

    monkeypatch.setattr("jaxrl_llm.trainers.pass_rate.measure_pass_rates", measure)
    passes = ["--curriculum.pass_at=0.9", "--curriculum.pass_part=low"]
    assert main([f"--config={config}", *passes, "x.jsonl"]) == 0
    assert (seen[0].pass_at, seen[0].pass_part) == (0.9, "low")


def test_histogram():
    rows = {
        str(i): {"passes": passes, "n": n}
        for i, (passes, n) in enumerate([(0, 16)] * 4 + [(16, 16)] + [(8, 16)] * 2 + [(0, 0)])
    }
    lines = histogram(rows).splitlines()
    assert lines[0] == "pass rates of 7 prompts, mean 28.6%"
    assert lines[1].split() == ["never", "4", "█" * 40]
    assert lines[7].split() == ["50–60%", "2", "█" * 20]
    assert lines[12].split() == ["always", "1", "█" * 10]
    assert lines[13] == "  not judged: 1"
    assert all(line.split()[1] == "0" for line in [*lines[2:7], *lines[8:12]])
