# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Make everything of a run from its config; models, meshes and engines are made nowhere else."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.checkpoint.base_facts import base_facts, changes
from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.checkpoint.pretrained import peek
from jaxrl_llm.data.curriculum import CurriculumStream
from jaxrl_llm.data.pipeline import (
    PromptStream,
    check_same_heldout,
    content_digest,
)
from jaxrl_llm.data.stored_runs import RunIdentity
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import init_adapter
from jaxrl_llm.models.placement import FREE, Place, Placement
from jaxrl_llm.rollout.engine import Engine, EngineConfig, SamplingParams
from jaxrl_llm.rollout.engines import Engines, Sampler, SplitEngine
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.sharding.processes import check_alike, connect, of_first
from jaxrl_llm.sharding.reshard import fetch
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.trainers.build_data import build_data, open_stored
from jaxrl_llm.trainers.critic import shared_optimizer
from jaxrl_llm.trainers.evaluate import evaluate
from jaxrl_llm.trainers.loop import Run
from jaxrl_llm.trainers.optimizers import make_optimizer, make_schedule
from jaxrl_llm.trainers.policy import Form, TrainFunctions, make_train_functions
from jaxrl_llm.trainers.quiet import shown
from jaxrl_llm.trainers.rl import RLTrainer
from jaxrl_llm.trainers.roles import (
    build_critic,
    build_passes,
    check_apart,
    check_roles,
    load_at,
    on_default_device,
    place_for,
)
from jaxrl_llm.trainers.rollouts import Rollouts, StoredRollouts
from jaxrl_llm.trainers.run_directory import RunDirectory
from jaxrl_llm.trainers.scoring import Scorer
from jaxrl_llm.trainers.settings import (
    RLConfig,
    counting_rewards,
    resolve_algorithm,
    with_backend,
)
from jaxrl_llm.trainers.show import Show
from jaxrl_llm.trainers.update import Reference, Updater


def build_run(config: RLConfig, directory: RunDirectory, settings: Mapping[str, Any]) -> Run:
    """A run that is ready for `loop.train`; `settings` is the config as JSON values."""
    base, tokenizer = peek(config.model.path)
    check_roles(config, with_backend(base, config.model))
    facts, sampler = keep_base(directory, config.model.path), config.sampler
    of_run = directory.seed, directory.date.isoformat(), facts
    identity = RunIdentity.of(*of_run, sampler.group_size, sampler.temperature)
    if config.critic.path is not None:
        keep_base(directory, config.critic.path, "critic.json", "critic")
    tokenizer = tokenizer.at_time(directory.date)
    _, heldout_prompts, stream = build_data(config, tokenizer, base, directory.seed)
    # Scalings of rotary frequencies that depend on the length are the same for a whole run.
    longest = config.sampler.max_prompt_tokens + config.sampler.max_new_tokens
    model_config = with_backend(base, config.model, context=longest)
    place = Placement.make(config.mesh, model_config)
    connect(place.mesh)
    params = load_at(place, config.model.path, jnp.dtype(config.model.dtype))
    trainer = build_trainer(
        config, model_config, params, tokenizer, directory.seed, stream, identity
    )
    del params
    source = trainer.source
    greedy = dataclasses.replace(source.sampling, temperature=0.0)
    show = shown(
        lambda: Show(
            directory.path,
            config,
            settings,
            base,
            heldout_count=len(heldout_prompts),
            seed=directory.seed,
        )
    )

    judged = content_digest([[(prompt.id, prompt.text) for prompt in heldout_prompts]])

    def set_data_state(state: dict[str, Any]) -> None:
        check_same_heldout(judged, state.get("heldout"))
        stream.set_state(state["prompts"])
        show.set_state(state["health"])

    def export() -> pathlib.Path:
        params = fetch(trainer.updater.merged())
        folder = directory.path / "export"
        return of_first(lambda: save_folder(folder, params, base, tokenizer), "export")

    return Run(
        directory=directory,
        trainer=trainer,
        checkpoints=CheckpointManager(
            directory.path / "checkpoints", keep=config.train.keep_checkpoints
        ),
        total_steps=config.train.steps,
        eval_every=config.train.eval_every,
        checkpoint_every=config.train.checkpoint_every,
        data_state=lambda: {
            "prompts": stream.get_state(),
            "health": show.get_state(),
            "heldout": judged,
        },
        set_data_state=set_data_state,
        evaluate=lambda: (
            evaluate(trainer.engine, heldout_prompts, greedy, source.scorer)
            if heldout_prompts
            else ({}, [])
        ),
        export=export,
        show=show,
        release=source.scorer.close,
    )


