# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of supervised fine-tuning: packed against padded rows, and transformers.

    python scripts/bench_sft.py --torch=/path/to/python-with-torch-and-transformers

The data are docstrings of Python's standard library: a real, long-tailed mix of lengths. Every
variant trains on the same docstrings (forward, backward, AdamW, float32), counts their tokens
without padding, and takes its turn in every round, so that a busy machine slows all of them.

    packed    ours, best-fit rows of --row-tokens
    padded    ours, --batch docstrings a step, padded to the longest
    torch     transformers, the same padded batches
    full      transformers on full rows without padding and without borders between docstrings,
              as packing without a variable-length kernel does: the most that it can reach

Without --torch only the first two run.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.checkpoint.pretrained import load
from jaxrl_llm.data.encode import cut, encode_text
from jaxrl_llm.data.packing import PackedRows, Unit, best_fit, lay_out, pack_step, target_bound
from jaxrl_llm.trainers.learner import Bounds, Learner, LearnState, make_learn_functions
from jaxrl_llm.trainers.optimizers import OptimizerConfig, make_optimizer, make_schedule
from jaxrl_llm.trainers.sft import sft_counts, sft_loss

MODULES = (
    "argparse ast asyncio base64 bisect calendar codecs collections configparser csv datetime "
    "decimal difflib email fractions functools glob heapq inspect itertools json logging math "
    "os pathlib pickle random re shutil socket statistics string subprocess tarfile threading "
    "tokenize unittest urllib.request zipfile"
)

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
    start = time.perf_counter()
    for batch in work[line.strip()]:
        width = max(map(len, batch))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in batch])
        seen = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch])
        labels = ids.masked_fill(seen == 0, -100)
        loss = model(input_ids=ids, attention_mask=seen, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(time.perf_counter() - start, flush=True)
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


def run_steps(learner: Learner, steps: list[PackedRows]) -> float:
    start = time.perf_counter()
    for rows in steps:
        bounds = Bounds(target_bound(rows.mask), 1)
        learner.update(rows, sft_counts(rows), {}, bounds, 0)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", help="a Python that has torch and transformers")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()

    model = load(options.model)
    units = make_units(model.tokenizer, options.examples, options.row_tokens)
    lengths = [unit.length for unit in units]
    total, width = sum(lengths), options.row_tokens
    print(f"{len(units)} docstrings, {total} tokens, quartiles "
          f"{np.percentile(lengths, [0, 25, 50, 75, 100]).astype(int).tolist()}")  # fmt: skip
    padded = [
        pack_step(units[i : i + options.batch], row_tokens=width, packed=False, multiple=1)[0]
        for i in range(0, len(units), options.batch)
    ]
    places = best_fit(lengths, width)
    per_step = 2
    packed = [
        lay_out([[units[i] for i in row] for row in places[s : s + per_step]], width, 64)
        for s in range(0, len(places), per_step)
    ]
    for name, steps in (("padded", padded), ("packed", packed)):
        size = sum(rows.tokens.size for rows in steps)
        print(f"{name}: {len(steps)} steps, {1 - total / size:.0%} padding")

    optimizer = OptimizerConfig(learning_rate=1e-6)
    functions = make_learn_functions(
        sft_loss(model.config, kind="nll", remat=False),
        make_optimizer(optimizer, 100),
    )
    folder = tempfile.TemporaryDirectory()
    if options.torch:
        save_folder(pathlib.Path(folder.name) / "hf", model.params, model.config, model.tokenizer)
    state = LearnState(train=functions.state.init(model.params))
    learner = Learner(functions, jax.device_put, state, make_schedule(optimizer, 100), per_step)

    def ours(name: str) -> float:
        learner.micro_rows = per_step if name == "packed" else options.batch
        return run_steps(learner, packed if name == "packed" else padded)

    child, names = None, ["packed", "padded"]
    if options.torch:
        tokens = [unit.parts[0].tokens.tolist() for unit in units]
        flat = [token for one in tokens for token in one]
        rows = [flat[i : i + width] for i in range(0, len(flat), width)]
        work = {
            "torch": [tokens[i : i + options.batch] for i in range(0, len(tokens), options.batch)],
            "full": [rows[i : i + per_step] for i in range(0, len(rows), per_step)],
        }
        path = pathlib.Path(folder.name) / "work.json"
        path.write_text(json.dumps(work))
        command = [options.torch, "-c", TORCH, f"{folder.name}/hf", str(path), str(options.threads)]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        while child.stdout.readline().strip() != "ready":
            assert child.poll() is None, "the torch process ended"
        names += ["torch", "full"]

    def theirs(name: str) -> float:
        child.stdin.write(name + "\n")
        return float(child.stdout.readline())

    call = {"packed": ours, "padded": ours, "torch": theirs, "full": theirs}
    for name, steps in (("packed", packed), ("padded", padded)):  # compile each shape once
        learner.micro_rows = per_step if name == "packed" else options.batch
        shapes = {(rows.tokens.shape[1], target_bound(rows.mask)): rows for rows in steps}
        run_steps(learner, list(shapes.values()))
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            times[name].append(call[name](name))
    speed = {name: total / statistics.median(values) for name, values in times.items()}
    for name, value in speed.items():
        print(f"{name:<7} {value:7.0f} tokens/s   {[round(t, 1) for t in times[name]]} s")
    for other in names[1:]:
        print(f"packed / {other}: {speed['packed'] / speed[other]:.2f}")
    if child is not None:
        child.stdin.close()
        child.wait()


if __name__ == "__main__":
    sys.exit(main())
