# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Train a model: ``python -m jaxrl_llm.train --config=grpo.py``.

--config=NAME      a Python file with get_config(): here, in ./configs, or one of those shipped
--help             with --config: every field, its value and its meaning
--dry-run          build everything without weights, show sizes, prompts and rewards, and exit
--fresh            move an earlier run of this config aside and start another
--run-dir=PATH     where the run is written; default: runs/<config>
--devices=KIND[:N] cpu, cuda or tpu; cpu:8 makes 8 CPU devices
--coordinator=HOST:PORT --processes=N --process=I
                   this is process I of N, which train together: the same command in each, and
                   host and port of process 0; --coordinator=auto where the cluster knows all that
--lost-after=60    seconds after which a process that gives no sign of life ends the others
--algo.kl_coef=…   any field of the config
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax

from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.sharding.processes import ProcessConfig, Watchdog, check_alike, of_first, several
from jaxrl_llm.trainers.devices import check_devices, check_shares, choose_devices


@dataclasses.dataclass
class Launch:
    """The options that are not fields of a config."""

    config: str | None = None
    help: bool = False
    dry_run: bool = False
    fresh: bool = False
    run_dir: str | None = None
    devices: str | None = None
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    lost_after: float | None = None

    def group(self) -> ProcessConfig:
        """The processes that train together."""
        after = {} if self.lost_after is None else {"lost_after": self.lost_after}
        return ProcessConfig(self.coordinator, self.processes, self.process, **after)


_VALUES: dict[str, Callable[[str], Any]] = {
    "config": str,
    "run_dir": str,
    "devices": str,
    "coordinator": str,
    "processes": int,
    "process": int,
    "lost_after": float,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse → build → run. Returns the exit code; a user's mistake is one line and 2."""
    try:
        launch, overrides = parse(sys.argv[1:] if argv is None else argv)
        if launch.config is None:
            if launch.help:
                print(__doc__)
                return 0
            raise ConfigError("no config is named", hint="--config=grpo.py, or --help")
        group = launch.group()
        choose_devices(launch.devices, None if launch.help else group)
        with Watchdog(group.lost_after):
            if launch.devices is not None and not launch.help:
                check_devices(launch.devices)
            if several():
                check_shares()
            return run(launch, overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def leave(code: int) -> NoReturn:
    """End the program; with an error at once, as the others may wait where this one won't come."""
    if code and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def parse(argv: Sequence[str]) -> tuple[Launch, list[str]]:
    """Split the command line into launch options and overrides of config fields."""
    launch, rest = Launch(), []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if word in ("-h", "--help"):
            launch.help = True
        elif word.startswith("--") and name in ("dry_run", "fresh"):
            if equals:
                raise ConfigError(f"--{name.replace('_', '-')} takes no value", got=word)
            setattr(launch, name, True)
        elif word.startswith("--") and name in _VALUES:
            flag = f"--{name.replace('_', '-')}"
            if not equals and not words:
                raise ConfigError(f"{flag} needs a value", hint=f"{word}=…")
            text = value if equals else words.pop(0)
            try:
                setattr(launch, name, _VALUES[name](text))
            except ValueError as error:
                raise ConfigError(f"{flag} is not a number", got=text) from error
        else:
            rest.append(word)
    return launch, rest


def run(launch: Launch, overrides: Sequence[str]) -> int:
    from jaxrl_llm import config as configs
    from jaxrl_llm.trainers.loop import train
    from jaxrl_llm.trainers.run_directory import open_together
    from jaxrl_llm.trainers.runs import kind_of_run

    path = configs.find_config(launch.config or "")
    doc, written = configs.load_config(path)
    # Settings that differ in a run are told one by one when its directory is opened.
    shown = list(overrides) if launch.dry_run else None
    check_alike(
        "command",
        [path.stem, path.read_bytes(), launch.dry_run, launch.fresh, shown],
        "the same for all but --process, and the same config file on all hosts",
    )
    kind = kind_of_run(written, path)
    config = configs.apply_overrides(written, overrides)
    kind.check_overrides(written, config)
    if launch.help:
        print(configs.help_text(config, doc))
        return 0
    if launch.dry_run:
        kind.dry_run(config)
        return 0
    place = pathlib.Path(launch.run_dir or pathlib.Path("runs") / path.stem)
    settings = configs.to_dict(config)
    directory = open_together(
        place,
        settings,
        diff=configs.diff,
        seed=config.train.seed,
        fresh=launch.fresh,
    )
    finished = of_first(
        lambda: (
            kind.finished_text(directory.path, directory.read_result())
            if directory.done.exists()
            else None
        ),
        "result of a finished run",
    )
    if finished is not None:
        print(finished)
        return 0
    with out_of_memory_told(kind.sizes):
        with directory.undone_on_error():
            built = kind.build(config, directory, settings)
        return train(built)


@contextlib.contextmanager
def out_of_memory_told(sizes: str) -> Iterator[None]:
    """Turns XLA's error into a UserError that names the settings that memory depends on."""
    try:
        yield
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            "out of memory",
            got=str(error).splitlines()[0],
            hint=f"a smaller {sizes}, or --model.remat=True",
        ) from error


if __name__ == "__main__":
    leave(main())
