# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The parameters alone out of a run's checkpoints, onto whatever devices are here."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_llm.errors import RunDirectoryError
from jaxrl_llm.models.transformer import Params


def saved_steps(run: str | pathlib.Path) -> list[int]:
    """Steps of a run that have a whole checkpoint, in order.

    Raises:
        RunDirectoryError: the directory is not there or holds no checkpoint.
    """
    folder = pathlib.Path(run) / "checkpoints"
    found = sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())
    if not found:
        raise RunDirectoryError(
            "the run has no checkpoint",
            got=run,
            hint="the directory that training named, such as runs/grpo",
        )
    return found


def restore_params(run: str | pathlib.Path, step: int, abstract: Params) -> Params:
    """Parameters of one step; optimiser state is not read. Shardings of the machine that wrote them
    don't matter.

    Args:
        abstract: shapes, dtypes and, where set, shardings; without one a leaf goes to the first
            device.

    Raises:
        RunDirectoryError: the step is not there, damaged, or of another model.
    """
    steps = saved_steps(run)
    if step not in steps:
        raise RunDirectoryError(
            f"the run has no checkpoint of step {step}",
            got=run,
            expected="one of " + ", ".join(map(str, steps)),
        )
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or first), abstract
    )
    wanted: dict[str, Any] = {"params": placed}
    path = pathlib.Path(run).absolute() / "checkpoints" / str(step) / "arrays"
    try:
        with ocp.PyTreeCheckpointer() as reader:
            restored = reader.restore(
                path,
                args=ocp.args.PyTreeRestore(
                    item=wanted,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                    partial_restore=True,
                ),
            )
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise RunDirectoryError(
            f"the parameters of step {step} can't be restored",
            got=str(error).strip().splitlines()[0],
            hint="another step: " + ", ".join(map(str, steps)),
        ) from error
    return restored["params"]


def run_settings(run: str | pathlib.Path) -> dict[str, Any]:
    """The resolved config of a run, as JSON values.

    Raises:
        RunDirectoryError: no run directory.
    """
    path = pathlib.Path(run) / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            "this is not a run directory",
            got=run,
            expected="a directory with config.json and checkpoints/",
        ) from error
