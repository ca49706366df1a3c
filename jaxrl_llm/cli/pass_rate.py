# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Measure how often a model passes each training prompt of a config.

    python -m jaxrl_llm.cli.pass_rate --config=grpo.py rates.jsonl
    python -m jaxrl_llm.train --config=grpo.py --curriculum.enabled=True \\
        --curriculum.table=rates.jsonl

Each line of the file is {"id": …, "passes": …, "n": …, "mean_reward": …}. The same command goes on
after any stop. Any field of the config can be set as well: --curriculum.pass_at=0.9 and
--curriculum.pass_part say what passes.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from jaxrl_llm.errors import ConfigError, UserError


def main(args: Sequence[str] | None = None) -> int:
    """Write the table and print its histogram; returns the exit code."""
    try:
        return _run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130


def _run(args: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.cli.pass_rate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("out", help="the table, such as rates.jsonl")
    parser.add_argument("--config", required=True, help="whose model, prompts and rewards are used")
    parser.add_argument("--samples", type=int, default=16, help="completions of each prompt")
    parser.add_argument("--devices", help="cpu, cpu:8, cuda or tpu")
    options, overrides = parser.parse_known_args(args)

    from jaxrl_llm import config as configs
    from jaxrl_llm.data.pass_rates import histogram
    from jaxrl_llm.monitor.progress import emit
    from jaxrl_llm.trainers.devices import choose_devices
    from jaxrl_llm.trainers.pass_rate import measure_pass_rates, with_passes
    from jaxrl_llm.trainers.settings import RLConfig

    choose_devices(options.devices)
    path = configs.find_config(options.config)
    _, config = configs.load_config(path)
    if not isinstance(config, RLConfig):
        raise ConfigError(
            "only prompts with rewards have pass rates",
            got=f"{type(config).__name__} from {path}",
            expected="RLConfig",
        )
    config = configs.apply_overrides(with_passes(config), overrides)
    rows = measure_pass_rates(
        config,
        pathlib.Path(options.out),
        samples=options.samples,
        show=emit,
    )
    emit(histogram(rows))
    emit(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
