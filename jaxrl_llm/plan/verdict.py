# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a run fits, which term is in the way, and which knob to turn first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxrl_llm.plan.compile import Compiled
from jaxrl_llm.plan.hardware import Topology
from jaxrl_llm.plan.memory import GRADIENTS, MAY_WAIT, Memory
from jaxrl_llm.plan.programs import APPLY, DECODE, LOGPROBS, PREFILL, UPDATE
from jaxrl_llm.plan.workload import Workload
from jaxrl_llm.sharding.mesh import MeshConfig

ROOM = 0.95  # of a device's memory; the rest is the runtime's and fragmentation's

# What of the resident terms each program gets as arguments; the others lie beside it.
_HELD = {
    UPDATE: ("parameters",),
    APPLY: ("parameters", "optimiser"),
    LOGPROBS: ("parameters",),
    PREFILL: ("sampler's weights", "KV pages"),
    DECODE: ("sampler's weights", "KV pages"),
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
    sampler_tensor: int,
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
    terms = memory.terms(tuple(p for p in PHASES.get(phase, (phase,)) if p in memory.phases))
    knob = None
    if peak > limit:
        knobs = {term: term_knob(term, load, topology, layout, sampler_tensor) for term in terms}
        if PHASES.get(phase, (phase,)) == ("sampling",) and topology.chip.kind != "cpu":
            waits = {} if load.offload else dict.fromkeys(MAY_WAIT, "--train.offload=True")
            knobs |= {term: knob for term, knob in waits.items() if term in terms}
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


def term_knob(
    term: str, load: Workload, topology: Topology, layout: MeshConfig, sampler_tensor: int
) -> str | None:
    """The override that shrinks a term most cheaply; None if nothing does but more chips."""
    if term in OF_ROWS:
        if not load.remat and term == "activations":
            return "--model.remat=True"
        if load.micro >= 2 * layout.data * layout.fsdp:
            half = load.micro // 2
            if load.algo is None:
                return f"--train.micro_batch={half}"
            return f"--train.micro_tokens={half * load.width}"
    if term in ("KV pages", "decoding"):
        return f"--sampler.slots={load.sampler.slots // 2}" if load.sampler.slots > 16 else None
    if term == "sampler's weights":
        parts = 2 * sampler_tensor
        divides = topology.devices % parts == 0 == load.model.num_heads % parts
        return f"--sampler-tensor={parts}" if divides else None
    if load.dtype == "float32":
        return "--model.dtype=bfloat16"
    rest = topology.devices // (layout.tensor * layout.pipeline)
    if layout.fsdp < rest and term not in OF_ROWS + WHOLE:
        return f"--mesh.fsdp={rest} --mesh.data=1"
    if layout.tensor == 1 and layout.fsdp % 2 == 0 and term in OF_ROWS + WHOLE:
        return f"--mesh.tensor=2 --mesh.fsdp={layout.fsdp // 2}"
    return None
