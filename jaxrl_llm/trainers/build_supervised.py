# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Make everything of a supervised run from its config: as `build.py` does for reinforcement
learning."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.checkpoint.pretrained import load, peek
from jaxrl_llm.checkpoint.score_folder import (
    ScoringModel,
    is_score_folder,
    load_score_folder,
    padding_id,
    save_score_folder,
)
from jaxrl_llm.data.encode import Unit
from jaxrl_llm.data.packing import PackedStream, UnitStream, in_batches, pack_step
from jaxrl_llm.errors import ConfigError, ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import attach, init_adapter, merge
from jaxrl_llm.models.placement import Placement
from jaxrl_llm.models.score_heads import init_score_head
from jaxrl_llm.monitor.progress import emit
from jaxrl_llm.sharding.mesh import MeshConfig, nearest, row_parts
from jaxrl_llm.sharding.processes import connect, of_first
from jaxrl_llm.sharding.reshard import fetch
from jaxrl_llm.text.templates import with_template
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.trainers.build import keep_base
from jaxrl_llm.trainers.encoders import Encoded, encode_examples
from jaxrl_llm.trainers.learner import Join, Learner, LearnState, Loss, as_is, make_learn_functions
from jaxrl_llm.trainers.loop import Run
from jaxrl_llm.trainers.optimizers import make_optimizer, make_schedule
from jaxrl_llm.trainers.policy import Form
from jaxrl_llm.trainers.preference import (
    PreferenceTrainer,
    host_slot_sums,
    preference_loss,
    reply_logprobs,
)
from jaxrl_llm.trainers.quiet import shown
from jaxrl_llm.trainers.reward import (
    RewardTrainer,
    pair_reward_loss,
    sequence_scores,
    step_reward_loss,
)
from jaxrl_llm.trainers.roles import check_rows, load_at
from jaxrl_llm.trainers.run_directory import RunDirectory
from jaxrl_llm.trainers.settings import with_backend
from jaxrl_llm.trainers.sft import SFTTrainer, sft_loss
from jaxrl_llm.trainers.show_supervised import SupervisedShow
from jaxrl_llm.trainers.supervised_settings import PreferenceConfig, RewardConfig, SFTConfig

Config = SFTConfig | RewardConfig | PreferenceConfig


@dataclasses.dataclass
class Pieces:
    """What every supervised run is made of.

    Attributes:
        place: where it all lives.
        params: of the model that is trained: a decoder, or decoder and head for a reward model.
        ref_params: of a live reference, or None.
        tokenizer: with the run's chat template.
        data: encoded examples.
    """

    config: Config
    seed: int
    place: Placement
    model_config: ModelConfig
    params: Any
    ref_params: Any | None
    tokenizer: Tokenizer
    data: Encoded


def gather(
    config: Config,
    seed: int,
    trained: str | None = None,
    date: datetime.datetime | None = None,
) -> Pieces:
    """Mesh, model and encoded data of a run; every example is checked here.

    Args:
        date: that chat templates write; None: today's.
        trained: a model to evaluate in place of the one that training would begin with; a reference
            stays that of the config.

    Raises:
        UserError: whatever is wrong with model, data or settings.
    """
    dtype = jnp.dtype(config.model.dtype)
    path = trained or config.model.path
    model = None
    if isinstance(config, RewardConfig):
        classes = 2 if config.reward.kind == "steps" else 1
        model = load_scoring(path, classes, dtype, seed if trained is None else None)
    base, tokenizer = (model.config, model.tokenizer) if model else peek(path)
    check_context(config, base)
    # Scalings of rotary frequencies that depend on the length are the same for a whole run.
    model_config = with_backend(base, config.model, context=config.rows.max_length)
    place = Placement.make(config.mesh, model_config)
    check_micro_batch(config, place.layout, row_parts(place.mesh))
    check_rows(place, config.model.dtype, shared=False)
    connect(place.mesh)
    tokenizer = with_template(tokenizer, config.rows.chat_template)
    tokenizer = tokenizer if date is None else tokenizer.at_time(date)
    data = encode_examples(config, tokenizer)
    params = place.put(model.params if model else load_at(place, path, dtype))
    ref_params = None
    if isinstance(config, PreferenceConfig) and config.preference.needs_reference:
        if trained is not None:
            ref_params = place.put(load_at(place, config.model.path, dtype))
        elif config.preference.reference == "live" and config.lora is None:
            ref_params = jax.tree.map(jnp.copy, params)
    return Pieces(config, seed, place, model_config, params, ref_params, tokenizer, data)


