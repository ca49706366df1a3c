# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Where each role of a run lives, how it goes through a batch, and the critic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.checkpoint.pretrained import load, peek
from jaxrl_llm.checkpoint.score_folder import is_score_folder, load_score_folder
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kernels.choice import Case, choose_pages, choose_rows
from jaxrl_llm.models.placement import Placement
from jaxrl_llm.models.transformer import abstract_params
from jaxrl_llm.sharding.mesh import MeshConfig, row_parts
from jaxrl_llm.sharding.processes import connect
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.trainers.batching import RowPlan, plan_rows
from jaxrl_llm.trainers.critic import Critic, make_critic_functions
from jaxrl_llm.trainers.offload import check_offload
from jaxrl_llm.trainers.passes import Passes
from jaxrl_llm.trainers.settings import RLConfig, resolve_algorithm, with_backend
from jaxrl_llm.types import Batch


def place_for(
    config: RLConfig, own: MeshConfig | None, name: str, model_config: ModelConfig
) -> Placement:
    """Where a role lives: on a mesh of its own, or on one like the policy's."""
    if own is None:
        return Placement.make(config.mesh, model_config)
    return Placement.make(own, model_config, name=name)


def load_at(place: Placement, path: str, dtype: Any) -> Any:
    """A model's parameters, stacked, read straight to the devices of a mesh."""
    shardings = None
    if not on_default_device(place):
        shardings = place.shardings(abstract_params(place.model, dtype), "parameters")
    return load(path, dtype, shardings).params


def on_default_device(place: Placement) -> bool:
    """Whether a mesh is the one device where arrays are made if nothing else is said."""
    return place.mesh.size == 1 and place.mesh.devices.flat[0] == jax.local_devices()[0]


def build_passes(config: RLConfig, place: Placement, seed: int) -> Passes:
    """How a model that lives at `place` goes through a batch: rows are laid out for its mesh.

    Raises:
        ConfigError: more micro-batches are asked for than there are samples for, or an attention
            back end that can't serve here.
    """
    check_rows(place, config.model.dtype, shared=config.train.layout == "shared_prefix")
    check_pages(place, config)
    check_microbatches(config, place.layout, row_parts(place.mesh))
    return Passes(
        put=place.put_rows,
        plan=row_planner(config, place.row_multiple),
        epochs=config.train.epochs,
        minibatches=config.train.minibatches,
        group_size=config.sampler.group_size,
        seed=seed,
    )


def check_microbatches(config: RLConfig, layout: MeshConfig, parts: int) -> None:
    """Raises ConfigError if a batch has fewer samples than there are rows at a time, of which the
    mesh has so many parts, in the micro-batches that its pipeline was given."""
    samples = config.train.prompts_per_step * config.sampler.group_size // config.train.minibatches
    if layout.microbatches is not None and layout.microbatches * parts > samples:
        raise ConfigError(
            "a pipeline has more micro-batches than a batch has samples for them",
            got=f"microbatches={layout.microbatches} of {parts} rows, {samples} samples",
            hint=f"at most {max(1, samples // parts)}",
        )


def check_roles(config: RLConfig, model_config: ModelConfig) -> None:
    """Refuses, before any weights are read, what the roles of a run can't be built with.

    Raises:
        ConfigError: a mesh that fits neither devices, model nor batch, an attention back end that
            can't serve, a reference's mesh or an offload without effect.
    """
    if config.train.offload:
        check_offload(jax.default_backend())
    algorithm = resolve_algorithm(config)
    build_passes(config, Placement.make(config.mesh, model_config), 0)
    if config.ref_mesh is not None:
        check_apart(config, algorithm)
        build_passes(config, place_for(config, config.ref_mesh, "ref_mesh", model_config), 0)
    path = config.critic.path
    apart = algorithm.needs_values and not config.critic.shared_trunk
    if apart and (path is None or not is_score_folder(path)):  # such a folder is read as a whole
        if path is not None:
            model_config = with_backend(peek(path)[0], config.model)
        build_passes(config, place_for(config, config.critic.mesh, "critic.mesh", model_config), 0)


def check_apart(config: RLConfig, algorithm: Algorithm) -> None:
    """Refuses `ref_mesh` where no reference is used, or where it is the base under an adapter."""
    if config.lora is not None or not algorithm.needs_ref:
        why = "under an adapter the reference is its base" if config.lora else "none is used"
        raise ConfigError(f"ref_mesh has no effect: {why}", hint="leave out --ref_mesh.*")


def check_rows(place: Placement, dtype: str, *, shared: bool) -> None:
    """Refuses a named attention back end here, not at the first step: by then the run directory is
    written, and another config would no longer be taken there."""
    parts = {"tensor": place.layout.tensor, "pipeline": place.layout.pipeline}
    platform = place.mesh.devices.flat[0].platform
    case = Case.of(place.model, dtype, platform, shared=shared, **parts)
    choose_rows(place.model.attention_backend, case)


