# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Processes that don't find each other end with one line and exit code 2."""

import os
import socket
import subprocess
import sys

import pytest
from process_group import free_port, killed_at_the_end

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.sharding.joining import check_port
from jaxrl_llm.sharding.processes import ProcessConfig

CHILD = """
import sys
from jaxrl_llm.train import leave, main
leave(main(["--config=tiny_grpo.py", "--devices=cpu:1", "--lost-after=2", *sys.argv[1:]]))
"""

DIES = """
import os, signal, sys
from jaxrl_llm.sharding.joining import start
from jaxrl_llm.sharding.processes import ProcessConfig
start(ProcessConfig(sys.argv[1], 2, 1, lost_after=2.0))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "address", ["host:1", "10.0.0.1:65535", "node-1.pod.local:8476", "[::1]:5000", "[fd00::5]:8476"]
)
def test_an_address_is_a_host_and_a_port(address):
    assert ProcessConfig(address, 2, 0).coordinator == address


@pytest.mark.parametrize(
    "address",
    [
        "host",
        "host:",
        ":5000",
        "host:0",
        "host:65536",
        "a:b:c:5000",
        "::1:5000",
        "[]:1",
        "[::1]",
        "[h]:1",
    ],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="--coordinator is no address"):
        ProcessConfig(address, 2, 0)


def test_a_port_that_another_program_has():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"can't be used on this host · got {port} "):
            check_port(f"localhost:{port}")
    check_port(f"localhost:{free_port()}")


def errors(tmp_path, *starts):
    """What processes write that are started with (port, processes, index)."""
    commands = [
        [f"--coordinator=localhost:{port}", f"--processes={count}", f"--process={i}"]
        for port, count, i in starts
    ]
    group = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, f"--run-dir={tmp_path / 'run'}", *command],
            env={**os.environ, "XLA_FLAGS": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    with killed_at_the_end(group):
        texts = [process.communicate(timeout=100)[1] for process in group]
    assert [process.returncode for process in group] == [2] * len(group), texts
    assert all(text.count("\n") == 1 for text in texts), texts
    assert not (tmp_path / "run").exists()
    return texts


@pytest.mark.full
def test_who_is_not_found_or_not_wanted_is_one_line(tmp_path):
    nobody, twice, other = free_port(), free_port(), free_port()
    texts = errors(
        tmp_path,
        (nobody, 2, 1),
        *((twice, 3, i) for i in (0, 1, 1)),
        (other, 2, 0),
        (other, 3, 2),
    )
    late, refused = "error: not all processes of this run came within 10 s", "process 0 refused"
    assert late in texts[0] and late in texts[1]
    # One of the two with the same number is let in.
    assert sorted(refused in text for text in texts[2:4]) == [False, True]


@pytest.mark.full
def test_who_dies_before_devices_are_looked_for_is_one_line(tmp_path):
    address = f"localhost:{free_port()}"
    with subprocess.Popen([sys.executable, "-c", DIES, address]) as second:
        command = [f"--coordinator={address}", "--processes=2", "--process=0"]
        first = subprocess.run(
            [sys.executable, "-c", CHILD, f"--run-dir={tmp_path / 'run'}", *command],
            env={**os.environ, "XLA_FLAGS": ""},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (first.returncode, second.returncode) == (2, -9), first.stderr[-2000:]
    lines = [line for line in first.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "process 1 of 2 is lost or late" in lines[0], first.stderr[-2000:]
