# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""How fast the sampler is, beside transformers and vLLM, interleaved in one run.

    python scripts/bench_rollout.py --peer-python=/path/to/python-with-torch-and-transformers
    python scripts/bench_rollout.py --cases pages length compile

Prompts of 46 random tokens, 64 new ones, end tokens ignored; medians over --repeats. The peers run
as processes of their own that wait while another is measured. CPU seconds are those of the process.

    16 distinct, 8 × 8, 64 distinct   prompts × samples, against the peers
    ragged    256 requests of geometric lengths (mean 24, at most 64) on 64 slots: useful tokens;
              transformers in static batches of 64 that run until their longest has ended, and
              our own engine in the same batches
    pages     a decode step of the engine against the same step over a dense cache alone
    length    a limit of 512 new tokens against one of 8,192
    compile   all programs of the 8 × 8 case, without and with a persistent compilation cache

The roofline of a decode step is max(FLOPs / XLA's GEMM rate, bytes of weights and live cache / read
bandwidth), both measured here.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

PROMPT, NEW, SLOTS = 46, 64, 64
FORMS = {"native": "ours", "int8": "ours, int8", "bfloat16": "ours, bfloat16"}
SPEED = {"16 distinct": (16, 1), "8 × 8": (8, 8), "64 distinct": (64, 1)}


