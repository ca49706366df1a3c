# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Several processes take the steps of one; a lost one ends the others with a line."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from mesh_problems import cache_variables
from process_group import free_port, killed_at_the_end, outputs

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.sharding import processes
from jaxrl_llm.sharding.processes import ProcessConfig, Watchdog

SCRIPT = pathlib.Path(__file__).with_name("process_steps.py")


def launch(processes, devices, mesh, *more):
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(port), str(processes), str(i), mesh, *more],
            env={**os.environ, **cache_variables(), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]


def running(*how):
    return killed_at_the_end(launch(*how))


def results(*how):
    with running(*how) as group:
        return [json.loads(out.splitlines()[-1]) for out in outputs(group, 200)]


@pytest.mark.parametrize(
    ("processes", "devices", "mesh", "rows"),
    [
        (2, 2, "data=2,fsdp=2", [[0, 4], [8, 12]]),
        pytest.param(2, 2, "data=2,tensor=2", [[0], [8]], marks=pytest.mark.full),
        pytest.param(2, 2, "data=1,pipeline=2,fsdp=2", [[0, 8]] * 2, marks=pytest.mark.full),
        pytest.param(4, 1, "data=1,pipeline=4", [[0]] * 4, marks=pytest.mark.full),
    ],
)
def test_processes_take_the_steps_of_one(processes, devices, mesh, rows):
    (alone,) = results(1, processes * devices, mesh)
    found = results(processes, devices, mesh)
    # The first row of each part of a micro-batch of 16 that is on devices of a process.
    assert [one["rows"] for one in found] == rows
    for one in found:
        assert one["devices"] == 4
        assert not one["addressable"]
        for (loss, norm), (loss1, norm1) in zip(one["steps"], alone["steps"], strict=True):
            assert abs(loss - loss1) <= 1e-6 * abs(loss1)
            assert abs(norm - norm1) <= 1e-6 * abs(norm1)
    assert alone["addressable"]


@pytest.mark.full
def test_who_compiles_for_long_is_waited_for():
    """Longer than the 30 s that gloo gives the other end of a connection."""
    found = results(2, 2, "data=2,fsdp=2", "late")
    assert [len(one["steps"]) for one in found] == [3, 3]


@pytest.mark.full
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_is_one_line_on_the_others(stop):
    with running(2, 2, "data=2,fsdp=2", "hang") as (first, second):
        # Gloo says something first.
        assert any(line == '{"step": 1}\n' for line in second.stdout)
        os.kill(second.pid, stop)
        start = time.monotonic()
        _, errors = first.communicate(timeout=100)
        assert first.returncode == 2
        # Three seconds, a look every half a second, and a busy machine.
        assert time.monotonic() - start < 20
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, errors[-2000:]
    assert re.fullmatch(
        r"error: process 1 of 2 is lost or late · got no sign .* 3.0 s · .*", lines[0]
    )


def test_settings_of_processes():
    for wrong in (("localhost:1",), ("auto", 2, 0), (None, 2, 0), ("localhost:1", 2)):
        with pytest.raises(ConfigError, match="go together"):
            ProcessConfig(*wrong)
    with pytest.raises(ConfigError, match="HOST:PORT"):
        ProcessConfig("localhost", 2, 0)
    with pytest.raises(ConfigError, match="0 … 1"):
        ProcessConfig("localhost:1", 2, 2)
    with pytest.raises(ConfigError, match="1 or more"):
        ProcessConfig("localhost:1", 0, 0)
    for short in (0, 1.9, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=r"lost-after is too short .* expected seconds, ≥ 2"):
            ProcessConfig(lost_after=short)


def test_process_0_does_not_call_itself_lost(monkeypatch):
    monkeypatch.setattr(processes, "_count", lambda: 2)
    watchdog = Watchdog(3.0)
    now = watchdog._answered
    watchdog._heard = {1: ("7", now)}
    assert watchdog._verdict(now + 2.9) is None
    monkeypatch.setattr(processes, "_index", lambda: 0)
    told = str(watchdog._verdict(now + 3.1))
    assert told.startswith(
        "the coordination service of this process does not answer · got no answer"
    )
    watchdog._heard = {0: ("7", now)}
    monkeypatch.setattr(processes, "_index", lambda: 1)
    assert str(watchdog._verdict(now + 3.1)).startswith("process 0 of 2 is lost or late")


def test_one_process_has_nobody_to_watch():
    with Watchdog(0.1, end=pytest.fail):
        time.sleep(0.3)
