# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""How the processes of a run find each other: JAX's own start, with its ends in one line.

JAX's client of the coordination service calls `abort` when it is refused, when not all come in
time, and later when the service, which lives in process 0, is gone. Here the wait ends before JAX's
own limit does, and an abort is told as what it means.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
from jax._src import distributed  # its state has no public name

from jaxrl_llm.errors import ConfigError, LostProcess, UserError
from jaxrl_llm.sharding.processes import ProcessConfig

_SAME = "--coordinator=HOST:PORT of process 0 and --processes alike in all, another --process each"
_KEPT: list[Any] = []  # a handler that is set must not be collected


def start(config: ProcessConfig) -> None:
    """Join the other processes, if there are any; before anything else of JAX is used.

    Raises:
        ConfigError: the cluster does not know of other processes, the port is taken, or not all
            have come after five times `lost_after`.
    """
    if not config.several:
        return
    # It would take SIGTERM away from this process, for a service that nothing here asks.
    jax.config.update("jax_enable_preemption_service", False)
    # On a CPU this is how processes reach each other.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if config.index == 0:
        check_port(config.coordinator or "")
    with _quiet() as terminal:
        refused = ConfigError(
            "process 0 refused this process, or broke off", got=_told(config), hint=_SAME
        )
        _on_abort(lambda: _end(refused, terminal))
        _connect(config, max(5.0 * config.lost_after, 10.0))
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    if distributed.global_state.process_id > 0:
        _on_abort(_tell_if_first_is_lost)


def _told(config: ProcessConfig) -> str:
    if config.index is None:
        return f"--coordinator={config.coordinator}"
    return f"process {config.index} of {config.processes} at {config.coordinator}"


def _connect(config: ProcessConfig, wait: float) -> None:
    outcome: list[BaseException | None] = []

    def connect() -> None:
        try:
            # `Watchdog` tells of a lost process before JAX does.
            jax.distributed.initialize(
                None if config.coordinator == "auto" else config.coordinator,
                config.processes,
                config.index,
                heartbeat_timeout_seconds=max(int(10 * config.lost_after), 10),
                initialization_timeout=int(2 * wait) + 60,
            )
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=connect, daemon=True, name="joining")
    thread.start()
    thread.join(wait)
    if not outcome:
        raise ConfigError(
            f"not all processes of this run came within {wait:g} s",
            got=_told(config),
            hint=f"{_SAME}; --lost-after={2 * config.lost_after:g} waits longer",
        )
    if isinstance(outcome[0], ValueError | RuntimeError):
        told = config.coordinator != "auto"
        raise ConfigError(
            "the processes of this run do not find each other",
            got=(str(outcome[0]).strip().splitlines() or ["no reason"])[0],
            hint=_SAME if told else f"auto where JAX knows the cluster; elsewhere {_SAME}",
        ) from outcome[0]
    if outcome[0] is not None:
        raise outcome[0]


def check_port(address: str) -> None:
    """Raises ConfigError if another program listens where process 0 is to: both would be let in,
    and each would hear a part of what is meant for one."""
    port = int(address.rsplit(":", 1)[1])
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                "the port of --coordinator can't be used on this host",
                got=f"{port} ({error.strerror})",
                hint="another one, the same in all processes",
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[int]:
    """Keeps what C++ writes on the terminal until all is well; yields the terminal's descriptor."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield terminal
            sys.stderr.flush()
            kept.seek(0)
            os.write(terminal, kept.read())
        finally:
            os.dup2(terminal, 2)


def _on_abort(act: Any) -> None:
    """Calls `act` where this process would end by `abort`; the thread that aborts calls it."""
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda signum: act())
    _KEPT.append(handler)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def _tell_if_first_is_lost() -> None:
    """Another abort than for a lost service goes on its way."""
    state = distributed.global_state
    address = str(state.coordinator_address)
    host, port = address.rsplit(":", 1)
    for _ in range(20):  # what a killed process leaves open takes a moment to close
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
        except OSError as error:
            lost = LostProcess(
                f"process 0 of {state.num_processes} is lost",
                got=f"no answer at {address} ({error.strerror or error})",
                hint="start all processes again: the run continues from its checkpoint",
            )
            _end(lost, 2)
        time.sleep(0.1)


def _end(error: UserError, terminal: int) -> NoReturn:
    os.write(terminal, f"error: {error}\n".encode())
    os._exit(error.exit_code)
