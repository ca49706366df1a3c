# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""How fast the sampler is, beside transformers and vLLM, interleaved in one run.

    python scripts/bench_rollout.py --peer-python=/path/to/python-with-torch-and-transformers

Prompts of 46 random tokens, 64 new ones, end tokens ignored. The peers run as processes of their
own that wait while another is measured. CPU seconds are those of the process. The roofline of a
decode step is max(FLOPs / XLA's GEMM rate, bytes of weights and live cache / read bandwidth), both
measured here. Static batching is emulated by our own engine: batches of as many requests as there
are slots, each run until its longest has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

PROMPT, NEW = 46, 64
CASES = {"16 distinct": (16, 1), "8 × 8": (8, 8), "64 distinct": (64, 1)}


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


# ---- peers: read a case as a JSON line, answer with a measurement ----


def serve(make_sampler, folder: str) -> None:
    sampler = make_sampler(folder)
    print("ready", flush=True)
    for line in sys.stdin:
        prompts, n = json.loads(line)
        print(json.dumps(timed(lambda p=prompts, n=n: sampler(p, n))), flush=True)


def transformers_sampler(folder: str):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def sample(prompts, n):
        ids = torch.tensor([prompt for prompt in prompts for _ in range(n)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW,
            pad_token_id=0,
        )
        return (out.shape[1] - PROMPT) * out.shape[0]

    return sample


def vllm_sampler(folder: str):
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="float32", max_model_len=256, max_num_seqs=64, seed=0)

    def sample(prompts, n):
        params = SamplingParams(n=n, temperature=1.0, max_tokens=NEW, ignore_eos=True)
        done = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return sum(len(sample.token_ids) for request in done for sample in request.outputs)

    return sample


class Peer:
    """A sampler in another process; None answers if it could not start."""

    def __init__(self, name: str, python: str, folder: str):
        command = [python, __file__, "--serve", name, "--folder", folder]
        self.name = name
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

    def __call__(self, prompts, n) -> dict[str, float]:
        self.process.stdin.write(json.dumps([prompts, n]) + "\n")
        self.process.stdin.flush()
        return json.loads(self._line())


# ---- our own ----


class Ours:
    def __init__(self, model, slots: int = 64, **options):
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


def row(name: str, who: str, got: dict[str, float]) -> str:
    rate, cpu = got["tokens"] / got["wall"], got["tokens"] / got["cpu"]
    return f"| {name} | {who} | {rate:.0f} | {cpu:.1f} |"


def ragged(ours: Ours, vocab: int, slots: int = 64, count: int = 256) -> None:
    """Lengths as they fall (geometric, mean 24, at most 64), continuous against static."""
    lengths = np.clip(np.random.default_rng(1).geometric(1 / 24, count), 1, NEW).tolist()
    prompts = prompts_of(count, vocab, 1)
    got = ours(prompts, 1, lengths)
    print(row(f"ragged, {count} on {slots}", "ours", got), flush=True)
    waste = got["decoded_slots"] / got["useful_tokens"]
    static = {"tokens": sum(lengths), "wall": 0.0, "cpu": 0.0}
    for first in range(0, count, slots):
        part = lengths[first : first + slots]
        one = ours(prompts[first : first + slots], 1, [max(part)] * len(part))
        static["wall"] += one["wall"]
        static["cpu"] += one["cpu"]
    print(row("the same, static batches", "ours, emulated", static))
    print(
        f"\nragged: decoded slots / useful tokens {waste:.3f}, {got['decode_calls']} decode calls"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", choices=["transformers", "vllm"])
    parser.add_argument("--folder")
    parser.add_argument("--peer-python", help="an interpreter with torch and transformers")
    parser.add_argument("--vllm-python", help="an interpreter with vLLM for CPUs")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--int8", action="store_true", help="also with int8 weights")
    parser.add_argument("--ragged", action="store_true", help="also ragged lengths")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    if options.serve:
        samplers = {"transformers": transformers_sampler, "vllm": vllm_sampler}
        return serve(samplers[options.serve], options.folder)

    import jax

    from jaxrl_llm.checkpoint.huggingface import save_folder
    from jaxrl_llm.checkpoint.pretrained import load

    model = load(options.model)
    vocab = model.config.vocab_size
    flops, bandwidth = machine()
    cores = len(os.sched_getaffinity(0))
    rates = f"GEMM {flops / 1e9:.0f} GFLOP/s, read {bandwidth / 1e9:.1f} GB/s"
    print(f"jax {jax.__version__}, {cores} cores: {rates}\n")
    print("| case | sampler | tok/s | tok/CPU-s |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save_folder(pathlib.Path(folder), model.params, model.config, model.tokenizer)
        pythons = {"transformers": options.peer_python, "vllm": options.vllm_python}
        peers = [Peer(name, python, folder) for name, python in pythons.items() if python]
        peers = [peer for peer in peers if peer.ready]
        ours = {"ours": Ours(model)}
        if options.int8:
            ours["ours, int8"] = Ours(model, weights="int8")
        for case in options.cases:
            count, n = CASES[case]
            prompts = prompts_of(count, vocab)
            for sampler in ours.values():
                sampler(prompts, n, [2] * count)  # compiles
            for _ in range(options.repeats):
                for who, sampler in [*ours.items(), *((peer.name, peer) for peer in peers)]:
                    got = sampler(prompts, n)
                    print(row(case, who, got), flush=True)
                    if who == "ours" and case == "64 distinct":
                        share = roofline(model.config, got, flops, bandwidth)
        if options.ragged:
            ragged(ours["ours"], vocab)
        if "64 distinct" in options.cases:
            print(f"\nbatch 64: {share:.0%} of the roofline of its decode steps (prefill included)")
        for peer in peers:
            peer.process.stdin.close()
            peer.process.wait()


def roofline(config, got: dict[str, float], flops: float, bandwidth: float) -> float:
    """The share of a step's roofline at 64 rows that whole runs reached."""
    context = PROMPT + NEW / 2
    work = 64 * config.flops_per_token(context)
    size = 4 * config.num_params + 64 * context * config.kv_bytes_per_token(4)
    step = max(work / flops, size / bandwidth)
    return step * got["decode_steps"] / got["wall"]


if __name__ == "__main__":
    main()
