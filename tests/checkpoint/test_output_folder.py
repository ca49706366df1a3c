# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What a written folder may take the place of, for every kind of folder that is written."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tiny_model import tiny_model

from jaxrl_llm.checkpoint import output_folder as module
from jaxrl_llm.checkpoint.adapters import save_adapter
from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.checkpoint.output_folder import output_folder
from jaxrl_llm.checkpoint.score_folder import save_score_folder
from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.lora import LoraConfig, adapter_shapes
from jaxrl_llm.text.tokenizer import bytes_tokenizer

CONFIG, PARAMS = tiny_model()
LORA = LoraConfig(rank=2, targets=("q",))
ADAPTER = {
    target: {part: jnp.asarray(np.ones(shape, np.float32)) for part, shape in parts.items()}
    for target, parts in adapter_shapes(CONFIG, LORA).items()
}
SCORE = {"decoder": PARAMS, "score": {"weight": jnp.asarray(np.ones((1, 24), np.float32))}}
WRITERS = {
    "model": lambda out: save_folder(out, PARAMS, CONFIG, bytes_tokenizer()),
    "score": lambda out: save_score_folder(out, SCORE, CONFIG, bytes_tokenizer()),
    "adapter": lambda out: save_adapter(out, ADAPTER, LORA, CONFIG),
}
OWN = {"model": "config.json", "score": "config.json", "adapter": "adapter_config.json"}


def everything(root):
    """Every entry below a folder: kind, and content of files."""
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else None,
            os.readlink(path) if path.is_symlink() else None,
        )
        for path in root.rglob("*")
    }


def plant(kind, root, own):
    """What lies at OUT before, and the words of its refusal."""
    out = root / "out"
    if kind == "file":
        out.write_text("thesis")
        return "over a file"
    if kind == "pipe":
        os.mkfifo(out)
        return "over a file"
    if kind == "link to nothing":
        out.symlink_to(root / "away")
        return "leads nowhere"
    if kind == "link to itself":
        out.symlink_to(out)
        return "leads nowhere"
    out.mkdir()
    if kind == "stranger":
        (out / "thesis.txt").write_text("years of work")
    elif kind == "folder of a file's name":
        (out / own).mkdir()
        (out / own / "thesis.txt").write_text("years of work")
    elif kind == "link of a file's name":
        (root / "blob").write_text("{}")
        (out / own).symlink_to(root / "blob")
    elif kind == "pipe of a file's name":
        os.mkfifo(out / own)
    elif kind == "link to a folder with strangers":
        (out / "thesis.txt").write_text("years of work")
        out.rename(root / "target")
        out.symlink_to(root / "target")
    return "holds other files"


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    "kind",
    [
        "file",
        "pipe",
        "link to nothing",
        "link to itself",
        "stranger",
        "folder of a file's name",
        "link of a file's name",
        "pipe of a file's name",
        "link to a folder with strangers",
    ],
)
def test_what_is_not_a_former_output_is_left_alone(writer, kind, tmp_path):
    said = plant(kind, tmp_path, OWN[writer])
    before = everything(tmp_path)
    with pytest.raises(ModelError, match=said) as caught:
        WRITERS[writer](tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("writer", WRITERS)
def test_a_former_output_is_replaced_also_behind_a_link(writer, tmp_path):
    WRITERS[writer](tmp_path / "target")
    first = everything(tmp_path / "target")
    (tmp_path / "target" / OWN[writer]).write_text("{}")
    (tmp_path / "out").symlink_to("target")
    WRITERS[writer](tmp_path / "out")
    assert os.readlink(tmp_path / "out") == "target"
    assert everything(tmp_path / "target") == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "target"]
    assert len({mode for mode, *_ in first.values()}) == 1  # as the umask says, all of them


def test_an_adapter_does_not_go_into_a_model_nor_a_model_into_an_adapter(tmp_path):
    WRITERS["model"](tmp_path / "model")
    WRITERS["adapter"](tmp_path / "adapter")
    before = everything(tmp_path)
    for writer, out in (("adapter", "model"), ("model", "adapter"), ("score", "adapter")):
        with pytest.raises(ModelError, match="holds other files"):
            WRITERS[writer](tmp_path / out)
    assert everything(tmp_path) == before