def check_pages(place: Placement, config: RLConfig) -> None:
    """The same of the sampler's, for its own mesh; on one device the engine itself looks."""
    sampler = config.sampler
    if sampler.mesh is not None:
        platform = place.mesh.devices.flat[0].platform
        sizes = {"page_size": sampler.page_size, "tensor": sampler.mesh.tensor}
        case = Case.of(place.model, config.model.dtype, platform, **sizes)
        choose_pages(sampler.attention_backend, case)


def row_planner(config: RLConfig, devices: int) -> Callable[[Batch], RowPlan]:
    """How this run lays samples out in rows, on so many devices of the data axis."""
    return functools.partial(
        plan_rows,
        layout=config.train.layout,
        row_tokens=config.train.row_tokens or 1024,
        micro_tokens=config.train.micro_tokens,
        longest=config.sampler.max_prompt_tokens + config.sampler.max_new_tokens,
        multiple=devices,
    )


def build_critic(
    config: RLConfig,
    algorithm: Algorithm,
    model_config: ModelConfig,
    params: Any,
    tokenizer: Tokenizer,
    seed: int,
) -> Critic:
    """A critic that starts from the policy's parameters, from another model, or a reward model.

    Args:
        tokenizer: the policy's.

    Raises:
        ConfigError: a model that can't read all that the policy writes.
    """
    path, dtype = config.critic.path, jnp.dtype(config.model.dtype)
    policy, own = model_config, tokenizer
    score = {"weight": jnp.zeros((1, model_config.hidden_size), dtype)}
    decoder = params
    if path is not None and is_score_folder(path):
        model = load_score_folder(path, dtype)
        model_config, decoder, score = model.config, model.params["decoder"], model.params["score"]
        own = model.tokenizer
    elif path is not None:
        model_config, own = peek(path)
        score = {"weight": jnp.zeros((1, model_config.hidden_size), dtype)}
    if score["weight"].shape[0] != 1:
        raise ConfigError(
            "the critic's folder is not that of a reward model",
            got=f"{score['weight'].shape[0]} scores a token in {path}",
            expected="one",
        )
    check_reads(config, policy, model_config, path)
    check_same_tokens(tokenizer, own, path)
    model_config = with_backend(model_config, config.model, context=policy.context)
    place = place_for(config, config.critic.mesh, "critic.mesh", model_config)
    connect(place.mesh)
    if path is not None and not is_score_folder(path):
        decoder = load_at(place, path, dtype)
    functions = make_critic_functions(
        place.model, algorithm, config.critic, remat=config.model.remat, place=place
    )
    # The output head says nothing of values: it is left out, and what the policy gives is copied.
    decoder = {name: value for name, value in decoder.items() if name != "head"}
    first = place.put({"decoder": decoder, "score": score})
    return Critic(
        algorithm=algorithm,
        functions=functions,
        state=functions.state.init(jax.tree.map(jnp.copy, first)),
        passes=build_passes(config, place, seed),
        warmup_steps=config.critic.warmup_steps,
        place=place,
    )


def check_reads(
    config: RLConfig, policy: ModelConfig, critic: ModelConfig, path: str | None
) -> None:
    """Refuses a critic with fewer tokens or positions than the policy needs."""
    if critic.vocab_size < policy.vocab_size:
        raise ConfigError(
            "the critic does not know all tokens of the policy",
            got=f"{critic.vocab_size} tokens in {path}",
            expected=f"at least {policy.vocab_size}",
        )
    longest = config.sampler.max_prompt_tokens + config.sampler.max_new_tokens
    needed = min(longest, policy.max_position_embeddings)  # prompts may be shorter than allowed
    if critic.max_position_embeddings < needed:
        raise ConfigError(
            "the critic can't read as far as the policy writes",
            got=f"{critic.max_position_embeddings} positions in {path}",
            expected=f"at least {needed}",
            hint="a smaller --sampler.max_prompt_tokens or --sampler.max_new_tokens",
        )


def check_same_tokens(policy: Tokenizer, critic: Tokenizer, path: str | None) -> None:
    """Refuses a critic to which the policy's token ids mean something else."""
    if critic is policy:
        return
    for index in range(min(policy.vocab_size, critic.vocab_size)):
        meant, read = policy.id_to_token(index), critic.id_to_token(index)
        # Ids without a token fill up a vocabulary; they are not written.
        if meant != read and None not in (meant, read):
            raise ConfigError(
                "the critic has another tokenizer than the policy",
                got=f"token {index} is {read!r} in {path}",
                expected=f"{meant!r}, as for the policy",
            )
