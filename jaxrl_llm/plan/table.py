# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A plan as text: one table for each question. Every figure says whence it comes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from jaxrl_llm.plan.compile import Compiled
from jaxrl_llm.plan.estimate import Bill, Range
from jaxrl_llm.plan.hardware import GIB, MIB, Topology
from jaxrl_llm.plan.memory import Memory
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.plan.search import PLAIN, Candidate
from jaxrl_llm.plan.verdict import Verdict, compiled_peaks
from jaxrl_llm.plan.workload import Workload
from jaxrl_llm.sharding.mesh import AXES, MeshConfig
from jaxrl_llm.trainers.dry_run import attention_line


def plan_text(plan: Plan) -> str:
    """The whole plan."""
    parts = [
        *_head(plan.load, plan.topology, plan.layout, plan.sampler),
        "",
        *_memory(plan.topology, plan.memory, plan.verdict),
    ]
    if plan.programs:
        parts += ["", *_programs(plan.memory, plan.programs)]
    if plan.not_compiled:
        parts += ["", f"compiled   nothing: {plan.not_compiled}"]
    return "\n".join([*parts, "", *_bill(plan.bill)])


def search_text(found: Sequence[Candidate], topology: Topology, most: int = 8) -> str:
    """The best meshes of a search."""
    fitting = sum(c.fits for c in found)
    lines = [
        f"meshes     {len(found)} divide the model and {topology}; {fitting} fit (estimated)",
        "data  fsdp  tensor  sampler  peak GiB  fits  s/step",
    ]
    for c in found[:most]:
        lines.append(
            f"{c.layout.data:4d}  {c.layout.fsdp:4d}  {c.layout.tensor:6d}  "
            f"{f'{c.sampler.data} × {c.sampler.tensor}':>7}"
            f"  {c.memory.peak / GIB:8.2f}  {'yes' if c.fits else 'no':>4}  {c.seconds:6.1f}"
        )
    return "\n".join(lines)


def paste(plan: Plan, base: MeshConfig = PLAIN) -> str:
    """Overrides that choose a plan's mesh and its sampler's.

    Args:
        base: the config's own mesh; what else differs from it, or from none, is named, too.
    """
    layout = plan.layout
    names = ["data", "fsdp", "tensor"]
    for name in ("pipeline", "zero", "rounds", "microbatches"):
        if {getattr(base, name), getattr(PLAIN, name)} != {getattr(layout, name)}:
            names.append(name)
    sizes = {f"mesh.{name}": getattr(layout, name) for name in names}
    if plan.load.sampler is not None:
        sizes |= {
            f"sampler.mesh.{name}": getattr(plan.sampler, name) for name in ("data", "tensor")
        }
    return " ".join(f"--{name}={size}" for name, size in sizes.items())


def _head(
    load: Workload, topology: Topology, layout: MeshConfig, sampler: MeshConfig
) -> Iterator[str]:
    chip, model = topology.chip, load.model
    yield (
        f"model      {model.family}, {_millions(model.num_params)} M parameters in {load.dtype}; "
        f"{load.method}" + (", layers computed again" if load.remat else "")
    )
    yield (
        f"topology   {topology}: {topology.chips} chips, {topology.devices} devices, "
        f"{topology.hosts} host{'s' * (topology.hosts > 1)}"
    )
    yield (
        f"device     {chip.device_memory / GIB:.1f} GiB, {chip.rate_words(load.dtype)}, "
        f"{chip.device_memory_bandwidth / 1e9:,.0f} GB/s ({chip.source})"
    )
    yield "mesh       " + " × ".join(f"{axis} {getattr(layout, axis)}" for axis in AXES)
    platform = {"cuda": "gpu"}.get(chip.kind, chip.kind)
    line = attention_line(
        model,
        load.dtype,
        platform,
        layout,
        shared=load.shared,
        planned=True,
        engine=load.sampler,
        sampler_tensor=sampler.tensor,
    )
    yield f"attention  {line}"
    yield (
        f"rows       {load.rows} × {load.width} tokens a step, micro-batches of {load.micro} rows"
    )
    if load.sampler is not None:
        copies, tensor = sampler.data * topology.hosts, sampler.tensor
        yield (
            f"sampler    {load.sequences} completions of {load.new_tokens} tokens, the most; "
            f"{copies} cop{'ies' if copies > 1 else 'y'} over {tensor} "
            f"device{'s' * (tensor > 1)} each"
        )


