# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A whole GRPO step beside TRL's, interleaved in one run, compilation and first step apart.

    python scripts/bench_grpo.py --peer-python=/path/to/python-with-trl-1.16

SmolLM2-135M in float32: 8 prompts of 46 tokens × 8 samples of at most 64 new tokens, no reference,
one optimiser update a step. Both sample until their own end token. The peer is a process of its own
that waits while we work, and the other way round; peak memory is each process's resident memory,
ours with our caches, the peer's with its own. CPU-seconds are the process's, children included.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

PROMPTS, SAMPLES, PROMPT, NEW = 8, 8, 46, 64


def words(count: int, seed: int) -> list[str]:
    """Prompts of single-token words; `fit` cuts them to length by the tokenizer."""
    import random

    draw = random.Random(seed)
    known = ["time", "year", "people", "way", "day", "man", "thing", "life", "child", "world"]
    return [" ".join(draw.choice(known) for _ in range(3 * PROMPT)) for _ in range(count)]


def rewarded(text: str) -> float:
    """Any reward that differs within groups."""
    return text.count("e") / max(len(text), 1)


def usage() -> tuple[float, float]:
    """CPU seconds so far, and peak resident memory in GiB."""
    own, children = (resource.getrusage(who) for who in (0, resource.RUSAGE_CHILDREN))
    cpu = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return cpu, own.ru_maxrss / 2**20


def serve_trl(folder: str, steps: int) -> None:
    """TRL's own trainer; after each step it says its seconds and waits for a line."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = [
        tokenizer.decode(tokenizer(text)["input_ids"][:PROMPT]) for text in words(64, seed=0)
    ]
    start = {}

    class Turns(TrainerCallback):
        def on_step_begin(self, *_, **__):
            if not start:
                print("ready", flush=True)
            sys.stdin.readline()
            start.update(wall=time.perf_counter(), cpu=usage()[0])

        def on_step_end(self, *_, **__):
            cpu, peak = usage()
            print(time.perf_counter() - start["wall"], cpu - start["cpu"], peak, flush=True)

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW,
        max_steps=steps,
        learning_rate=1e-6,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": torch.float32},
    )
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=lambda completions, **_: [rewarded(text) for text in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    trainer.train()


def serve_ours(folder: str, steps: int) -> None:
    """Our own step, with the settings of `configs/grpo.py` where they matter."""
    from jaxrl_llm.checkpoint.pretrained import load
    from jaxrl_llm.data.curriculum import CurriculumConfig, make_stream
    from jaxrl_llm.sharding.mesh import MeshConfig
    from jaxrl_llm.text.chat import encode_prompt
    from jaxrl_llm.trainers.build import build_trainer
    from jaxrl_llm.trainers.settings import RLConfig, SamplerConfig, TrainConfig

    del folder
    model = load("smollm2-135m-instruct")
    tokenizer = model.tokenizer
    prompts = [tokenizer.decode(tokenizer.encode(text)[:PROMPT]) for text in words(64, seed=0)]
    rows = [{"id": str(index), "prompt": text} for index, text in enumerate(prompts)]

    class Stored:
        def load(self):
            return rows, []

    config = RLConfig(
        task=Stored(),
        rewards={"letters": lambda rollouts: [rewarded(r.completion) for r in rollouts]},
        sampler=SamplerConfig(
            group_size=SAMPLES, max_prompt_tokens=PROMPT + 8, max_new_tokens=NEW, slots=64
        ),
        train=TrainConfig(steps=steps, prompts_per_step=PROMPTS, reward_workers=0),
        mesh=MeshConfig(data=1),
    )
    stream = make_stream(
        rows,
        lambda text: encode_prompt(text, tokenizer),
        CurriculumConfig(),
        seed=1,
        batch=PROMPTS,
    )
    trainer = build_trainer(config, model.config, model.params, tokenizer, 1, stream)
    del model
    print("ready", flush=True)
    for _ in range(steps):
        sys.stdin.readline()
        wall, cpu = time.perf_counter(), usage()[0]
        metrics, _ = trainer.train_step()
        spent, (after, peak) = time.perf_counter() - wall, usage()
        parts = {k.removeprefix("time/"): f"{v:.1f}" for k, v in metrics.items() if "time/" in k}
        print(parts, metrics["completions/mean_length"], file=sys.stderr, flush=True)
        print(spent, after - cpu, peak, flush=True)


class Side:
    """A trainer in a process of its own that makes a step when it is told to."""

    def __init__(self, name: str, python: str, folder: str, steps: int):
        self.name = name
        command = [python, __file__, "--serve", name, "--folder", folder, "--steps", str(steps)]
        env = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.rows: list[list[float]] = []
        self._line("ready")

    def _line(self, wanted: str = "") -> str:
        for line in self.process.stdout:
            if line.strip() == wanted or (not wanted and line[:1].isdigit()):
                return line
        raise SystemExit(f"{self.name} ended")

    def step(self) -> list[float]:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.rows.append([float(word) for word in self._line().split()])
        return self.rows[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", choices=["ours", "trl"])
    parser.add_argument("--folder", default="")
    parser.add_argument("--peer-python", help="an interpreter with trl==1.16.*")
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted")
    args = parser.parse_args()
    if args.serve:
        return {"ours": serve_ours, "trl": serve_trl}[args.serve](args.folder, args.steps)

    from jaxrl_llm.checkpoint.huggingface import save_folder
    from jaxrl_llm.checkpoint.pretrained import load

    with tempfile.TemporaryDirectory() as folder:
        model = load("smollm2-135m-instruct")
        save_folder(pathlib.Path(folder) / "hf", model.params, model.config, model.tokenizer)
        del model
        sides = [Side("ours", sys.executable, f"{folder}/hf", args.steps)]
        if args.peer_python:
            sides.append(Side("trl", args.peer_python, f"{folder}/hf", args.steps))
        print("| step | trainer | seconds | CPU-seconds | peak GiB |\n|---|---|---|---|---|")
        for step in range(args.steps):
            for side in sides:
                wall, cpu, peak = side.step()
                note = " (compiles)" if step == 0 and side.name == "ours" else ""
                row = f"| {step + 1}{note} | {side.name} | {wall:.1f} | {cpu:.1f} | {peak:.2f} |"
                print(row, flush=True)
        medians = {
            side.name: [statistics.median(column) for column in zip(*side.rows[1:], strict=True)]
            for side in sides
        }
        for name, (wall, cpu, peak) in medians.items():
            print(f"{name}: {wall:.1f} s, {cpu:.1f} CPU-seconds a step, peak {peak:.2f} GiB")
        if "trl" in medians:
            ours, theirs = medians["ours"], medians["trl"]
            print(
                f"ours / TRL: {ours[0] / theirs[0]:.2f} in time, {ours[1] / theirs[1]:.2f} in CPU"
            )
        for side in sides:
            side.process.stdin.close()
            side.process.wait(60)


if __name__ == "__main__":
    main()
