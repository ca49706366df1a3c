# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Make everything of a supervised run from its config: as `build.py` does for reinforcement
learning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.checkpoint.pretrained import load
from jaxrl_llm.checkpoint.score_folder import padding_id, save_score_folder
from jaxrl_llm.data.encode import Unit
from jaxrl_llm.data.packing import PackedStream, UnitStream, in_batches, pack_step
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.score_heads import init_score_head
from jaxrl_llm.monitor.progress import emit
from jaxrl_llm.sharding.mesh import make_mesh, replicated, rows
from jaxrl_llm.text.templates import with_template
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.trainers.encoders import Encoded, encode_examples
from jaxrl_llm.trainers.learner import Learner, LearnState, Loss, make_learn_functions
from jaxrl_llm.trainers.loop import Run
from jaxrl_llm.trainers.optimizers import make_optimizer, make_schedule
from jaxrl_llm.trainers.preference import (
    PreferenceTrainer,
    host_slot_sums,
    preference_loss,
    reply_logprobs,
)
from jaxrl_llm.trainers.reward import (
    RewardTrainer,
    pair_reward_loss,
    sequence_scores,
    step_reward_loss,
)
from jaxrl_llm.trainers.run_directory import RunDirectory
from jaxrl_llm.trainers.sft import SFTTrainer, sft_loss
from jaxrl_llm.trainers.show_supervised import SupervisedShow
from jaxrl_llm.trainers.supervised_settings import (
    PreferenceConfig,
    RewardConfig,
    SFTConfig,
)

Config = SFTConfig | RewardConfig | PreferenceConfig


@dataclasses.dataclass
class Pieces:
    """What every supervised run is made of.

    Attributes:
        tokenizer: with the run's chat template.
        data: encoded examples.
    """

    config: Config
    directory: RunDirectory
    settings: Mapping[str, Any]
    mesh: jax.sharding.Mesh
    model_config: ModelConfig
    params: Any
    tokenizer: Tokenizer
    data: Encoded


def gather(config: Config, directory: RunDirectory, settings: Mapping[str, Any]) -> Pieces:
    """Mesh, model and encoded data of a run; every example is checked here.

    Raises:
        UserError: whatever is wrong with model, data or settings.
    """
    mesh = make_mesh(config.mesh)
    check_micro_batch(config, mesh.shape["data"])
    model = load(config.model.path, jnp.dtype(config.model.dtype))
    check_context(config, model.config)
    tokenizer = with_template(model.tokenizer, config.rows.chat_template)
    data = encode_examples(config, tokenizer)
    params = jax.device_put(model.params, replicated(mesh))
    return Pieces(config, directory, settings, mesh, model.config, params, tokenizer, data)


def build_sft(config: SFTConfig, directory: RunDirectory, settings: Mapping[str, Any]) -> Run:
    """A fine-tuning run that is ready for `loop.train`."""
    p = gather(config, directory, settings)
    tables, weights = p.data.train, p.data.weights
    row_tokens = config.rows.row_tokens if config.rows.packed else config.rows.max_length
    if config.rows.packed:
        stream = PackedStream(
            tables,
            weights,
            seed=directory.seed,
            row_tokens=row_tokens,
            bins=config.sft.pack_bins,
        )
        next_rows = lambda: stream.next_rows(config.train.batch)  # noqa: E731
    else:
        stream = UnitStream(tables, weights, seed=directory.seed)
        next_rows = lambda: pack_step(  # noqa: E731
            stream.next(config.train.batch), row_tokens=row_tokens, packed=False, multiple=1
        )[0]
    loss = sft_loss(p.model_config, kind=config.sft.loss, remat=config.model.remat)
    trainer = SFTTrainer(
        next_rows=next_rows,
        updater=make_learner(p, loss, p.params),
        measure=jax.jit(loss, static_argnums=4),
        heldout=p.data.heldout,
        row_tokens=row_tokens,
        eval_rows=config.train.micro_batch,
    )
    return make_run(p, trainer, stream, lambda: language_model(p, trainer), title="sft")


def build_preference(
    config: PreferenceConfig, directory: RunDirectory, settings: Mapping[str, Any]
) -> Run:
    """A preference run that is ready for `loop.train`."""
    p = gather(config, directory, settings)
    stream = UnitStream(p.data.train, p.data.weights, seed=directory.seed)
    wanted, remat = config.preference, config.model.remat
    ref = None
    if wanted.needs_reference and wanted.reference == "live":
        ref = jax.tree.map(jnp.copy, p.params)
    loss = preference_loss(p.model_config, wanted, remat=remat)
    rate = wanted.ref_update_rate
    trainer = PreferenceTrainer(
        settings=wanted,
        next_units=lambda: stream.next(config.train.batch),
        updater=make_learner(p, loss, p.params, ref),
        measure=jax.jit(loss, static_argnums=4),
        logprobs=jax.jit(reply_logprobs(p.model_config, remat=remat), static_argnums=2),
        move=jax.jit(lambda old, new: jax.tree.map(lambda a, b: a + rate * (b - a), old, new)),
        table=None,
        heldout=p.data.heldout,
        row_tokens=config.rows.row_tokens if config.rows.packed else 2 * config.rows.max_length,
        packed=config.rows.packed,
        max_length=config.rows.max_length,
    )
    if wanted.needs_reference and wanted.reference == "precomputed":
        trainer.table = reference_table(trainer, [*stream.units, *p.data.heldout])
    name = " + ".join(name for name, _ in wanted.mixture)
    return make_run(p, trainer, stream, lambda: language_model(p, trainer), title=name)