def _millions(count: int | float) -> str:
    return f"{count / 1e6:,.1f}" if count >= 1e6 else f"{count / 1e6:.3f}"


def _memory(topology: Topology, memory: Memory, verdict: Verdict) -> Iterator[str]:
    unit = ("GiB", GIB) if verdict.peak >= GIB else ("MiB", MIB)
    row = functools.partial(_row, unit[1])
    yield f"{'memory of a device':<31}{unit[0]:>9}"
    for name, size in memory.resident.items():
        yield row(name, size, "estimated")
    worst = max(memory.totals, key=memory.totals.__getitem__)
    for phase, terms in memory.phases.items():
        yield row(f"+ {phase}", sum(terms.values()), "estimated")
        parts = terms.items() if phase in (worst, "sampling") else ()
        yield from (row(f"    {name}", size, "") for name, size in parts if size)
    share = verdict.peak / topology.chip.device_memory
    yield row(f"peak ({verdict.phase})", verdict.peak, f"{verdict.tag}; {share:.0%} of a device")
    if verdict.fits:
        yield "fits"
    else:
        yield f"does not fit: the largest term is {verdict.term} · try: {verdict.knob}"


def _row(unit: int, name: str, size: int | float, tag: str) -> str:
    return f"  {name:<29}{size / unit:9.2f}  {tag}".rstrip()


def _programs(memory: Memory, programs: Sequence[Compiled]) -> Iterator[str]:
    peaks = compiled_peaks(memory, programs)
    yield (
        f"{'program (compiled)':<18}{'alone GiB':>10}{'beside':>8}{'TFLOP':>10}{'moved GiB':>11}"
        f"{'s':>7}  collectives and kernels"
    )
    for p in programs:
        if p.error is not None and p.used is None:
            yield f"{p.name:<18}{p.error}"
            continue
        if p.error is not None:
            yield f"{p.name:<18}{p.used / GIB:10.2f}  too large alone: {p.error[:60]}"
            continue
        moved = sum(size for _, size in p.collectives.values())
        kinds = [f"{int(n)} {kind}" for kind, (n, _) in sorted(p.collectives.items())]
        kinds += [f"{int(n)} {name}" for name, n in kernel_counts(p).items()]
        kinds += [f"{p.open_loops} loop{'s' * (p.open_loops > 1)} counted once"] * (
            p.open_loops > 0
        )
        yield (
            f"{p.name:<18}{p.peak / GIB:10.2f}{(peaks[p.name] - p.peak) / GIB:8.2f}"
            f"{p.flops / 1e12:10.3f}{moved / GIB:11.3f}{p.seconds:7.1f}  " + ", ".join(kinds)
        )


def kernel_counts(program: Compiled) -> dict[str, float]:
    """Attention kernels of a program: custom calls → how often they run."""
    return {name: n for name, n in program.kernels.items() if name.startswith(KERNELS)}


KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "__cudnn$fmha")


def _bill(bill: Bill) -> Iterator[str]:
    yield f"{'time of a step (estimated)':<28}{'seconds':>17}  assumed"
    for phase in bill.phases:
        what = "of the memory's bandwidth" if phase.bound == "bandwidth" else "of the rate"
        what += "; the links decide" if phase.bound == "links" else ""
        low, high = phase.efficiency
        yield f"  {phase.name:<26}{_span(phase.seconds):>17}  {low:.0%}–{high:.0%} {what}"
    yield f"  {'all':<26}{_span(bill.step_seconds):>17}"
    yield f"MFU        {bill.mfu[0]:.1%}–{bill.mfu[1]:.1%} of a whole step"
    yield f"tokens/s   {_span(bill.tokens_per_second)} (completions; rows where nothing is sampled)"
    what = f"{bill.steps} steps on {bill.chips} chips, evaluations not counted"
    yield f"hours      {_span(bill.hours)} for {what}"
    if bill.money is None:
        yield f"money      no list price for {bill.chip.name} · try: --price=USD"
    else:
        price = f"{bill.price:g} USD a chip and hour, {bill.retry:.0%} for retries"
        yield f"money      {_span(bill.money)} USD at {price} ({bill.price_source})"


def _span(values: Range) -> str:
    def one(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    return one(values[0]) if one(values[0]) == one(values[1]) else "–".join(map(one, values))