def rewrite(path, change=lambda name, x: x, metadata=None):
    """What another program makes of a file of weights."""
    tensors = safetensors.numpy.load_file(path)
    tensors = {name: change(name, x) for name, x in tensors.items()}
    safetensors.numpy.save_file(tensors, path, metadata=metadata or {"format": "pt"})


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("harm", ["others' weights", "one of others", "damaged", "no weights"])
def test_a_folder_with_the_names_of_an_export_is_not_one(writer, harm, tmp_path):
    """Any fine-tuned model has these names; the mark is what only an export carries."""
    out = WRITERS[writer](tmp_path / "out")
    weights = sorted(out.glob("*.safetensors"))
    if harm == "others' weights":
        for path in weights:
            rewrite(path, lambda name, x: x + 1)
    elif harm == "one of others":
        name = weights[0].name if writer == "adapter" else "model-00009-of-00009.safetensors"
        shutil.copy(weights[0], out / name) if not (out / name).exists() else None
        rewrite(out / name)
    elif harm == "damaged":
        weights[0].write_bytes(weights[0].read_bytes()[:20])
    else:
        for path in weights:
            path.unlink()
    before = everything(tmp_path)
    with pytest.raises(ModelError, match="not an older export of its kind") as caught:
        WRITERS[writer](out)
    assert "\n" not in str(caught.value)
    assert everything(tmp_path) == before


def test_a_model_and_a_reward_model_do_not_replace_each_other(tmp_path):
    for kind, other in (("model", "score"), ("score", "model")):
        out = WRITERS[kind](tmp_path / kind)
        before = everything(tmp_path)
        with pytest.raises(ModelError, match="not an older export of its kind"):
            WRITERS[other](out)
        assert everything(tmp_path) == before


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    WRITERS["adapter"](tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").is_file()


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_among_the_checkpoints_of_any_run(writer, tmp_path):
    steps = tmp_path / "run" / "checkpoints"
    (steps / "5").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    before = everything(tmp_path)
    for out in (
        steps,
        steps / "11",
        steps / "5" / "deep" / "er",
        tmp_path / "run/../run/checkpoints/7",
    ):
        with pytest.raises(ModelError, match="among the checkpoints of a run"):
            WRITERS[writer](out)
    assert everything(tmp_path) == before
    WRITERS[writer](tmp_path / "checkpoints" / "best")  # of no run


def test_the_folder_that_one_works_in_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in (".", "", tmp_path):
        with pytest.raises(ModelError, match="the command runs in"):
            WRITERS["adapter"](out)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("room", [0, 1_000, 10_000])
def test_a_full_disk_is_one_line_and_leaves_all_as_it_was(writer, room, tmp_path):
    WRITERS[writer](tmp_path / "out")
    before = everything(tmp_path)
    if room >= max(len(content) for _, content, _ in before.values() if content):
        pytest.skip("everything fits")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(ModelError, match=r"can't be written to .*too large"):
            WRITERS[writer](tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert everything(tmp_path) == before


def test_what_a_killed_process_left_is_cleared_and_nothing_else(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    files = re.compile("a.json")
    place = tmp_path / "out"
    abandoned = module._sibling(place, ended.pid)
    alive = module._sibling(place, os.getppid())
    others = [
        module._sibling(tmp_path / "other", ended.pid),
        tmp_path / f".out-elsewhere-{ended.pid}-partial",
        tmp_path / f"{abandoned.name}-old",
    ]
    for folder in (abandoned, alive, *others):
        folder.mkdir()
        (folder / "a.json").write_text("{}")
    with output_folder(place, files, "test") as building:
        (building / "a.json").write_text("{}")
    assert sorted(tmp_path.iterdir()) == sorted([place, alive, *others])
    abandoned.mkdir()
    (abandoned / "thesis.txt").write_text("years of work")
    shutil.rmtree(place)
    with output_folder(place, files, "test") as building:
        (building / "a.json").write_text("{}")
    assert (abandoned / "thesis.txt").is_file()


def test_a_swap_that_fails_puts_the_older_one_back(tmp_path, monkeypatch):
    WRITERS["adapter"](tmp_path / "out")
    before = everything(tmp_path)
    rename = os.replace

    def fail(source, target):
        if str(source).endswith("-partial"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(module.os, "replace", fail)
    with pytest.raises(ModelError, match="Input/output error"):
        WRITERS["adapter"](tmp_path / "out")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_files_of_no_size_are_refused(size, tmp_path):
    with pytest.raises(ModelError, match="not positive"):
        save_folder(tmp_path / "m", PARAMS, CONFIG, bytes_tokenizer(), max_shard_bytes=size)
    with pytest.raises(ModelError, match="not positive"):
        save_score_folder(tmp_path / "m", SCORE, CONFIG, bytes_tokenizer(), max_shard_bytes=size)
    assert not list(tmp_path.iterdir())
