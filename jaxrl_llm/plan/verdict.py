# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a run fits, which term is in the way, and which knob to turn first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.placement import check_fit
from jaxrl_llm.plan.compile import Compiled
from jaxrl_llm.plan.hardware import Topology
from jaxrl_llm.plan.memory import GRADIENTS, MAY_WAIT, Memory, plan_memory, sampler_share
from jaxrl_llm.plan.programs import APPLY, DECODE, LOGPROBS, PREFILL, UPDATE
from jaxrl_llm.plan.workload import Workload
from jaxrl_llm.rollout.kv_cache import default_num_pages
from jaxrl_llm.sharding.mesh import MeshConfig

ROOM = 0.95  # of a device's memory; the rest is the runtime's and fragmentation's

# What of the resident terms each program gets as arguments; the others lie beside it.
_HELD = {
    UPDATE: ("parameters",),
    APPLY: ("parameters", "optimiser"),
    LOGPROBS: ("parameters",),
    PREFILL: (),  # what is the sampler's comes and goes with its phase
    DECODE: (),
}

# The phases of our own model of memory that each program goes through.
PHASES = {
    UPDATE: GRADIENTS,
    APPLY: ("optimiser",),
    LOGPROBS: GRADIENTS,
    PREFILL: ("sampling",),
    DECODE: ("sampling",),
}

OF_ROWS = ("activations", "work of a layer", "logits")  # terms that grow with the rows of a device
OF_SAMPLER = ("sampler's weights", "KV pages", "decoding")
FEWEST_SLOTS = 8  # of a copy of the sampler, below which they are not halved
WHOLE = ("gradient of the embedding", "gathered head", "gathered weights")  # not split over fsdp


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a run fits on each device.

    Attributes:
        peak: bytes.
        limit: bytes that may be used.
        phase: when the peak is.
        term: the largest term then.
        knob: what to change first; None if it fits.
        tag: "compiled" or "estimated".
    """

    peak: float
    limit: float
    phase: str
    term: str
    knob: str | None
    tag: str

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit


def judge(
    load: Workload,
    topology: Topology,
    layout: MeshConfig,
    memory: Memory,
    sampler: MeshConfig,
    programs: Sequence[Compiled] = (),
) -> Verdict:
    """The verdict by the compiler's figures, where every program was compiled; else by ours."""
    limit = ROOM * topology.chip.device_memory
    peaks = compiled_peaks(memory, programs)
    done = {p.name for p in programs if p.error is None or p.used is not None}
    whole = UPDATE in done and (load.sampler is None or DECODE in done)
    tag = "compiled" if whole else "estimated"
    if not whole:
        peaks = memory.totals
    phase = max(peaks, key=peaks.__getitem__)
    peak = peaks[phase]
    within = tuple(p for p in PHASES.get(phase, (phase,)) if p in memory.phases)
    terms = memory.terms(within)
    knob = None
    if peak > limit:
        run = Run(load, layout, sampler)
        knobs = {term: term_knob(term, run, topology, within) for term in terms}
        stays = sum(size for term, size in terms.items() if knobs[term] is None)
        helps = [knob for knob in knobs.values() if knob is not None and stays <= limit]
        knob = helps[0] if helps else "more chips"
    return Verdict(peak, limit, phase, next(iter(terms)), knob, tag)


def compiled_peaks(memory: Memory, programs: Sequence[Compiled]) -> dict[str, float]:
    """Bytes while each compiled program runs, with what lies beside it."""
    peaks = {}
    for program in programs:
        if program.name in _HELD and (program.error is None or program.used is not None):
            held = _HELD[program.name]
            lying = memory.lying(PHASES[program.name][0])
            beside = sum(size for name, size in lying.items() if name not in held)
            peaks[program.name] = beside + program.peak
    return peaks


@dataclasses.dataclass(frozen=True)
class Run:
    """What knobs change: a workload, its mesh, and the sampler's on each host."""

    load: Workload
    layout: MeshConfig
    sampler: MeshConfig

    @property
    def memory(self) -> Memory:
        return plan_memory(self.load, self.layout, self.sampler)

    def other(self, **changes: object) -> Run:
        """With other fields of the workload."""
        return dataclasses.replace(self, load=dataclasses.replace(self.load, **changes))


Turned = tuple[str, Run]  # an override, and the run with it


