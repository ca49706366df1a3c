# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A grader as they are often written: expected outputs beside the program, exit code 0 passes.

The exploits of `test_code_exploits.py` must work here, or they would prove nothing about ours.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys

_CHECKER = """
import json, sys

def main():
    tests = json.load(open("tests.json"))
    failed = 0
    try:
        namespace = {"__name__": "candidate"}
        exec(open("program.py").read(), namespace)
        for case in tests["cases"]:
            result = namespace[tests["entry"]](*case["args"])
            if result != case["expected"]:
                failed += 1
    except Exception:
        pass
    sys.exit(1 if failed else 0)

main()
"""


@dataclasses.dataclass(frozen=True)
class Grading:
    """What came of a grading: whether it paid, and how it ended."""

    paid: bool
    timed_out: bool
    stdout: bytes
    exit_code: int | None


def grade(program: str, tests: dict, folder: pathlib.Path, timeout_s: float = 60.0) -> Grading:
    """Pays if the checker's process ends with exit code 0."""
    (folder / "tests.json").write_text(json.dumps(tests))
    (folder / "program.py").write_text(program)
    (folder / "checker.py").write_text(_CHECKER)
    process = subprocess.Popen(
        [sys.executable, "checker.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        return Grading(False, True, b"", None)
    return Grading(process.returncode == 0, False, output, process.returncode)


def grade_output(program: str, expected: str, folder: pathlib.Path) -> bool:
    """Pays if a program printed the expected text, whatever printed it."""
    (folder / "printing.py").write_text(program + "\nprint(solve(2))\n")
    command = [sys.executable, "printing.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, text=True)
    return done.stdout.strip() == expected


def grade_asserts(program: str, asserts: list[str], setup: str, folder: pathlib.Path) -> bool:
    """Pays if the program, the setup and the asserts run in one process without an error."""
    (folder / "setup.json").write_text(json.dumps({"setup": setup}))
    text = "\n".join([program, setup, *asserts, "print('all passed')\n"])
    (folder / "asserting.py").write_text(text)
    command = [sys.executable, "asserting.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, text=True)
    return done.stdout.strip() == "all passed"
