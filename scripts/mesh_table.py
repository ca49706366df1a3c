# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A table of meshes of eight devices: what each device holds, sends, and waits.

    python scripts/mesh_table.py [data=2,fsdp=2,tensor=2 …]

Bytes are of a model shaped like SmolLM2-135M (but for 8 and 4 heads of 72 in place of 9 and 3 of
64) in float32 with Adam. Collectives are those of the compiled gradient of a small model of the
same kind, for eight devices made of one CPU; one inside a loop over layers or ticks counts once.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections import Counter

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import sequence_logprobs
from jaxrl_llm.models.placement import Placement
from jaxrl_llm.models.transformer import abstract_params
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.sharding.pipeline import bubble, ticks

SMOLLM2 = ModelConfig(49152, 576, 1536, 30, 8, 4, 72, tie_word_embeddings=True)
SMALL = dataclasses.replace(
    SMOLLM2, vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=8, head_dim=8
)
MESHES = [
    "data=8",
    "fsdp=8,zero=1",
    "fsdp=8,zero=2",
    "fsdp=8",
    "data=2,tensor=4",
    "data=2,fsdp=2,tensor=2",
    "data=4,pipeline=2",
    "data=4,pipeline=2,rounds=2",
    "fsdp=4,pipeline=2",
    "fsdp=2,pipeline=2,tensor=2",
    "fsdp=2,pipeline=2,tensor=2,rounds=2",
    "pipeline=4,tensor=2",
    "pipeline=4,tensor=2,microbatches=16",
]
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def parse(text: str) -> MeshConfig:
    return MeshConfig(**{k: int(v) for k, v in (part.split("=") for part in text.split(","))})


def held(layout: MeshConfig) -> list[int]:
    """Bytes of parameters, gradients and optimiser state on a device."""
    place = Placement.make(layout, SMOLLM2)
    params = abstract_params(SMOLLM2)
    moments = jax.eval_shape(optax.scale_by_adam().init, params)
    trees = {"parameters": params, "gradients": params, "optimizer": moments}
    return [place.device_bytes(tree, kind) for kind, tree in trees.items()]


def collectives(layout: MeshConfig) -> Counter:
    """How often each kind stands in the compiled gradient."""
    place = Placement.make(layout, SMALL)
    n, t = 2 * place.row_multiple, 16

    def gradient(params, tokens):
        def loss(params):
            ones, positions = jnp.ones_like(tokens), jnp.arange(t)[None, :] + 0 * tokens
            logp, _ = sequence_logprobs(
                params, place.model, tokens, positions, ones, positions > 0, num_targets=t
            )
            return jnp.sum(logp)

        return place.split(jax.grad(loss)(params), "gradients")

    staged = jax.eval_shape(place.stage, abstract_params(SMALL))
    params = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        staged,
        place.shardings(staged, "parameters"),
    )
    tokens = jax.ShapeDtypeStruct((n, t), jnp.int32, sharding=place.row_sharding)
    text = place.jit(gradient).lower(params, tokens).compile().as_text()
    return Counter(re.findall(rf"= \S.*? ({'|'.join(KINDS)})(?:-start)?\(", text))


def main() -> None:
    heads = ["mesh", "parameters", "gradients", "optimiser", *KINDS, "ticks", "bubble"]
    print("| " + " | ".join(heads) + " |")
    print("|---" * len(heads) + "|")
    for text in sys.argv[1:] or MESHES:
        layout = parse(text)
        shape = (layout.in_flight, layout.pipeline, layout.rounds)
        sizes = [f"{size / 2**20:.1f} MiB" for size in held(layout)]
        counts = collectives(layout)
        schedule = (
            [str(ticks(*shape)), f"{bubble(*shape):.0%}"] if layout.pipeline > 1 else ["", ""]
        )
        cells = [text.replace(",", " "), *sizes, *(str(counts[k]) for k in KINDS), *schedule]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
