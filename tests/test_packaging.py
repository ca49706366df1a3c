# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What is shipped, and what must never be depended on."""

import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    rows = project["project"]["dependencies"] + [row for extra in extras for row in extra]
    return rows + project["build-system"]["requires"]


def test_jetstream_pt_is_never_a_dependency():
    # The name on the package index belongs to a stranger (dependency confusion).
    names = {re.split(r"[\[<>=!~; ]", row)[0].lower().replace("_", "-") for row in requirements()}
    assert "jax" in names
    assert "jetstream-pt" not in names
    for path in [*ROOT.glob("scripts/*"), ROOT / ".ci" / "run"]:
        assert "jetstream" not in path.read_text(errors="replace"), path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_config_and_page(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for config in ROOT.glob("configs/**/*"):
        if config.is_file() and "__pycache__" not in config.parts:
            assert f"jaxrl_llm/{config.relative_to(ROOT)}" in names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "runs/"))]


def test_an_installed_wheel_finds_its_configs_from_another_folder(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, str(site), str(wheel)], check=True, capture_output=True)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import jaxrl_llm.train as t; "
        f"assert t.__file__.startswith({str(site)!r}), t.__file__; "
        "sys.exit(t.main(['--config=grpo.py', '--help']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=elsewhere, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--algo.kl_coef" in done.stdout