def keep_base(
    directory: RunDirectory, name: str, file: str = "base.json", role: str = "model"
) -> dict[str, Any]:
    """Notes and returns what model a run begins with; a resumed run must begin with the same."""
    facts = base_facts(name)
    directory.keep(file, facts, changes, f"the {role} {name}")
    check_alike(f"{role} under the name {name}", facts, "the same files on all hosts")
    return facts


def build_trainer(
    config: RLConfig,
    model_config: ModelConfig,
    params: Any,
    tokenizer: Tokenizer,
    seed: int,
    stream: PromptStream | CurriculumStream,
    identity: RunIdentity | None = None,
) -> RLTrainer:
    """The trainer over given parameters, which it takes over; `identity` is for stored rollouts."""
    sampler, train = config.sampler, config.train
    algorithm = resolve_algorithm(config)
    form = policy_form(config, algorithm)
    place = Placement.make(config.mesh, model_config)
    functions = build_functions(config, algorithm, place.model, place)
    engine = build_engine(config, model_config, params, place)
    critic = None
    if algorithm.needs_values and not config.critic.shared_trunk:
        critic = build_critic(config, algorithm, model_config, params, tokenizer, seed)
    first, params = params, place.put(params)
    passes = build_passes(config, place, seed)
    reference = None
    if config.ref_mesh is not None:
        reference = reference_apart(config, algorithm, model_config, first, seed)
    elif algorithm.needs_ref:
        weights, base = reference_weights(form, params), form.lora is not None
        reference = Reference(weights, functions.logprobs, passes, base)
    trained, frozen = split_weights(form, model_config, params, seed, place)
    updater = Updater(
        algorithm=algorithm,
        functions=functions,
        form=form,
        policy=functions.state.init(trained),
        frozen=frozen,
        router=config.router,
        learning_rate=make_schedule(config.optimizer, total_updates(config)),
        passes=passes,
        critic=critic,
        place=place,
        kl_coef=algorithm.kl_coef,
        entropy_coef=algorithm.entropy_coef,
        applied_entropy_coef=algorithm.entropy_coef,
    )
    return RLTrainer(
        source=build_source(config, model_config, tokenizer, engine, stream, seed, identity),
        engine=engine,
        updater=updater,
        learns=config.rollouts.update,
        to_sampler=updater.merged if type(engine) is Engine else updater.merged_later,
        reference=reference,
        reward_parts=tuple(counting_rewards(config.rewards)),
        mask_truncated=train.mask_truncated,
        longest_row=sampler.max_prompt_tokens + sampler.max_new_tokens,
        offload=train.offload,
    )


def reference_weights(form: Form, params: Any) -> tuple[Any, Any]:
    """The first policy, which stays: an adapter's base, or a copy."""
    if form.lora is not None:
        return None, params
    copy = jax.tree.map(jnp.copy, params)
    return ({"decoder": copy} if form.scored else copy), None


def reference_apart(
    config: RLConfig, algorithm: Algorithm, model_config: ModelConfig, params: Any, seed: int
) -> Reference:
    """The first policy on a mesh of its own.

    Raises:
        ConfigError: no reference is used, or it is the base under an adapter.
    """
    check_apart(config, algorithm)
    place = place_for(config, config.ref_mesh, "ref_mesh", model_config)
    connect(place.mesh)
    functions = build_functions(config, algorithm, place.model, place)
    weights = jax.tree.map(jnp.copy, place.put(params))
    return Reference((None, weights), functions.logprobs, build_passes(config, place, seed))


def build_engine(
    config: RLConfig, model_config: ModelConfig, params: Any, place: Placement
) -> Sampler:
    """The sampler of this process: on its mesh, or on the first device of the policy's."""
    sizes = engine_config(config.sampler)
    if config.sampler.mesh is not None:
        return Engines(model_config, params, sizes, config.sampler.mesh)
    if on_default_device(place):
        return Engine(model_config, params, sizes)
    own = Placement.make(MeshConfig(), model_config, place.mesh.local_devices[:1])
    return SplitEngine(model_config, params, sizes, own)


