# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Memory of each device, added up from what the trainer keeps and what its programs need.

What stays: parameters and Adam's two moments in the parameters' own dtype, and frozen copies. The
sampler's copy of the weights and its cache are there until the update begins. What an update adds
comes and goes, so that its peak is that of its greediest phase: the output head forward and
backward, one layer's backward pass with all that the layers keep, or the embedding's gradient,
which is whole before it is split.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from jaxrl_llm.models.attention import QUERIES, queries_at_once
from jaxrl_llm.models.axes import axis_sizes, tree_axes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import VOCAB_CHUNK
from jaxrl_llm.models.transformer import abstract_params
from jaxrl_llm.plan.flops import ALONE, held_layers
from jaxrl_llm.plan.workload import ITEMSIZE, Workload
from jaxrl_llm.rollout.engines import engine_share
from jaxrl_llm.rollout.settings import EngineConfig, default_pool
from jaxrl_llm.sharding.mesh import AXES, MeshConfig
from jaxrl_llm.sharding.pipeline import ticks
from jaxrl_llm.sharding.rules import ZERO, Kind, mesh_axes

WIDE = 4  # bytes of a float32
MAY_WAIT = ("optimiser", "critic", "reference")  # in the host's memory while the sampler runs
GRADIENTS = ("output head", "layers", "embedding")  # phases of computing gradients


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        resident: what is there all the time, by name.
        phases: what each phase of a step adds to that, by name.
        away: names of what waits in the host's memory while the sampler runs.
    """

    resident: dict[str, float]
    phases: dict[str, dict[str, float]]
    away: tuple[str, ...] = ()

    def lying(self, phase: str) -> dict[str, float]:
        """What of the resident terms is on the device in a phase."""
        away = self.away if phase == "sampling" else ()
        return {name: size for name, size in self.resident.items() if name not in away}

    @property
    def totals(self) -> dict[str, float]:
        """What each phase needs in all."""
        return {
            phase: sum(self.lying(phase).values()) + sum(terms.values())
            for phase, terms in self.phases.items()
        }

    @property
    def peak(self) -> float:
        return max(self.totals.values())

    def terms(self, phases: Sequence[str] = ()) -> dict[str, float]:
        """The terms of the greediest phase, of all or of some, largest first."""
        phase = max(phases or self.phases, key=self.totals.__getitem__)
        terms = self.lying(phase) | self.phases[phase]
        return dict(sorted(terms.items(), key=lambda item: -item[1]))


def plan_memory(load: Workload, layout: MeshConfig, sampler: MeshConfig = ALONE) -> Memory:
    """Memory of a workload on each device of a mesh (`layout.data` filled in).

    Args:
        sampler: the sampler's mesh on each host, `data` filled in.
    """
    size = load.itemsize
    params = tree_bytes(load.model, layout, "parameters", size)
    moments = 2 * tree_bytes(load.model, layout, "optimizer", size)
    resident = {"parameters": params, "optimiser": moments}
    if load.critic:
        resident["critic"] = params + moments
    if load.frozen:
        resident["reference"] = load.frozen * params
    phases = update_phases(load, layout)
    # The state is donated and changed in place. Gradients wait in its dtype for their norm, unless
    # the compiler would rather form them twice, as the TPU's does.
    phases["optimiser"] = {
        "gradient sums": tree_bytes(load.model, layout, "gradients", WIDE),
        "gradients": tree_bytes(load.model, layout, "gradients", size),
    }
    if load.sampler is not None:
        # Before the update the engine frees what is its own (`Engine.release`).
        phases["sampling"] = {
            "sampler's weights": sampler_weights(load, sampler),
            "KV pages": kv_bytes(load, sampler),
            "decoding": decode_bytes(load, sampler),
        }
    return Memory(resident, phases, MAY_WAIT if load.offload else ())


def state_bytes_per_param(dtype: str) -> int:
    """Bytes for each parameter before activations: itself, Adam's two moments, the gradient's sum.

    16 in float32, which is what mixed precision with float32 master weights needs as well (2 for
    the weights, 2 for gradients, 4 for the master, 8 for the moments); 10 in bfloat16 alone.
    """
    return 3 * ITEMSIZE[dtype] + WIDE


def tree_bytes(
    model: ModelConfig,
    layout: MeshConfig,
    kind: Kind,
    itemsize: int,
    *,
    layers_only: bool = False,
) -> float:
    """Bytes of arrays of all parameters' shapes on one device of a mesh, or of all layers'."""
    params = abstract_params(model, jnp.float32)
    mesh = abstract_mesh(dataclasses.replace(layout, pipeline=1))
    sizes, split_fsdp = axis_sizes(model), kind in ZERO[layout.zero]

    def leaf(x, axes):
        names = [mesh_axes(a, sizes.get(a, 0), mesh, split_fsdp=split_fsdp) for a in axes]
        split = math.prod(mesh.shape[name] for part in names for name in part)
        return math.prod(x.shape) / split

    leaves = jax.tree.map(leaf, params, tree_axes(params, model))
    layers = sum(leaves.pop("layers").values())
    others = 0.0 if layers_only else sum(leaves.values())
    return itemsize * (others + layers * held_layers(model, layout) / model.num_layers)


def abstract_mesh(layout: MeshConfig) -> AbstractMesh:
    """The mesh without devices."""
    shape = tuple(getattr(layout, axis) for axis in AXES)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def kept_per_token(model: ModelConfig, width: int, size: int, tensor: int) -> float:
    """Bytes that one layer keeps of each token for its backward pass, on one device: its input and
    what its products give, but the last, which only a norm after it reads."""
    if model.num_experts:
        return _kept_with_experts(model, width, size, tensor)
    d, f = model.hidden_size, model.intermediate_size
    q = model.num_heads * model.head_dim / tensor
    kv = model.num_kv_heads * model.head_dim / _parts(model.num_kv_heads, tensor)
    outputs = 2 if model.post_norms else 1
    return size * (d + 2 * q + 2 * kv + outputs * d + 2 * f / tensor)


def _kept_with_experts(model: ModelConfig, width: int, size: int, tensor: int) -> float:
    """The same where all is kept that the backward pass reads.

    Of each norm its input and quotient in float32 and its output; of each product what it is
    multiplied with; of attention q, k, v, and in rows of one block of queries the softmax in
    float32 and again as it is multiplied.
    """
    d = model.hidden_size
    q = model.num_heads * model.head_dim / tensor
    kv = model.num_kv_heads * model.head_dim / _parts(model.num_kv_heads, tensor)
    norms = 2 * model.pre_norms + 2 * model.post_norms
    total = norms * (2 * WIDE + size) * d
    total += size * (3 * d + q + 2 * kv + q)  # inputs of q, k, v; rotated q, k; v; input of o
    if model.qk_norm is not None:
        total += (2 * WIDE + size) * (q + kv)
    if width <= QUERIES:  # longer rows compute their scores again
        scores = model.num_heads / tensor * width
        total += scores * (WIDE + size)
        if model.attention_softcap is not None:
            total += scores * 2 * WIDE  # tanh, and 1 − tanh
    if any(t.window for t in model.layers) and not all(t.window for t in model.layers):
        total += 2 * width  # which mask a layer has is known inside the loop only: a byte, twice
    f = model.expert_size * model.experts_per_token
    total += model.experts_per_token * size * d
    return total + size * (2 * d + _GATED[model.activation] * f / tensor)


# Arrays of the MLP's width that its gate, its product and its last matrix keep.
_GATED = {"silu": 6, "gelu_tanh": 8, "gelu": 7}


def update_phases(load: Workload, layout: MeshConfig) -> dict[str, dict[str, float]]:
    """What computing the gradient of a micro-batch adds, in each of its phases.

    In the head's phase the layers keep what they need for their backward pass; in the layers'
    phase new gradients of all layers lie beside that, and the work of one; the embedding comes
    last. The head's gradient, in float32, waits for them all. A pipeline keeps what its stage
    begins with in each tick, and computes one tick's layers again at a time.
    """
    model, size = load.model, load.itemsize
    tokens = load.micro * load.width / (layout.data * layout.fsdp)
    each = stream = size * model.hidden_size  # a token's residual stream
    if not load.remat:
        each = kept_per_token(model, load.width, size, layout.tensor)
    sums = {"gradient sums": tree_bytes(model, layout, "gradients", WIDE)}
    kept, tick = {"activations": model.num_layers * tokens * each}, {}
    if layout.pipeline > 1:
        runs = ticks(layout.in_flight, layout.pipeline, layout.rounds)
        kept = {"activations": (runs / layout.in_flight + 1) * tokens * stream}
        depth = held_layers(model, layout) / layout.rounds
        tick = {"activations of a tick": depth * tokens / layout.in_flight * each}
    table = model.vocab_size * model.hidden_size / _parts(model.vocab_size, layout.tensor)
    head_grad = {"gradient of the head": table * WIDE / layout.fsdp}
    new = {"new gradients": tree_bytes(model, layout, "gradients", size, layers_only=True)}
    gathers = layout.fsdp > 1
    # Products give gradients in float32. Over `data` alone those of a layer are summed whole.
    summed = {"a layer's gradients": _layer_bytes(model, WIDE) / layout.tensor}
    summed = summed if layout.data > 1 and not gathers else {}
    # Summed over devices whole, then split: the sum is another array. Behind a pipeline the TPU's
    # compiler splits it over `fsdp` as it sums.
    summed_whole = 1 / layout.fsdp if layout.pipeline > 1 else 1.0
    embedding = table * size * (1 + summed_whole * (layout.data * layout.fsdp > 1))
    return {
        "output head": sums
        | kept
        | head_grad
        | {"gathered head": table * size * gathers, "logits": head_bytes(load, layout)},
        "layers": sums
        | kept
        | head_grad
        | new
        | tick
        | summed
        | {
            "work of a layer": layer_bytes(load, layout),
            "gathered weights": _layer_bytes(model, size) / layout.tensor * gathers,
        },
        "embedding": sums | head_grad | new | {"gradient of the embedding": embedding},
    }


def layer_bytes(load: Workload, layout: MeshConfig) -> float:
    """What the backward pass of one layer has in hand, beside what it keeps for it.

    The MLP's gate, product and their three gradients; what is computed again, with `remat`: the
    residual stream before and between the half layers, each normalised, queries, keys, values and
    what attention makes of them; the residual stream's gradient. Split over `tensor`, products
    give parts of it in float32 that are summed over devices into another array. Of attention the
    scores of one block of queries, with their softmax and its gradient.
    """
    model, size, tensor = load.model, load.itemsize, layout.tensor
    rows = load.micro / (layout.data * layout.fsdp * layout.in_flight)
    tokens = rows * load.width
    f = model.intermediate_size
    if model.num_experts:
        f = model.expert_size * model.experts_per_token
    q = model.num_heads * model.head_dim / tensor
    kv = model.num_kv_heads * model.head_dim / _parts(model.num_kv_heads, tensor)
    stream = 2 * model.hidden_size
    again = 3 * f / tensor
    if load.remat:
        stream += 4 * model.hidden_size + 2 * q + 2 * kv
        again += 2 * f / tensor
    parts = 2 * WIDE * tokens * model.hidden_size * (tensor > 1)
    block = rows * model.num_heads / tensor * queries_at_once(load.width) * load.width
    scores = 3 * WIDE * block
    return tokens * size * stream + parts + max(tokens * size * again, scores)


def head_bytes(load: Workload, layout: MeshConfig) -> float:
    """A chunk of the output head: logits, their gradient as it is multiplied, hidden states."""
    model, size = load.model, load.itemsize
    tokens = load.micro / (layout.data * layout.fsdp * layout.pipeline) * load.targets
    chunk = min(VOCAB_CHUNK, model.vocab_size) / _parts(model.vocab_size, layout.tensor)
    return tokens * (chunk * (WIDE + size) + model.hidden_size * (WIDE + size))


def sampler_weights(load: Workload, sampler: MeshConfig) -> float:
    """The sampler's weights on one of its devices: each copy is split over `tensor` alone."""
    one = MeshConfig(data=1, tensor=sampler.tensor)
    return tree_bytes(load.model, one, "parameters", load.itemsize)


