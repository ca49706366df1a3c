# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Will it fit, how long will it take, what will it cost: before anything is rented.

    python -m jaxrl_llm.cli.plan --config=grpo.py --topology=v5p:4x4x4
    python -m jaxrl_llm.cli.plan --config=grpo.py --topology=h100:8 --search

Compiles the run's own programs for the topology in a process of its own (TPUs: the extra `tpu`; no
TPU is needed) and prints memory, time and money. Any field of the config can be set as well; a
model folder with `config.json` alone is enough.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from jaxrl_llm.errors import ConfigError, UserError


def main(args: Sequence[str] | None = None) -> int:
    """Print the plan; returns the exit code."""
    try:
        return _run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.cli.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="the run to plan")
    parser.add_argument("--topology", required=True, help="v5p:4x4x4, v5e:4x4, h100:8, cpu:8 …")
    parser.add_argument("--search", action="store_true", help="try the meshes that the chips allow")
    parser.add_argument("--estimate", action="store_true", help="compile nothing")
    parser.add_argument("--sampler-tensor", type=int, help="of sampler.mesh, over all devices")
    parser.add_argument(
        "--price", type=float, help="USD for a chip and hour, instead of the list's"
    )
    parser.add_argument(
        "--retry", type=float, default=0.2, help="of the money, for second attempts"
    )
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for the compiler")
    return parser


def _check_numbers(options: argparse.Namespace) -> None:
    for name, least in (("price", 0.0), ("retry", 0.0), ("timeout", 1.0)):
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(
                f"--{name} is out of range", got=value, expected=f"a number, at least {least:g}"
            )


def _run(args: Sequence[str] | None) -> int:
    options, overrides = _parser().parse_known_args(args)
    _check_numbers(options)
    from jaxrl_llm import config as configs
    from jaxrl_llm.monitor.progress import emit
    from jaxrl_llm.plan.hardware import parse_topology
    from jaxrl_llm.plan.plan import Options, find_meshes, make_plan, plan_best
    from jaxrl_llm.plan.table import paste, plan_text, search_text
    from jaxrl_llm.plan.workload import read_model

    topology = parse_topology(options.topology)
    _, config = configs.load_config(configs.find_config(options.config))
    config = configs.apply_overrides(config, overrides)
    model = read_model(config.model.path)
    wanted = Options(
        sampler_tensor=options.sampler_tensor,
        compiles=not options.estimate,
        timeout=options.timeout,
        price=options.price,
        retry=options.retry,
    )
    if not options.search:
        emit(plan_text(make_plan(config, model, topology, wanted)))
        return 0
    found = find_meshes(config, model, topology, wanted)
    emit(search_text(found, topology))
    for plan in plan_best(config, model, topology, wanted, found):
        emit("\n" + plan_text(plan))
    emit("\npaste      " + paste(plan, config.mesh))
    return 0


if __name__ == "__main__":
    sys.exit(main())
