# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Functions that the tests of the workers have them call."""

from __future__ import annotations

import os
import sys
import time


def echo(request: bytes) -> bytes:
    return request


def busy(request: bytes) -> bytes:
    while b"ever" in request:
        pass
    return b"true"


def act(request: bytes) -> bytes:
    what, _, count = request.decode().partition(" ")
    if what == "sleep":
        time.sleep(float(count))
    elif what == "exit":
        os._exit(int(count))
    elif what == "raise":
        raise ValueError(count)
    elif what == "allocate":
        return str(len(bytearray(int(count)))).encode()
    elif what == "big_power":
        return str((9 ** int(count)) % 7).encode()  # one C call that takes for ever
    elif what == "print":
        print(count)
        sys.stdout.flush()
        os.write(1, b"more")
    elif what == "spin":
        end = time.process_time() + float(count)
        while time.process_time() < end:
            pass
    elif what == "pid":
        return str(os.getpid()).encode()
    return request
