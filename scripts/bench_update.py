# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The update's three layouts against each other: padded, packed and shared prompts.

    .venv/bin/python scripts/bench_update.py
    .venv/bin/python scripts/bench_update.py --model=tiny-random --repeats=1

Two batches of the model's own shape with random weights: (a) ragged completions, mean length 0.4 of
the longest, one sample a prompt; (b) eight samples a prompt, prompts as long as completions. Every
layout takes the same gradient (checked here); they are timed in turn, compilation apart, and the
table gives the median of wall seconds, the CPU-seconds, and ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np
import optax

from jaxrl_llm.algorithms.presets import AlgoConfig, resolve
from jaxrl_llm.checkpoint.pretrained import peek
from jaxrl_llm.models.transformer import init_params
from jaxrl_llm.trainers.batching import count_targets, pad_rollouts, plan_rows
from jaxrl_llm.trainers.policy import make_train_functions
from jaxrl_llm.types import Batch, Prompt, Reward, Rollout


def make_samples(rng, vocabulary: int, prompts: int, group: int, prompt: int, sizes) -> Batch:
    rollouts = []
    for index in range(prompts):
        shared = Prompt(str(index), tuple(rng.integers(0, vocabulary, prompt).tolist()), "")
        for sample in range(group):
            count = int(sizes[index * group + sample])
            tokens = rng.integers(0, vocabulary, count).astype(np.int32)
            none = np.zeros(count, np.float32)
            rollouts.append(
                Rollout(shared, sample, tokens, none - 5, none == 0, tokens, "stop", "", Reward(1))
            )
    batch = pad_rollouts(rollouts, longest=prompt + int(max(sizes)))
    return batch.replace(advantages=rng.normal(size=batch.mask.shape).astype(np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--longest", type=int, default=128, help="tokens of the longest sample")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    config, _ = peek(args.model)
    params = init_params(config, jax.random.key(0))
    algorithm = resolve(AlgoConfig(name="grpo"), group_size=8, max_tokens=args.longest)
    functions = make_train_functions(
        config, algorithm.loss, optax.sgd(0.0), temperature=1.0, remat=False
    )

    def gradient(samples: Batch, layout: str):
        plan = plan_rows(
            samples,
            layout=layout,
            row_tokens=8 * args.longest,
            micro_tokens=8 * args.longest,
            longest=samples.tokens.shape[1],
        )
        rows = plan.pack(samples)
        counts = algorithm.counts(rows.mask, rows.segment_ids)
        targets = count_targets(rows.mask)
        grads = functions.state.zeros(params)
        for micro in plan.micro_batches(rows):
            grads, _ = functions.accumulate(
                grads, params, None, micro, counts, None, None, {}, targets
            )
        return jax.block_until_ready(grads), rows.tokens.size

    def compare(title: str, samples: Batch, layouts: tuple[str, str]) -> None:
        walls, cpus = {name: [] for name in layouts}, {name: [] for name in layouts}
        first = {name: gradient(samples, name) for name in layouts}
        norms = {name: float(functions.state.norm(grads)) for name, (grads, _) in first.items()}
        places = {name: size for name, (_, size) in first.items()}
        del first
        for _ in range(args.repeats):
            for name in layouts:
                wall, cpu = time.perf_counter(), time.process_time()
                gradient(samples, name)
                walls[name].append(time.perf_counter() - wall)
                cpus[name].append(time.process_time() - cpu)
        slow, fast = layouts
        print(f"\n{title}: {int((samples.segment_ids > 0).sum())} tokens")
        print("| layout | token places | wall s | CPU s | gradient norm |\n|---|---|---|---|---|")
        for name in layouts:
            wall, cpu = statistics.median(walls[name]), statistics.median(cpus[name])
            print(f"| {name} | {places[name]} | {wall:.2f} | {cpu:.2f} | {norms[name]:.6f} |")
        ratio = [statistics.median(x[slow]) / statistics.median(x[fast]) for x in (walls, cpus)]
        print(
            f"{fast} against {slow}: {ratio[0]:.2f}× in wall time, {ratio[1]:.2f}× in CPU-seconds"
        )
        assert np.isclose(norms[slow], norms[fast], rtol=1e-4), norms

    rng = np.random.default_rng(0)
    longest, prompt = args.longest, 8
    # Lengths with mean 0.4 of the longest, one of them the longest.
    shape = np.clip(rng.gamma(4.0, 0.1, 16), 0.1, 1.0)
    shape[0] = 1.0
    sizes = np.maximum((shape * (longest - prompt)).astype(int), 1)
    mean = float((sizes + prompt).mean() / longest)
    ragged = make_samples(rng, config.vocab_size, 16, 1, prompt, sizes)
    compare(f"ragged, mean length {mean:.2f} of the longest", ragged, ("padded", "packed"))
    half = longest // 2
    groups = make_samples(rng, config.vocab_size, 2, 8, half, [half] * 16)
    compare(f"8 samples a prompt, {half} + {half} tokens", groups, ("packed", "shared_prefix"))


if __name__ == "__main__":
    main()
