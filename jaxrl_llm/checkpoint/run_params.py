# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What was trained, out of a run's checkpoints, onto whatever device is here."""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_llm.checkpoint.manager import is_step
from jaxrl_llm.errors import RunDirectoryError


def saved_steps(run: str | pathlib.Path) -> list[int]:
    """Steps of a run that have a whole checkpoint, in order.

    Raises:
        RunDirectoryError: the directory is not there or holds no checkpoint.
    """
    folder = pathlib.Path(run) / "checkpoints"
    found = sorted(int(path.name) for path in folder.glob("*") if is_step(path))
    if not found:
        raise RunDirectoryError(
            "the run has no checkpoint",
            got=run,
            hint="the directory that training named, such as runs/grpo",
        )
    return found


def restore_trained(run: str | pathlib.Path, step: int) -> Any:
    """What was trained, as of one step, on the first device: parameters, an adapter, or a decoder
    and a score head; of the policy, where a critic was trained beside it. Optimiser state is not
    read. Shardings of the machine that wrote them don't matter.

    Raises:
        RunDirectoryError: the step is not there, or damaged.
    """
    steps = saved_steps(run)
    if step not in steps:
        raise RunDirectoryError(
            f"the run has no checkpoint of step {step}",
            got=run,
            expected="one of " + ", ".join(map(str, steps)),
        )
    path = pathlib.Path(run).absolute() / "checkpoints" / str(step) / "arrays"
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    try:
        with ocp.PyTreeCheckpointer() as reader, _quiet():
            tree = reader.metadata(path).item_metadata.tree
            # The policy of two that learn, or what is trained beside a reference that moves.
            inside = next((name for name in ("policy", "train") if name in tree), None)
            held = tree[inside] if inside else tree
            placed = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=first), held["params"]
            )
            wanted: dict[str, Any] = {"params": placed}
            wanted = {inside: wanted} if inside else wanted
            restored = reader.restore(
                path,
                args=ocp.args.PyTreeRestore(
                    item=wanted,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                    partial_restore=True,
                ),
            )
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise RunDirectoryError(
            f"the parameters of step {step} can't be restored",
            got=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            hint="another step: " + ", ".join(map(str, steps)),
        ) from error
    return (restored[inside] if inside else restored)["params"]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Orbax's warning that a manager's checkpoint lacks what a lone one has."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def run_settings(run: str | pathlib.Path) -> dict[str, Any]:
    """The resolved config of a run, as JSON values; it names a model and the dtype of its weights.

    Raises:
        RunDirectoryError: no run directory, or its config.json is not one that training wrote.
    """
    path = pathlib.Path(run) / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(
            "this is not a run directory",
            got=run,
            expected="a directory with config.json and checkpoints/",
        ) from error
    model = settings.get("model") if isinstance(settings, dict) else None
    if (
        not isinstance(model, dict)
        or not isinstance(model.get("path"), str)
        or model.get("dtype") not in ("float32", "bfloat16", "float16")
        or not isinstance(settings.get("rows") or {}, dict)
    ):
        raise RunDirectoryError(
            "the config.json of the run is not one that training wrote",
            got=path,
            expected="an object with model.path and model.dtype",
        )
    return settings
