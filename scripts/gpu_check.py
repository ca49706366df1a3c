# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What `gpu_check.sh` runs: device tests, throughput of sampler and update, a short GRPO run.

Each part is tried by itself and told of in one row: passed with its figures, failed with the
reason, or not run for want of a package. Exit code 0: all passed; 1: one failed; 3: none failed,
and one was not run.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

from gpu_device_tests import DEVICE_TESTS, SIZES, Size, make_engine, requests

LIMIT = 480.0  # seconds, for all parts together
# Import name → what pip calls it. The first are needed for anything, the others by single parts.
CORE = {"jax": "jax", "flax": "flax", "optax": "optax", "numpy": "numpy", "jaxtyping": "jaxtyping"}
TRAIN = {
    "cloudpickle": "cloudpickle", "etils": "etils[epath]", "gguf": "gguf", "grain": "grain",
    "huggingface_hub": "huggingface_hub", "jinja2": "jinja2", "rich": "rich", "tyro": "tyro",
    "orbax.checkpoint": "orbax-checkpoint", "safetensors": "safetensors",
    "tensorboardX": "tensorboardX", "tensorstore": "tensorstore", "tokenizers": "tokenizers",
}  # fmt: skip


class Missing(Exception):
    """A part can't run for want of packages."""


class NotRun(Exception):
    """A part was not started, because the time was up."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, as a stand-in")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    absent = missing(CORE)
    if absent:
        print(f"error: without {', '.join(absent)} nothing runs\n{carry(absent)}", file=sys.stderr)
        return 2
    if options.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    kind = jax.devices()[0].platform
    if kind != "gpu" and not options.cpu:
        print(
            f"error: no GPU is found · got {kind} · try: --cpu --size=tiny, or jax[cuda13]",
            file=sys.stderr,
        )
        return 2
    rows = run_parts(SIZES[options.size], options)
    print_table(rows)
    absent = missing(TRAIN)
    if absent:
        print(f"\nnot here: {', '.join(absent)}\n{carry(absent)}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    outcomes = {row["outcome"] for row in rows}
    return 1 if "failed" in outcomes else 3 if "not run" in outcomes else 0


def missing(packages: dict[str, str]) -> list[str]:
    """Names for pip of the packages that can't be imported."""

    def there(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return [package for name, package in packages.items() if not there(name)]


def carry(packages: list[str]) -> str:
    """What to do about missing packages on a machine that reaches no index."""
    names = " ".join(f"'{name}'" for name in packages)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        "carry them here: where there is a network, with Python "
        f"{version}: pip install --target carried {names}\n"
        "then copy the folder `carried` and run: PYTHONPATH=carried bash scripts/gpu_check.sh"
    )


def run_parts(size: Size, options: argparse.Namespace) -> list[dict]:
    start, rows = time.perf_counter(), []
    tests = [(name, functools.partial(as_part, test)) for name, test in DEVICE_TESTS]
    parts = [*tests, ("sampler", sampler), ("update", update), ("GRPO run", grpo_run)]
    for name, part in parts:
        began = time.perf_counter()
        try:
            left = LIMIT - (began - start)
            if left <= 0:
                raise NotRun(f"the {LIMIT:.0f} s were up")
            outcome, text = "passed", part(size, options, left)
        except (Missing, NotRun) as reason:
            outcome, text = "not run", str(reason)
        except Exception as error:  # whatever it is, the other parts still run
            outcome, text = "failed", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            traceback.print_exc()
        seconds = time.perf_counter() - began
        rows.append({"part": name, "outcome": outcome, "seconds": seconds, "result": text})
        print(f"{name}: {outcome} in {seconds:.1f} s: {text}", flush=True)
    return rows


def as_part(test: Callable[[], str], size: Size, options, left: float) -> str:
    """A device test has one size for all."""
    return test()


def print_table(rows: list[dict]) -> None:
    import jax

    device = jax.devices()[0]
    print(f"\n{len(jax.devices())} × {device.device_kind}, jax {jax.__version__}\n")
    print("| part | outcome | seconds | result |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['part']} | {row['outcome']} | {row['seconds']:.1f} | {row['result']} |")
    print(f"\n{sum(row['seconds'] for row in rows):.0f} s in all")


# ---- throughput ----


def random_model(size: Size):
    import jax
    import jax.numpy as jnp

    from jaxrl_llm.models.config import ModelConfig
    from jaxrl_llm.models.transformer import init_params

    config = ModelConfig(**size.shape, tie_word_embeddings=True)
    make = jax.jit(functools.partial(init_params, config, dtype=jnp.dtype(size.dtype)))
    return config, make(jax.random.key(0))


