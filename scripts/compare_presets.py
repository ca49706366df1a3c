# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Train the quickstart's task with several algorithms and draw their curves in one picture.

    .venv/bin/pip install matplotlib
    .venv/bin/python scripts/compare_presets.py --presets grpo dr_grpo rloo gspo cispo --steps 12
    .venv/bin/python scripts/compare_presets.py --presets grpo rloo gspo ppo=ppo.py dapo=dapo.py

NAME=CONFIG runs a config of its own; a NAME alone is a row of the algorithms' table in --config.
Every run has the same seed, so the same prompts in the same order. Runs that exist are continued or
kept. Writes OUT/curves.png and prints held-out accuracy before and after as a table.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

from jaxrl_llm.monitor.writers import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--presets", nargs="+", default=["grpo", "dr_grpo", "rloo", "gspo", "cispo"]
    )
    parser.add_argument("--config", default="grpo.py")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--eval-every", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/compare"))
    args = parser.parse_args()

    rows = {}
    for preset in args.presets:
        name, _, config = preset.partition("=")
        run_dir = args.out / name
        # The row's own reduction and statistics, not those that the config sets for grpo.
        row = [f"--algo.name={name}", "--algo.reduction=None", "--algo.eps=None"]
        command = [
            sys.executable, "-m", "jaxrl_llm.train", f"--config={config or args.config}",
            *([] if config else row),
            f"--train.steps={args.steps}", f"--train.eval_every={args.eval_every}",
            f"--train.checkpoint_every={args.steps}", f"--train.seed={args.seed}",
            f"--run-dir={run_dir}",
        ]  # fmt: skip
        print("$", *command[1:], flush=True)
        subprocess.run(command, check=True)
        rows[name] = read_metrics(run_dir)
    draw(rows, args.out / "curves.png")
    for name, metrics in rows.items():
        accuracy = [row["eval/accuracy"] for row in metrics if "eval/accuracy" in row]
        print(f"{name:16} {accuracy[0]:6.1%} → {accuracy[-1]:6.1%}")
    print(args.out / "curves.png")


def draw(rows: dict[str, list[dict]], path: pathlib.Path) -> None:
    """Held-out accuracy and training reward by step, a colour for each algorithm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    panels = (("eval/accuracy", "held-out accuracy, greedy"), ("reward", "training reward"))
    for axis, (metric, title) in zip(axes, panels, strict=True):
        # Thick lines first: rows that agree stay visible below each other.
        for width, (name, metrics) in zip(range(2 * len(rows), 0, -2), rows.items(), strict=True):
            points = [(row["step"], row[metric]) for row in metrics if metric in row]
            axis.plot(*zip(*points, strict=True), lw=width, marker="o", label=name)
        axis.set(title=title, xlabel="step", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].legend(loc="lower right")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