def reference_table(trainer: PreferenceTrainer, units: list[Unit]) -> np.ndarray:
    """Log-probability of each part of each unit under the parameters that the trainer begins with,
    [units, parts]; the model is always loaded before a checkpoint is restored."""
    emit(f"reference log-probabilities of {len(units)} examples …")
    table = np.zeros((len(units), len(units[0].parts)), np.float32)
    for group in in_batches(units, 64):
        packed, places = pack_step(
            group,
            row_tokens=trainer.row_tokens,
            packed=trainer.packed,
            multiple=trainer.updater.micro_rows,
        )
        bounds = trainer.bounds(packed)
        tokens = trainer.token_logprobs(trainer.updater.params, packed, bounds)
        sums = host_slot_sums(tokens, packed, bounds.slots)
        for n, row in enumerate(places):
            slot = 0
            for i in row:
                count = len(group[i].parts)
                table[group[i].index] = sums[n, slot : slot + count]
                slot += count
    return table


def build_reward(config: RewardConfig, directory: RunDirectory, settings: Mapping[str, Any]) -> Run:
    """A reward-model run that is ready for `loop.train`."""
    p = gather(config, directory, settings)
    padding_id(p.tokenizer)  # refuses here what an export would refuse after hours
    # A reward model has no output head.
    p.model_config = dataclasses.replace(p.model_config, tie_word_embeddings=True)
    decoder = {name: leaf for name, leaf in p.params.items() if name != "head"}
    wanted, remat = config.reward, config.model.remat
    classes = 2 if wanted.kind == "steps" else 1
    head = init_score_head(
        p.model_config, classes, jax.random.key(directory.seed), jnp.dtype(config.model.dtype)
    )
    params = {"decoder": decoder, "score": jax.device_put(head, replicated(p.mesh))}
    if wanted.kind == "steps":
        loss = step_reward_loss(p.model_config, remat=remat)
    else:
        loss = pair_reward_loss(
            p.model_config,
            use_margin=wanted.use_margin,
            center_coef=wanted.center_coef,
            remat=remat,
        )
    parts = 1 if wanted.kind == "steps" else 2
    stream = UnitStream(p.data.train, p.data.weights, seed=directory.seed)
    trainer = RewardTrainer(
        kind=wanted.kind,
        next_units=lambda: stream.next(config.train.batch),
        updater=make_learner(p, loss, params),
        measure=jax.jit(loss, static_argnums=4),
        scores=jax.jit(
            lambda params, rows, slots: sequence_scores(params, p.model_config, rows, slots),
            static_argnums=2,
        ),
        heldout=p.data.heldout,
        row_tokens=config.rows.row_tokens if config.rows.packed else parts * config.rows.max_length,
        packed=config.rows.packed,
    )

    def export():
        return save_score_folder(
            directory.path / "export", trainer.updater.params, p.model_config, p.tokenizer
        )

    title = "process reward model" if wanted.kind == "steps" else "reward model"
    return make_run(p, trainer, stream, export, title=title)


def make_learner(p: Pieces, loss: Loss, params: Any, ref: Any | None = None) -> Learner:
    """The learner over given parameters, which it takes over."""
    config = p.config
    functions = make_learn_functions(
        p.model_config, loss, make_optimizer(config.optimizer, config.train.steps)
    )
    return Learner(
        functions=functions,
        put=lambda packed: jax.device_put(packed, rows(p.mesh)),
        state=LearnState(train=functions.init(params), ref=ref),
        learning_rate=make_schedule(config.optimizer, config.train.steps),
        micro_rows=config.train.micro_batch,
    )


def make_run(
    p: Pieces, trainer: Any, stream: UnitStream, export: Callable[[], Any], *, title: str
) -> Run:
    """The run around a trainer."""
    train = p.config.train
    return Run(
        directory=p.directory,
        trainer=trainer,
        checkpoints=CheckpointManager(
            p.directory.path / "checkpoints", keep=train.keep_checkpoints
        ),
        total_steps=train.steps,
        eval_every=train.eval_every,
        checkpoint_every=train.checkpoint_every,
        data_state=stream.get_state,
        set_data_state=stream.set_state,
        evaluate=trainer.evaluate,
        export=export,
        show=SupervisedShow(
            p.directory.path,
            p.config,
            p.settings,
            p.model_config,
            title=title,
            data=p.data,
            seed=p.directory.seed,
        ),
    )


def language_model(p: Pieces, trainer: Any) -> Any:
    return save_folder(
        p.directory.path / "export", trainer.updater.params, p.model_config, p.tokenizer
    )


def check_micro_batch(config: Config, data: int) -> None:
    """Every micro-batch must fill the data axis."""
    if config.train.micro_batch % data:
        raise ConfigError(
            "a micro-batch does not divide over the data axis",
            got=f"train.micro_batch={config.train.micro_batch} on {data} devices",
            expected=f"a multiple of {data}",
            hint=f"--train.micro_batch={data}, or --mesh.data=1",
        )


def check_context(config: Config, model_config: ModelConfig) -> None:
    if config.rows.max_length > model_config.max_position_embeddings:
        raise ConfigError(
            "rows.max_length is beyond the model's context",
            got=config.rows.max_length,
            expected=f"at most {model_config.max_position_embeddings}",
        )


BUILDERS: dict[type, Callable[..., Run]] = {
    SFTConfig: build_sft,
    RewardConfig: build_reward,
    PreferenceConfig: build_preference,
}
