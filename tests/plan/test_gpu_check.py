# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check

    return gpu_check


def test_missing_packages_are_named_with_what_to_carry(gpu_check):
    names = {"json": "json", "no_such_package": "no-such", "no_such.part": "no-such-part"}
    assert gpu_check.missing(names) == ["no-such", "no-such-part"]
    text = gpu_check.carry(["grain", "etils[epath]"])
    assert "--target carried 'grain' 'etils[epath]'" in text
    assert "PYTHONPATH=carried" in text


def test_a_part_that_lacks_packages_is_not_run_and_one_that_fails_does_not_stop_the_rest(
    gpu_check, monkeypatch
):
    def broken(*_):
        raise ValueError("no\nluck")

    monkeypatch.setattr(gpu_check, "missing", lambda packages: ["grain"])
    monkeypatch.setattr(gpu_check, "DEVICE_TESTS", [("works", lambda: "well")])
    monkeypatch.setattr(gpu_check, "sampler", broken)
    monkeypatch.setattr(gpu_check, "update", lambda *_: "fast")
    rows = gpu_check.run_parts(gpu_check.SIZES["tiny"], None)
    outcomes = {row["part"]: (row["outcome"], row["result"]) for row in rows}
    assert outcomes == {
        "works": ("passed", "well"),
        "sampler": ("failed", "ValueError: no"),
        "update": ("passed", "fast"),
        "GRPO run": ("not run", "needs grain"),
    }


@pytest.mark.full
def test_all_parts_pass_on_a_cpu(tmp_path):
    command = ["bash", str(SCRIPTS / "gpu_check.sh"), "--cpu", "--size=tiny"]
    done = subprocess.run(
        [*command, f"--json={tmp_path / 'rows.json'}"],
        capture_output=True,
        text=True,
        timeout=480,
        env=os.environ | {"PYTHON": sys.executable},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["outcome"] for row in rows] == ["passed"] * 10
