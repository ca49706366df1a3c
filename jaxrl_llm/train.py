# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Train a model: ``python -m jaxrl_llm.train --config=grpo.py``.

--config=NAME      a Python file with get_config(): here, in ./configs, or one of those shipped
--help             with --config: every field, its value and its meaning
--dry-run          build everything without weights, show sizes, prompts and rewards, and exit
--fresh            move an earlier run of this config aside and start another
--run-dir=PATH     where the run is written; default: runs/<config>
--devices=KIND[:N] cpu, cuda or tpu; cpu:8 makes 8 CPU devices
--algo.kl_coef=…   any field of the config
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.trainers.devices import choose_devices


@dataclasses.dataclass
class Launch:
    """The options that are not fields of a config."""

    config: str | None = None
    help: bool = False
    dry_run: bool = False
    fresh: bool = False
    run_dir: str | None = None
    devices: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Parse → build → run. Returns the exit code; a user's mistake is one line and 2."""
    try:
        launch, overrides = parse(sys.argv[1:] if argv is None else argv)
        if launch.config is None:
            if launch.help:
                print(__doc__)
                return 0
            raise ConfigError("no config is named", hint="--config=grpo.py, or --help")
        choose_devices(launch.devices)
        return run(launch, overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(
            f"error: out of memory · got {str(error).splitlines()[0]} · try: a smaller "
            "--train.micro_tokens, --sampler.slots or --sampler.num_pages, or --model.remat=True",
            file=sys.stderr,
        )
        return 2


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
        elif word.startswith("--") and name in ("config", "run_dir", "devices"):
            if not equals and not words:
                raise ConfigError(f"--{name.replace('_', '-')} needs a value", hint=f"{word}=…")
            setattr(launch, name, value if equals else words.pop(0))
        else:
            rest.append(word)
    return launch, rest


def run(launch: Launch, overrides: Sequence[str]) -> int:
    from jaxrl_llm import config as configs
    from jaxrl_llm.trainers.loop import train
    from jaxrl_llm.trainers.run_directory import RunDirectory
    from jaxrl_llm.trainers.runs import kind_of_run

    path = configs.find_config(launch.config or "")
    doc, config = configs.load_config(path)
    kind = kind_of_run(config, path)
    config = configs.apply_overrides(config, overrides)
    if launch.help:
        print(configs.help_text(config, doc))
        return 0
    if launch.dry_run:
        kind.dry_run(config)
        return 0
    place = pathlib.Path(launch.run_dir or pathlib.Path("runs") / path.stem)
    settings = configs.to_dict(config)
    directory = RunDirectory(
        place,
        settings,
        diff=configs.diff,
        seed=config.train.seed,
        fresh=launch.fresh,
    )
    if directory.done.exists():
        print(kind.finished_text(directory.path, directory.read_result()))
        return 0
    with directory.undone_on_error():
        built = kind.build(config, directory, settings)
    return train(built)


if __name__ == "__main__":
    sys.exit(main())
