# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The model of a run's checkpoint as a folder that other tools read."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.checkpoint.adapters import save_adapter
from jaxrl_llm.checkpoint.base_facts import base_facts, changes
from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.checkpoint.pretrained import load, peek
from jaxrl_llm.checkpoint.run_params import restore_trained, run_settings, saved_steps
from jaxrl_llm.checkpoint.score_folder import is_score_folder, load_score_folder, save_score_folder
from jaxrl_llm.errors import ConfigError, RunDirectoryError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import LoraConfig, merge
from jaxrl_llm.models.transformer import Params, abstract_params
from jaxrl_llm.text.files import read_json
from jaxrl_llm.text.templates import with_template
from jaxrl_llm.text.tokenizer import Tokenizer

# Compiled as where it is merged for the sampler: the last bits are the same.
_merge = functools.partial(jax.jit, static_argnums=2)(merge)


@dataclasses.dataclass(frozen=True)
class _Base:
    """The model that a run began with; parameters only where an adapter needs them."""

    config: ModelConfig
    tokenizer: Tokenizer
    decoder: Params | None


def export_run(
    run: str | pathlib.Path,
    out: str | pathlib.Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int | float | None = None,
    adapter: bool = False,
) -> tuple[pathlib.Path, int]:
    """Write the model of one step of a run as a HF folder with its tokenizer: a language model, or
    a classifier where a reward model was trained.

    Args:
        step: of the checkpoint; None: the newest.
        dtype: of the written weights; None: as trained.
        max_shard_bytes: of a file of weights; None: 5 GB.
        adapter: write the adapter alone, as a PEFT folder; otherwise it is merged in.

    Returns:
        the folder and the step.

    Raises:
        RunDirectoryError, ModelError: no such run or step, or the folder can't be written.
        ConfigError: `adapter` of a run that trained none or has a score head too, `out` is the run
            or a model that it began with, or the weights don't fit `dtype`.
    """
    settings = run_settings(run)
    lora = adapter_settings(settings)
    if adapter:
        _refuse_adapter(run, lora, "reward" in settings, max_shard_bytes)
    _refuse_sources(run, out, settings)
    step = saved_steps(run)[-1] if step is None else step
    if lora is not None:
        _refuse_other_base(run, settings["model"]["path"])
    trained = restore_trained(run, step)
    head = trained.get("score")
    part = trained if head is None else trained["decoder"]
    scoring = "reward" in settings
    if part is None or (scoring and head is None):
        raise RunDirectoryError(f"step {step} is not of the run that config.json tells of", got=run)
    base = _base(settings, with_params=lora is not None and not adapter)
    if adapter:
        path = settings["model"]["path"]
        return save_adapter(out, _cast(part, dtype), lora, base.config, base_model=path), step
    decoder = part if lora is None else _merge(base.decoder, part, lora)
    _check_shapes(run, step, decoder, base.config, headless=scoring)
    size = 5e9 if max_shard_bytes is None else max_shard_bytes
    whole = _cast({"decoder": decoder, "score": head} if scoring else decoder, dtype)
    save = save_score_folder if scoring else save_folder  # a critic's head stays behind
    return save(out, whole, base.config, base.tokenizer, max_shard_bytes=size), step


def _refuse_adapter(
    run: object, lora: LoraConfig | None, scoring: bool, max_shard_bytes: int | float | None
) -> None:
    if lora is None:
        raise ConfigError("the run trained no adapter", got=run, hint="leave out --adapter")
    if scoring:
        raise ConfigError(
            "the adapter of a reward model is nothing without its score head",
            got=run,
            hint="leave out --adapter: the merged reward model is written",
        )
    if max_shard_bytes is not None:
        raise ConfigError(
            "an adapter is written as one file",
            got=f"{max_shard_bytes:.0f} bytes for a file of weights",
            hint="leave out --max-shard-gb",
        )


def _refuse_other_base(run: str | pathlib.Path, name: str) -> None:
    """An adapter over another model than it was trained with is noise."""
    path = pathlib.Path(run) / "base.json"
    told = changes(read_json(path), base_facts(name)) if path.is_file() else []
    if told:
        raise ConfigError(
            f"the model {name} is not the one that the run began with",
            got="; ".join(told[:3]),
            hint="put it back",
        )


