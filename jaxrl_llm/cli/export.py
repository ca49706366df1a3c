# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Write the model of a run as a HF folder: `python -m jaxrl_llm.cli.export runs/grpo@100 out`.

Without @step the newest checkpoint is taken. One device is enough, however many trained it.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.checkpoint.pretrained import peek
from jaxrl_llm.checkpoint.run_params import restore_params, run_settings, saved_steps
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.transformer import abstract_params


def export_run(
    run: str | pathlib.Path,
    out: str | pathlib.Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int | float = 5e9,
) -> tuple[pathlib.Path, int]:
    """Write the parameters of one step of a run as a HF folder with its tokenizer.

    Args:
        step: of the checkpoint; None: the newest.
        dtype: of the written weights; None: as trained.

    Returns:
        the folder and the step.

    Raises:
        RunDirectoryError, ModelError: no such run or step, or the folder can't be written.
    """
    settings = run_settings(run)["model"]
    step = saved_steps(run)[-1] if step is None else step
    config, tokenizer = peek(settings["path"])
    abstract = abstract_params(config, jnp.dtype(settings["dtype"]))
    params = restore_params(run, step, abstract)
    if dtype is not None:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    folder = save_folder(out, params, config, tokenizer, max_shard_bytes=max_shard_bytes)
    return folder, step


def main(args: Sequence[str] | None = None) -> int:
    """Export one checkpoint; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.cli.export", description=__doc__)
    parser.add_argument("run", help="run directory, or run directory@step")
    parser.add_argument("out", help="the folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="size of a file of weights")
    given = parser.parse_args(args)
    run, at, step = given.run.rpartition("@")
    if not at or not step.isdigit():
        run, step = given.run, None
    try:
        folder, taken = export_run(
            run,
            given.out,
            step=None if step is None else int(step),
            dtype=given.dtype,
            max_shard_bytes=given.max_shard_gb * 1e9,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{folder}: the model of {run} at step {taken}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
