# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Reward models as HF folders: sequence classification with one label, token classification with
two. A folder is read and written as a language model's, with a head beside it."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl_llm.checkpoint.hf_names import HF_NAMES
from jaxrl_llm.checkpoint.huggingface import MODEL_FILES, write_model
from jaxrl_llm.checkpoint.output_folder import output_folder
from jaxrl_llm.checkpoint.stacking import build_params
from jaxrl_llm.checkpoint.tensor_files import INDEX, TensorFiles, save_tensors
from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_config import config_from_hf
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.text import tokenizer as tokenizers
from jaxrl_llm.text.files import read_json, user_path
from jaxrl_llm.text.tokenizer import Tokenizer

_KIND = "reward model"
_KINDS = {1: "ForSequenceClassification", 2: "ForTokenClassification"}
_LABELS = {1: {"0": "reward"}, 2: {"0": "wrong", "1": "right"}}
# What only a classifier's config.json says.
_OF_CLASSIFIERS = ("num_labels", "id2label", "label2id", "problem_type", "classifier_dropout")


@dataclasses.dataclass(frozen=True)
class ScoringModel:
    """A reward model in memory: ``params = {"decoder": …, "score": …}``."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer


def save_score_folder(
    folder: str | pathlib.Path,
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    max_shard_bytes: int | float = 5e9,
) -> pathlib.Path:
    """Write a reward model as a folder that `transformers` loads, never half-written.

    `transformers` reads the score at the last token that is not padding, so the padding token that
    the folder names, for the model and for its tokenizer, is one that ends no reply.

    Raises:
        ModelError: as `save_folder`; or as `padding_id`.
    """
    tokenizer = tokenizer.padding_with(padding_id(tokenizer))
    with output_folder(folder, MODEL_FILES, _KIND) as building:
        write_model(building, params["decoder"], config, tokenizer, max_shard_bytes, kind=_KIND)
        classes = params["score"]["weight"].shape[0]
        _write_head(
            building, {k: np.asarray(jax.device_get(v)) for k, v in params["score"].items()}
        )
        attributes = read_json(building / "config.json")
        (causal,) = attributes["architectures"]
        attributes |= {
            "architectures": [causal.replace("ForCausalLM", _KINDS[classes])],
            "id2label": _LABELS[classes],
            "label2id": {label: int(index) for index, label in _LABELS[classes].items()},
        }
        text = json.dumps(attributes, indent=2) + "\n"
        (building / "config.json").write_text(text, encoding="utf-8")
    return pathlib.Path(folder)


def padding_id(tokenizer: Tokenizer) -> int:
    """A token to pad with that no reply ends in: the model's own, or another special one.

    Raises:
        ModelError: every special token ends replies, or has no spelling to name it by.
    """
    for token in (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id):
        spelled = tokenizer.id_to_token(token) is not None
        if spelled and token not in tokenizer.eos_ids:
            return token
    raise ModelError("the tokenizer has no token to pad with that does not end replies")


def load_score_folder(folder: str | pathlib.Path, dtype: DTypeLike = jnp.float32) -> ScoringModel:
    """A HF classification folder with one label a sequence, or two a token.

    Raises:
        ModelError: it is of another kind, damaged, or of a family that is not supported.
    """
    folder = user_path(folder) or pathlib.Path(folder)
    attributes = read_json(folder / "config.json")
    architecture = _architecture(attributes)
    kind = next((k for k in _KINDS.values() if architecture.endswith(k)), None)
    if kind is None:
        raise ModelError(
            f"{folder} is no reward model",
            got=architecture or "no usable architectures in config.json",
            expected="…ForSequenceClassification or …ForTokenClassification",
        )
    plain = {k: v for k, v in attributes.items() if k not in _OF_CLASSIFIERS}
    plain["architectures"] = [architecture.replace(kind, "ForCausalLM")]
    # A classifier has no output head, whatever its configuration says.
    config = config_from_hf(plain | {"tie_word_embeddings": True}, folder / "config.json")
    files = TensorFiles(folder)
    head = _read_head(files, config, architecture, kind)
    available = {
        name: shape
        for name, shape in files.shapes.items()
        if name not in ("lm_head.weight", *(f"score.{key}" for key in head))
    }
    decoder = build_params(
        config,
        HF_NAMES[config.family],
        available,
        files.read,
        dtype=dtype,
        source=folder,
    )
    score = {key: jnp.asarray(value.astype(jnp.dtype(dtype))) for key, value in head.items()}
    params = {"decoder": decoder, "score": score}
    tokenizer = tokenizers.from_folder(folder).for_rows(config.vocab_size, folder)
    return ScoringModel(config, params, tokenizer)


def is_score_folder(name: str | pathlib.Path) -> bool:
    """Whether a name is that of a folder whose config.json says that it is a classifier of a kind
    that is read."""
    folder = user_path(name)
    if folder is None or not (folder / "config.json").is_file():
        return False
    named = _architecture(read_json(folder / "config.json"))
    return named.endswith(tuple(_KINDS.values()))


def _architecture(attributes: dict[str, Any]) -> str:
    """What config.json calls the model's class; empty if it doesn't."""
    named = attributes.get("architectures")
    first = named[0] if isinstance(named, list) and named else ""
    return first if isinstance(first, str) else ""


def _read_head(
    files: TensorFiles, config: ModelConfig, architecture: str, kind: str
) -> dict[str, np.ndarray]:
    """``weight`` [classes, D] and, where there is one, ``bias`` [classes]."""
    shape = files.shapes.get("score.weight")
    if shape is None:
        raise ModelError(
            f"{files.folder} has no tensor score.weight", hint="another kind of classifier"
        )
    classes = next(count for count, name in _KINDS.items() if name == kind)
    if len(shape) != 2 or shape[1] != config.hidden_size:
        raise ModelError(
            f"tensor score.weight of {files.folder} has the wrong shape",
            got=shape,
            expected=(classes, config.hidden_size),
        )
    if shape[0] != classes:
        raise ModelError(
            f"{files.folder} has another number of labels than a reward model",
            got=f"{shape[0]} in {architecture}",
            expected="1 a sequence, or 2 a token",
        )
    if files.shapes.get("score.bias", (classes,)) != (classes,):
        raise ModelError(
            f"tensor score.bias of {files.folder} has the wrong shape",
            got=files.shapes["score.bias"],
            expected=(classes,),
        )
    keys = [key for key in ("weight", "bias") if f"score.{key}" in files.shapes]
    return {key: files.read(f"score.{key}") for key in keys}


def _write_head(folder: pathlib.Path, head: dict[str, np.ndarray]) -> None:
    """The head in a file of its own, and an index over all files."""
    files = TensorFiles(folder).files
    names = sorted(set(files.values()))
    total = len(names) + 1
    renamed = {
        old: f"model-{number:05d}-of-{total:05d}.safetensors"
        for number, old in enumerate(names, start=1)
    }
    for old, new in renamed.items():
        os.replace(folder / old, folder / new)
    own = f"model-{total:05d}-of-{total:05d}.safetensors"
    tensors = {f"score.{key}": np.ascontiguousarray(value) for key, value in head.items()}
    save_tensors(folder / own, tensors, _KIND)
    (folder / own).chmod((folder / "config.json").stat().st_mode)
    weight_map = {name: renamed[file] for name, file in files.items()}
    weight_map |= dict.fromkeys(tensors, own)
    size = sum((folder / file).stat().st_size for file in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
