# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What tells the model that a run began with from any other, as JSON values."""

from __future__ import annotations

import concurrent.futures
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.checkpoint.pretrained import resolve
from jaxrl_llm.checkpoint.tensor_files import TensorFiles
from jaxrl_llm.text.files import read_json


def base_facts(name: str) -> dict[str, Any]:
    """The facts of a model, by the name that a config gives it; every byte of it is read.

    Of a folder: a digest of all tensors (names, shapes, types and values, however they are spread
    over files), its config.json, and a digest of its tokenizer.json. Of a GGUF file: its digest.

    Raises:
        ModelError: as `resolve`, or its files are damaged.
    """
    where = resolve(name)
    if where.path is None:
        return {"name": where.name}
    if where.kind == "gguf":
        return {"file": _file_digest(where.path)}
    attributes = read_json(where.path / "config.json")
    return {
        "weights": _tensor_digest(TensorFiles(where.path)),
        "config": {k: v for k, v in attributes.items() if k not in _WITHOUT_MEANING},
        "tokenizer": _file_digest(where.path / "tokenizer.json"),
    }


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What two facts differ in, in words."""
    before, after = _flat(old), _flat(new)
    told = []
    for key in [*before, *(key for key in after if key not in before)]:
        if before.get(key) != after.get(key):
            pair = f"{key}: {before.get(key)} → {after.get(key)}"
            told.append(f"other {key}" if key in _DIGESTS else pair[:100])
    return told


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of config.json beside the digests."""
    attributes = facts.get("config")
    named = attributes if isinstance(attributes, dict) else {}
    return {**{k: v for k, v in facts.items() if k != "config"}, **named}


def _tensor_digest(files: TensorFiles) -> str:
    def digest(name: str) -> bytes:
        values = files.read(name)
        head = f"{name} {values.dtype.name} {values.shape}".encode()
        plain = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return hashlib.blake2b(plain, key=hashlib.blake2b(head).digest()).digest()

    # Hashing leaves the interpreter's lock; one tensor a thread is in memory.
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(digest, sorted(files.shapes)))
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def _file_digest(path: pathlib.Path) -> str:
    if not path.is_file():
        return "absent"
    with path.open("rb") as file:
        made = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return made.hexdigest()


_DIGESTS = ("weights", "file", "tokenizer")
# Of config.json: who wrote it, and what only a program that generates reads.
_WITHOUT_MEANING = {
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
