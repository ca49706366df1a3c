# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: Orbax, atomic, written in the background, restorable onto another mesh."""

from __future__ import annotations

import contextlib
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_llm.errors import RunDirectoryError

# Orbax's own file, and the two items of `CheckpointManager.save`.
_PARTS = ("_CHECKPOINT_METADATA", "arrays", "host")


def _meet(*, key: str, timeout_ms: int) -> None:
    """Orbax's barrier of all processes, where a thread that has failed does not wait: it would for
    20 minutes, as the others wait elsewhere for what it can't do."""
    failed = sys.exception()
    if failed is not None:
        raise failed
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def is_step(path: pathlib.Path) -> bool:
    """Whether a folder is a step of a run, whole or damaged: others may have numbers for names."""
    named = re.fullmatch("0|[1-9][0-9]{0,17}", path.name)
    return named is not None and any((path / part).exists() for part in _PARTS)


class CheckpointManager:
    """Saves and restores (arrays, host state) pairs under `directory`, one Orbax step each.

    Args:
        directory: created if missing.
        keep: how many of the latest steps stay on disk.

    Raises:
        RunDirectoryError: something else lies where a step would. Orbax takes it for one: it would
            save no earlier step, and remove it as an old one.
    """

    def __init__(self, directory: pathlib.Path, *, keep: int = 2):
        stranger = next(
            (p for p in directory.glob("*") if p.name.isdecimal() and not is_step(p)), None
        )
        if stranger is not None:
            raise RunDirectoryError(
                "among the checkpoints of the run lies what is none",
                got=stranger,
                hint="move it away",
            )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(barrier_sync_fn=_meet),
        )
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, arrays: Any, host_state: dict[str, Any]) -> None:
        """Copies the arrays and returns; the step appears on disk whole or not at all.

        Args:
            arrays: a pytree of arrays: parameters, optimiser state.
            host_state: JSON values: data position, versions, timers.

        Raises:
            RunDirectoryError: this step, or the one before, could not be written.
        """
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host_state)
        )
        with self._told():
            self._manager.save(step, args=items)

    def restore(self, step: int, abstract_arrays: Any) -> tuple[Any, dict[str, Any]]:
        """The arrays of a step, placed as `abstract_arrays` says, and its host state."""
        items = ocp.args.Composite(
            arrays=ocp.args.StandardRestore(abstract_arrays), host=ocp.args.JsonRestore()
        )
        try:
            restored = self._manager.restore(step, args=items)
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise RunDirectoryError(
                f"the checkpoint of step {step} can't be restored",
                got=str(error).splitlines()[0],
                hint=self._way_on(step),
            ) from error
        return restored["arrays"], restored["host"]

    def _way_on(self, damaged: int) -> str:
        older = [step for step in self._manager.all_steps() if step != damaged]
        if not older:
            return "--fresh starts another run"
        folder = pathlib.Path(self._manager.directory) / str(damaged)
        return f"move {folder} away to continue from step {max(older)}"

    def wait(self) -> None:
        """Until everything saved so far is on disk; raises as `save`."""
        with self._told():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            if isinstance(error.__cause__, jax.errors.JaxRuntimeError):
                # Something of another process, of which `Watchdog` knows.
                raise error.__cause__ from None
            lines = str(error).splitlines() or [type(error).__name__]
            raise RunDirectoryError(
                "a checkpoint can't be written",
                got=lines[0][:300],
                hint=f"room and rights in {self._manager.directory}; the same command continues",
            ) from error

    def close(self) -> None:
        self._manager.close()


def abstract_like(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a pytree of arrays, as `restore` wants them."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
        tree,
    )
