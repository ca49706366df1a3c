# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Reward models as HF folders: sequence classification with one label, token classification with
two. A folder is read and written as a language model's, with a head beside it."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.typing import DTypeLike

from jaxrl_llm.checkpoint.huggingface import load_config, load_params, save_folder
from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.text import tokenizer as tokenizers
from jaxrl_llm.text.tokenizer import Tokenizer, read_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
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
    folder: str | pathlib.Path, params: Params, config: ModelConfig, tokenizer: Tokenizer
) -> pathlib.Path:
    """Write a reward model as a folder that `transformers` loads, never half-written.

    `transformers` reads the score at the last token that is not padding, so the padding token that
    the folder names is one that ends no reply.

    Raises:
        ModelError: as `save_folder`.
    """
    folder = pathlib.Path(folder)
    building = folder.parent / f".{folder.name}-{os.getpid()}-score"
    shutil.rmtree(building, ignore_errors=True)
    try:
        save_folder(building, params["decoder"], config, tokenizer)
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
            "pad_token_id": padding_id(tokenizer),
        }
        text = json.dumps(attributes, indent=2) + "\n"
        (building / "config.json").write_text(text, encoding="utf-8")
        old = building.with_name(building.name + "-old")
        if folder.exists():
            os.replace(folder, old)
        os.replace(building, folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"the reward model can't be written to {folder}: {error.strerror or error}",
            hint="another folder, or make room",
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def padding_id(tokenizer: Tokenizer) -> int:
    """A token to pad with that no reply ends in: the model's own, or another special one.

    Raises:
        ModelError: every special token ends replies.
    """
    for token in (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id):
        if token is not None and token not in tokenizer.eos_ids:
            return token
    raise ModelError("the tokenizer has no token to pad with that does not end replies")


def load_score_folder(folder: str | pathlib.Path, dtype: DTypeLike = jnp.float32) -> ScoringModel:
    """A HF classification folder with one label a sequence, or two a token.

    Raises:
        ModelError: it is of another kind, damaged, or of a family that is not supported.
    """
    folder = pathlib.Path(folder)
    attributes = read_json(folder / "config.json")
    architecture = (attributes.get("architectures") or ["nothing"])[0]
    kind = next((k for k in _KINDS.values() if str(architecture).endswith(k)), None)
    if kind is None:
        raise ModelError(
            f"{folder} is no reward model",
            got=architecture,
            expected="…ForSequenceClassification or …ForTokenClassification",
        )
    files = _tensor_files(folder)
    head = _read_head(folder, files, dtype)
    if _KINDS.get(head["weight"].shape[0]) != kind:
        raise ModelError(
            f"{folder} has another number of labels than a reward model",
            got=f"{head['weight'].shape[0]} in {architecture}",
            expected="1 a sequence, or 2 a token",
        )
    with tempfile.TemporaryDirectory() as place:
        view = _as_language_model(pathlib.Path(place), folder, attributes, files, kind)
        config = load_config(view)
        decoder = load_params(view, config, dtype)
    params = {"decoder": decoder, "score": {k: jnp.asarray(v) for k, v in head.items()}}
    return ScoringModel(config, params, tokenizers.from_folder(folder))


def is_score_folder(folder: pathlib.Path) -> bool:
    """Whether a folder's config.json says that it is a classifier of a kind that is read."""
    if not (folder / "config.json").is_file():
        return False
    named = read_json(folder / "config.json").get("architectures") or [""]
    return str(named[0]).endswith(tuple(_KINDS.values()))


def _as_language_model(
    view: pathlib.Path,
    folder: pathlib.Path,
    attributes: dict[str, Any],
    files: dict[str, str],
    kind: str,
) -> pathlib.Path:
    """A folder of links that looks like the language model without its output head."""
    plain = {k: v for k, v in attributes.items() if k not in _OF_CLASSIFIERS}
    causal = [plain["architectures"][0].replace(kind, "ForCausalLM")]
    plain |= {"architectures": causal, "tie_word_embeddings": True}
    (view / "config.json").write_text(json.dumps(plain), encoding="utf-8")
    kept = {n: f for n, f in files.items() if not n.startswith(("score.", "lm_head."))}
    for file in set(kept.values()):
        (view / file).symlink_to((folder / file).resolve())
    (view / _INDEX).write_text(json.dumps({"weight_map": kept}), encoding="utf-8")
    return view


def _tensor_files(folder: pathlib.Path) -> dict[str, str]:
    """The name of every tensor, and the file that it is in."""
    if (folder / _INDEX).is_file():
        return dict(read_json(folder / _INDEX).get("weight_map") or {})
    if not (folder / _SINGLE).is_file():
        raise ModelError(f"the folder has neither {_SINGLE} nor {_INDEX}", got=folder)
    with _open(folder / _SINGLE) as file:
        return dict.fromkeys(file.keys(), _SINGLE)


def _open(path: pathlib.Path) -> Any:
    try:
        return safetensors.safe_open(str(path), framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a whole safetensors file: {error}") from error


def _read_head(folder: pathlib.Path, files: dict[str, str], dtype: DTypeLike) -> dict[str, Any]:
    head = {}
    for key in ("weight", "bias"):
        name = f"score.{key}"
        if name in files:
            with _open(folder / files[name]) as file:
                head[key] = file.get_tensor(name).astype(jnp.dtype(dtype))
    if "weight" not in head:
        raise ModelError(f"{folder} has no tensor score.weight", hint="another kind of classifier")
    return head


def _write_head(folder: pathlib.Path, head: dict[str, np.ndarray]) -> None:
    """The head in a file of its own, and an index over all files."""
    files = _tensor_files(folder)
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
    safetensors.numpy.save_file(tensors, folder / own, metadata={"format": "pt"})
    (folder / own).chmod((folder / "config.json").stat().st_mode)
    weight_map = {name: renamed[file] for name, file in files.items()}
    weight_map |= dict.fromkeys(tensors, own)
    size = sum((folder / file).stat().st_size for file in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