def build_source(
    config: RLConfig,
    model_config: ModelConfig,
    tokenizer: Tokenizer,
    engine: Sampler,
    stream: PromptStream | CurriculumStream,
    seed: int,
    identity: RunIdentity | None,
) -> Rollouts:
    """Samples a step's rollouts, or reads those of an earlier run."""
    sampler, stored = config.sampler, config.rollouts
    written = read = None
    if stored.write is not None:
        assert identity is not None
        written = of_first(lambda: stored.open_to_write(identity), "rollouts to write")
    if stored.read is not None:
        assert identity is not None
        read = open_stored(stored, config.train.steps, identity)
    pieces: dict[str, Any] = {
        "stream": stream,
        "prompts_per_step": config.train.prompts_per_step,
        "group_size": sampler.group_size,
        "rule": config.filter,
        "engine": engine,
        "sampling": SamplingParams(
            max_tokens=sampler.max_new_tokens,
            temperature=sampler.temperature,
            stop_ids=stop_ids(sampler.stop, tokenizer),
            seed=seed,
        ),
        "scorer": Scorer(config.rewards, tokenizer.decode, scoring_workers(config)),
        "written": written,
    }
    if read is None:
        return Rollouts(**pieces)
    return StoredRollouts(
        **pieces,
        read=read,
        vocab_size=model_config.vocab_size,
        weights=counting_rewards(config.rewards),
    )


def build_functions(
    config: RLConfig,
    algorithm: Algorithm,
    model_config: ModelConfig,
    place: Place = FREE,
) -> TrainFunctions:
    """The compiled programs of the update."""
    config.router.check(model_config)
    form = policy_form(config, algorithm)
    optimizer = make_optimizer(config.optimizer, total_updates(config))
    value_loss = None
    if form.scored:
        optimizer = shared_optimizer(optimizer, config.critic)

        def value_loss(values, batch, counts):
            loss, metrics = algorithm.value_loss(
                values, batch.values, batch.returns, batch.mask, counts
            )
            named = {f"value/{k.removeprefix('value_')}": pair for k, pair in metrics.items()}
            return config.critic.value_coef * loss, named

    return make_train_functions(
        model_config,
        algorithm.loss,
        optimizer,
        temperature=config.sampler.temperature,
        remat=config.model.remat,
        form=form,
        router=config.router,
        value_loss=value_loss,
        place=place,
    )


def policy_form(config: RLConfig, algorithm: Algorithm) -> Form:
    """What of the policy is trained."""
    return Form(config.lora, scored=algorithm.needs_values and config.critic.shared_trunk)


def split_weights(
    form: Form, model_config: ModelConfig, params: Any, seed: int, place: Place = FREE
) -> tuple[Any, Any | None]:
    """What is trained, which the updater may take over, and what stays under it.

    Args:
        params: as `place` keeps them.
    """
    trained, frozen = params, None
    if form.lora is not None:
        # DoRA starts from the lengths of the base's rows, all of them.
        base = place.take(params) if form.lora.dora else None
        adapter = init_adapter(model_config, form.lora, jax.random.key(seed), base)
        trained, frozen = place.put(adapter), params
    if form.scored:
        head = jnp.zeros((1, model_config.hidden_size), params["embed"].dtype)
        trained = {"decoder": trained, "score": place.put({"score": {"weight": head}})["score"]}
    return trained, frozen


def total_updates(config: RLConfig) -> int:
    """The policy's optimiser updates in the whole run, which schedules count in."""
    learning = config.train.steps - config.critic.warmup_steps
    return learning * config.train.epochs * config.train.minibatches


def engine_config(sampler) -> EngineConfig:
    """The sampler's own settings from those of the run."""
    return EngineConfig(
        slots=sampler.slots,
        page_size=sampler.page_size,
        num_pages=sampler.num_pages,
        max_prompt_tokens=sampler.max_prompt_tokens,
        max_new_tokens=sampler.max_new_tokens,
        group_size=sampler.group_size,
        attention_backend=sampler.attention_backend,
    )


def stop_ids(stop: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a completion: the model's own end tokens and the strings of the config."""
    ids = list(tokenizer.eos_ids)
    for text in stop:
        tokens = tokenizer.encode(text)
        if len(tokens) != 1:
            raise ConfigError(
                "a stop string must be a single token of this model's vocabulary",
                got=f"sampler.stop has {text!r}, which is {len(tokens)} tokens",
                hint="a shorter string",
            )
        ids += [token for token in tokens if token not in ids]
    return tuple(ids)


def scoring_workers(config: RLConfig) -> int:
    """Processes that score while others sample."""
    given = config.train.reward_workers
    return min(os.cpu_count() or 1, 8) if given is None else given
