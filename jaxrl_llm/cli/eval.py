# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Judge a model by the held-out data of a config.

    python -m jaxrl_llm.cli.eval runs/sft/export --config=sft.py
    python -m jaxrl_llm.cli.eval runs/dpo/export --config=dpo.py
    python -m jaxrl_llm.cli.eval runs/grpo/export --config=grpo.py --samples=8 --pass-at=1,4,8

Fine-tuning configs give loss and perplexity; preference configs accuracy and margin against the
config's own model; reward configs accuracy and calibration of an exported reward model; configs of
reinforcement learning reward, its parts and pass@k. Any field of the config can be set as well, and
--json=FILE writes the numbers.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from jaxrl_llm.errors import ConfigError, UserError


def main(args: Sequence[str] | None = None) -> int:
    """Print one metric a line; returns the exit code."""
    try:
        return _run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(args: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.cli.eval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a model, such as runs/sft/export")
    parser.add_argument("--config", required=True, help="whose held-out data are used")
    parser.add_argument("--samples", type=int, default=1, help="completions a prompt; 1 is greedy")
    parser.add_argument("--pass-at", default="", help="k of pass@k, such as 1,4,8")
    parser.add_argument("--correct", help="the reward that tells right completions (> 0.5)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--devices", help="cpu, cpu:8, cuda or tpu")
    parser.add_argument("--json", help="also write the numbers to this file")
    options, overrides = parser.parse_known_args(args)
    ks = [int(k) for k in options.pass_at.split(",") if k.strip().isdecimal()]
    if options.pass_at and len(ks) != len(options.pass_at.split(",")):
        raise ConfigError("--pass-at is not a list of numbers", got=options.pass_at)
    if options.samples < 1 or min(ks, default=1) < 1:
        raise ConfigError("--samples and --pass-at are numbers from 1 on")
    target = pathlib.Path(options.json).expanduser() if options.json else None
    if target is not None and (target.is_dir() or not target.parent.is_dir()):
        raise ConfigError("--json can't be written", got=target, expected="a file in a folder")

    from jaxrl_llm import config as configs
    from jaxrl_llm.trainers.devices import choose_devices
    from jaxrl_llm.trainers.evaluate_model import evaluate_model
    from jaxrl_llm.trainers.runs import kind_of_run

    choose_devices(options.devices)
    path = configs.find_config(options.config)
    _, config = configs.load_config(path)
    kind_of_run(config, path)
    config = configs.apply_overrides(config, overrides)
    metrics = evaluate_model(
        config,
        options.model,
        samples=options.samples,
        ks=ks,
        correct=options.correct,
        seed=options.seed,
    )
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value:.6g}")
    if target is not None:
        try:
            target.write_text(json.dumps(metrics, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                "--json can't be written", got=f"{target}: {error.strerror}"
            ) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