def load_scoring(path: str, classes: int, dtype: Any, seed: int | None) -> ScoringModel:
    """A reward model: a folder that is one, or a language model with a new head.

    Args:
        seed: of a new head; None refuses to make one.

    Raises:
        ModelError: as `load`; the folder is no reward model of this kind; or the tokenizer has no
            token to pad exported batches with.
    """
    if is_score_folder(path):
        scoring = load_score_folder(path, dtype)
        if scoring.params["score"]["weight"].shape[0] != classes:
            judges = "steps, not replies" if classes == 1 else "replies, not steps"
            raise ModelError(f"{path} judges {judges}", hint="another model, or --reward.kind")
        padding_id(scoring.tokenizer)
        return scoring
    model = load(path, dtype)
    if seed is None:
        raise ModelError(f"{path} is no reward model", hint="the export of a run of this config")
    padding_id(model.tokenizer)  # refuses here what an export would refuse after hours
    config = dataclasses.replace(model.config, tie_word_embeddings=True)  # no output head
    decoder = {name: leaf for name, leaf in model.params.items() if name != "head"}
    head = init_score_head(config, classes, jax.random.key(seed), dtype)
    return ScoringModel(config, {"decoder": decoder, "score": head}, model.tokenizer)


def make_sft(p: Pieces) -> tuple[SFTTrainer, UnitStream]:
    """The trainer and the stream that feeds it."""
    config, data = p.config, (p.data.train, p.data.weights)
    row_tokens = config.rows.row_tokens if config.rows.packed else config.rows.max_length
    if config.rows.packed:
        bins, heldout = config.sft.pack_bins, p.data.heldout
        stream = PackedStream(*data, seed=p.seed, row_tokens=row_tokens, bins=bins, heldout=heldout)
        next_rows = lambda: stream.next_rows(config.train.batch)  # noqa: E731 - short
    else:
        stream = UnitStream(*data, seed=p.seed, heldout=p.data.heldout)
        next_rows = lambda: pack_step(  # noqa: E731 - short
            stream.next(config.train.batch), row_tokens=row_tokens, packed=False, multiple=1
        )[0]
    loss = sft_loss(p.place.model, kind=config.sft.loss, remat=config.model.remat)
    trainer = SFTTrainer(
        next_rows=next_rows,
        updater=make_learner(p, loss),
        heldout=p.data.heldout,
        row_tokens=row_tokens,
        eval_rows=config.train.micro_batch,
    )
    return trainer, stream


def make_preference(p: Pieces) -> tuple[PreferenceTrainer, UnitStream]:
    """The trainer, with its reference, and the stream that feeds it."""
    config, wanted, remat = p.config, p.config.preference, p.config.model.remat
    stream = UnitStream(p.data.train, p.data.weights, seed=p.seed, heldout=p.data.heldout)
    loss = preference_loss(p.place.model, wanted, remat=remat)
    logprobs = reply_logprobs(p.place.model, remat=remat)
    rate, moves = wanted.ref_update_rate, wanted.ref_update_every > 0
    trainer = PreferenceTrainer(
        settings=wanted,
        next_units=lambda: stream.next(config.train.batch),
        # Only a reference that moves is part of a checkpoint.
        updater=make_learner(p, loss, p.ref_params if moves else None),
        fixed_ref=None if moves else p.ref_params,
        logprobs=p.place.jit(
            lambda trained, frozen, *rest: logprobs(joined(config)(trained, frozen), *rest),
            static_argnums=3,
        ),
        move=jax.jit(lambda old, new: jax.tree.map(lambda a, b: a + rate * (b - a), old, new)),
        table=None,
        heldout=p.data.heldout,
        row_tokens=config.rows.row_tokens if config.rows.packed else 2 * config.rows.max_length,
        packed=config.rows.packed,
        max_length=config.rows.max_length,
    )
    if wanted.needs_reference and wanted.reference == "precomputed" and p.ref_params is None:
        trainer.table = reference_table(trainer, [*stream.units, *p.data.heldout])
    return trainer, stream


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
        tokens = trainer.token_logprobs(trainer.policy, packed, bounds)
        sums = host_slot_sums(tokens, packed, bounds.slots)
        for n, row in enumerate(places):
            slot = 0
            for i in row:
                count = len(group[i].parts)
                table[group[i].index] = sums[n, slot : slot + count]
                slot += count
    return table


def make_reward(p: Pieces) -> tuple[RewardTrainer, UnitStream]:
    """The trainer and the stream that feeds it."""
    config, wanted, remat = p.config, p.config.reward, p.config.model.remat
    if wanted.kind == "steps":
        loss = step_reward_loss(p.place.model, remat=remat)
    else:
        loss = pair_reward_loss(
            p.place.model,
            use_margin=wanted.use_margin,
            center_coef=wanted.center_coef,
            remat=remat,
        )
    parts = 1 if wanted.kind == "steps" else 2
    stream = UnitStream(p.data.train, p.data.weights, seed=p.seed, heldout=p.data.heldout)
    trainer = RewardTrainer(
        kind=wanted.kind,
        next_units=lambda: stream.next(config.train.batch),
        updater=make_learner(p, loss),
        scores=p.place.jit(
            lambda trained, frozen, packed, slots: sequence_scores(
                joined(config)(trained, frozen), p.place.model, packed, slots
            ),
            static_argnums=3,
        ),
        heldout=p.data.heldout,
        row_tokens=config.rows.row_tokens if config.rows.packed else parts * config.rows.max_length,
        packed=config.rows.packed,
    )
    return trainer, stream


