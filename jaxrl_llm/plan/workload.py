# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What one step of a run does, in plain values: sizes of rows, passes, models and caches.

Every prompt and completion is taken to be as long as it may be: that is what has to fit, and what
time and money are counted of.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxrl_llm.algorithms.presets import AlgoConfig
from jaxrl_llm.checkpoint import gguf, huggingface
from jaxrl_llm.checkpoint.gguf_file import GGUFFile
from jaxrl_llm.checkpoint.pretrained import TINY_CONFIG, resolve
from jaxrl_llm.data.pipeline import check_lengths
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.placement import check_fit
from jaxrl_llm.plan.flops import Pass
from jaxrl_llm.rollout.settings import EngineConfig
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.trainers.batching import count_targets
from jaxrl_llm.trainers.build import engine_config, total_updates
from jaxrl_llm.trainers.build_supervised import check_context, check_micro_batch
from jaxrl_llm.trainers.dry_run import longest_samples
from jaxrl_llm.trainers.optimizers import OptimizerConfig
from jaxrl_llm.trainers.roles import check_microbatches, row_planner
from jaxrl_llm.trainers.settings import (
    RLConfig,
    counting_rewards,
    resolve_algorithm,
    with_backend,
)
from jaxrl_llm.trainers.supervised_settings import PreferenceConfig, RewardConfig, SFTConfig
from jaxrl_llm.types import Reach

ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Workload:
    """One step of a run.

    Attributes:
        method: what it is called in the table.
        model: the policy's traits.
        dtype: of the parameters that are trained, and of activations.
        remat: layers are computed again in the backward pass.
        optimizer: its settings.
        steps: of the run.
        updates: optimiser updates of the run.
        tokens: token places of a step that hold a token.
        rows, width: rows of a step, padded to whole micro-batches, and their length.
        micro: rows of a micro-batch, on all devices together.
        targets: trained tokens of a row, at most.
        reach: bounds on what stands in rows, or None.
        epochs: passes of the update over a step's rows.
        forwards: names of the passes before the update; each is over all rows.
        frozen: copies of the policy's size that do not learn (a reference).
        critic: whether a second model learns beside the policy.
        sequences: completions of a step, 0 without a sampler.
        greedy: completions of a step that are the baseline of the others and not trained on.
        prompt_tokens, new_tokens: of the longest.
        sampler: the engine's sizes, None without one.
        algo: the algorithm, for compiling its loss; None outside reinforcement learning.
        group_size: samples of a prompt.
        temperature: τ.
        offload: what only the update needs waits in the host's memory while the sampler runs.
        shared: whether rows hold prompts that several completions share.
    """

    method: str
    model: ModelConfig
    dtype: str
    remat: bool
    optimizer: OptimizerConfig
    steps: int
    updates: int
    tokens: int
    rows: int
    width: int
    micro: int
    targets: int
    reach: Reach | None = None
    epochs: int = 1
    forwards: tuple[str, ...] = ()
    frozen: int = 0
    critic: bool = False
    sequences: int = 0
    greedy: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    sampler: EngineConfig | None = None
    algo: AlgoConfig | None = None
    group_size: int = 1
    temperature: float = 1.0
    offload: bool = False
    shared: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter."""
        return ITEMSIZE[self.dtype]

    @property
    def update_passes(self) -> list[Pass]:
        """The passes over rows: those before the update, and the update of each model."""
        sizes = {
            "model": self.model,
            "tokens": self.tokens,
            "context": self.tokens / max(self.rows, 1) / 2.0,
            "places": self.rows * self.width,
            "width": self.width,
            "reach": self.reach,
            "head": self.targets / self.width,
        }
        passes = [Pass(name, "forward", **sizes) for name in self.forwards]
        often = sizes | {key: self.epochs * sizes[key] for key in ("tokens", "places")}
        names = ["update", "update of the critic"] if self.critic else ["update"]
        for name in names:
            passes.append(Pass(name, "update", **often, remat=self.remat))
        return passes


def read_model(path: str) -> ModelConfig:
    """Traits of a model by name or path; a folder with `config.json` alone is enough."""
    where = resolve(path, weights=False)
    if where.kind == "random":
        return TINY_CONFIG
    if where.kind == "gguf":
        return gguf.config_from_gguf(GGUFFile(where.path))
    return huggingface.load_config(where.path)


def make_workload(config: Any, model: ModelConfig, layout: MeshConfig) -> Workload:
    """The workload of a config on a mesh.

    Args:
        layout: with `data` filled in; rows of a micro-batch divide it.

    Raises:
        ConfigError: a kind of config that is not planned.
    """
    for kind, make in KINDS.items():
        if isinstance(config, kind):
            return make(config, model, layout)
    raise ConfigError(
        "runs of this kind are not planned",
        got=type(config).__name__,
        expected="one of " + ", ".join(kind.__name__ for kind in KINDS),
    )


def _rl_workload(config: RLConfig, model: ModelConfig, layout: MeshConfig) -> Workload:
    _check_no_adapter(config)
    _check_one_mesh(config)
    if config.rollouts.read is not None:
        raise ConfigError(
            "runs that read stored rollouts are not planned: their steps sample nothing",
            got=f"rollouts.read={config.rollouts.read}",
            hint="the same config without it, as an upper bound",
        )
    check_microbatches(config, layout, layout.data * layout.fsdp)
    sampler, train = config.sampler, config.train
    check_lengths((), None, sampler.max_new_tokens, model.max_position_embeddings)
    algorithm = resolve_algorithm(config)
    algo = config.algo
    if algorithm.needs_reward_parts and algo.reward_weights is None:
        weights = tuple(counting_rewards(config.rewards).values())
        algo = dataclasses.replace(algo, reward_weights=weights)
    samples = longest_samples(config)
    plan = row_planner(config, layout.data * layout.fsdp * layout.in_flight)(samples)
    mask = plan.pack(samples).mask
    forwards = []
    if train.epochs * train.minibatches > 1 or algorithm.needs_rollout_logp:
        forwards.append("old log-probabilities")
    if algorithm.needs_ref:
        forwards.append("reference")
    own_critic = algorithm.needs_values and not config.critic.shared_trunk
    if own_critic or (algorithm.needs_values and not forwards):  # else the same pass gives both
        forwards.append("values")
    longest = sampler.max_prompt_tokens + sampler.max_new_tokens
    return Workload(
        method=algorithm.name,
        model=with_backend(model, config.model, context=longest),
        dtype=config.model.dtype,
        remat=config.model.remat,
        optimizer=config.optimizer,
        steps=train.steps,
        updates=total_updates(config),
        tokens=int((plan.sample >= 0).sum()),
        rows=plan.sample.shape[0],
        width=plan.sample.shape[1],
        micro=plan.micro,
        targets=count_targets(mask),
        reach=plan.reach,
        epochs=train.epochs,
        forwards=tuple(forwards),
        frozen=int(algorithm.needs_ref),
        critic=own_critic,
        sequences=train.prompts_per_step * sampler.group_size,
        greedy=train.prompts_per_step * algorithm.needs_greedy_baseline,
        prompt_tokens=sampler.max_prompt_tokens,
        new_tokens=sampler.max_new_tokens,
        sampler=engine_config(sampler),
        algo=algo,
        group_size=sampler.group_size,
        temperature=sampler.temperature,
        offload=train.offload,
        shared=train.layout == "shared_prefix",
    )


def _supervised_workload(
    config: SFTConfig | RewardConfig | PreferenceConfig, model: ModelConfig, layout: MeshConfig
) -> Workload:
    _check_no_adapter(config)
    check_context(config, model)
    names = {SFTConfig: "sft", RewardConfig: "reward", PreferenceConfig: "preference"}
    pairs = isinstance(config, PreferenceConfig) and config.preference.loss != "kto"
    pairs |= isinstance(config, RewardConfig) and config.reward.kind == "pairs"
    length = config.rows.row_tokens if config.rows.packed else config.rows.max_length
    rows = config.train.batch
    if not isinstance(config, SFTConfig):  # their batch counts examples
        each = config.rows.max_length * (2 if pairs else 1)
        rows = math.ceil(rows * each / length)
    check_micro_batch(config, layout, layout.data * layout.fsdp)
    micro = config.train.micro_batch
    live = isinstance(config, PreferenceConfig) and config.preference.needs_reference
    precomputed = live and config.preference.reference == "precomputed"
    return Workload(
        method=names[type(config)],
        model=with_backend(model, config.model),
        dtype=config.model.dtype,
        remat=config.model.remat,
        optimizer=config.optimizer,
        steps=config.train.steps,
        updates=config.train.steps,
        tokens=rows * length,
        rows=math.ceil(rows / micro) * micro,
        width=length,
        micro=micro,
        targets=length,
        forwards=("reference",) if live and not precomputed else (),
        frozen=int(live and not precomputed),
        shared=False,
    )


def _check_no_adapter(config: Any) -> None:
    if config.lora is not None:
        raise ConfigError(
            "adapters are not planned yet: what they save is not in the model of memory",
            hint="the same config without lora, as an upper bound",
        )


def _check_one_mesh(config: RLConfig) -> None:
    """Raises ConfigError for roles that are not of the policy's size, on the policy's mesh."""
    apart = {
        "critic.path": config.critic.path,
        "critic.mesh": config.critic.mesh,
        "ref_mesh": config.ref_mesh,
    }
    for name, value in apart.items():
        if value is not None:
            raise ConfigError(
                f"{name} is not planned: critic and reference are taken to be as large as the "
                "policy, and on its mesh",
                got=value,
                hint=f"the same config with {name}=None",
            )


KINDS = {
    RLConfig: _rl_workload,
    SFTConfig: _supervised_workload,
    RewardConfig: _supervised_workload,
    PreferenceConfig: _supervised_workload,
}


def layout_of(config: Any, model: ModelConfig, devices: int) -> MeshConfig:
    """The config's mesh on so many devices, `data` filled in.

    Raises:
        ConfigError: it does not fit them, or does not divide the model.
    """
    check_whole(config)
    layout = config.mesh
    others = layout.fsdp * layout.pipeline * layout.tensor
    data = devices // others if layout.data == -1 else layout.data
    if data < 1 or data * others != devices:
        raise ConfigError(
            "the mesh does not fit the topology",
            got=f"data {layout.data} × fsdp {layout.fsdp} × pipeline {layout.pipeline} × "
            f"tensor {layout.tensor}",
            expected=f"a product of {devices} devices",
            hint="--search, or --mesh.fsdp=" + str(devices),
        )
    layout = dataclasses.replace(layout, data=data)
    check_fit(layout, model, devices)
    return layout


def check_whole(config: Any) -> None:
    """Raises ConfigError where a config's mesh is for a part of the devices."""
    if config.mesh.devices is not None:
        raise ConfigError(
            "a plan is for a mesh over all devices of the topology",
            got=f"mesh.devices {config.mesh.devices}",
            hint="leave out --mesh.devices",
        )
