# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A run's directory: one config, one seed, one writer at a time, never overwritten by another run.

config.json  command.txt  versions.json  seed.txt  date.txt  base.json  critic.json       what runs
metrics.jsonl  samples.jsonl  samples.txt  tensorboard/  report.html   what a person looks at
checkpoints/  export/                                    what continues and what is used afterwards
DONE | FAILED.txt  result.json                           how it ended
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxrl_llm.errors import ConfigError, RunDirectoryError
from jaxrl_llm.sharding.processes import exchange, of_first, several

_PACKAGES = ("jaxrl_llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


# What a run that was killed in its first moments may hold.
_BEFORE_CONFIG = {".lock", "seed.txt", "date.txt", "base.json", "critic.json"}
_BEFORE_CONFIG |= {"checkpoints", "tensorboard"}


class RunDirectory:
    """An opened and locked run directory.

    Args:
        path: where; created if missing.
        config: the resolved config as JSON values; another config than the stored one stops here.
        diff: tells the differences of two such configs as lines.
        seed: the config's seed, or None: then one is drawn once and kept in the directory.
        fresh: move an existing run aside (to `<path>.1`, `.2`, …) and start another.
        held: seed and date of the run, where another process holds the directory: then nothing is
            looked at or written.

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
        held: tuple[int, datetime.datetime] | None = None,
    ):
        self.path = path = path.resolve()
        self.moved_to: pathlib.Path | None = None
        self._begun, self._made, self._config = False, False, config
        self._kept: dict[str, Any] = {}
        self._writes = held is None
        if held is not None:
            self.seed, self.date = held
            return
        if path.exists():
            self._check_is_run()
        if fresh and path.exists():
            self._check_not_in_use()
            self.moved_to = _move_aside(path)
        self._made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("a")
        except OSError as error:
            raise RunDirectoryError(
                "the run directory can't be written",
                got=f"{path} ({error.strerror})",
                hint="--run-dir=… names another place",
            ) from error
        self._take_lock(self._lock)
        if self._holds_config():
            self._check_same_config(diff)
        self.seed = self._find_seed(seed)
        self.date = self._find_date()

    def keep(self, name: str, facts: dict[str, Any], changes: Callable, what: str) -> None:
        """Facts that hold for the whole run: `begin` writes them down; a resumed run compares.

        Args:
            name: of the JSON file that holds them.
            changes: (old facts, new facts) → what they differ in, in words.
            what: how the error calls what they are facts of.

        Raises:
            RunDirectoryError: they changed.
        """
        if not self._holds_config():
            self._kept[name] = facts
        elif (self.path / name).exists() and (told := changes(self._read_json(name), facts)):
            raise RunDirectoryError(
                f"{what} is not the one that the run began with",
                got="; ".join(told[:3]),
                hint="put it back, or --fresh for another run",
            )

    def mark(self) -> str:
        """Writes a new word into the lock's file, by which others know that they see the same
        directory, and returns it."""
        word = secrets.token_hex(8)
        self._lock.truncate(0)
        self._lock.write(word)
        self._lock.flush()
        return word

    def begin(self) -> None:
        """Write down what runs; called once everything is built, so that mistakes leave nothing."""
        self._begun = True
        if not self._writes:
            return
        self.failed.unlink(missing_ok=True)
        if self._holds_config():
            return
        self.write_text("seed.txt", f"{self.seed}\n")
        self.write_text("date.txt", f"{self.date.isoformat()}\n")
        for name, facts in self._kept.items():
            self.write_text(name, json.dumps(facts, indent=1) + "\n")
        self.write_text("config.json", json.dumps(self._config, indent=1) + "\n")
        versions: dict[str, Any] = {"python": platform.python_version()}
        for package in _PACKAGES:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                versions[package] = "unknown"
        versions["devices"] = [str(device.device_kind) for device in jax.devices()]
        self.write_text("versions.json", json.dumps(versions, indent=1) + "\n")
        self.write_text("command.txt", shlex.join(["python", *sys.orig_argv[1:]]) + "\n")

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """If the block fails before `begin`, what this object made or moved is put back."""
        try:
            yield
        except BaseException:
            if not self._begun and self._made:
                self._lock.close()
                shutil.rmtree(self.path, ignore_errors=True)
                if self.moved_to:
                    self.moved_to.rename(self.path)
            raise

    @property
    def done(self) -> pathlib.Path:
        return self.path / "DONE"

    @property
    def failed(self) -> pathlib.Path:
        return self.path / "FAILED.txt"

    def write_text(self, name: str, text: str) -> None:
        """Write a small file whole or not at all."""
        if self._writes:
            write_atomically(self.path / name, text)

    def write_result(self, result: dict[str, Any]) -> None:
        self.write_text("result.json", json.dumps(result, indent=1) + "\n")

    def read_result(self) -> dict[str, Any]:
        return self._read_json("result.json")

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.path / name).read_text())
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{name} of the run is missing or damaged",
                got=f"{self.path / name} ({type(error).__name__})",
                hint="put it back, or --fresh for another run",
            ) from error

    def _holds_config(self) -> bool:
        return (self.path / "config.json").exists()

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

    def _check_is_run(self) -> None:
        """An empty place, or one with the files of a run; anything else is left alone."""
        if not self.path.is_dir():
            raise RunDirectoryError("the run directory is a file", got=self.path)
        begun = (self.path / "metrics.jsonl").exists()
        ours = {".lock"} if begun else _BEFORE_CONFIG
        others = [p.name for p in self.path.iterdir() if p.name not in ours]
        if others and not self._holds_config():
            raise RunDirectoryError(
                "the run directory has files but no config.json: it is not a run, or a damaged one",
                got=f"{self.path} with {', '.join(sorted(others)[:3])}",
                hint="--run-dir=… names an empty or new place",
            )

    def _check_same_config(self, diff: Callable) -> None:
        changes = diff(
            _without_meshes(self._read_json("config.json")), _without_meshes(self._config)
        )
        if changes:
            raise RunDirectoryError(
                f"{self.path} holds a run with another config: {'; '.join(changes)}",
                hint="the old values to resume it, --fresh to start another, or --run-dir=…",
            )

    def _find_seed(self, seed: int | None) -> int:
        stored = self.path / "seed.txt"
        if seed is not None:
            return seed
        if not stored.exists():
            return secrets.randbits(31)
        text = stored.read_text().strip()
        if not text.isdecimal():
            raise RunDirectoryError("the seed of the run is damaged", got=f"{stored}: {text!r}")
        return int(text)

    def _find_date(self) -> datetime.datetime:
        """When the run began, to the second."""
        now = datetime.datetime.now().replace(microsecond=0)
        stored = self.path / "date.txt"
        if not stored.exists():
            return now
        try:
            return datetime.datetime.fromisoformat(stored.read_text().strip())
        except ValueError as error:
            raise RunDirectoryError("the date of the run is damaged", got=stored) from error


def open_together(
    path: pathlib.Path,
    config: dict[str, Any],
    *,
    diff: Callable[[dict, dict], Sequence[str]],
    seed: int | None,
    fresh: bool = False,
) -> RunDirectory:
    """`RunDirectory` of all processes: the first one holds it; its seed and date are everyone's.

    Raises:
        RunDirectoryError: as `RunDirectory`, or not all see the directory; in all processes.
        ConfigError: the processes were started with different settings.
    """
    first = of_first(lambda: config, "config")
    for index, changes in enumerate(exchange(diff(first, config), "differences of configs")):
        if changes:
            raise ConfigError(
                f"process {index} was started with other settings than process 0",
                got="; ".join(changes),
                hint="the same command for all but --process",
            )
    mine: list[RunDirectory] = []

    def open_here() -> tuple[int, datetime.datetime]:
        mine.append(RunDirectory(path, config, diff=diff, seed=seed, fresh=fresh))
        return mine[0].seed, mine[0].date

    held = of_first(open_here, "run directory")
    directory = mine[0] if mine else RunDirectory(path, config, diff=diff, seed=seed, held=held)
    if several():
        with directory.undone_on_error():
            _check_seen_by_all(directory)
    return directory


def _check_seen_by_all(directory: RunDirectory) -> None:
    word, lock = of_first(directory.mark, "mark in the run directory"), directory.path / ".lock"
    until = time.monotonic() + 10.0  # a disk that several hosts share may show it late
    while not (seen := lock.exists() and lock.read_text() == word) and time.monotonic() < until:
        time.sleep(0.2)
    wrong = _cannot_write(directory.path) if seen else "does not see"
    for index, told in enumerate(exchange(wrong, "sight of the run directory")):
        if told is not None:
            raise RunDirectoryError(
                f"process {index} {told} the run directory of process 0",
                got=directory.path,
                hint="--run-dir=… in a place that all hosts share and may write to",
            )


def _cannot_write(path: pathlib.Path) -> str | None:
    """Why this process can't; each writes its part of a checkpoint."""
    try:
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            file.write(b"written")
    except OSError as error:
        return f"can't write ({error.strerror}) in"
    return None


def write_atomically(path: pathlib.Path, text: str) -> pathlib.Path:
    """Write to a temporary file beside `path`, then rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
    return path


def _without_meshes(config: Any) -> Any:
    """A run may go on with other devices: its checkpoints fit every mesh."""
    if not isinstance(config, dict):
        return config
    meshes = ("mesh", "ref_mesh")
    return {k: _without_meshes(v) for k, v in config.items() if k not in meshes}


def _move_aside(path: pathlib.Path) -> pathlib.Path:
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(target)
    return target
