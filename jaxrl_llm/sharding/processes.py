# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Several processes, one or more on a host, that work as one: JAX's own, started and watched."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # what processes know of each other before devices are looked for
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl_llm.errors import ConfigError, LostProcess, UserError

_EXCHANGES = itertools.count()
_FOREVER_MS = 2**31 - 1
_BEATS = "jaxrl_llm/beat/"
_SHORTEST = 2  # seconds: while a program is compiled, no thread may get its turn for one
_DONE = "done"
_FAILED = "failed "


@dataclasses.dataclass(frozen=True)
class ProcessConfig:
    """The processes of a run.

    Attributes:
        coordinator: host:port of process 0, or "auto" where the cluster knows all three: TPU pods,
            Slurm, Kubernetes. None: a single process, or one of several tasks of a Slurm step.
        processes: how many there are.
        index: which of them this is.
        lost_after: seconds without a sign of life after which a process counts as lost; the others
            then end with one line, and the next start resumes. Five times as long is waited for
            all to come at the start.
    """

    coordinator: str | None = None
    processes: int | None = None
    index: int | None = None
    lost_after: int | float = 60.0

    def __post_init__(self) -> None:
        numbers = [x is not None for x in (self.processes, self.index)]
        needed = self.coordinator not in (None, "auto")
        if numbers != [needed, needed]:
            raise ConfigError(
                "--coordinator=HOST:PORT, --processes and --process go together",
                got=f"{self.coordinator}, {self.processes}, {self.index}",
                hint="all three; or --coordinator=auto on a cluster that knows them",
            )
        if needed and not _is_address(self.coordinator):
            raise ConfigError(
                "--coordinator is no address",
                got=self.coordinator,
                expected="HOST:PORT, [IPv6]:PORT, or auto",
            )
        if needed and self.processes < 1:
            raise ConfigError("too few --processes", got=self.processes, expected="1 or more")
        if needed and not 0 <= self.index < self.processes:
            raise ConfigError(
                "no such process", got=self.index, expected=f"0 … {self.processes - 1}"
            )
        if not _SHORTEST <= self.lost_after < float("inf"):
            raise ConfigError(
                "--lost-after is too short for a busy machine, or no time",
                got=self.lost_after,
                expected=f"seconds, ≥ {_SHORTEST}",
            )

    @property
    def several(self) -> bool:
        """Whether there are others, as far as this process is told."""
        # What `srun` sets; a script that Slurm runs once, before its steps, has none of it.
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
        return self.coordinator is not None or (tasks.isdecimal() and int(tasks) > 1)


def _is_address(text: str) -> bool:
    """HOST:PORT; the colons of an IPv6 host are told from the port's by brackets."""
    found = re.fullmatch(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):([0-9]{1,5})", text)
    return found is not None and 0 < int(found[1]) < 2**16


def several() -> bool:
    """Whether there are other processes; asking starts no backend of JAX."""
    return jax.distributed.is_initialized() and _count() > 1


def is_first() -> bool:
    """Whether this process writes what all have in common."""
    return not several() or _index() == 0


def exchange(value: Any, what: str) -> list[Any]:
    """What each process has, in order of the processes; all call this together.

    Args:
        value: anything that can be pickled; the processes are one program and trust each other.
        what: the values are, in a word: the same in all processes.

    Raises:
        ConfigError: the others exchange something else, being at another place of the program.
    """
    if not several():
        return [value]
    # Who comes late is waited for here, where there is no limit of a collective; `Watchdog` ends
    # the wait for one that is lost.
    _client().wait_at_barrier(f"jaxrl_llm/exchange/{next(_EXCHANGES)}", _FOREVER_MS)
    mine = np.frombuffer(pickle.dumps((what, pickle.dumps(value))), np.uint8)
    sizes = process_allgather(np.asarray([mine.size], np.int32))[:, 0]
    # Few lengths, so that few programs are compiled.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: mine.size] = mine
    parts = zip(process_allgather(padded), sizes, strict=True)
    told = [pickle.loads(part[:size].tobytes()) for part, size in parts]
    for index, (other, _) in enumerate(told):
        if other != what:
            raise ConfigError(
                "the processes are at different places of the program",
                got=f"{what!r} in process {_index()}, {other!r} in process {index}",
                hint="the same command, files and versions in all",
            )
    return [pickle.loads(packed) for _, packed in told]


