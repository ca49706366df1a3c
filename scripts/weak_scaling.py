# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Weak scaling by the TPU compiler's accounting: as many rows for each chip, ever more chips.

    pip install "jaxrl_llm[tpu]"      # no TPU is needed; each size takes a minute or two
    python scripts/weak_scaling.py --out=tests/golden/weak_scaling.json

With data parallelism FLOPs and temporary bytes of a chip's update stay what they are; with `fsdp`
the bytes of what the optimiser holds fall as 1/n. `tests/plan/test_weak_scaling.py` checks both in
the stored file, and that the plan's formulas say the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys

import jax
from plan_pairs import make_load, public

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.plan.compile import Compiled, compile_programs
from jaxrl_llm.plan.hardware import parse_topology
from jaxrl_llm.plan.programs import APPLY, UPDATE
from jaxrl_llm.plan.workload import Workload
from jaxrl_llm.sharding.mesh import MeshConfig

TOPOLOGIES = {4: "v5e:2x2", 16: "v5e:4x4", 64: "v5e:8x8", 256: "v5e:16x16"}
ROWS = 16  # of each chip
SIZES = {"dtype": "bfloat16", "remat": False, "width": 128, "targets": 96}


def small_model() -> ModelConfig:
    """Two layers of Llama 3.2 1B with a vocabulary of 32,000."""
    return dataclasses.replace(
        public("meta-llama/Llama-3.2-1B"), num_layers=2, vocab_size=32000, tie_word_embeddings=False
    )


def scaled_load(chips: int) -> Workload:
    """So many rows for each chip."""
    return make_load(small_model(), SIZES | {"micro": ROWS * chips})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--chips", type=int, choices=TOPOLOGIES, nargs="*", help="only these")
    parser.add_argument("--axis", choices=["data", "fsdp"], nargs="*", help="only these")
    parser.add_argument("--show", action="store_true", help="measure nothing, print what is known")
    args = parser.parse_args()
    known = {"data": {}, "fsdp": {}}
    if args.out.exists():
        known |= json.loads(args.out.read_text())
    for axis in () if args.show else args.axis or ("fsdp", "data"):
        for chips in args.chips or TOPOLOGIES:
            program = measure(axis, chips)
            if program.error:
                print(f"{axis} {chips}: {program.error}")
                continue
            known[axis][str(chips)] = {
                "topology": TOPOLOGIES[chips],
                "arguments": program.arguments,
                "temporary": program.at_peak - program.arguments,
                "seconds": round(program.seconds),
            }
            if axis == "data":
                known[axis][str(chips)]["flops"] = program.flops
            known[axis] = {str(n): known[axis][str(n)] for n in TOPOLOGIES if str(n) in known[axis]}
            known["jax"] = jax.__version__
            args.out.write_text(json.dumps(known, indent=1) + "\n")
    show(known)


def measure(axis: str, chips: int) -> Compiled:
    """Gradients where rows are split over data; the optimiser where its state is over fsdp."""
    layout = MeshConfig(data=chips) if axis == "data" else MeshConfig(data=1, fsdp=chips)
    only = (UPDATE,) if axis == "data" else (APPLY,)
    topology = parse_topology(TOPOLOGIES[chips])
    (program,) = compile_programs(scaled_load(chips), topology, layout, only=only)
    return program


def show(known: dict) -> None:
    """Tables in Markdown."""
    print("| chips | data: TFLOP a chip | temporary MiB | fsdp: state MiB | × chips |")
    print("|---|---|---|---|---|")
    for chips in TOPOLOGIES:
        data, fsdp = (known[axis].get(str(chips)) for axis in ("data", "fsdp"))
        row = (
            [f"{data['flops'] / 1e12:.4f}", f"{data['temporary'] / 2**20:.1f}"]
            if data
            else ["", ""]
        )
        held = fsdp["arguments"] / 2**20 if fsdp else None
        row += [f"{held:.2f}", f"{held * chips:.0f}"] if fsdp else ["", ""]
        print(f"| {chips} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
