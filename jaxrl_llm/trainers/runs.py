# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The kinds of run, by the dataclass that a config file's `get_config()` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.trainers import build_supervised, show, show_supervised
from jaxrl_llm.trainers.build import build_run
from jaxrl_llm.trainers.dry_run import dry_run, supervised_dry_run
from jaxrl_llm.trainers.settings import RLConfig, check_overrides
from jaxrl_llm.trainers.supervised_settings import PreferenceConfig, RewardConfig, SFTConfig


class Kind(NamedTuple):
    """What the command line asks of a kind of run.

    Attributes:
        build: (config, run directory, config as JSON values) → a run for `loop.train`.
        dry_run: builds everything but weights, and shows it.
        finished_text: the summary of a run that was finished earlier.
        sizes: the settings that memory depends on.
        check_overrides: (the file's config, the command's) → refuses overrides without effect.
    """

    build: Callable
    dry_run: Callable
    finished_text: Callable
    sizes: str
    check_overrides: Callable = lambda before, after: None


def kind_of_run(config: Any, path: object) -> Kind:
    """The row of `KINDS` for a config.

    Raises:
        ConfigError: `get_config()` of the file at `path` returned something else.
    """
    if type(config) not in KINDS:
        raise ConfigError(
            "get_config() returns a config of another kind",
            got=f"{type(config).__name__} from {path}",
            expected="one of " + ", ".join(kind.__name__ for kind in KINDS),
        )
    return KINDS[type(config)]


KINDS: dict[type, Kind] = {
    RLConfig: Kind(
        build_run,
        dry_run,
        show.finished_text,
        "--train.micro_tokens, --sampler.slots or --sampler.num_pages",
        check_overrides,
    ),
    **dict.fromkeys(
        (SFTConfig, RewardConfig, PreferenceConfig),
        Kind(
            build_supervised.build,
            supervised_dry_run,
            show_supervised.finished_text,
            "--train.micro_batch, --rows.row_tokens or --rows.max_length",
        ),
    ),
}
