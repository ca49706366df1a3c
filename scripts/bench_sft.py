# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of supervised fine-tuning: packed against padded rows, and transformers.

    python scripts/bench_sft.py --torch=/path/to/python-with-torch-and-transformers

The data are docstrings of Python's standard library: a real, long-tailed mix of lengths. Every
variant trains on the same docstrings (forward, backward, clipping, AdamW, float32) and counts their
tokens without padding. The work is cut into --rounds portions and all variants take turns, so that
a busy machine slows all of them. Ours compile before the clock starts; the CPU seconds of all
threads are told beside the wall time.

    packed    ours, best-fit rows of --row-tokens
    padded    ours, --batch docstrings a step, padded to the longest
    torch     transformers, the same padded batches
    full      transformers on full rows without padding and without borders between docstrings,
              as packing without a variable-length kernel does: the most that it can reach

Without --torch only the first two run. About four minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np

from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.checkpoint.pretrained import Pretrained, load
from jaxrl_llm.data.encode import cut, encode_text
from jaxrl_llm.data.packing import PackedRows, Unit, best_fit, lay_out, pack_step, target_bound
from jaxrl_llm.trainers.learner import (
    Bounds,
    Learner,
    LearnState,
    make_learn_functions,
    micro_rows,
)
from jaxrl_llm.trainers.optimizers import OptimizerConfig, make_optimizer, make_schedule
from jaxrl_llm.trainers.sft import sft_counts, sft_loss

MODULES = (
    "argparse ast asyncio base64 bisect calendar codecs collections configparser csv datetime "
    "decimal difflib email fractions functools glob heapq inspect itertools json logging math "
    "os pathlib pickle random re shutil socket statistics string subprocess tarfile threading "
    "tokenize unittest urllib.request zipfile"
)

ROWS = 2  # full rows of an optimiser step: as many tokens as a padded batch holds, or more

TORCH = r"""
import json, sys, time, torch, transformers
folder, path, threads = sys.argv[1:4]
torch.set_num_threads(int(threads))
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
work = json.load(open(path))
print("ready", flush=True)
for line in sys.stdin:
    name, portion = line.split()
    start, used = time.perf_counter(), time.process_time()
    for batch in work[name][int(portion)]:
        width = max(map(len, batch))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in batch])
        seen = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch])
        labels = ids.masked_fill(seen == 0, -100)
        loss = model(input_ids=ids, attention_mask=seen, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(time.perf_counter() - start, time.process_time() - used, flush=True)
"""


def docstrings() -> list[str]:
    found = set()
    for name in MODULES.split():
        module = importlib.import_module(name)
        for _, thing in inspect.getmembers(module):
            for one in (thing, *vars(thing).values()) if inspect.isclass(thing) else (thing,):
                text = inspect.getdoc(one) if callable(one) else None
                if text and len(text) > 20:
                    found.add(text)
    return sorted(found)


def make_units(tokenizer, count: int, longest: int) -> list[Unit]:
    texts = docstrings()
    order = np.random.default_rng(0).permutation(len(texts))[:count]
    parts = [cut(encode_text(texts[i], tokenizer), longest, "end", None) for i in order]
    return [Unit((part,), (), i) for i, part in enumerate(parts)]


@dataclasses.dataclass(frozen=True)
class Variant:
    """Does a portion of its work; tells wall and CPU seconds."""

    portions: int
    run: Callable[[int], tuple[float, float]]


def cut_up(steps: list, portions: int) -> list[list]:
    """Portions of steps, as even as can be."""
    edges = np.linspace(0, len(steps), portions + 1).round().astype(int)
    return [steps[a:b] for a, b in itertools.pairwise(edges)]


def ours(learner: Learner, portions: list[list[PackedRows]], rows_at_once: int) -> Variant:
    """Steps of this package, compiled here."""

    def at_once(rows: PackedRows) -> int:
        return min(rows_at_once, rows.tokens.shape[0])

    shapes = {(r.tokens.shape, target_bound(r.mask), r.reach): r for p in portions for r in p}
    for (_, targets, _), rows in shapes.items():
        micro = next(micro_rows(rows, at_once(rows)))
        grads = None  # the only micro-batch of a step is added to nothing
        if rows.tokens.shape[0] > rows_at_once:
            grads = jax.eval_shape(learner.functions.state.zeros, learner.params)
        arguments = (grads, learner.params, None, learner.put(micro), sft_counts(rows), {})
        learner.functions.accumulate.lower(*arguments, Bounds(targets, 1)).compile()

    def run(portion: int) -> tuple[float, float]:
        start, used = time.perf_counter(), time.process_time()
        for rows in portions[portion]:
            learner.micro_rows = at_once(rows)
            bounds = Bounds(target_bound(rows.mask), 1)
            learner.update(rows, sft_counts(rows), {}, bounds, 0)
        return time.perf_counter() - start, time.process_time() - used

    return Variant(len(portions), run)