def term_knob(term: str, run: Run, topology: Topology, phases: Sequence[str]) -> str | None:
    """The override that shrinks a term most cheaply; None if nothing does but more chips.

    Each is tried: the phases of the peak need less with it, and no other needs more than the peak.
    """
    now = run.memory
    need = max(now.totals[phase] for phase in phases)
    for knob, turned in term_knobs(term, run, topology, phases):
        then = turned.memory
        if max(then.totals[phase] for phase in phases) < need and then.peak <= now.peak:
            return knob
    return None


def term_knobs(term: str, run: Run, topology: Topology, phases: Sequence[str]) -> Iterator[Turned]:
    """Overrides that may shrink a term, the cheapest first."""
    load = run.load
    if tuple(phases) == ("sampling",) and term in MAY_WAIT and topology.chip.kind != "cpu":
        yield "--train.offload=True", run.other(offload=True)
    if term in OF_ROWS:
        yield from _row_knobs(term, run)
    if term in OF_SAMPLER:
        yield from _sampler_knobs(term, run, topology)
    if load.dtype == "float32":
        yield "--model.dtype=bfloat16", run.other(dtype="bfloat16")
    if term not in OF_SAMPLER:
        yield from _mesh_knobs(term, run, topology)


def _row_knobs(term: str, run: Run) -> Iterator[Turned]:
    load, parts = run.load, run.layout.data * run.layout.fsdp * run.layout.in_flight
    if not load.remat and term == "activations":
        yield "--model.remat=True", run.other(remat=True)
    half = load.micro // 2 // parts * parts
    if half:
        knob = f"--train.micro_tokens={half * load.width}"
        if load.algo is None:
            knob = f"--train.micro_batch={half}"
        yield knob, run.other(micro=half)


def _sampler_knobs(term: str, run: Run, topology: Topology) -> Iterator[Turned]:
    load, sampler = run.load, run.sampler
    engine, devices = load.sampler, topology.host_devices
    if term != "sampler's weights":
        most = devices // sampler.tensor
        if sampler.data < most:
            yield sampler_turned(run, dataclasses.replace(sampler, data=most))
        if term == "KV pages" and engine.num_pages is not None:
            least = default_num_pages(
                slots=1,
                page_size=engine.page_size,
                max_prompt_tokens=engine.max_prompt_tokens,
                max_new_tokens=engine.max_new_tokens,
                group_size=engine.group_size,
            )
            half = max(engine.num_pages // 2, least)
            fewer = dataclasses.replace(engine, num_pages=half)
            yield f"--sampler.num_pages={half}", run.other(sampler=fewer)
        if sampler_share(load, sampler).slots > FEWEST_SLOTS:
            half = engine.slots // 2
            fewer = dataclasses.replace(engine, slots=half)
            yield f"--sampler.slots={half}", run.other(sampler=fewer)
    for parts in range(sampler.tensor + 1, devices + 1):
        split = MeshConfig(data=devices // parts, tensor=parts)
        if devices % parts == 0 and fits_model(split, load.model, devices):
            yield sampler_turned(run, split)


def sampler_turned(run: Run, sampler: MeshConfig) -> Turned:
    """The sampler on another mesh."""
    knob = f"--sampler.mesh.data={sampler.data} --sampler.mesh.tensor={sampler.tensor}"
    return knob, dataclasses.replace(run, sampler=sampler)


def _mesh_knobs(term: str, run: Run, topology: Topology) -> Iterator[Turned]:
    """More parts of what `fsdp` splits, or of what only `tensor` does."""
    layout, devices = run.layout, topology.devices
    rest = devices // (layout.tensor * layout.pipeline)
    if term not in OF_ROWS + WHOLE:
        sizes = [{"fsdp": n, "data": rest // n} for n in range(rest, layout.fsdp, -1)]
    else:
        sizes = [{"tensor": 2, "fsdp": layout.fsdp // 2}] * (layout.tensor == 1)
    for size in sizes:
        if (layout.fsdp % 2 and "tensor" in size) or rest % size["fsdp"]:
            continue
        zero = layout.zero if size["fsdp"] > 1 else 3
        other = dataclasses.replace(layout, **size, zero=zero)
        if fits_model(other, run.load.model, devices):
            knob = " ".join(f"--mesh.{axis}={parts}" for axis, parts in size.items())
            yield knob, dataclasses.replace(run, layout=other)


def fits_model(layout: MeshConfig, model: ModelConfig, devices: int) -> bool:
    """Whether a mesh divides a model."""
    try:
        check_fit(layout, model, devices)
    except ConfigError:
        return False
    return True
