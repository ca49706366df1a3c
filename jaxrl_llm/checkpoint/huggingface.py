# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""HF folders in and out: config.json, one or many safetensors shards, tokenizer files."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.typing import DTypeLike

from jaxrl_llm.checkpoint.hf_names import HF_NAMES
from jaxrl_llm.checkpoint.stacking import build_params, leaf_shapes, pieces, split_params
from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_config import config_from_hf, config_to_hf
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.text.tokenizer import Tokenizer, read_json

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_config(folder: str | pathlib.Path) -> ModelConfig:
    """The configuration in a HF folder's config.json, read strictly.

    Raises:
        ModelError: no config.json, or one that we can't follow to the letter.
    """
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(
            "the model folder has no config.json",
            got=folder,
            hint="a folder that transformers loads",
        )
    return config_from_hf(read_json(path), path)


def load_params(
    folder: str | pathlib.Path,
    config: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    shardings: Any = None,
) -> Params:
    """Parameters of a HF folder, in `dtype`; tensors are read one by one.

    Args:
        shardings: a pytree like the parameters with where each leaf goes, or None.

    Raises:
        ModelError: a shard or tensor is missing, damaged, left over, or of the wrong shape or type.
    """
    folder = pathlib.Path(folder)
    shards = _Shards(folder)
    names = HF_NAMES[config.family]
    available = {name: shape for name, shape in shards.shapes.items() if not _is_ignored(name)}
    head = names["head"]
    if config.tie_word_embeddings and head in available:  # some writers store a tied head twice
        del available[head]
        same = names["embed"] in available
        if not (same and np.array_equal(shards.read(head), shards.read(names["embed"]))):
            raise ModelError(
                f"{folder} has a tied output head that differs from the embedding",
                got=f"{head} beside tie_word_embeddings = true",
                hint="set tie_word_embeddings to false in config.json",
            )
    return build_params(
        config, names, available, shards.read, dtype=dtype, shardings=shardings, source=folder
    )