def theirs(child: subprocess.Popen, name: str, portions: int) -> Variant:
    """Steps of the torch process."""

    def run(portion: int) -> tuple[float, float]:
        child.stdin.write(f"{name} {portion}\n")
        wall, used = child.stdout.readline().split()
        return float(wall), float(used)

    return Variant(portions, run)


def start_torch(options, model: Pretrained, work: dict, folder: pathlib.Path) -> subprocess.Popen:
    save_folder(folder / "hf", model.params, model.config, model.tokenizer)
    (folder / "work.json").write_text(json.dumps(work))
    arguments = [str(folder / "hf"), str(folder / "work.json"), str(options.threads)]
    child = subprocess.Popen(
        [options.torch, "-c", TORCH, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    while child.stdout.readline().strip() != "ready":
        assert child.poll() is None, "the torch process ended"
    return child


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", help="a Python that has torch and transformers")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--examples", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def make_learner(model: Pretrained) -> Learner:
    optimizer = OptimizerConfig(learning_rate=1e-6)
    functions = make_learn_functions(
        sft_loss(model.config, kind="nll", remat=False),
        make_optimizer(optimizer, 100),
    )
    state = LearnState(train=functions.state.init(model.params))
    learner = Learner(functions, jax.device_put, state, make_schedule(optimizer, 100), 1)
    # The programs that every variant shares run once before the clock starts.
    grads = functions.state.zeros(learner.params)
    functions.state.norm(grads)
    learner.state = learner.state.replace(train=functions.state.apply(learner.state.train, grads))
    return learner


def main() -> None:
    options = parse()
    began = time.perf_counter()
    model = load(options.model)
    width, batch = options.row_tokens, options.batch
    units = make_units(model.tokenizer, options.examples, width)
    lengths = [unit.length for unit in units]
    print(f"{len(units)} docstrings, {sum(lengths)} tokens, quartiles of their lengths "
          f"{np.percentile(lengths, [0, 25, 50, 75, 100]).astype(int).tolist()}")  # fmt: skip
    padded = [
        pack_step(units[i : i + batch], row_tokens=width, packed=False, multiple=1)[0]
        for i in range(0, len(units), batch)
    ]
    places = best_fit(lengths, width)
    rows = [[units[i] for i in row] for row in places]
    packed = [lay_out(rows[i : i + ROWS], width, 64) for i in range(0, len(rows), ROWS)]
    tokens = [unit.parts[0].tokens.tolist() for unit in units]
    flat = [token for one in tokens for token in one]
    full = [flat[i : i + width] for i in range(0, len(flat), width)]
    work = {
        "torch": [tokens[i : i + batch] for i in range(0, len(tokens), batch)],
        "full": [full[i : i + ROWS] for i in range(0, len(full), ROWS)],
    }
    slots = {
        "packed": [step.tokens.size for step in packed],
        "padded": [step.tokens.size for step in padded],
        **{name: [max(map(len, b)) * len(b) for b in batches] for name, batches in work.items()},
    }
    for name, sizes in slots.items():
        print(f"{name:<7} {len(sizes)} steps, {1 - sum(lengths) / sum(sizes):.0%} padding")
    with tempfile.TemporaryDirectory() as folder:
        child, variants = None, {}
        if options.torch:
            cut_work = {name: cut_up(steps, options.rounds) for name, steps in work.items()}
            child = start_torch(options, model, cut_work, pathlib.Path(folder))
        learner = make_learner(model)
        variants["packed"] = ours(learner, cut_up(packed, options.rounds), ROWS)
        variants["padded"] = ours(learner, cut_up(padded, options.rounds), batch)
        if child is not None:
            variants |= {name: theirs(child, name, options.rounds) for name in work}
        print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
        measure(variants, sum(lengths))
        if child is not None:
            child.stdin.close()
            child.wait()


def measure(variants: dict[str, Variant], tokens: int) -> None:
    """Run everything in turns; print speeds and ratios."""
    times = {name: np.zeros(2) for name in variants}
    for portion in range(next(iter(variants.values())).portions):
        for name, variant in variants.items():
            times[name] += variant.run(portion)
    for name, (wall, used) in times.items():
        print(f"{name:<7} {tokens / wall:7.1f} tokens/s   {wall:6.1f} s   {used:6.1f} CPU s")
    first, *others = times
    for other in others:
        wall, used = times[other] / times[first]
        print(f"{first} / {other}: {wall:.2f} by wall time, {used:.2f} by CPU time")
    if "torch" in times:
        wall, used = times["torch"] / times["padded"]
        print(f"padded / torch: {wall:.2f} by wall time, {used:.2f} by CPU time")


if __name__ == "__main__":
    sys.exit(main())
