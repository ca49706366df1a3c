# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which rollouts a run stores, and which it reads: one run's, made with its model and sampler."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.data.rollout_store import RolloutStore, read_run
from jaxrl_llm.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """What tells a run from all others in the files of its rollouts.

    Attributes:
        seed: of its prompt order and samples.
        begun: when it began; a resumed run keeps it.
        model: a digest of the model that it began with.
        group_size: samples of each prompt.
        temperature: that they were drawn at.
    """

    seed: int
    begun: str
    model: str
    group_size: int
    temperature: int | float

    @classmethod
    def of(
        cls,
        seed: int,
        begun: str,
        base: Mapping[str, Any],
        group_size: int,
        temperature: int | float,
    ) -> RunIdentity:
        """That of a run; `base` are facts of its model, as JSON values."""
        facts = json.dumps(base, sort_keys=True).encode()
        model = hashlib.blake2b(facts, digest_size=16).hexdigest()
        return cls(seed, begun, model, group_size, float(temperature))


@dataclasses.dataclass(frozen=True)
class StoredConfig:
    """Rollouts on disk: sample without training, or train without sampling.

    Attributes:
        write: a folder that gets the rollouts of every step, with their rewards; an empty one, or
            this run's own.
        read: a folder that an earlier run wrote; its rollouts are trained on, step by step, and
            nothing is sampled but for held-out evaluation.
        update: False samples, judges and writes, and leaves the model as it is.
    """

    write: str | None = None
    read: str | None = None
    update: bool = True

    def __post_init__(self) -> None:
        if self.read is not None and (self.write is not None or not self.update):
            raise ConfigError(
                "rollouts are read to be trained on: they can't be written or left alone as well",
                got=f"rollouts.write={self.write}, rollouts.update={self.update}",
                hint="either --rollouts.read or --rollouts.write",
            )
        if not self.update and self.write is None:
            raise ConfigError(
                "a run that neither trains nor writes does nothing", hint="--rollouts.write=FOLDER"
            )

    def open_to_write(self, run: RunIdentity) -> RolloutStore:
        """The folder to write to, which holds nothing of another run.

        Raises:
            DataError: it does.
        """
        assert self.write is not None
        store = RolloutStore(self.write, dataclasses.asdict(run))
        store.check_own()
        return store

    def open(self, steps: int, run: RunIdentity) -> RolloutStore:
        """The folder to read from, of the same model and sampler as this run's.

        Raises:
            DataError: as `complete`, or it was made otherwise.
        """
        store, first = self.complete(steps)
        _check_made_alike(str(self.read), first, dataclasses.asdict(run))
        return store

    def complete(self, steps: int) -> tuple[RolloutStore, dict[str, Any]]:
        """The folder to read from, which holds every step of the run, all of one run, and what is
        said of that one.

        Raises:
            DataError: a step is missing, or they are of several runs.
        """
        assert self.read is not None
        store = RolloutStore(self.read)
        there = store.steps()
        missing = sorted(set(range(1, steps + 1)) - set(there))
        if missing:
            raise DataError(
                f"{self.read} does not hold the rollouts of every step of this run",
                got=f"steps {there[0]} … {there[-1]}" if there else "no step",
                expected=f"steps 1 … {steps}",
                hint=f"--train.steps={missing[0] - 1}" if missing[0] > 1 else "another folder",
            )
        first = read_run(store.path(1))
        for step in range(2, steps + 1):
            if read_run(store.path(step)) != first:
                raise DataError(
                    f"{self.read} holds rollouts of several runs",
                    got=f"steps 1 and {step} of different ones",
                    hint="another folder",
                )
        return store, first or {}


def _check_made_alike(folder: str, found: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    if found.get("model") != ours["model"]:
        raise DataError(
            f"{folder} holds rollouts of another model",
            got=f"a model of digest {found.get('model', 'unknown')}",
            expected=ours["model"],
            hint="the model.path that they were made with",
        )
    for name in ("group_size", "temperature"):
        if found.get(name) != ours[name]:
            raise DataError(
                f"{folder} holds rollouts of another sampler.{name}",
                got=found.get(name),
                expected=ours[name],
                hint=f"--sampler.{name}={found.get(name)}",
            )
