# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What the TPU compiler says of updates on (model, mesh) pairs, beside the plan's own formulas.

    pip install "jaxrl_llm[tpu]"      # no TPU is needed; each pair takes two or three minutes
    python scripts/plan_pairs.py --out=tests/golden/plan_pairs.json

`tests/plan/test_pairs.py` holds the formulas of `jaxrl_llm.plan` against this file. The third
family is not looked at when the formulas are changed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import jax

from jaxrl_llm.algorithms.presets import AlgoConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_config import config_from_hf
from jaxrl_llm.plan.compile import compile_programs
from jaxrl_llm.plan.hardware import parse_topology
from jaxrl_llm.plan.memory import GRADIENTS, Memory, plan_memory
from jaxrl_llm.plan.programs import UPDATE
from jaxrl_llm.plan.workload import Workload
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.trainers.optimizers import OptimizerConfig

GOLDEN = pathlib.Path(__file__).parent.parent / "tests" / "golden"
USUAL = {"dtype": "bfloat16", "remat": True, "micro": 64, "width": 256, "targets": 192}
EIGHT = "v5p:2x2x2"
# name → (model, topology, mesh, what is not usual)
PAIRS: dict[str, tuple[str, str, dict, dict]] = {
    "llama-data": ("meta-llama/Llama-3.2-1B", EIGHT, {"data": 8}, {"remat": False}),
    "llama-fsdp": ("meta-llama/Llama-3.1-8B", EIGHT, {"data": 1, "fsdp": 8}, {}),
    "llama-tensor": (
        "meta-llama/Llama-3.1-8B",
        EIGHT,
        {"data": 2, "fsdp": 2, "tensor": 2},
        {},
    ),
    "llama-long": (
        "meta-llama/Llama-3.1-8B",
        "v5e:4x4",
        {"data": 1, "fsdp": 16},
        {"micro": 16, "width": 1152, "targets": 768},
    ),
    "llama-wide": (
        "meta-llama/Llama-3.1-8B",
        "v5p:4x4x4",
        {"data": 4, "fsdp": 16},
        {"micro": 64, "width": 1152, "targets": 768},
    ),
    "llama-pipeline": (
        "meta-llama/Llama-3.2-1B",
        EIGHT,
        {"data": 1, "fsdp": 4, "pipeline": 2},
        {},
    ),
    "llama-rounds": (
        "meta-llama/Llama-3.2-1B",
        EIGHT,
        {"data": 2, "pipeline": 4, "rounds": 2},
        {"remat": False},
    ),
    "qwen3-fsdp": ("Qwen/Qwen3-8B", EIGHT, {"data": 2, "fsdp": 4}, {}),
    "qwen3-tensor": (
        "Qwen/Qwen3-0.6B",
        EIGHT,
        {"data": 1, "fsdp": 2, "tensor": 4},
        {"remat": False},
    ),
    "gemma2-fsdp": ("google/gemma-2-2b", EIGHT, {"data": 2, "fsdp": 4}, {}),
    "gemma2-tensor": (
        "google/gemma-2-2b",
        EIGHT,
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"remat": False},
    ),
}


def public(name: str) -> ModelConfig:
    """A public model's traits."""
    known = json.loads((GOLDEN / "model_configs.json").read_text())["models"]
    return config_from_hf(known[name]["config"])


def make_load(model: ModelConfig, sizes: dict) -> Workload:
    """One micro-batch of GRPO, no sampler."""
    tokens = sizes["micro"] * sizes["width"]
    return Workload(
        method="grpo",
        model=model,
        optimizer=OptimizerConfig(),
        steps=1,
        updates=1,
        tokens=tokens,
        rows=sizes["micro"],
        algo=AlgoConfig(name="grpo"),
        group_size=8,
        new_tokens=sizes["targets"],
        prompt_tokens=sizes["width"] - sizes["targets"],
        **sizes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", choices=PAIRS, nargs="*", help="measure these anew")
    parser.add_argument("--show", action="store_true", help="measure nothing, print what is known")
    args = parser.parse_args()
    known = json.loads(args.out.read_text())["pairs"] if args.out.exists() else {}
    for name in () if args.show else args.only or PAIRS:
        model, topology, mesh, changes = PAIRS[name]
        sizes, layout = USUAL | changes, MeshConfig(**mesh)
        load = make_load(public(model), sizes)
        (update,) = compile_programs(load, parse_topology(topology), layout, only=(UPDATE,))
        if update.error:
            print(f"{name}: {update.error}")
            continue
        known[name] = {
            "model": model,
            "topology": topology,
            "mesh": mesh,
            "sizes": sizes,
            "peak": update.at_peak,
            "flops": update.flops,
            "collectives": update.collectives,
            "seconds": round(update.seconds),
            "jax": jax.__version__,
        }
        args.out.write_text(json.dumps({"pairs": known}, indent=1) + "\n")
    for name, pair in known.items():
        show(name, pair)


def show(name: str, pair: dict) -> None:
    """A row of the table in Markdown, and the terms of the estimate."""
    layout, load = MeshConfig(**pair["mesh"]), make_load(public(pair["model"]), pair["sizes"])
    memory, peak, flops = plan_memory(load, layout), pair["peak"], pair["flops"]
    ours, computed = update_peak(memory), load.update_passes[-1].computed_flops(layout)
    computed /= layout.data * layout.copy_devices
    print(
        f"| {name} | {peak / 2**30:.2f} | {ours / 2**30:.2f} | {ours / peak - 1:+.1%} "
        f"| {flops / 1e12:.2f} | {computed / 1e12:.2f} | {computed / flops - 1:+.1%} |",
        flush=True,
    )


def update_peak(memory: Memory) -> float:
    """Of computing gradients: what the program gets and what it adds."""
    return memory.resident["parameters"] + max(sum(memory.phases[p].values()) for p in GRADIENTS)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
