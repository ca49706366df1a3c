# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Make everything of a run from its config; models, meshes and engines are made nowhere else."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.checkpoint.base_facts import base_facts, changes
from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.checkpoint.pretrained import load
from jaxrl_llm.checkpoint.score_folder import is_score_folder, load_score_folder
from jaxrl_llm.data.curriculum import CurriculumStream, make_stream
from jaxrl_llm.data.pipeline import PromptStream, check_lengths, make_prompt
from jaxrl_llm.data.rollout_store import RolloutStore
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import init_adapter
from jaxrl_llm.rollout.engine import Engine, EngineConfig, SamplingParams
from jaxrl_llm.sharding.mesh import data_mesh, replicated, rows
from jaxrl_llm.text.chat import encode_prompt
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.trainers.batching import RowPlan, plan_rows
from jaxrl_llm.trainers.critic import Critic, make_critic_functions, shared_optimizer
from jaxrl_llm.trainers.evaluate import evaluate
from jaxrl_llm.trainers.loop import Run
from jaxrl_llm.trainers.optimizers import make_optimizer, make_schedule
from jaxrl_llm.trainers.passes import Passes
from jaxrl_llm.trainers.policy import Form, TrainFunctions, make_train_functions
from jaxrl_llm.trainers.rl import RLTrainer
from jaxrl_llm.trainers.rollouts import Rollouts, StoredRollouts
from jaxrl_llm.trainers.run_directory import RunDirectory
from jaxrl_llm.trainers.scoring import Scorer
from jaxrl_llm.trainers.settings import RLConfig, counting_rewards, resolve_algorithm
from jaxrl_llm.trainers.show import Show
from jaxrl_llm.trainers.update import Updater
from jaxrl_llm.types import Batch, Prompt


def build_run(config: RLConfig, directory: RunDirectory, settings: Mapping[str, Any]) -> Run:
    """A run that is ready for `loop.train`; `settings` is the config as JSON values."""
    mesh = data_mesh(config.mesh)
    keep_base(directory, config.model.path)
    model = load(config.model.path, jnp.dtype(config.model.dtype))
    tokenizer = model.tokenizer.at_time(directory.date)
    _, heldout_prompts, stream = build_data(config, tokenizer, model.config, directory.seed)
    # Scalings of rotary frequencies that depend on the length are the same for a whole run.
    longest = config.sampler.max_prompt_tokens + config.sampler.max_new_tokens
    model_config = dataclasses.replace(model.config, context=longest)
    trainer = build_trainer(
        config, model_config, model.params, tokenizer, mesh, directory.seed, stream
    )
    source = trainer.source
    greedy = dataclasses.replace(source.sampling, temperature=0.0)
    show = Show(
        directory.path,
        config,
        settings,
        model.config,
        heldout_count=len(heldout_prompts),
        seed=directory.seed,
    )

    def set_data_state(state: dict[str, Any]) -> None:
        stream.set_state(state["prompts"])
        show.health.set_state(state["health"])

    return Run(
        directory=directory,
        trainer=trainer,
        checkpoints=CheckpointManager(
            directory.path / "checkpoints", keep=config.train.keep_checkpoints
        ),
        total_steps=config.train.steps,
        eval_every=config.train.eval_every,
        checkpoint_every=config.train.checkpoint_every,
        data_state=lambda: {"prompts": stream.get_state(), "health": show.health.get_state()},
        set_data_state=set_data_state,
        evaluate=lambda: (
            evaluate(trainer.engine, heldout_prompts, greedy, source.scorer)
            if heldout_prompts
            else ({}, [])
        ),
        export=lambda: save_folder(
            directory.path / "export", trainer.updater.merged(), model.config, tokenizer
        ),
        show=show,
        release=source.scorer.close,
    )


def keep_base(directory: RunDirectory, name: str) -> None:
    """Notes what model a run begins with; a resumed run must begin with the same."""
    directory.keep("base.json", base_facts(name), changes, f"the model {name}")


def build_trainer(
    config: RLConfig,
    model_config: ModelConfig,
    params: Any,
    tokenizer: Tokenizer,
    mesh: jax.sharding.Mesh,
    seed: int,
    stream: PromptStream | CurriculumStream,
) -> RLTrainer:
    """The trainer over given parameters, which it takes over."""
    sampler, train = config.sampler, config.train
    algorithm = resolve_algorithm(config)
    form = policy_form(config, algorithm)
    functions = build_functions(config, algorithm, model_config)
    # The sampler runs on the mesh's first device; the update on all of them.
    sampler_device = jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])

    def to_sampler(params):
        return jax.device_put(params, sampler_device)

    engine = Engine(model_config, to_sampler(params), engine_config(sampler))
    params = jax.device_put(params, replicated(mesh))
    # How both the policy and the critic go through a batch.
    passes = Passes(
        put=lambda batch: jax.device_put(batch, rows(mesh)),
        plan=row_planner(config, mesh.shape["data"]),
        epochs=train.epochs,
        minibatches=train.minibatches,
        group_size=sampler.group_size,
        seed=seed,
    )
    critic = None
    if algorithm.needs_values and not config.critic.shared_trunk:
        critic = build_critic(config, algorithm, model_config, params, mesh, passes)
    ref_weights = None
    if algorithm.needs_ref:
        ref_weights = reference(form, params)
    trained, frozen = split_weights(form, model_config, params, seed)
    updater = Updater(
        algorithm=algorithm,
        functions=functions,
        form=form,
        policy=functions.state.init(jax.device_put(trained, replicated(mesh))),
        frozen=frozen,
        router=config.router,
        learning_rate=make_schedule(config.optimizer, total_updates(config)),
        passes=passes,
        critic=critic,
        kl_coef=algorithm.kl_coef,
        entropy_coef=algorithm.entropy_coef,
        applied_entropy_coef=algorithm.entropy_coef,
    )
    return RLTrainer(
        source=build_source(config, model_config, tokenizer, engine, stream, seed),
        engine=engine,
        updater=updater,
        learns=config.rollouts.update,
        to_sampler=to_sampler,
        ref_weights=ref_weights,
        reward_parts=tuple(counting_rewards(config.rewards)),
        mask_truncated=train.mask_truncated,
        longest_row=sampler.max_prompt_tokens + sampler.max_new_tokens,
    )


