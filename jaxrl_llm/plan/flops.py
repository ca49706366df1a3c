# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a run, as a sum of passes.

A token costs 2·N FLOPs for a pass forward and 6·N for one that learns (forward 2·N, and 4·N for the
gradients of activations and weights; Kaplan et al., https://arxiv.org/abs/2001.08361, Sec. 2.1). N
counts what a token is multiplied with: of experts only those that it uses, never a total. To that
comes attention's part, which grows with the context.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from jaxrl_llm.models.attention import QUERIES, keys_read
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import VOCAB_CHUNK
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.sharding.pipeline import ticks
from jaxrl_llm.types import Reach

Kind = Literal["decode", "forward", "update"]

ALONE = MeshConfig(data=1)  # one device; of a sampler the first one of each host

# How often a forward pass's FLOPs each kind of pass takes.
TIMES: dict[str, float] = {"decode": 1.0, "forward": 1.0, "update": 3.0}

# (what, kind) of the passes that every token of a method goes through, one epoch each.
METHODS: dict[str, tuple[tuple[str, Kind], ...]] = {
    "sft": (("update", "update"),),
    "reward": (("update", "update"),),
    "preference": (("reference", "forward"), ("update", "update")),
    "grpo": (("rollout", "decode"), ("reference", "forward"), ("update", "update")),
    "ppo": (
        ("rollout", "decode"),
        ("old log-probabilities", "forward"),
        ("reference", "forward"),
        ("reward model", "forward"),
        ("values", "forward"),
        ("update", "update"),
        ("update of the critic", "update"),
    ),
}


def method_flops_per_token(method: str, params: int | float) -> float:
    """FLOPs of a token in one step of a method, all of whose models have `params` parameters.

    ``2·N`` for each pass forward and ``6·N`` for each that learns, attention left out: 6·N for sft,
    8·N for preference, 10·N for grpo, 22·N for ppo with four models of one size.
    """
    return sum(2.0 * TIMES[kind] * params for _, kind in METHODS[method])


def training_flops(params: int | float, tokens: int | float) -> float:
    """``6·N·T`` of learning from T tokens; N are the parameters that a token uses."""
    return 6.0 * params * tokens


def active_params(config: ModelConfig) -> float:
    """N: entries of the matrices that one token is multiplied with, the output head included."""
    return config.flops_per_token() / 2.0


@dataclasses.dataclass(frozen=True)
class Pass:
    """Tokens of one step that go through a model.

    Attributes:
        name: what for.
        kind: decode and forward cost one forward pass, update three.
        model: whose sizes count.
        tokens: how many, useful ones.
        context: tokens that one of them attends to, on average.
        places: token places that are computed, padding included.
        width: keys that are computed for each place (all of a row where attention is masked).
        remat: the layers are computed forward once more in the backward pass.
        head: part of the places that go through the output head.
        reach: bounds on what stands in rows, which attention keeps to, or None.
    """

    name: str
    kind: Kind
    model: ModelConfig
    tokens: int | float
    context: int | float
    places: int | float
    width: int | float
    remat: bool = False
    head: float = 1.0
    reach: Reach | None = None

    @property
    def model_flops(self) -> float:
        """FLOPs that the method needs; what a utilisation (MFU) counts."""
        return TIMES[self.kind] * self.tokens * self.model.flops_per_token(self.context)

    def computed_flops(self, layout: MeshConfig = ALONE) -> float:
        """FLOPs that the programs compute on all devices of a mesh: all places and keys, layers
        again under `remat`; in a pipeline once more than that, with the ticks in which a stage has
        nothing to do and the layers that fill up the stages."""
        model = self.model
        head = 2.0 * model.vocab_size * model.hidden_size
        attention = plain_flops(model, keys_read(self.width, self.reach)) - plain_flops(model, 0)
        layers = plain_flops(model, 0) - head + attention
        times = TIMES[self.kind] * layers
        # Of a layer its products are kept, but no scores; all of what experts compute.
        again = self.width > QUERIES or not (self.remat or model.num_experts)
        if self.kind == "update" and again:
            times += attention / 2  # scores are formed again in the backward pass
        if self.kind == "update" and self.remat:
            times += layers - last_product_flops(model)
        if layout.pipeline > 1:
            if self.kind == "update":
                times += layers
            works = layout.rounds * layout.in_flight
            times *= ticks(layout.in_flight, layout.pipeline, layout.rounds) / works
            times *= layout.pipeline * held_layers(model, layout) / model.num_layers
        # The head works chunk by chunk, the last of which is moved back over rows done before; its
        # logits are formed again in the backward pass.
        chunk = min(VOCAB_CHUNK, model.vocab_size)
        head *= math.ceil(model.vocab_size / chunk) * chunk / model.vocab_size
        head_times = 4.0 if self.kind == "update" else 1.0
        return self.places * (times + head_times * self.head * head)


def held_layers(model: ModelConfig, layout: MeshConfig) -> int:
    """Layers that a device holds: those of its stage in every round, with what fills them up."""
    return layout.rounds * math.ceil(model.num_layers / (layout.pipeline * layout.rounds))


def last_product_flops(model: ModelConfig) -> float:
    """The products of a forward pass whose results no gradient reads: the MLPs' last, unless a
    norm follows it."""
    if model.num_experts or model.post_norms:
        return 0.0
    return 2.0 * model.num_layers * model.intermediate_size * model.hidden_size


def plain_flops(config: ModelConfig, width: int | float) -> float:
    """FLOPs of a forward pass for one place when attention computes all `width` keys, windows or
    not."""
    whole = dataclasses.replace(config, sliding_window=None, window_layers=())
    return whole.flops_per_token(width)
