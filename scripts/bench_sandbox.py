# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Sandboxed runs a second on this machine: bare starts, Python starts, test runs of a code reward.

python scripts/bench_sandbox.py
"""

from __future__ import annotations

import os
import time
from concurrent import futures

from jaxrl_llm.rewards.code_tests import run_tests
from jaxrl_llm.rewards.sandbox import Job, Limits, Sandbox

RUNS = 100
TESTS = {
    "kind": "calls",
    "entry": "solve",
    "cases": [{"args": [i], "expected": i * i} for i in range(8)],
}


def rate(name: str, work) -> None:
    """Prints how often a second `work` is done, by as many threads as the rewards use."""
    work(0)
    begin, cpu = time.perf_counter(), time.process_time()
    with futures.ThreadPoolExecutor(3 * (os.cpu_count() or 1)) as pool:
        list(pool.map(work, range(RUNS)))
    seconds = time.perf_counter() - begin
    own = (time.process_time() - cpu) / RUNS
    print(
        f"{name:34} {RUNS / seconds:6.1f} a second   {1e3 * own:5.1f} ms of our own CPU time each"
    )


def main() -> None:
    sandbox, limits = Sandbox(), Limits(cpu_s=2.0, idle_s=2.0)
    sandbox.run(Job(("true",)))  # the first run probes
    print(f"{os.cpu_count()} CPUs; one bare start after another: ", end="")
    begin = time.perf_counter()
    for _ in range(10):
        sandbox.run(Job(("true",)))
    print(f"{100 * (time.perf_counter() - begin):.0f} ms")
    rate("bare start", lambda _: sandbox.run(Job(("true",), limits=limits)))
    rate("Python start", lambda _: sandbox.run(Job(("python3", "-c", ""), limits=limits)))
    program = "def solve(x):\n    return x * x\n"
    rate("test run of 8 calls", lambda _: run_tests(program, TESTS, sandbox, limits=limits))


if __name__ == "__main__":
    main()