def build_source(
    config: RLConfig,
    model_config: ModelConfig,
    tokenizer: Tokenizer,
    engine: Engine,
    stream: PromptStream | CurriculumStream,
    seed: int,
) -> Rollouts:
    """Samples a step's rollouts, or reads those of an earlier run."""
    sampler, stored = config.sampler, config.rollouts
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
        "written": None if stored.write is None else RolloutStore(stored.write),
    }
    if stored.read is None:
        return Rollouts(**pieces)
    store = stored.open(config.train.steps)
    return StoredRollouts(**pieces, read=store, vocab_size=model_config.vocab_size)


def build_functions(
    config: RLConfig, algorithm: Algorithm, model_config: ModelConfig
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
    )


def policy_form(config: RLConfig, algorithm: Algorithm) -> Form:
    """What of the policy is trained."""
    return Form(config.lora, scored=algorithm.needs_values and config.critic.shared_trunk)


def split_weights(
    form: Form, model_config: ModelConfig, params: Any, seed: int
) -> tuple[Any, Any | None]:
    """What is trained, which the updater may take over, and what stays under it."""
    trained, frozen = params, None
    if form.lora is not None:
        trained = init_adapter(model_config, form.lora, jax.random.key(seed), params)
        frozen = params
    if form.scored:
        head = jnp.zeros((1, model_config.hidden_size), params["embed"].dtype)
        trained = {"decoder": trained, "score": {"weight": head}}
    return trained, frozen


def reference(form: Form, params: Any) -> tuple[Any, Any]:
    """The first policy, which stays: an adapter's base, or a copy."""
    if form.lora is not None:
        return None, params
    copy = jax.tree.map(jnp.copy, params)
    return ({"decoder": copy} if form.scored else copy), None


def build_critic(
    config: RLConfig,
    algorithm: Algorithm,
    model_config: ModelConfig,
    params: Any,
    mesh: jax.sharding.Mesh,
    passes: Passes,
) -> Critic:
    """A critic that starts from the policy's parameters, from another model, or a reward model."""
    path, dtype = config.critic.path, jnp.dtype(config.model.dtype)
    decoder_vocabulary, context = model_config.vocab_size, model_config.context
    score = {"weight": jnp.zeros((1, model_config.hidden_size), dtype)}
    decoder = params
    if path is not None and is_score_folder(path):
        model = load_score_folder(path, dtype)
        model_config, decoder, score = model.config, model.params["decoder"], model.params["score"]
    elif path is not None:
        other = load(path, dtype)
        model_config, decoder = other.config, other.params
        score = {"weight": jnp.zeros((1, model_config.hidden_size), dtype)}
    if score["weight"].shape[0] != 1:
        raise ConfigError(
            "the critic's folder is not that of a reward model",
            got=f"{score['weight'].shape[0]} scores a token in {path}",
            expected="one",
        )
    if model_config.vocab_size < decoder_vocabulary:
        raise ConfigError(
            "the critic does not know all tokens of the policy",
            got=f"{model_config.vocab_size} tokens in {path}",
            expected=f"at least {decoder_vocabulary}",
        )
    model_config = dataclasses.replace(model_config, context=context)
    functions = make_critic_functions(
        model_config, algorithm, config.critic, remat=config.model.remat
    )
    # The output head says nothing of values: it is left out, and what the policy gives is copied.
    decoder = {name: value for name, value in decoder.items() if name != "head"}
    first = jax.device_put({"decoder": decoder, "score": score}, replicated(mesh))
    return Critic(
        algorithm=algorithm,
        functions=functions,
        state=functions.state.init(jax.tree.map(jnp.copy, first)),
        passes=passes,
        warmup_steps=config.critic.warmup_steps,
    )


def build_data(
    config: RLConfig, tokenizer: Tokenizer, model_config: ModelConfig, seed: int
) -> tuple[Sequence[Any], list[Prompt], PromptStream | CurriculumStream]:
    """Training records, held-out prompts and the prompt stream; all lengths checked."""
    train, heldout = config.task.load()

    def encode(prompt):
        return encode_prompt(prompt, tokenizer)

    stream = make_stream(
        train, encode, config.curriculum, seed=seed, batch=config.train.prompts_per_step
    )
    heldout_prompts = [make_prompt(record, encode) for record in heldout]
    limits = (
        config.sampler.max_prompt_tokens,
        config.sampler.max_new_tokens,
        model_config.max_position_embeddings,
    )
    check_lengths((make_prompt(record, encode) for record in train), *limits)
    check_lengths(heldout_prompts, *limits)
    return train, heldout_prompts, stream


def total_updates(config: RLConfig) -> int:
    """Optimiser updates of the whole run, which schedules count in."""
    return config.train.steps * config.train.epochs * config.train.minibatches


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


def engine_config(sampler) -> EngineConfig:
    """The sampler's own settings from those of the run."""
    return EngineConfig(
        slots=sampler.slots,
        page_size=sampler.page_size,
        num_pages=sampler.num_pages,
        max_prompt_tokens=sampler.max_prompt_tokens,
        max_new_tokens=sampler.max_new_tokens,
        group_size=sampler.group_size,
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
