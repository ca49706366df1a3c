# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Write the model of a run as a HF folder: `python -m jaxrl_llm.cli.export runs/grpo@100 out`.

Without @step the newest checkpoint is taken. One device is enough, however many trained it.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence

from jaxrl_llm.checkpoint.run_export import export_run
from jaxrl_llm.errors import ConfigError, UserError


def main(args: Sequence[str] | None = None) -> int:
    """Export one checkpoint; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.cli.export", description=__doc__)
    parser.add_argument("run", help="run directory, or run directory@step")
    parser.add_argument("out", help="the folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--max-shard-gb", help="size of a file of weights (5)")
    parser.add_argument(
        "--adapter", action="store_true", help="the adapter alone, as PEFT reads it; else merged in"
    )
    given = parser.parse_args(args)
    run, at, step = given.run.rpartition("@")
    if not at or not re.fullmatch("[0-9]{1,18}", step):
        run, step = given.run, None
    try:
        folder, taken = export_run(
            run,
            given.out,
            step=None if step is None else int(step),
            dtype=given.dtype,
            max_shard_bytes=_bytes(given.max_shard_gb),
            adapter=given.adapter,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    what = "adapter" if given.adapter else "model"
    print(f"{folder}: the {what} of {run} at step {taken}")
    return 0


def _bytes(gigabytes: str | None) -> float | None:
    try:
        size = None if gigabytes is None else float(gigabytes)
    except ValueError:
        size = math.nan
    if size is not None and not 0 < size < math.inf:
        raise ConfigError(
            "bad --max-shard-gb", got=repr(gigabytes)[:80], expected="a finite number > 0"
        )
    return None if size is None else size * 1e9


if __name__ == "__main__":
    sys.exit(main())