def sampler_share(load: Workload, sampler: MeshConfig) -> EngineConfig:
    """The sizes of one copy of the sampler, its pages filled in; a host's copies share its slots,
    and each has as many pages as are set."""
    share = engine_share(load.sampler, sampler.data)
    return dataclasses.replace(share, num_pages=share.num_pages or default_pool(share))


def kv_bytes(load: Workload, sampler: MeshConfig) -> float:
    """The sampler's pages on one of its devices."""
    share, heads = sampler_share(load, sampler), load.model.num_kv_heads
    each = load.model.kv_bytes_per_token(load.itemsize) / _parts(heads, sampler.tensor)
    return share.num_pages * share.page_size * each


def decode_bytes(load: Workload, sampler: MeshConfig) -> float:
    """What a decode step needs: logits in float32, with the order of the vocabulary for a draw."""
    slots = sampler_share(load, sampler).slots
    vocabulary = load.model.vocab_size / _parts(load.model.vocab_size, sampler.tensor)
    return 3 * slots * vocabulary * WIDE + slots * WIDE * 4 * load.model.hidden_size


def _layer_bytes(model: ModelConfig, size: int) -> float:
    tables = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    return size * (model.num_params - tables) / model.num_layers


def _parts(units: int, devices: int) -> int:
    """In how many parts so many heads or rows are split: whole where they don't divide."""
    return devices if units % devices == 0 else 1
