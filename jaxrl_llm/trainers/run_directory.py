# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A run's directory: one config, one seed, one writer at a time, never overwritten by another run.

config.json  command.txt  versions.json  seed.txt       what runs
metrics.jsonl  samples.jsonl  samples.txt  tensorboard/  report.html   what a person looks at
checkpoints/  export/                                    what continues and what is used afterwards
DONE | FAILED.txt  result.json                           how it ended
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl_llm.errors import RunDirectoryError

_PACKAGES = ("jaxrl_llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class RunDirectory:
    """An opened and locked run directory.

    Args:
        path: where; created if missing.
        config: the resolved config as JSON values; another config than the stored one stops here.
        diff: tells the differences of two such configs as lines.
        seed: the config's seed, or None: then one is drawn once and kept in the directory.
        fresh: move an existing run aside (to `<path>.1`, `.2`, …) and start another.

    Raises:
        RunDirectoryError: not writable, in use by another process, or holding another config.
    """

    def __init__(
        self,
        path: pathlib.Path,
        config: dict[str, Any],
        *,
        diff: Callable[[dict, dict], Sequence[str]],
        seed: int | None,
        fresh: bool = False,
    ):
        self.path = path
        self.moved_to: pathlib.Path | None = None
        if fresh and path.exists():
            self._check_not_in_use()
            self.moved_to = _move_aside(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
        except OSError as error:
            raise RunDirectoryError(
                "the run directory can't be written",
                got=f"{path} ({error.strerror})",
                hint="--run-dir=… names another place",
            ) from error
        self._take_lock(self._lock)
        self._keep_config(config, diff)
        self.seed = self._keep_seed(seed)
        self.failed.unlink(missing_ok=True)

    @property
    def done(self) -> pathlib.Path:
        return self.path / "DONE"

    @property
    def failed(self) -> pathlib.Path:
        return self.path / "FAILED.txt"

    def write_text(self, name: str, text: str) -> pathlib.Path:
        """Write a small file whole or not at all."""
        return write_atomically(self.path / name, text)

    def write_result(self, result: dict[str, Any]) -> None:
        self.write_text("result.json", json.dumps(result, indent=1) + "\n")

    def read_result(self) -> dict[str, Any]:
        return json.loads((self.path / "result.json").read_text())

    def _take_lock(self, handle) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunDirectoryError(
                "another process is training in this run directory",
                got=self.path,
                hint="wait for it, or --run-dir=… for another run",
            ) from error

    def _check_not_in_use(self) -> None:
        if (self.path / ".lock").exists():
            with (self.path / ".lock").open() as handle:
                self._take_lock(handle)

    def _keep_config(self, config: dict[str, Any], diff: Callable) -> None:
        stored = self.path / "config.json"
        if stored.exists():
            changes = diff(json.loads(stored.read_text()), config)
            if changes:
                raise RunDirectoryError(
                    f"{self.path} holds a run with another config: {'; '.join(changes)}",
                    hint="the old values to resume it, --fresh to start another, or --run-dir=…",
                )
            return
        others = [p.name for p in self.path.iterdir() if p.name != ".lock"]
        if others:
            raise RunDirectoryError(
                "the run directory holds something that is not a run",
                got=f"{self.path} with {', '.join(sorted(others)[:3])}",
                hint="--run-dir=… names an empty or new place",
            )
        versions = {"python": platform.python_version()}
        for package in _PACKAGES:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                versions[package] = "unknown"
        versions["devices"] = [str(device.device_kind) for device in jax.devices()]
        self.write_text("versions.json", json.dumps(versions, indent=1) + "\n")
        self.write_text("command.txt", shlex.join(["python", *sys.orig_argv[1:]]) + "\n")
        self.write_text("config.json", json.dumps(config, indent=1) + "\n")

    def _keep_seed(self, seed: int | None) -> int:
        if seed is not None:
            return seed
        stored = self.path / "seed.txt"
        if not stored.exists():
            self.write_text("seed.txt", f"{secrets.randbits(31)}\n")
        return int(stored.read_text())


def write_atomically(path: pathlib.Path, text: str) -> pathlib.Path:
    """Write to a temporary file beside `path`, then rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
    return path


def _move_aside(path: pathlib.Path) -> pathlib.Path:
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(target)
    return target