class _Shards:
    """The tensors of a folder by name, whichever file they are in.

    Attributes:
        files: name → file.
        shapes: name → shape, as the files themselves say.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.files = self._indexed() if (folder / _INDEX).is_file() else self._single()
        self.shapes = {
            name: shape
            for file in sorted(set(self.files.values()))
            for name, shape in self._shapes_in(file)
        }

    def _single(self) -> dict[str, str]:
        if not (self.folder / _WEIGHTS).is_file():
            raise ModelError(
                f"the model folder has neither {_WEIGHTS} nor {_INDEX}",
                got=self.folder,
                hint="weights in safetensors format, as save_pretrained writes them",
            )
        with self._open(_WEIGHTS) as file:
            return dict.fromkeys(file.keys(), _WEIGHTS)

    def _indexed(self) -> dict[str, str]:
        files = read_json(self.folder / _INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise ModelError(f"{self.folder / _INDEX} has no usable weight_map")
        for file in sorted(set(files.values())):
            if pathlib.PurePath(file).name != file:
                raise ModelError(f"{_INDEX} names a shard outside its folder", got=repr(file))
            if not (self.folder / file).is_file():
                raise ModelError(
                    f"a shard of the model is missing: {file}",
                    got=self.folder,
                    hint="fetch the file again",
                )
        return files

    def _open(self, file: str):
        try:
            return safetensors.safe_open(str(self.folder / file), framework="numpy")
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(
                f"{self.folder / file} is not a whole safetensors file: {error}",
                hint="fetch the file again",
            ) from error

    def _shapes_in(self, file: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        with self._open(file) as opened:
            held = set(opened.keys())
            for name in (name for name, where in self.files.items() if where == file):
                if name not in held:
                    raise ModelError(f"{file} lacks tensor {name}, which {_INDEX} says it holds")
                part = opened.get_slice(name)
                if part.get_dtype() not in _FLOATS and not _is_ignored(name):
                    raise ModelError(
                        f"tensor {name} of {file} is of a type that is not supported",
                        got=part.get_dtype(),
                        expected="one of " + ", ".join(_FLOATS),
                    )
                yield name, tuple(part.get_shape())

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        with self._open(self.files[name]) as opened:
            return opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]


def save_folder(
    folder: str | pathlib.Path,
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    max_shard_bytes: int | float = 5e9,
) -> pathlib.Path:
    """Write a model as a HF folder that `transformers` loads, in the dtype of `params`.

    Everything is written into a sibling folder that is renamed at the end, so `folder` is never
    half-written; an older export there is replaced only then.

    Args:
        params: stacked parameters, wherever they lie.
        max_shard_bytes: tensors are spread over files of at most this size (one tensor at least).

    Returns:
        The folder.

    Raises:
        ModelError: the folder can't be written, or holds files that are not an export's.
    """
    folder = pathlib.Path(folder)
    try:
        _refuse_strangers(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = folder.parent / f".{folder.name}-{os.getpid()}-partial"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            _write_configs(building, params, config, tokenizer)
            tokenizer.save(building)
            _write_weights(building, params, config, max_shard_bytes)
            _replace(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"the model can't be written to {folder}: {error.strerror or error}",
            hint="another folder, or make room",
        ) from error
    return folder


def _refuse_strangers(folder: pathlib.Path) -> None:
    """A folder is replaced as a whole, so it must hold nothing but what an export writes."""
    if folder.is_file():
        raise ModelError("the model can't be written over a file", got=folder, hint="a new folder")
    strangers = sorted(p.name for p in folder.glob("*") if not _EXPORTED.fullmatch(p.name))
    if strangers:
        raise ModelError(
            f"the model can't replace {folder}, which holds other files",
            got=", ".join(strangers[:3]),
            hint="a new folder",
        )


def _replace(building: pathlib.Path, folder: pathlib.Path) -> None:
    """Move a finished folder into place; an older one is there until the instant of the swap."""
    if folder.exists():
        old = building.with_name(f".{folder.name}-{os.getpid()}-old")
        os.replace(folder, old)
        os.replace(building, folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(building, folder)


def _write_configs(folder, params: Params, config: ModelConfig, tokenizer: Tokenizer) -> None:
    eos: Any = list(tokenizer.eos_ids)
    eos = None if not eos else eos[0] if len(eos) == 1 else eos
    ids = {"bos": tokenizer.bos_id, "eos": eos, "pad": tokenizer.pad_id}
    special = {f"{name}_token_id": value for name, value in ids.items()}
    dtype = str(params["embed"].dtype)
    # Both spellings: transformers 5 reads dtype, 4 reads torch_dtype.
    attributes = {**config_to_hf(config), **special, "dtype": dtype, "torch_dtype": dtype}
    _write_json(folder / "config.json", attributes)
    given = {name: value for name, value in special.items() if value is not None}
    _write_json(folder / "generation_config.json", {**tokenizer.generation, **given})


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    folder: pathlib.Path, params: Params, config: ModelConfig, limit: int | float
) -> None:
    sizes = _tensor_sizes(params, config)
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    fetch = split_params(params, config, HF_NAMES[config.family])
    count, files = len(shards), {}
    for number, names in enumerate(shards, start=1):
        file = _WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        part = {name: fetch[name]() for name in names}
        safetensors.numpy.save_file(part, folder / file, metadata={"format": "pt"})
        (folder / file).chmod((folder / "config.json").stat().st_mode)  # as the user's umask says
        files.update(dict.fromkeys(names, file))
    if count > 1:
        total = {"total_size": sum(sizes.values())}
        _write_json(folder / _INDEX, {"metadata": total, "weight_map": files})


def _tensor_sizes(params: Params, config: ModelConfig) -> dict[str, int]:
    """Bytes of every tensor, in an order in which each leaf is fetched once."""
    shapes, itemsize = leaf_shapes(config), params["embed"].dtype.itemsize
    sizes: dict[str, int] = {}
    for piece in pieces(config, HF_NAMES[config.family]):
        width = shapes[piece.leaf][len(piece.index) + 1 :]
        size = piece.rows * math.prod(width) * itemsize
        sizes[piece.tensor] = sizes.get(piece.tensor, 0) + size
    return sizes


def _is_ignored(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in _IGNORED)


# What `save_folder` and transformers' save_pretrained write.
_EXPORTED = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens)\.json"
    r"|chat_template\.jinja|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)
_FLOATS = ("F64", "F32", "F16", "BF16")
# Buffers that older writers stored and that follow from the configuration.
_IGNORED = (re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),)