def connect(mesh: Mesh) -> None:
    """Has the processes of a mesh make all connections that its collectives need at one time; all
    call this together.

    On a CPU gloo makes a group's connections in its first collective, and waits 30 s for the other
    end: on a busy machine one process compiles a program for longer than another.
    """
    here = {device.process_index for device in mesh.devices.flat}
    if len(here) < 2 or mesh.devices.flat[0].platform != "cpu":
        return
    names = [name for name in mesh.axis_names if mesh.shape[name] > 1]
    sizes = range(1, len(names) + 1)
    groups = [group for size in sizes for group in itertools.combinations(names, size)]

    def sums() -> Any:
        mine = jax.lax.axis_index(names) + 1  # what is alike everywhere would not be sent
        return sum(jax.lax.psum(mine, group) for group in groups)

    everywhere = jax.shard_map(sums, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
    program = jax.jit(everywhere).lower().compile()
    _client().wait_at_barrier(f"jaxrl_llm/connect/{next(_EXCHANGES)}", _FOREVER_MS)
    jax.block_until_ready(program())


def share(items: Sequence[Any]) -> Sequence[Any]:
    """What this process works on: each gets another part, and together all."""
    return items[_index() :: _count()] if several() else items


def gathered(items: Sequence[Any], what: str) -> list[Any]:
    """What all processes made of their shares, one process's after another's."""
    return [item for part in exchange(items, what) for item in part]


def of_first(make: Callable[[], Any], what: str) -> Any:
    """What `make` returns in process 0, in all of them; it is called nowhere else.

    Raises:
        UserError: that of process 0, in all of them.
    """
    if not several():
        return make()
    outcome = None
    if is_first():
        try:
            outcome = make(), None
        except UserError as error:
            outcome = None, error
    found, error = exchange(outcome, what)[0]
    if error is not None:
        raise error
    return found


def check_alike(what: str, facts: Any, hint: str) -> None:
    """That all processes have the same.

    Args:
        what: the facts are of, for the error.
        facts: anything small that can be compared.

    Raises:
        ConfigError: they don't, in all processes.
    """
    first, *others = exchange(facts, what)
    for index, told in enumerate(others, start=1):
        if told != first:
            raise ConfigError(f"process {index} has another {what} than process 0", hint=hint)


class Watchdog:
    """Ends this process with one line when another one has given no sign of life for too long.

        with Watchdog(lost_after=60.0):
            …                           # training

    Every process tells JAX's coordination service that it lives, or with which error it ended, and
    looks at what the others tell. An error of JAX inside the block, as when a connection breaks,
    waits for the verdict: if there is none, it goes on its way. Without an error the block ends
    when that of every process has, and then they part: JAX is no longer distributed. With a single
    process nothing happens. The loss of process 0, where the service runs, JAX itself notices, and
    ends the others; `joining` adds a line that says why.

    Args:
        lost_after: seconds.
        end: called with the error instead of ending the process.
    """

    def __init__(self, lost_after: int | float, end: Callable[[LostProcess], Any] | None = None):
        self._lost_after = lost_after
        self._every = lost_after / 6
        self._end = self._exit if end is None else end
        self._over = threading.Event()
        self._done = False
        self._heard: dict[int, tuple[str, float]] = {}
        self._answered = time.monotonic()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Watchdog:
        if several():
            self._answered = now = time.monotonic()
            others = (i for i in range(_count()) if i != _index())
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
        if not self._heard:
            return
        if error is None:
            self._part()
            return
        if isinstance(error, jax.errors.JaxRuntimeError):
            self._over.wait(self._lost_after + 2 * self._every)
        self._stop()
        _say(_FAILED + " ".join(str(error).split())[:500])
        self._let_others_end()

    def _part(self) -> None:
        """All end together, whatever their exit codes: who went first would end the others, if it
        is process 0, or would be missed by them."""
        self._done = True
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # then the judge has the last word
            _say(_DONE)
        while not self._all_done():
            if self._over.wait(0.1):
                return
        self._stop()
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # what was to be done is done
            _say(_DONE)  # the thread that was stopped may have said something else meanwhile
            jax.distributed.shutdown()

    def _all_done(self) -> bool:
        try:
            beats = dict(_client().key_value_dir_get(_BEATS))
        except jax.errors.JaxRuntimeError:
            return False
        return all(beats.get(f"{_BEATS}{i}") == _DONE for i in self._heard)

    def _stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(self._lost_after + 5.0)  # the verdict may be on its way

    def _let_others_end(self) -> None:
        """Process 0, where the service runs, goes last: the others would end in JAX's words."""
        if _index() > 0:
            return
        now = time.monotonic()
        left = {i for i, (_, when) in self._heard.items() if now - when <= self._lost_after}
        while left and time.monotonic() < now + self._lost_after:
            beats = dict(_client().key_value_dir_get(_BEATS))
            left = {i for i in left if not _is_last(beats.get(f"{_BEATS}{i}", ""))}
            time.sleep(0.1)

    def _tell(self) -> None:
        count = 0
        while not self._over.is_set():
            count += 1
            try:
                _say(_DONE if self._done else str(count))
                beats = dict(_client().key_value_dir_get(_BEATS))
            except jax.errors.JaxRuntimeError:
                beats = None  # the time since the last answer tells
            if beats is not None:
                self._answered = now = time.monotonic()
                for i, (last, _) in list(self._heard.items()):
                    beat = beats.get(f"{_BEATS}{i}", "")
                    if _is_last(beat) or beat != last:
                        self._heard[i] = (beat, now)
            self._over.wait(self._every)

    def _judge(self) -> None:
        while not self._over.wait(self._every / 2):
            verdict = self._verdict(time.monotonic())
            if verdict is not None:
                self._over.set()
                self._end(verdict)
                return

    def _exit(self, error: LostProcess) -> None:
        """The main thread may hang in a collective for good: no clean-up can be waited for."""
        print(f"error: {error}", file=sys.stderr, flush=True)

        def tell() -> None:
            _say(f"{_FAILED}{error}"[:500])
            self._let_others_end()

        telling = threading.Thread(target=tell, daemon=True)
        telling.start()
        # A lost process never tells its end; the others look every sixth of the time.
        telling.join(self._lost_after / 2)
        os._exit(error.exit_code)

    def _verdict(self, now: float) -> LostProcess | None:
        count = _count()
        again = "start all processes again: the run continues from its checkpoint"
        for i, (beat, _) in self._heard.items():
            if beat.startswith(_FAILED):
                what = f"process {i} of {count} ended with an error"
                return LostProcess(what, got=beat.removeprefix(_FAILED), hint=again)
        lost = [i for i, (_, when) in self._heard.items() if now - when > self._lost_after]
        if now - self._answered > self._lost_after:
            if _index() == 0:
                return LostProcess(
                    "the coordination service of this process does not answer",
                    got=f"no answer for {self._lost_after} s",
                    hint=f"a longer --lost-after, and {again}",
                )
            lost = [0]  # nobody answers for the others, either
        if not lost:
            return None
        what = f"process {lost[0]} of {count} is lost or late"
        return LostProcess(what, got=f"no sign of life for {self._lost_after} s", hint=again)


def _is_last(beat: str) -> bool:
    return beat == _DONE or beat.startswith(_FAILED)


def _say(beat: str) -> None:
    """Tells the others, by way of the service."""
    _client().key_value_set(f"{_BEATS}{_index()}", beat, allow_overwrite=True)


def _client() -> Any:
    return distributed.global_state.client


def _index() -> int:
    return distributed.global_state.process_id


def _count() -> int:
    return distributed.global_state.num_processes