def sampler(size: Size, options, left: float) -> str:
    config, params = random_model(size)
    engine = make_engine(config, params, size)
    prompts = 2 * size.slots // size.group
    list(engine.generate(requests(config, size, max(size.slots // size.group, 1))))  # compiles
    start = time.perf_counter()
    rollouts = list(engine.generate(requests(config, size, prompts)))
    seconds = time.perf_counter() - start
    tokens = sum(len(rollout.tokens) for rollout in rollouts)
    rate = tokens / seconds
    return f"{rate:,.0f} tokens/s ({len(rollouts)} completions, {size.slots} slots, {size.dtype})"


def update(size: Size, options, left: float) -> str:
    import jax
    import numpy as np
    import optax

    from jaxrl_llm.algorithms.presets import AlgoConfig, resolve
    from jaxrl_llm.trainers.policy import make_train_functions
    from jaxrl_llm.types import Batch

    config, params = random_model(size)
    algorithm = resolve(AlgoConfig(name="grpo"), group_size=size.group, max_tokens=size.width)
    functions = make_train_functions(
        config, algorithm.loss, optax.adamw(1e-6), temperature=1.0, remat=True
    )
    rng = np.random.default_rng(2)
    shape = (size.rows, size.width)
    ints = np.ones(shape, np.int32)
    batch = Batch(
        tokens=rng.integers(0, config.vocab_size, shape).astype(np.int32),
        positions=np.broadcast_to(np.arange(size.width, dtype=np.int32), shape).copy(),
        segment_ids=ints,
        mask=np.broadcast_to(np.arange(size.width) >= size.width // 4, shape).copy(),
        advantages=rng.normal(size=shape).astype(np.float32),
        logp_sampler=np.full(shape, -np.log(config.vocab_size), np.float32),
    )
    counts = algorithm.counts(batch.mask, batch.segment_ids)
    targets = size.width - size.width // 4
    state = functions.state.init(params)

    def step(state):
        grads = functions.state.zeros(state.params)
        grads, (loss, _) = functions.accumulate(
            grads, state.params, None, batch, counts, None, None, {}, targets
        )
        return functions.state.apply(state, grads), jax.block_until_ready(loss)

    state, loss = step(state)  # compiles
    times = []
    for _ in range(3):
        start = time.perf_counter()
        state, loss = step(state)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - start)
    assert np.isfinite(float(loss)), f"the loss is {float(loss)}"
    rate = size.rows * size.width / statistics.median(times)
    needed = 3.0 * rate * config.flops_per_token(size.width / 2)
    return (
        f"{rate:,.0f} tokens/s, {needed / 1e12:.3g} TFLOP/s{share_of_peak(needed)} ({size.dtype})"
    )


def share_of_peak(rate: float) -> str:
    """The utilisation, where the device is in the table of chips."""
    import jax

    from jaxrl_llm.plan.hardware import CHIPS

    name = jax.devices()[0].device_kind.lower()
    rows = [chip for chip in CHIPS.values() if chip.kind == "cuda"]
    found = [chip for chip in rows if chip.name.partition("-")[0] in name]
    return f", {rate / found[-1].flops:.1%} of the peak of {found[-1].name}" if found else ""


# ---- the whole thing ----


def grpo_run(size: Size, options, left: float) -> str:
    """A few steps of the shipped tiny config, on a random model, by its own command."""
    absent = missing(TRAIN)
    if absent:
        raise Missing("needs " + ", ".join(absent))
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "run"
        command = [sys.executable, "-m", "jaxrl_llm.train", "--config=tiny_grpo.py"]
        command += [f"--run-dir={run}", "--train.steps=4", "--train.eval_every=0"]
        command += ["--train.checkpoint_every=4", "--train.seed=0"]
        command += ["--devices=cpu" if options.cpu else "--devices=cuda"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
        lines = (run / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        gaps = [s[_GAP] for s in steps if _GAP in s]
        assert (run / "DONE").exists() and gaps, "the run left no metrics"
        assert max(gaps) < 1e-2, f"sampler and trainer differ by {max(gaps):.1e}"
        exported = (run / "export").is_dir()
        return f"4 steps, exported: {exported}; sampler against trainer {max(gaps):.1e} nats"


_GAP = "sampling/sampling_logp_difference/mean"

if __name__ == "__main__":
    sys.exit(main())
