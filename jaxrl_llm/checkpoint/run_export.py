# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The model of a run's checkpoint as a folder that other tools read."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.checkpoint.adapters import save_adapter
from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.checkpoint.pretrained import load, peek
from jaxrl_llm.checkpoint.run_params import restore_trained, run_settings, saved_steps
from jaxrl_llm.checkpoint.score_folder import is_score_folder, load_score_folder, save_score_folder
from jaxrl_llm.errors import ConfigError, RunDirectoryError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import LoraConfig, merge
from jaxrl_llm.models.transformer import Params, abstract_params
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
    max_shard_bytes: int | float = 5e9,
    adapter: bool = False,
) -> tuple[pathlib.Path, int]:
    """Write the model of one step of a run as a HF folder with its tokenizer: a language model, or
    a classifier where a reward model was trained.

    Args:
        step: of the checkpoint; None: the newest.
        dtype: of the written weights; None: as trained.
        adapter: write the adapter alone, as a PEFT folder; otherwise it is merged in.

    Returns:
        the folder and the step.

    Raises:
        RunDirectoryError, ModelError: no such run or step, or the folder can't be written.
        ConfigError: `adapter` of a run that trained none.
    """
    settings = run_settings(run)
    lora = adapter_settings(settings)
    if adapter and lora is None:
        raise ConfigError("the run trained no adapter", got=run, hint="leave out --adapter")
    step = saved_steps(run)[-1] if step is None else step
    trained = restore_trained(run, step)
    base = _base(settings, with_params=lora is not None and not adapter)
    head = trained.get("score")
    part = trained if head is None else trained.get("decoder", trained.get("adapter"))
    if lora is not None and adapter:
        path = settings["model"]["path"]
        return save_adapter(out, part, lora, base.config, base_model=path), step
    decoder = part if lora is None else _merge(base.decoder, part, lora)
    _check_shapes(run, step, decoder, base.config, headless="reward" in settings)
    cast = lambda tree: jax.tree.map(lambda x: x.astype(dtype or x.dtype), tree)  # noqa: E731
    if "reward" in settings:
        whole = cast({"decoder": decoder, "score": head})
        return save_score_folder(pathlib.Path(out), whole, base.config, base.tokenizer), step
    folder = save_folder(
        out, cast(decoder), base.config, base.tokenizer, max_shard_bytes=max_shard_bytes
    )
    return folder, step


def adapter_settings(settings: Mapping[str, Any]) -> LoraConfig | None:
    """The adapter of a run, from its config as JSON values."""
    found = settings.get("lora")
    return None if found is None else LoraConfig(**found | {"targets": tuple(found["targets"])})


def _base(settings: Mapping[str, Any], with_params: bool) -> _Base:
    path, dtype = settings["model"]["path"], jnp.dtype(settings["model"]["dtype"])
    scoring = "reward" in settings
    if scoring and is_score_folder(pathlib.Path(path).expanduser()):
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
    template = settings.get("rows", {}).get("chat_template")
    return _Base(config, with_template(tokenizer, template), decoder)


def _check_shapes(run, step: int, decoder: Params, config: ModelConfig, *, headless: bool) -> None:
    shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)  # noqa: E731
    expected = abstract_params(config)
    if headless:
        expected = {name: x for name, x in expected.items() if name != "head"}
    if jax.tree.structure(decoder) != jax.tree.structure(expected) or shapes(decoder) != shapes(
        expected
    ):
        raise RunDirectoryError(
            f"the parameters of step {step} can't be restored: they are of another model",
            got=run,
            expected=f"{config.num_params:,} parameters as in the run's model.path",
        )
