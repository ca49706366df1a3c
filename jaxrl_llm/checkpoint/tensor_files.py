# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The tensors of a folder by name, out of one safetensors file or many; and such files written."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_llm.errors import ModelError
from jaxrl_llm.text.files import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorFiles:
    """Reads tensors of floats, or parts of them, whichever file of a folder they are in.

    Where a folder holds both a single file and an index over shards, the single file is read, as
    `transformers` does. Buffers that older writers stored are passed over.

    Attributes:
        folder: where the files are.
        files: name → file.
        shapes: name → shape, as the files themselves say.

    Raises:
        ModelError: a file is missing, damaged or outside the folder, holds tensors of another type,
            or doesn't hold exactly what the index says.
    """

    def __init__(self, folder: pathlib.Path, single: str = WEIGHTS):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.files: dict[str, str] = {}
        if (folder / single).is_file():
            self._add(single)
        elif single == WEIGHTS and (folder / INDEX).is_file():
            self._add_shards()
        else:
            wanted = f"neither {WEIGHTS} nor {INDEX}" if single == WEIGHTS else f"no {single}"
            raise ModelError(
                f"the folder has {wanted}",
                got=folder,
                hint="weights in safetensors format, as save_pretrained writes them",
            )

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor, or some rows of it."""
        with self._open(self.files[name]) as opened:
            return opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]

    def _add_shards(self) -> None:
        named = _weight_map(self.folder)
        for file in sorted(set(named.values())):
            held = self._add(file)
            for name, where in named.items():
                if where == file and name not in held:
                    raise ModelError(
                        f"{file} lacks tensor {name}, which {INDEX} says it holds",
                        got=self.folder,
                        hint="fetch the files again",
                    )
            extra = sorted(name for name in held if named.get(name) != file)
            if extra:
                raise ModelError(
                    f"{file} holds tensor {extra[0]}, which {INDEX} does not say",
                    got=named.get(extra[0], "nothing") + " there",
                    hint="fetch the files again",
                )

    def _add(self, file: str) -> list[str]:
        """Take the tensors of a file; their names."""
        with self._open(file) as opened:
            names = opened.keys()  # an open file can't be iterated over
            held = [name for name in names if not _BUFFERS.fullmatch(name)]
            for name in held:
                part = opened.get_slice(name)
                if part.get_dtype() not in _FLOATS:
                    raise ModelError(
                        f"tensor {name} of {file} is of a type that is not supported",
                        got=part.get_dtype(),
                        expected="one of " + ", ".join(_FLOATS),
                    )
                self.shapes[name], self.files[name] = tuple(part.get_shape()), file
        return held

    def _open(self, file: str) -> Any:
        try:
            return safetensors.safe_open(str(self.folder / file), framework="numpy")
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(
                f"{self.folder / file} is not a whole safetensors file: {error}",
                hint="fetch the file again",
            ) from error


def save_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray], kind: str) -> None:
    """Write a safetensors file, marked with the kind of folder that it is part of; the same tensors
    give the same bytes."""
    safetensors.numpy.save_file(dict(tensors), path, metadata={"format": "pt", _MARK: kind})
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        # The library writes the metadata in an order that changes from call to call.
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, (len(text), size)
        file.seek(8)
        file.write(text.ljust(size))


def kind_of_tensors(path: pathlib.Path) -> str | None:
    """What `save_tensors` marked a file with; None where another program wrote it.

    Raises:
        ModelError: it is not a whole safetensors file.
    """
    try:
        with safetensors.safe_open(str(path), framework="numpy") as opened:
            return (opened.metadata() or {}).get(_MARK)
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a whole safetensors file: {error}") from error


_MARK = "exported_by_jaxrl_llm"


def _weight_map(folder: pathlib.Path) -> dict[str, str]:
    """Name of a tensor → file in the same folder, of an index that is as it should be."""
    files = read_json(folder / INDEX).get("weight_map")
    usable = isinstance(files, dict) and all(isinstance(f, str) for f in files.values())
    if not files or not usable:
        raise ModelError(
            f"{folder / INDEX} has no usable weight_map",
            got=type(files).__name__,
            expected="an object of names of tensors and files",
        )
    for file in sorted(set(files.values())):
        if pathlib.PurePath(file).name != file:
            raise ModelError(f"{INDEX} names a shard outside its folder", got=repr(file))
        if not file.endswith(".safetensors") or len(file) > 200 or "\0" in file:
            raise ModelError(
                f"{INDEX} names a shard that is not a safetensors file", got=repr(file[:80])
            )
        if not (folder / file).is_file():
            raise ModelError(
                f"a shard of the model is missing: {file}",
                got=folder,
                hint="fetch the file again",
            )
    return {name: file for name, file in files.items() if not _BUFFERS.fullmatch(name)}


_FLOATS = ("F64", "F32", "F16", "BF16")
# Buffers that follow from the configuration.
_BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
