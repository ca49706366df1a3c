# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Processes of a test that work together."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def killed_at_the_end(group: list[subprocess.Popen]) -> Iterator[list[subprocess.Popen]]:
    try:
        yield group
    finally:
        for process in group:
            process.kill()
            process.wait()


def outputs(group: list[subprocess.Popen], timeout: float) -> list[str]:
    """What each wrote, once all have ended well."""
    texts = [process.communicate(timeout=timeout) for process in group]
    codes = [process.returncode for process in group]
    assert codes == [0] * len(group), [errors[-3000:] for _, errors in texts]
    return [out for out, _ in texts]
