# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""HF folders in and out: config.json, one or many safetensors shards, tokenizer files."""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl_llm.checkpoint.hf_names import HF_NAMES
from jaxrl_llm.checkpoint.output_folder import output_folder
from jaxrl_llm.checkpoint.stacking import build_params, leaf_shapes, pieces, split_params
from jaxrl_llm.checkpoint.tensor_files import INDEX, WEIGHTS, TensorFiles, save_tensors
from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_config import config_from_hf, config_to_hf
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.text.files import read_json
from jaxrl_llm.text.tokenizer import Tokenizer


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
    files = TensorFiles(folder)
    names = HF_NAMES[config.family]
    available = dict(files.shapes)
    head = names["head"]
    if config.tie_word_embeddings and head in available:  # some writers store a tied head twice
        del available[head]
        same = names["embed"] in available
        if not (same and np.array_equal(files.read(head), files.read(names["embed"]))):
            raise ModelError(
                f"{folder} has a tied output head that differs from the embedding",
                got=f"{head} beside tie_word_embeddings = true",
                hint="set tie_word_embeddings to false in config.json",
            )
    return build_params(
        config, names, available, files.read, dtype=dtype, shardings=shardings, source=folder
    )


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
        ModelError: the folder can't be written, or holds what is not an older export.
    """
    with output_folder(folder, MODEL_FILES, "model") as building:
        write_model(building, params, config, tokenizer, max_shard_bytes)
    return pathlib.Path(folder)


def write_model(
    folder: pathlib.Path,
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    max_shard_bytes: int | float = 5e9,
    *,
    kind: str = "model",
) -> None:
    """Write the files of a model into an empty folder; arguments and errors as `save_folder`.

    Args:
        kind: what its weights are marked as (`tensor_files.save_tensors`).
    """
    if not max_shard_bytes > 0:
        raise ModelError("the size of a file of weights is not positive", got=max_shard_bytes)
    _write_configs(folder, params, config, tokenizer)
    _save_tokenizer(tokenizer, folder)
    _write_weights(folder, params, config, max_shard_bytes, kind)


def _save_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    try:
        tokenizer.save(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        # What the tokenizer's backend raises when the system refuses.
        raise OSError(str(error)) from error


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
    folder: pathlib.Path, params: Params, config: ModelConfig, limit: int | float, kind: str
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
        file = WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        part = {name: fetch[name]() for name in names}
        save_tensors(folder / file, part, kind)
        (folder / file).chmod((folder / "config.json").stat().st_mode)  # as the user's umask says
        files.update(dict.fromkeys(names, file))
    if count > 1:
        total = {"total_size": sum(sizes.values())}
        _write_json(folder / INDEX, {"metadata": total, "weight_map": files})


def _tensor_sizes(params: Params, config: ModelConfig) -> dict[str, int]:
    """Bytes of every tensor, in an order in which each leaf is fetched once."""
    shapes, itemsize = leaf_shapes(config), params["embed"].dtype.itemsize
    sizes: dict[str, int] = {}
    for piece in pieces(config, HF_NAMES[config.family]):
        width = shapes[piece.leaf][len(piece.index) + 1 :]
        size = piece.rows * math.prod(width) * itemsize
        sizes[piece.tensor] = sizes.get(piece.tensor, 0) + size
    return sizes


# What `save_folder` and transformers' save_pretrained write.
MODEL_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens)\.json"
    r"|chat_template\.jinja|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)