def _refuse_sources(
    run: str | pathlib.Path, out: str | pathlib.Path, settings: Mapping[str, Any]
) -> None:
    """What the run was made from, or holds, is never replaced by what comes out of it."""
    place, source = _real(out), _real(run)
    if place in (source, source / "checkpoints") or source / "checkpoints" in place.parents:
        raise ConfigError("the model can't take the place of the run", got=out, hint="a new folder")
    for path in _paths(settings):
        source = _real(path)
        same = os.path.exists(source) and os.path.exists(place) and source.samefile(place)
        if source in place.parents and source.is_dir():
            raise ConfigError(
                "the model can't be written into a folder of the one that the run began with",
                got=out,
                hint="a new folder",
            )
        if source == place or same:
            raise ConfigError(
                "the model can't take the place of one that the run began with",
                got=out,
                hint="a new folder",
            )


def _real(path: str | pathlib.Path) -> pathlib.Path:
    return pathlib.Path(os.path.realpath(os.path.expanduser(path)))  # these two never raise


def _paths(settings: Any) -> Iterator[str]:
    """Every setting that is called a path."""
    items = settings.items() if isinstance(settings, dict) else ((None, x) for x in settings)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from _paths(value)
        elif key == "path" and isinstance(value, str) and value:
            yield value


def _cast(tree: Params, dtype: str | None) -> Params:
    """Weights in `dtype`.

    Raises:
        ConfigError: a finite one is beyond the range of `dtype`.
    """
    if dtype is None:
        return tree

    def cast(path: Any, x: jax.Array) -> jax.Array:
        made = x.astype(dtype)
        if not np.isfinite(np.asarray(made)).all() and np.isfinite(np.asarray(x)).all():
            largest = float(np.abs(np.asarray(x)).max())
            raise ConfigError(
                f"the weights don't fit {dtype}: "
                + jax.tree_util.keystr(path, simple=True, separator="."),
                got=f"a weight of size {largest:.4g}",
                hint="--dtype=float32" if dtype == "bfloat16" else "--dtype=bfloat16",
            )
        return made

    return jax.tree_util.tree_map_with_path(cast, tree)


def adapter_settings(settings: Mapping[str, Any]) -> LoraConfig | None:
    """The adapter of a run, from its config as JSON values."""
    found = settings.get("lora")
    if found is None:
        return None
    try:
        return LoraConfig(**found | {"targets": tuple(found["targets"])})
    except (TypeError, KeyError) as error:
        raise RunDirectoryError(
            "the lora settings in the config.json of the run are not ones that training wrote",
            got=repr(found)[:80],
        ) from error


def _base(settings: Mapping[str, Any], with_params: bool) -> _Base:
    path, dtype = settings["model"]["path"], jnp.dtype(settings["model"]["dtype"])
    scoring = "reward" in settings
    if scoring and is_score_folder(path):
        model = load_score_folder(path, dtype)
        config, tokenizer, decoder = model.config, model.tokenizer, model.params["decoder"]
    elif with_params:
        model = load(path, dtype)
        config, tokenizer, decoder = model.config, model.tokenizer, model.params
    else:
        (config, tokenizer), decoder = peek(path), None
    if scoring:  # a reward model has no output head
        config = dataclasses.replace(config, tie_word_embeddings=True)
        decoder = decoder and {k: x for k, x in decoder.items() if k != "head"}
    template = (settings.get("rows") or {}).get("chat_template")
    return _Base(config, with_template(tokenizer, template), decoder)


def _check_shapes(run, step: int, decoder: Params, config: ModelConfig, *, headless: bool) -> None:
    expected = abstract_params(config)
    if headless:
        expected = {name: x for name, x in expected.items() if name != "head"}
    found, wanted = (jax.tree.map(lambda x: x.shape, tree) for tree in (decoder, expected))
    if found != wanted:
        raise RunDirectoryError(
            f"the parameters of step {step} can't be restored: they are of another model",
            got=run,
            expected=f"{config.num_params:,} parameters as in the run's model.path",
        )