def prompts_of(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(100, vocab - 100, (count, PROMPT)).tolist()


def timed(run) -> dict[str, float]:
    """Wall and CPU seconds of `run()`, which returns how many tokens it made."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = run()
    return {
        "tokens": tokens,
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
    }


# ---- peers: read prompts, samples and lengths as a JSON line, answer with a measurement ----


def serve(make_sampler, folder: str) -> None:
    sampler = make_sampler(folder)
    print("ready", flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps(timed(lambda case=case: sampler(*case))), flush=True)


def transformers_sampler(folder: str):
    """Static batches: every one runs until its longest completion has ended."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def sample(prompts, n, lengths):
        rows = [(p, length) for p, length in zip(prompts, lengths, strict=True) for _ in range(n)]
        for first in range(0, len(rows), SLOTS):
            part = rows[first : first + SLOTS]
            ids = torch.tensor([prompt for prompt, _ in part])
            options = {"attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0}
            longest = max(length for _, length in part)
            model.generate(ids, max_new_tokens=longest, pad_token_id=0, **options)
        return sum(length for _, length in rows)

    return sample


def vllm_sampler(folder: str):
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="float32", max_model_len=256, max_num_seqs=SLOTS, seed=0)

    def sample(prompts, n, lengths):
        params = [
            SamplingParams(n=n, temperature=1.0, max_tokens=length, ignore_eos=True)
            for length in lengths
        ]
        done = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return sum(len(sample.token_ids) for request in done for sample in request.outputs)

    return sample


class Peer:
    """A sampler in another process; not `ready` if it could not start."""

    def __init__(self, name: str, python: str, folder: str):
        command = [python, __file__, "--serve", name, "--folder", folder]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.ready = self._line() == "ready"

    def _line(self) -> str:
        for line in self.process.stdout:
            if line.startswith(("ready", "{")):
                return line.strip()
        return ""

    def __call__(self, prompts, n, lengths=None) -> dict[str, float]:
        case = [prompts, n, lengths or [NEW] * len(prompts)]
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        return json.loads(self._line())


# ---- our own ----


class Ours:
    def __init__(self, model, slots: int = SLOTS, **options):
        from jaxrl_llm.rollout.engine import Engine, EngineConfig

        sizes = {"max_prompt_tokens": PROMPT, "max_new_tokens": NEW, "slots": slots}
        self.engine = Engine(model.config, model.params, EngineConfig(**{**sizes, **options}))

    def __call__(self, prompts, n, lengths=None) -> dict[str, float]:
        from jaxrl_llm.rollout.engine import Request, SamplingParams
        from jaxrl_llm.types import Prompt

        lengths = lengths or [NEW] * len(prompts)
        requests = [
            Request(Prompt(str(i), tuple(p), ""), SamplingParams(max_tokens=length), n, i)
            for i, (p, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        before = self.engine.stats.snapshot()
        out = timed(lambda: sum(len(r.tokens) for r in self.engine.generate(requests)))
        return {**out, **vars(self.engine.stats.since(before))}

    def step(self, prompts, n, new: int = 17) -> float:
        """Seconds of a decode step: what `new` tokens take beyond one, by the step."""
        short = self(prompts, n, [1] * len(prompts))["wall"]
        return (self(prompts, n, [new] * len(prompts))["wall"] - short) / (new - 1)


def machine() -> tuple[float, float]:
    """XLA's float32 GEMM rate in FLOP/s and its read bandwidth in bytes/s, best of five."""
    import jax
    import jax.numpy as jnp

    side, size = 2048, 1 << 26
    a, b = jnp.ones((side, side)), jnp.ones(size)
    best = []
    for function, x in ((jax.jit(lambda x: x @ x), a), (jax.jit(jnp.sum), b)):
        jax.block_until_ready(function(x))
        times = [
            timed(lambda f=function, x=x: jax.block_until_ready(f(x)))["wall"] for _ in "12345"
        ]
        best.append(min(times))
    return 2 * side**3 / best[0], 4 * size / best[1]


def roofline(config, rows: int, flops: float, bandwidth: float) -> float:
    """Seconds that a decode step of so many rows takes at least."""
    context = PROMPT + NEW / 2
    work = rows * config.flops_per_token(context)
    size = 4 * config.num_params + rows * context * config.kv_bytes_per_token(4)
    return max(work / flops, size / bandwidth)


# ---- cases ----


def print_rows(case: str, results: dict[str, list[dict[str, float]]]) -> None:
    """The median run of each sampler, and how many times as fast as transformers it is."""
    middle = lambda runs, by: statistics.median(r["tokens"] / r[by] for r in runs)  # noqa: E731
    base = results.get("transformers")
    for who, runs in results.items():
        times = f"{middle(runs, 'wall') / middle(base, 'wall'):.2f}" if base else ""
        rates = f"{middle(runs, 'wall'):.0f} | {middle(runs, 'cpu'):.1f}"
        print(f"| {case} | {who} | {rates} | {times} |", flush=True)


def speed(case: str, samplers: dict, vocab: int, options) -> dict[str, list]:
    count, n = SPEED[case]
    prompts = prompts_of(count, vocab)
    for sampler in samplers.values():
        sampler(prompts, n, [2] * count)  # compiles
    results: dict[str, list] = {who: [] for who in samplers}
    for number in range(options.repeats):
        for who, sampler in samplers.items():
            results[who].append(sampler(prompts, n))
            rate = results[who][-1]["tokens"] / results[who][-1]["wall"]
            print(f"run {number + 1}: {case}, {who}: {rate:.1f} tok/s", file=sys.stderr, flush=True)
    print_rows(case, results)
    return results


def ragged(samplers: dict, vocab: int, options) -> None:
    count = options.requests
    lengths = np.clip(np.random.default_rng(1).geometric(1 / 24, count), 1, NEW).tolist()
    prompts = prompts_of(count, vocab, 1)
    ours = samplers["ours"]
    ours(prompts[:SLOTS], 1, [min(length, 3) for length in lengths[:SLOTS]])  # compiles
    results: dict[str, list] = {who: [] for who in [*samplers, "ours, static batches"]}
    for _ in range(options.repeats):
        for who, sampler in samplers.items():
            results[who].append(sampler(prompts, 1, lengths))
        static = {"tokens": sum(lengths), "wall": 0.0, "cpu": 0.0}
        for first in range(0, 0 if options.peer_python else count, SLOTS):
            part = lengths[first : first + SLOTS]
            one = ours(prompts[first : first + SLOTS], 1, [max(part)] * len(part))
            static = {**static, "wall": static["wall"] + one["wall"]}
            static["cpu"] += one["cpu"]
        results["ours, static batches"] += [static] if static["wall"] else []
    print_rows(f"ragged, {count} on {SLOTS}", {k: v for k, v in results.items() if v})
    got = results["ours"][0]
    waste = got["decoded_slots"] / got["useful_tokens"]
    print(f"\nragged: decoded slots / useful tokens {waste:.3f}, {got['decode_calls']} calls\n")


def pages(model, options) -> None:
    """The engine's step, through a view and through block tables, and a dense cache's own."""
    import jax

    from jaxrl_llm.rollout.layout import decode_slots
    from jaxrl_llm.rollout.programs import decode
    from jaxrl_llm.rollout.sampling import SamplingParams
    from jaxrl_llm.rollout.scheduler import Request, Sample
    from jaxrl_llm.rollout.view import init_view
    from jaxrl_llm.types import Prompt

    prompts, new = prompts_of(8, model.config.vocab_size), 17
    engines = {"view": Ours(model), "block tables": Ours(model, attention="pages")}
    engine = engines["view"].engine
    cache = init_view(model.config, SLOTS, 128, model.params["embed"].dtype)

    def dense(new: int) -> float:
        nonlocal cache
        params = SamplingParams(max_tokens=new)
        rows = [
            Sample(Request(Prompt("", tuple(prompts[i % 8]), ""), params, 1, i), 0, [])
            for i in range(SLOTS)
        ]
        start = time.perf_counter()
        program = functools.partial(decode, steps=NEW)
        ends = np.int32(0), np.int32(NEW)
        slots = decode_slots(rows)
        cache, out = program(engine._params, model.config, engine._form, cache, None, slots, *ends)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    for sampler in engines.values():
        sampler(prompts, 8, [2] * 8)
    dense(2)
    times: dict[str, list[float]] = {"dense": [], **{name: [] for name in engines}}
    for _ in range(max(options.repeats, 2)):
        times["dense"].append((dense(new) - dense(1)) / (new - 1))
        for name, sampler in engines.items():
            times[name].append(sampler.step(prompts, 8, new))
    best = {name: statistics.median(values) for name, values in times.items()}
    share = ", ".join(
        f"{name} {1e3 * value:.0f} ms ({value / best['dense'] - 1:+.0%})"
        for name, value in best.items()
    )
    print(f"\na decode step of {SLOTS} rows: {share}\n", flush=True)


def length(model, options) -> None:
    prompts = prompts_of(8, model.config.vocab_size)
    engines = {limit: Ours(model, max_new_tokens=limit) for limit in (512, 8192 - PROMPT)}
    walls: dict[int, list[float]] = {limit: [] for limit in engines}
    for sampler in engines.values():
        sampler(prompts, 8, [2] * 8)
    for _ in range(max(options.repeats, 2)):
        for limit, sampler in engines.items():
            walls[limit].append(sampler(prompts, 8, [24] * 8)["wall"])
    short, long = (statistics.median(values) for values in walls.values())
    print(f"\nlimit 512: {short:.2f} s, limit 8,192: {long:.2f} s ({long / short - 1:+.1%})\n")


COMPILE = """
import time, jax, sys
sys.path.insert(0, sys.argv[2])
from bench_rollout import Ours, prompts_of
from jaxrl_llm.checkpoint.pretrained import load
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
spent = {}
def listen(event, seconds, **_):
    spent[event] = spent.get(event, 0.0) + seconds
model = load(sys.argv[3])
jax.monitoring.register_event_duration_secs_listener(listen)
sampler, prompts = Ours(model), prompts_of(8, model.config.vocab_size)
first = sampler(prompts, 8, [2] * 8)["wall"]
second = sampler(prompts, 8, [2] * 8)["wall"]
core = "/jax/core/compile/"
trace = sum(v for k, v in spent.items() if k.startswith(core) and "backend" not in k)
print(f"{spent.get(core + 'backend_compile_duration', 0):.1f} {trace:.1f} {first - second:.1f}")
"""


def compile_times(options) -> None:
    """In child processes, as what was compiled in this one would not be compiled again."""
    here = str(pathlib.Path(__file__).parent)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("without", "with"):
            command = [sys.executable, "-c", COMPILE, folder, here, options.model]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            print(
                f"\n{name} a compilation cache: XLA {out[-3]} s, tracing and lowering {out[-2]} s, "
                f"first call {out[-1]} s longer than the second",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", choices=["transformers", "vllm"])
    parser.add_argument("--folder")
    parser.add_argument("--peer-python", help="an interpreter with torch and transformers")
    parser.add_argument("--vllm-python", help="an interpreter with vLLM for CPUs")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    cases = [*SPEED, "ragged", "pages", "length", "compile"]
    parser.add_argument("--cases", nargs="*", default=list(SPEED), choices=cases)
    parser.add_argument("--weights", nargs="*", default=["native"], choices=FORMS)
    parser.add_argument("--requests", type=int, default=256, help="of the ragged case")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    if options.serve:
        samplers = {"transformers": transformers_sampler, "vllm": vllm_sampler}
        return serve(samplers[options.serve], options.folder)

    import jax

    from jaxrl_llm.checkpoint.huggingface import save_folder
    from jaxrl_llm.checkpoint.pretrained import load

    model = load(options.model)
    flops, bandwidth = machine()
    cores = len(os.sched_getaffinity(0))
    rates = f"GEMM {flops / 1e9:.0f} GFLOP/s, read {bandwidth / 1e9:.1f} GB/s"
    print(f"jax {jax.__version__}, {cores} cores: {rates}\n")
    measured = [case for case in options.cases if case in SPEED or case == "ragged"]
    if measured:
        against(measured, model, options, flops, bandwidth, save_folder)
    if "pages" in options.cases:
        pages(model, options)
    if "length" in options.cases:
        length(model, options)
    if "compile" in options.cases:
        compile_times(options)


def against(measured, model, options, flops: float, bandwidth: float, save_folder) -> None:
    """The cases in which peers take part."""
    print(
        "| case | sampler | tok/s | tok/CPU-s | × transformers |\n|---|---|---|---|---|", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        save_folder(pathlib.Path(folder), model.params, model.config, model.tokenizer)
        samplers = {FORMS[form]: Ours(model, weights=form) for form in options.weights}
        pythons = {"transformers": options.peer_python, "vllm": options.vllm_python}
        peers = {name: Peer(name, python, folder) for name, python in pythons.items() if python}
        samplers |= {name: peer for name, peer in peers.items() if peer.ready}
        for case in measured:
            if case == "ragged":
                ragged(samplers, model.config.vocab_size, options)
                continue
            got = speed(case, samplers, model.config.vocab_size, options).get("ours")
            if not got:
                continue
            best = roofline(model.config, got[0]["useful_tokens"] // NEW, flops, bandwidth)
            share = statistics.median(best * run["decode_steps"] / run["wall"] for run in got)
            print(f"|  | ours | {share:.0%} of the roofline of its steps, prefill included | | |")
        for peer in peers.values():
            peer.process.stdin.close()
            peer.process.wait()


if __name__ == "__main__":
    main()
