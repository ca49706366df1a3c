# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Several processes, one or more on a host, that work as one: JAX's own, started and watched."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.errors import ConfigError, LostProcess

_BEATS = "jaxrl_llm/beat/"
_DONE = "done"


@dataclasses.dataclass(frozen=True)
class ProcessConfig:
    """The processes of a run.

    Attributes:
        coordinator: host:port of process 0; None on TPU pods and Slurm, which know it, and for a
            single process.
        processes: how many there are; None where the cluster knows.
        index: which of them this is; None where the cluster knows.
        lost_after: seconds without a sign of life after which a process counts as lost; the others
            then end with one line, and the next start resumes.
    """

    coordinator: str | None = None
    processes: int | None = None
    index: int | None = None
    lost_after: int | float = 60.0

    def __post_init__(self) -> None:
        given = [x is not None for x in (self.coordinator, self.processes, self.index)]
        if any(given) and not all(given):
            raise ConfigError(
                "coordinator, processes and index go together",
                got=f"{self.coordinator}, {self.processes}, {self.index}",
                hint="all three, or none on a cluster that knows them",
            )
        if self.processes is not None and not 0 <= self.index < self.processes:
            raise ConfigError(
                "no such process", got=self.index, expected=f"0 … {self.processes - 1}"
            )
        if self.lost_after <= 0:
            raise ConfigError("lost_after is no time", got=self.lost_after, expected="> 0 s")


def start(config: ProcessConfig) -> None:
    """Join the other processes; before anything else of JAX is used."""
    # `Watchdog` tells of a lost process before JAX does, which would leave a stack of C++.
    jax.distributed.initialize(
        config.coordinator,
        config.processes,
        config.index,
        heartbeat_timeout_seconds=max(int(10 * config.lost_after), 10),
    )


class Watchdog:
    """Ends this process with one line when another one has given no sign of life for too long.

        with Watchdog(lost_after=60.0):
            …                           # training

    Every process tells JAX's coordination service that it lives, and looks at what the others
    tell. An error of JAX inside the block, as when a connection breaks, waits for the verdict: if
    there is none, it goes on its way. With a single process nothing happens. The loss of process
    0, where the service runs, JAX itself tells the others, in its own words, and ends them.

    Args:
        lost_after: seconds.
        end: called with the error instead of ending the process.
    """

    def __init__(self, lost_after: int | float, end: Callable[[LostProcess], Any] | None = None):
        self._lost_after = lost_after
        self._every = lost_after / 6
        self._end = _exit if end is None else end
        self._over = threading.Event()
        self._heard: dict[int, tuple[str, float]] = {}
        self._answered = time.monotonic()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Watchdog:
        if jax.process_count() > 1:
            self._answered = now = time.monotonic()
            others = (i for i in range(jax.process_count()) if i != jax.process_index())
            self._heard = {i: ("", now) for i in others}
            # A call to a stopped coordinator hangs: who judges must not be the one who calls.
            self._threads = [
                threading.Thread(target=work, daemon=True, name=f"watchdog {work.__name__}")
                for work in (self._tell, self._judge)
            ]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        broken = isinstance(error, jax.errors.JaxRuntimeError)
        if broken and self._heard:
            self._over.wait(self._lost_after + 2 * self._every)
        self._over.set()
        for thread in self._threads:
            thread.join(self._lost_after + 5.0)  # the verdict may be on its way
        if self._heard and error is None:
            _client().key_value_set(f"{_BEATS}{jax.process_index()}", _DONE, allow_overwrite=True)

    def _tell(self) -> None:
        client, count = _client(), 0
        while not self._over.is_set():
            count += 1
            try:
                mine = f"{_BEATS}{jax.process_index()}"
                client.key_value_set(mine, str(count), allow_overwrite=True)
                beats = dict(client.key_value_dir_get(_BEATS))
            except jax.errors.JaxRuntimeError:
                beats = None  # the time since the last answer tells
            if beats is not None:
                self._answered = now = time.monotonic()
                for i, (last, _) in list(self._heard.items()):
                    beat = beats.get(f"{_BEATS}{i}", "")
                    if beat != last or beat == _DONE:
                        self._heard[i] = (beat, now)
            self._over.wait(self._every)

    def _judge(self) -> None:
        while not self._over.wait(self._every / 2):
            now = time.monotonic()
            lost = [i for i, (_, when) in self._heard.items() if now - when > self._lost_after]
            if now - self._answered > self._lost_after:
                lost = [0]  # nobody answers for the others, either
            if lost:
                self._over.set()
                self._end(
                    LostProcess(
                        f"process {lost[0]} of {jax.process_count()} is lost or late",
                        got=f"no sign of life for {self._lost_after} s",
                        hint="start all processes again: the run continues from its checkpoint",
                    )
                )
                return


def _exit(error: LostProcess) -> None:
    """The main thread may hang in a collective for good: no clean-up can be waited for."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    if jax.process_index() == 0:
        time.sleep(2.0)  # the others end by their own watchdogs while the service still answers
    os._exit(error.exit_code)


def _client() -> Any:
    """The client of the coordination service, which JAX has no public name for."""
    from jax._src import distributed

    return distributed.global_state.client
