# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What a compiled program does, read from its text: FLOPs of products, collectives, kernels.

The compiler's own count takes the body of a loop once. Here every computation counts as often as
it runs: a loop's body by its trip count, which XLA writes beside the loop or compares its counter
with. A loop whose end is decided while it runs counts once and is told of (`open_loops`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4,
    "s64": 8, "u64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
    "f8e4m3fn": 1, "f8e5m2": 1, "token": 0,
}  # fmt: skip
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\) -> .* \{$")
_CALLED = re.compile(
    r"(calls|body|condition|to_apply|true_computation|false_computation)=%?([^\s,)}]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?\s*[:=]\s*\{"?n"?\s*[:=]\s*"?(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: ``%name = shape opcode(operands), attributes``."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool


@dataclasses.dataclass
class Counts:
    """What one run of a program does, on each device.

    Attributes:
        flops: 2 for each multiply-add of a matrix product or convolution.
        collectives: kind → (how many, bytes of their results).
        kernels: targets of custom calls → how many.
        open_loops: loops whose trip count is not in the text; they count once.
    """

    flops: float = 0.0
    collectives: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    open_loops: int = 0


def count(text: str) -> Counts:
    """Counts of a compiled module's text (``compiled.as_text()``)."""
    computations, entry = read_computations(text)
    counts = Counts()
    seen: set[tuple[str, str]] = set()
    _add(counts, computations, entry, 1.0, seen, ())
    return counts


def read_computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The module's computations by name, and which of them is the entry."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.rstrip() == "}":  # a kernel's own text may have lines that begin so
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            shape, rest = _split_shape(found[3])
            opcode, _, rest = rest.partition("(")
            inside, attributes = _split_call(rest)
            names = tuple(part.split()[-1].lstrip("%") for part in _arguments(inside))
            current.append(Instruction(found[2], shape, opcode, names, attributes, bool(found[1])))
    return computations, entry


def array_bytes(shape: str) -> int | float:
    """Bytes of a shape, all parts of a tuple together."""
    return sum(
        _BYTES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n)
        for kind, dims in _ARRAY.findall(shape)
    )


def trip_count(loop: Instruction, computations: dict[str, list[Instruction]]) -> int | None:
    """How often a `while` runs: XLA's own note, or the constant that its condition compares with.

    None if neither is in the text.
    """
    known = _TRIPS.search(loop.attributes)
    if known:
        return int(known[1])
    called = dict(_CALLED.findall(loop.attributes))
    lines = computations.get(called.get("condition", ""), [])
    constants = _constants(lines)
    roots = [i for i in lines if i.root and i.opcode == "compare"]
    if len(roots) != 1 or "direction=LT" not in roots[0].attributes:
        return None
    limits = [constants[name] for name in roots[0].operands if name in constants]
    if len(limits) != 1:
        return None
    counters = [_index(i) for i in lines if i.name in roots[0].operands and i.name not in constants]
    return math.ceil(limits[0] / _step(computations.get(called.get("body", ""), []), counters))


def _constants(lines: list[Instruction]) -> dict[str, int]:
    return {
        i.name: int(i.operands[0])
        for i in lines
        if i.opcode == "constant" and i.operands and re.fullmatch(r"-?\d+", i.operands[0])
    }


def _index(line: Instruction) -> int | None:
    found = re.search(r"index=(\d+)", line.attributes)
    return int(found[1]) if found and line.opcode == "get-tuple-element" else None


def _step(body: list[Instruction], counters: list[int | None]) -> int:
    """What a loop's body adds to its counter: more than 1 where XLA has unrolled it."""
    root = next((i for i in body if i.root and i.opcode == "tuple"), None)
    if root is None or len(counters) != 1 or counters[0] is None:
        return 1
    constants, lines = _constants(body), {i.name: i for i in body}
    last = lines.get(root.operands[counters[0]])
    if last is None or last.opcode != "add":
        return 1
    steps = [constants[name] for name in last.operands if name in constants]
    return steps[0] if len(steps) == 1 and steps[0] > 0 else 1


def _add(counts: Counts, computations, name: str, times: float, seen: set, path: tuple) -> None:
    if name in path:
        return
    shapes = {i.name: i.shape for i in computations.get(name, [])}
    for line in computations.get(name, []):
        kind = line.opcode.removesuffix("-start")
        if line.opcode in ("dot", "convolution") or kind in COLLECTIVES:
            _add_own(counts, line, kind, shapes, times, seen)
        elif line.opcode == "custom-call":
            _add_custom(counts, line, shapes, times)
        for called, runs in _calls(line, computations, counts):
            _add(counts, computations, called, times * runs, seen, (*path, name))


def _add_own(counts, line: Instruction, kind: str, shapes, times, seen: set) -> None:
    if line.opcode == "dot":
        counts.flops += times * _dot_flops(line, shapes)
    elif line.opcode == "convolution":
        counts.flops += times * _convolution_flops(line, shapes)
    else:
        # A collective that runs beside products stands in several computations of one body, always
        # on the same channel.
        channel = _CHANNEL.search(line.attributes)
        if channel and (channel[1], times) in seen:
            return
        if channel:
            seen.add((channel[1], times))
        size = array_bytes(line.shape)
        # Of others than all-reduce the result's shape holds the operand's, too.
        if line.opcode.endswith("-start") and kind != "all-reduce":
            size -= sum(array_bytes(shapes.get(name, "")) for name in line.operands)
        number, total = counts.collectives.get(kind, (0.0, 0.0))
        counts.collectives[kind] = (number + times, total + times * max(size, 0.0))


def _add_custom(counts: Counts, line: Instruction, shapes, times: float) -> None:
    target = _TARGET.search(line.attributes)
    name = target[1] if target else "?"
    if name == "tpu_custom_call":
        name += " " + line.name.partition(".")[0]
    counts.kernels[name] = counts.kernels.get(name, 0.0) + times
    if "gemm" in name or "matmul" in name:
        counts.flops += times * _library_flops(line, shapes)


def _calls(line: Instruction, computations, counts: Counts) -> Iterator[tuple[str, float]]:
    """The computations that an instruction runs, and how often."""
    called = _CALLED.findall(line.attributes)
    if line.opcode == "while":
        trips = trip_count(line, computations)
        counts.open_loops += trips is None
        yield from ((name, float(trips or 1)) for kind, name in called if kind == "body")
    elif line.opcode == "conditional":
        branches = _BRANCHES.search(line.attributes)
        names = [n.strip().lstrip("%") for n in branches[1].split(",")] if branches else []
        names += [name for kind, name in called if kind.endswith("_computation")]
        yield from ((name, 1.0 / len(names)) for name in names)
    else:
        yield from ((name, 1.0) for kind, name in called if kind in ("calls", "to_apply"))


def _dims(shape: str) -> list[int]:
    found = _ARRAY.search(shape)
    return [int(n) for n in found[2].split(",") if n] if found else []


def _numbers(attributes: str, key: str) -> list[int]:
    found = re.search(rf'{key}"?\s*[:=]\s*[\[{{]([0-9,"\s]*)[\]}}]', attributes)
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else []


def _dot_flops(line: Instruction, shapes) -> float:
    lhs = _dims(shapes.get(line.operands[0], ""))
    contracted = math.prod(lhs[i] for i in _numbers(line.attributes, "lhs_contracting_dims"))
    return 2.0 * math.prod(_dims(line.shape)) * contracted


def _library_flops(line: Instruction, shapes) -> float:
    """A product that a library computes; its result comes first, then scratch."""
    lhs = _dims(shapes.get(line.operands[0], ""))
    axes = _numbers(line.attributes, "lhs_contracting_dimensions") or [len(lhs) - 1]
    return 2.0 * math.prod(_dims(line.shape)) * math.prod(lhs[i] for i in axes if i < len(lhs))


def _convolution_flops(line: Instruction, shapes) -> float:
    """2 · batch · output features · input features · (places where window and input meet)."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.attributes)
    lhs, rhs = (_dims(shapes.get(name, "")) for name in line.operands[:2])
    out = _dims(line.shape)
    if not labels or not (lhs and rhs and out):
        return 0.0
    size = dict(zip(labels[2], rhs, strict=True))
    result = dict(zip(labels[3], out, strict=True))
    source = dict(zip(labels[1], lhs, strict=True))
    window = _window(line.attributes)
    meet = 1.0
    for index, axis in enumerate(sorted(a for a in labels[2] if a.isdigit())):
        part = {key: values[index] for key, values in window.items() if index < len(values)}
        meet *= _meeting_places(source[axis], size[axis], result[axis], part)
    return 2.0 * result["b"] * result["f"] * size["i"] * meet


def _window(attributes: str) -> dict[str, list]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    values: dict[str, list] = {}
    for part in found[1].split() if found else []:
        key, _, text = part.partition("=")
        split = text.split("x")
        values[key] = [tuple(map(int, p.split("_"))) if key == "pad" else int(p) for p in split]
    return values


def _meeting_places(source: int, size: int, out: int, window: dict) -> int:
    """Pairs of an output place and a window place that read an entry of the input, not padding."""
    low = window.get("pad", (0, 0))[0]
    stride, hole = window.get("stride", 1), window.get("lhs_dilate", 1)
    spread, reach = window.get("rhs_dilate", 1), (source - 1) * window.get("lhs_dilate", 1)
    places = (o * stride + w * spread - low for o in range(out) for w in range(size))
    return sum(1 for at in places if 0 <= at <= reach and at % hole == 0)


def _split_shape(text: str) -> tuple[str, str]:
    """``(f32[2], s32[]) tuple(…)`` → the shape, and the rest from the opcode on."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[: index + 1], text[index + 1 :].lstrip()
    return text, ""


def _split_call(text: str) -> tuple[str, str]:
    """What stands before the bracket that closes the operands, and what follows it."""
    depth = 1
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[:index], text[index + 1 :]
    return text, ""


def _arguments(text: str) -> Iterator[str]:
    """Operands, split at the commas that stand in no bracket; comments are left out."""
    text = re.sub(r"/\*.*?\*/", "", text)
    depth, start = 0, 0
    for index, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            yield text[start:index].strip() or "?"
            start = index + 1
    if text[start:].strip():
        yield text[start:].strip()