def make_learner(p: Pieces, loss: Loss, ref: Any | None = None) -> Learner:
    """The learner over the parameters, which it takes over."""
    config = p.config
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    functions = make_learn_functions(loss, optimizer, joined(config), p.place)
    trained, frozen = p.params, None
    if config.lora is not None:
        trained, frozen = with_adapter(p)
    return Learner(
        functions=functions,
        put=p.place.put_rows,
        current=LearnState(train=functions.state.init(trained), ref=ref),
        learning_rate=make_schedule(config.optimizer, config.train.steps),
        micro_rows=config.train.micro_batch,
        frozen=frozen,
        place=p.place,
    )


def with_adapter(p: Pieces) -> tuple[Any, Any]:
    """A new adapter (beside the head of a reward model), and the decoder that it goes over."""
    scoring = isinstance(p.config, RewardConfig)
    decoder = p.params["decoder"] if scoring else p.params
    # DoRA starts from the lengths of the base's rows, all of them.
    base = p.place.take(decoder) if p.config.lora.dora else None
    adapter = init_adapter(p.model_config, p.config.lora, jax.random.key(p.seed), base)
    adapter = p.place.put(adapter)
    return ({"decoder": adapter, "score": p.params["score"]} if scoring else adapter), decoder


def joined(config: Config, put_together: Callable = attach) -> Join:
    """How what is trained and what stays become parameters.

    Args:
        put_together: `lora.attach` while training, `lora.merge` for an export.
    """
    if config.lora is None:
        return as_is
    form = Form(config.lora, scored=isinstance(config, RewardConfig))

    def join(trained: Any, frozen: Any) -> Any:
        decoder = form.decoder((trained, frozen), put_together)
        return {"decoder": decoder, "score": trained["score"]} if form.scored else decoder

    return join


def make_trainer(p: Pieces) -> tuple[Any, UnitStream]:
    """The trainer of a config and the stream that feeds it."""
    return _MAKERS[type(p.config)](p)


def build(config: Config, directory: RunDirectory, settings: Mapping[str, Any]) -> Run:
    """A run that is ready for `loop.train`; `settings` is the config as JSON values."""
    keep_base(directory, config.model.path)
    p = gather(config, directory.seed, date=directory.date)
    trainer, stream = make_trainer(p)
    save = save_score_folder if isinstance(config, RewardConfig) else save_folder
    whole, learner = joined(config, merge), trainer.updater
    train = config.train

    def export() -> pathlib.Path:
        params = fetch(p.place.take(whole(learner.params, learner.frozen)))
        folder = directory.path / "export"
        return of_first(lambda: save(folder, params, p.model_config, p.tokenizer), "export")

    return Run(
        directory=directory,
        trainer=trainer,
        checkpoints=CheckpointManager(directory.path / "checkpoints", keep=train.keep_checkpoints),
        total_steps=train.steps,
        eval_every=train.eval_every,
        checkpoint_every=train.checkpoint_every,
        data_state=stream.get_state,
        set_data_state=stream.set_state,
        evaluate=trainer.evaluate,
        export=export,
        show=shown(
            lambda: SupervisedShow(
                directory.path,
                config,
                settings,
                p.model_config,
                title=title(config),
                data=p.data,
                seed=directory.seed,
            )
        ),
    )


def title(config: Config) -> str:
    """What a run does, in a few words."""
    if isinstance(config, SFTConfig):
        return "sft"
    if isinstance(config, RewardConfig):
        return "process reward model" if config.reward.kind == "steps" else "reward model"
    return " + ".join(name for name, _ in config.preference.mixture)


def check_micro_batch(config: Config, layout: MeshConfig, parts: int) -> None:
    """Every micro-batch must fill the mesh: rows are split in so many parts, data × fsdp."""
    micro, multiple = config.train.micro_batch, parts * layout.in_flight
    if micro % multiple:
        least = layout.pipeline if layout.rounds > 1 else 1
        fewer = [n for n in range(least, layout.microbatches or 0) if micro % (parts * n) == 0]
        near = nearest(micro, [multiple * n for n in range(1, micro // multiple + 2)])
        raise ConfigError(
            "a micro-batch does not divide over the mesh",
            got=f"train.micro_batch={micro} in {parts} × {layout.in_flight} parts",
            expected=f"a multiple of {multiple} (data × fsdp × micro-batches in the pipeline)",
            hint=f"--mesh.microbatches={fewer[-1]}"
            if fewer
            else f"--train.micro_batch={' or '.join(map(str, near))}",
        )


def check_context(config: Config, model_config: ModelConfig) -> None:
    if config.rows.max_length > model_config.max_position_embeddings:
        raise ConfigError(
            "rows.max_length is beyond the model's context",
            got=config.rows.max_length,
            expected=f"at most {model_config.max_position_embeddings}",
        )


_MAKERS: dict[type, Callable[[Pieces], tuple[Any, UnitStream]]] = {
    SFTConfig: make_sft,
    RewardConfig: make_reward,
    PreferenceConfig: make_preference,
}
