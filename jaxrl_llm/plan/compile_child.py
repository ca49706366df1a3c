# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The process that compiles for a topology: a pickled `Job` on stdin, a JSON line per program."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import threading
import time
from typing import Any

_OVERFLOW = re.compile(r"Used ([0-9.]+)([KMGT]?) of ([0-9.]+)([KMGT]?) hbm")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main() -> None:
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    job = pickle.load(sys.stdin.buffer)
    import jax

    devices = topology_devices(job)
    from jaxrl_llm.models.placement import Placement
    from jaxrl_llm.plan.programs import sampler_placement, sampler_programs, train_programs

    load, programs = job.load, []
    if load.algo is not None:
        place = Placement.make(job.layout, load.model, devices)
        programs += [(place.mesh, *program) for program in train_programs(load, place)]
    if load.sampler is not None:
        place = sampler_placement(load, job.sampler.tensor, devices)
        sampling = sampler_programs(load, job.sampler, place, job.kind)
        programs += [(place.mesh, *program) for program in sampling]
    for mesh, name, lower in programs:
        if not job.only or name in job.only:
            with jax.set_mesh(mesh):
                emit({"program": name, **measured(lower, job.kind)})


def end_with_parent(parent: int) -> None:
    """Ends this process when the one that waits for it is gone, whatever ended that."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def topology_devices(job: Any) -> list[Any]:
    """Devices to compile for: those of the described topology, or real CPU devices."""
    import jax
    from jax.experimental import topologies

    if job.kind == "cpu":
        return jax.devices()[: job.devices]
    if job.kind == "cuda":
        gpus = {"topology": job.topology, "target_config": job.target}
        described = topologies.get_topology_desc(platform="cuda", topology_name="", **gpus)
    else:
        assert job.kind == "tpu", job.kind
        described = topologies.get_topology_desc(platform="tpu", topology_name=job.topology)
    return list(described.devices)


def measured(lower: Any, kind: str) -> dict[str, Any]:
    """Compile a program; its memory, FLOPs, collectives and kernels, or why it can't be.

    Args:
        kind: of the compiler. Only the TPU's says how much memory is in use at most; the CPU's
            figure of that name leaves out what matters.
    """
    from jaxrl_llm.plan.hlo import count

    start = time.perf_counter()
    try:
        compiled = lower().compile()
    except Exception as error:  # the compiler's own words are the result here
        text = str(error)
        found = _OVERFLOW.search(text)
        used = float(found[1]) * _UNITS[found[2]] if found else None
        first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
        return {"error": first[:400], "used": used, "seconds": time.perf_counter() - start}
    stats, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    text = compiled.as_text()
    counts = count(text)
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "at_peak": stats.peak_memory_in_bytes if kind == "tpu" else 0,
        "code": stats.generated_code_size_in_bytes,
        "flops": counts.flops,
        "collectives": counts.collectives,
        "kernels": counts.kernels,
        "open_loops": counts.open_loops,
        "bytes_accessed": cost.get("bytes accessed", 0.0),
        "once_flops": cost.get("flops", 0.0),
        "seconds": time.perf_counter() - start,
    }


def emit(values: dict[str, Any]) -> None:
    """A line for the parent, which skips what libraries write to stdout."""
    print("PLAN " + json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
