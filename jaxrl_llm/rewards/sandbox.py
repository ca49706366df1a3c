# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Runs programs that a model wrote, where they can harm nothing and learn nothing.

A `Job` is a few files, a command and its input; `Sandbox.run` gives back an `Outcome`: how the
program ended and what it wrote. It never says whether the program was right: the caller compares,
with values that were never in the sandbox.

The default kind, "bwrap", is bubblewrap (https://github.com/containers/bubblewrap): every run gets
its own user, PID, mount, network, IPC and UTS namespaces, a read-only file system that holds the
system's programs, the Python interpreter without its installed packages, and one small tmpfs. Time
is limited in CPU seconds of the whole process tree, and in seconds in which no process of it ran or
waited for a CPU: a busy machine changes no verdict.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from typing import IO, Literal, Protocol, runtime_checkable

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards import sandbox_bwrap
from jaxrl_llm.rewards.sandbox_watch import watch

_ATTEMPTS = 3
_SIDE_BY_SIDE = 3  # most of a short run is waiting for the kernel to make and end namespaces
_STARTED = b"started\n"
NO_CPU_TIME = "no CPU time to be had"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one run may use.

    Attributes:
        cpu_s: CPU seconds of all its processes together.
        idle_s: seconds in which no process of it ran or was waiting for a CPU (sleeping, say).
        memory_bytes: address space of each process.
        processes: processes and threads at one time.
        disk_bytes: everything it writes to files.
        open_files: file descriptors of each process.
        output_bytes: what it writes to standard output, standard error and the result channel,
            each; a run that writes more is ended and has failed.
    """

    cpu_s: float = 5.0
    idle_s: float = 5.0
    memory_bytes: int = 512 << 20
    processes: int = 16
    disk_bytes: int = 16 << 20
    open_files: int = 64
    output_bytes: int = 1 << 20


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a program.

    Attributes:
        command: the program and its arguments, run in the folder that holds `files`. `{results}` in
            an argument becomes the number of a file descriptor for results, apart from standard
            output.
        files: contents by name; read-only, and the names are plain names without a folder.
        stdin: what the program reads.
        limits: what it may use.
    """

    command: tuple[str, ...]
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stdin: str = ""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        for name in self.files:
            if not name or "/" in name or "\0" in name or name in (".", ".."):
                raise RewardError(
                    "a file of a sandbox job has a bad name",
                    got=repr(name),
                    expected="a plain name",
                )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: "exited" by itself or by a signal; "timeout" or "overflow" where a limit ended it;
            "unavailable" where the sandbox did not work (nothing is known about the program then).
        exit_code: of a run that exited; 128 + n after signal n.
        stdout, stderr, results: what it wrote, up to the byte limit. Bytes that are not UTF-8 are
            replaced.
        cpu_s: CPU seconds as last seen.
        reason: for people.
    """

    status: Literal["exited", "timeout", "overflow", "unavailable"]
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    results: str = ""
    cpu_s: float = 0.0
    reason: str = ""


@runtime_checkable
class Runner(Protocol):
    """What the code rewards need of a sandbox, here or on another machine."""

    def run(self, job: Job) -> Outcome: ...


@dataclasses.dataclass(frozen=True)
class Sandbox:
    """Runs jobs on this machine; safe to call from any number of threads.

    Attributes:
        kind: "bwrap", or "rlimits": limits and a temporary folder without any isolation. A program
            can then read what you can read and reach the network; asked for by name only.
        packages: importable packages of this environment that programs may import too. Anything
            else that is installed is hidden from them.
    """

    kind: Literal["bwrap", "rlimits"] = "bwrap"
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("bwrap", "rlimits"):
            raise RewardError(
                "unknown sandbox",
                got=repr(self.kind),
                expected="'bwrap', 'rlimits' or an http:// URL",
            )

    def run(self, job: Job) -> Outcome:
        """Runs a job; tries again where the sandbox itself failed, but not after the long wait for
        CPU time that a machine did not have.

        Raises:
            RewardError: this kind of sandbox does not work on this machine at all.
        """
        check_sandbox(self)
        outcome = Outcome("unavailable")
        for _ in range(_ATTEMPTS):
            outcome = self._run_once(job)
            if outcome.status != "unavailable" or outcome.reason == NO_CPU_TIME:
                break
        return outcome

    def run_all(self, jobs: Sequence[Job], *, workers: int | None = None) -> list[Outcome]:
        """Runs jobs side by side, by default three for each CPU; outcomes in their order."""
        with futures.ThreadPoolExecutor(workers or _SIDE_BY_SIDE * (os.cpu_count() or 1)) as pool:
            return list(pool.map(self.run, jobs))

    def _run_once(self, job: Job) -> Outcome:
        try:
            with contextlib.ExitStack() as stack:
                return self._start(job, stack)
        except OSError as error:  # no process, memory or file descriptor to be had
            return Outcome("unavailable", reason=str(error))

    def _start(self, job: Job, stack: contextlib.ExitStack) -> Outcome:
        read_end, write_end = os.pipe()
        results = stack.enter_context(os.fdopen(read_end, "rb", buffering=0))
        with contextlib.ExitStack() as handed:
            handed.callback(os.close, write_end)
            stdin = handed.enter_context(_memory_file(job.stdin))
            command = [part.replace("{results}", str(write_end)) for part in job.command]
            inner = [
                "prlimit",
                *_prlimits(job.limits),
                "/bin/sh",
                "-c",
                'echo started; exec "$@"',
                "sh",
            ]
            if self.kind == "bwrap":
                files = {n: handed.enter_context(_memory_file(t)) for n, t in job.files.items()}
                descriptors = {name: file.fileno() for name, file in files.items()}
                told, tell = os.pipe()
                info = stack.enter_context(os.fdopen(told, "rb"))
                handed.callback(os.close, tell)
                argv = sandbox_bwrap.argv(descriptors, tell, job.limits.disk_bytes, self.packages)
                fds, folder, env = (*descriptors.values(), write_end, tell), None, None
            else:
                folder = stack.enter_context(_folder(job.files))
                argv, fds, info = [], (write_end,), None
                env = sandbox_bwrap.environment(folder, self.packages)
            process = stack.enter_context(
                subprocess.Popen(
                    [*argv, *inner, *command],
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    cwd=folder,
                    env=env,
                    pass_fds=fds,
                    start_new_session=True,
                )
            )
        stack.callback(process.kill)  # whatever happens before the watch begins
        inner = stack.enter_context(_first_process(info))
        return _outcome(process, results, job.limits, inner)


@contextlib.contextmanager
def _first_process(info) -> Iterator[int | None]:
    """A descriptor of the process that bubblewrap says is the first of the sandbox."""
    try:
        inner = os.pidfd_open(json.loads(info.read())["child-pid"]) if info else None
    except (ValueError, OSError):  # bubblewrap failed, or everything is over already
        inner = None
    try:
        yield inner
    finally:
        if inner is not None:
            os.close(inner)


def _outcome(
    process: subprocess.Popen, results: IO[bytes], limits: Limits, inner: int | None
) -> Outcome:
    seen = watch(
        process,
        {"stdout": process.stdout, "stderr": process.stderr, "results": results},
        cpu_s=limits.cpu_s,
        idle_s=limits.idle_s,
        most_bytes=limits.output_bytes + len(_STARTED),
        inner=inner,
    )
    texts = {name: data.decode("utf-8", "replace") for name, data in seen.written.items()}
    if not seen.written["stdout"].startswith(_STARTED) or seen.ended == "starved":
        # The first line is written by the shell that is about to become the program.
        reason = NO_CPU_TIME if seen.ended == "starved" else texts["stderr"].strip()
        return Outcome(
            "unavailable", reason=reason or "the sandbox did not start", cpu_s=seen.cpu_s
        )
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Outcome(
        seen.ended,
        code if seen.ended == "exited" else None,
        texts["stdout"][len(_STARTED) :],
        texts["stderr"],
        texts["results"],
        seen.cpu_s,
        seen.reason,
    )


def _prlimits(limits: Limits) -> list[str]:
    # The watcher ends a run at cpu_s; the kernel's own limit is there should the watcher be late.
    return [
        f"--cpu={math.ceil(limits.cpu_s) + 2}",
        f"--as={limits.memory_bytes}",
        f"--nproc={limits.processes}",
        f"--fsize={limits.disk_bytes}",
        f"--nofile={limits.open_files}",
        "--core=0",
    ]


@contextlib.contextmanager
def _memory_file(text: str) -> Iterator:
    with os.fdopen(os.memfd_create("job", os.MFD_CLOEXEC), "w+b") as file:
        file.write(text.encode("utf-8", "replace"))
        file.flush()
        file.seek(0)
        yield file


@contextlib.contextmanager
def _folder(files: Mapping[str, str]) -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="jaxrl_llm-")
    try:
        for name, text in files.items():
            with open(os.path.join(path, name), "wb") as file:
                file.write(text.encode("utf-8", "replace"))
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# ----------------------------------------------------------------------------
# Whether it works here
# ----------------------------------------------------------------------------

_checked: dict[Sandbox, RewardError | None] = {}
_checking = threading.Lock()
_PROBE = Job(("python3", "-c", "import sys; print('probe', sys.version_info[0])"))


def check_sandbox(sandbox: Sandbox) -> None:
    """Runs a probe, once for each kind of sandbox and process.

    Raises:
        RewardError: it does not work here, and what to do about it.
    """
    with _checking:
        if sandbox not in _checked:
            _checked[sandbox] = _probe(sandbox)
    if (error := _checked[sandbox]) is not None:
        raise error


def _probe(sandbox: Sandbox) -> RewardError | None:
    hint = 'a machine that has it, or Sandbox(kind="rlimits") for programs that you trust'
    programs = ["prlimit", "/bin/sh"]
    programs += sandbox_bwrap.PROGRAMS if sandbox.kind == "bwrap" else []
    for program in programs:
        if shutil.which(program) is None:
            package = {"bwrap": "bubblewrap"}.get(program, "util-linux")
            return RewardError(
                f"the sandbox for model-written programs needs {program}",
                got="none on the PATH",
                hint=f"apt-get install {package}; or {hint}",
            )
    for package in sandbox.packages:
        if sandbox_bwrap.package_folder(package) is None:
            return RewardError("no such package for the sandbox", got=repr(package))
    outcome = sandbox._run_once(_PROBE)
    if outcome.status != "exited" or outcome.stdout != "probe 3\n":
        return RewardError(
            f"the sandbox {sandbox.kind!r} does not start on this machine",
            got=outcome.reason or outcome.stderr or outcome.status,
            hint=f"allow user namespaces (in a container: --privileged, or one without); or {hint}",
        )
    if sandbox.kind == "rlimits":
        warnings.warn(
            'sandbox "rlimits": model-written programs run with your rights, your files and your '
            "network; only time, memory and output are limited",
            stacklevel=2,
        )
    return None
