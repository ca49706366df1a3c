# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards import sandbox, sandbox_bwrap
from jaxrl_llm.rewards.sandbox import Job, Limits, Outcome, Sandbox
from jaxrl_llm.rewards.sandbox_http import RemoteSandbox, SandboxServer

_BWRAP = Sandbox()
_SHORT = Limits(cpu_s=1.0, idle_s=1.0)


def _python(text, *, limits=_SHORT, runner=_BWRAP, **options):
    command = ("python3", "main.py", "{results}")
    return runner.run(Job(command, {"main.py": text}, limits=limits, **options))


def _says(text, **options):
    outcome = _python(text, **options)
    assert (outcome.status, outcome.exit_code) == ("exited", 0), outcome
    return outcome.stdout.strip()


# ----------------------------------------------------------------------------
# What a run is
# ----------------------------------------------------------------------------


def test_input_output_results_and_exit_code():
    text = (
        "import os, sys\n"
        "print(sys.stdin.read().upper() + 'ß')\n"
        "print('oh', file=sys.stderr)\n"
        "os.write(int(sys.argv[1]), b'told')\n"
        "sys.exit(3)\n"
    )
    outcome = _python(text, stdin="abc\n" * 3)
    assert outcome.status == "exited" and outcome.exit_code == 3
    assert (outcome.stdout, outcome.stderr) == ("ABC\nABC\nABC\nß\n", "oh\n")
    assert outcome.results == "told"


def test_signals_and_bytes_that_are_no_text():
    assert _python("import os, signal; os.kill(os.getpid(), signal.SIGTERM)").exit_code == 143
    assert _python("import os; os.write(1, bytes([65, 255]))").stdout == "A\ufffd"


def test_more_input_than_a_pipe_holds_that_nobody_reads():
    assert _python("print('done')", stdin="x" * 10**6).stdout == "done\n"


def test_file_names_stay_in_the_folder():
    for name in ("../x", "a/b", "", ".", "..", "a\0"):
        with pytest.raises(RewardError, match="bad name"):
            Job(("true",), {name: ""})


# ----------------------------------------------------------------------------
# Isolation
# ----------------------------------------------------------------------------


def test_namespaces_are_its_own_and_fresh():
    kinds = ("user", "pid", "mnt", "net", "ipc", "uts")
    text = f"import os\nfor k in {kinds}: print(os.readlink(f'/proc/self/ns/{{k}}'))"
    first, second = _says(text).split("\n"), _says(text).split("\n")
    for kind, inside in zip(kinds, first, strict=True):
        assert inside != os.readlink(f"/proc/self/ns/{kind}")
    # The kernel may hand a dead namespace's number out again, so run two at the same time.
    slow = text + "\nimport time; time.sleep(0.5)"
    jobs = [Job(("python3", "main.py"), {"main.py": slow}, limits=_SHORT)] * 2
    first, second = (outcome.stdout.split() for outcome in _BWRAP.run_all(jobs))
    assert not set(first) & set(second)


@pytest.mark.parametrize("privileged", [True, False])
def test_nothing_of_this_machine_is_seen(tmp_path, monkeypatch, privileged):
    if not privileged:  # as for an ordinary user, whoever runs this
        monkeypatch.setattr(sandbox_bwrap, "_privileged", lambda: False)
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "42")
    secret = tmp_path / "expected.json"
    secret.write_text("42")
    text = (
        "import os, pathlib\n"
        f"paths = {[str(secret), __file__, str(pathlib.Path(__file__).parents[2])]}\n"
        "print([p for p in paths if os.path.exists(p)])\n"
        "print([k for k in os.environ if 'SECRET' in k])\n"
        "print(os.listdir('.'), os.listdir('/dev/shm'))\n"
        "print(sorted(p for p in os.listdir('/proc') if p.isdigit()))\n"
        "print(sorted(set(os.listdir('/')) & {'work', 'home', 'var', 'sys', 'run', 'boot'}))\n"
        "print(os.getuid(), open('/proc/self/status').read().split('CapEff:')[1].split()[0])\n"
        "open('left', 'w').write('x')\n"
    )
    for _ in range(2):  # what one run leaves behind, the next does not find
        assert _says(text).split("\n") == [
            "[]",
            "[]",
            "['main.py'] []",
            "['1', '2']",
            "[]",
            "65534 0000000000000000",
        ]


def test_installed_packages_are_hidden_unless_named():
    import jaxtyping

    text = "import importlib.util as u; print([bool(u.find_spec(n)) for n in ('jaxrl_llm', %r)])"
    assert _says(text % "jaxtyping") == "[False, False]"
    inside = Sandbox(packages=("jaxtyping",))
    # Found, though it does not import: what it needs was not asked for.
    assert _says(text % "jaxtyping", runner=inside) == "[False, True]"
    assert jaxtyping.__file__ and sandbox_bwrap.package_folder("no_such_package") is None
    with pytest.raises(RewardError, match="no such package"):
        Sandbox(packages=("no_such_package",)).run(Job(("true",)))


def test_only_the_work_folder_can_be_written():
    text = (
        "import os\n"
        "for path in ('/x', '/usr/x', '/etc/x', '/dev/x', '/proc/x', '/bin/x', 'main.py', 'x', "
        "'/dev/shm/x'):\n"
        "    try:\n"
        "        open(path, 'w').close()\n"
        "        print(path)\n"
        "    except OSError:\n"
        "        pass\n"
    )
    # As its owner a program may make main.py writable; it is a copy all the same.
    assert set(_says(text).split("\n")) - {"main.py"} == {"x", "/dev/shm/x"}


def test_no_network():
    text = (
        "import socket\n"
        "print([name for _, name in socket.if_nameindex()])\n"
        "try: socket.create_connection(('192.0.2.1', 80), 0.2)\n"
        "except OSError as error: print(error.errno)\n"
    )
    assert _says(text) == "['lo']\n101"


# ----------------------------------------------------------------------------
# Limits
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("import signal\nsignal.pause()", "timeout"),
        ("import os\nos.fork()\nos.fork()\nwhile True: pass", "timeout"),
        ("while True: print('x' * 1000)", "overflow"),
        ("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", "overflow"),
        ("import os, sys\nwhile True: os.write(int(sys.argv[1]), b'x' * 1000)", "overflow"),
    ],
)
def test_time_and_output_are_limited(text, status):
    begin = time.monotonic()
    outcome = _python(text)
    assert outcome.status == status and outcome.reason and outcome.exit_code is None
    assert time.monotonic() - begin < 30.0
    assert max(map(len, (outcome.stdout, outcome.stderr, outcome.results))) <= 2**20 + 8


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = bytearray(2**30)", "MemoryError"),
        ("for i in range(10): open(str(i), 'wb').write(b'x' * 2**22)", "No space left"),
        ("open('x', 'wb').truncate(2**25)", "File too large"),
        ("open('/dev/shm/x', 'wb').write(b'x' * 2**21)", "No space left"),
        ("x = [open('/dev/null') for _ in range(200)]", "Too many open files"),
        (
            "import os\nfor _ in range(99):\n  if not os.fork(): os.execvp('sleep', 'ab')",
            "Errno 11",
        ),
        ("import os; os.setuid(0)", "OSError"),
        ("import os; os.chroot('/')", "Operation not permitted"),
    ],
)
def test_memory_disk_files_processes_and_rights_are_limited(text, says):
    outcome = _python(text)
    assert outcome.status == "exited" and outcome.exit_code != 0 and says in outcome.stderr


def test_all_processes_end_with_the_run():
    name = f"left-{os.getpid()}-{time.monotonic_ns()}"
    text = (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    if os.fork() == 0: os.execv('/bin/sleep', ['{name}', '1000'])\n"
    )
    for ending in ("", "import time\ntime.sleep(1000)", "while True: print('x' * 1000)"):
        _python(text + ending)
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                running = entry.name.isdigit() and (entry / "cmdline").read_bytes()
                assert not (running and name.encode() in running)


def test_verdicts_do_not_change_on_a_busy_machine():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    try:
        works = "import time\nwhile time.process_time() < 0.5: pass\nprint('done')"
        jobs = [Job(("python3", "m.py"), {"m.py": works}, limits=_SHORT)] * 3
        jobs.append(Job(("python3", "-c", "while True: pass"), limits=_SHORT))
        jobs.append(Job(("sleep", "60"), limits=_SHORT))
        outcomes = _BWRAP.run_all(jobs)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    statuses = [outcome.status for outcome in outcomes]
    assert statuses == ["exited"] * 3 + ["timeout"] * 2
    assert [outcome.stdout for outcome in outcomes[:3]] == ["done\n"] * 3


def test_threads_and_lowered_priorities_on_a_busy_machine():
    """A thread that works is not idle; who steps back behind the others has used up its time."""
    core = max(os.sched_getaffinity(0))
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # the sandbox inherits it: all of them share one CPU
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    works = (
        "import threading, time\n"
        "def work():\n"
        "    while time.process_time() < 0.5: pass\n"
        "    print('done')\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start(); thread.join()\n"
    )
    try:
        assert _says(works, limits=Limits(cpu_s=2.0, idle_s=1.0)) == "done"
        begin = time.monotonic()
        for step_back in (
            "os.nice(12)",
            "os.sched_setscheduler(0, 5, os.sched_param(0))",
            "if os.path.exists(p := '/proc/self/autogroup'): open(p, 'w').write('15')",
        ):
            outcome = _python(f"import os\n{step_back}\nwhile True: pass")
            assert outcome.status == "timeout", outcome
        assert time.monotonic() - begin < 90.0
    finally:
        os.sched_setaffinity(0, mine)
        for process in busy:
            process.kill()
            process.wait()


def test_a_machine_without_cpu_time_is_asked_once(monkeypatch):
    runs = []

    def starved(self, job):
        runs.append(job)
        return Outcome("unavailable", reason=sandbox.NO_CPU_TIME)

    assert _says("print(1)") == "1"
    monkeypatch.setattr(Sandbox, "_run_once", starved)
    assert _python("print(1)").status == "unavailable" and len(runs) == 1


# ----------------------------------------------------------------------------
# When it does not work
# ----------------------------------------------------------------------------


def _pretend(monkeypatch, folder, **programs):
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(sandbox, "_checked", {})


def test_a_sandbox_that_fails_at_times_is_tried_again(tmp_path, monkeypatch):
    assert _says("print(1)") == "1"
    count = f"echo x >> {tmp_path}/tries"
    real = 'exec /usr/bin/bwrap "$@"'
    test = f"test $(wc -l < {tmp_path}/tries) -ge 3 || {{ echo 'no namespace' >&2; exit 1; }}"
    _pretend(monkeypatch, tmp_path, bwrap=f"{count}\n{test}\n{real}")
    monkeypatch.setattr(sandbox, "_checked", {_BWRAP: None})
    assert _says("print(1)") == "1"
    (tmp_path / "tries").unlink()
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{count}\necho 'no namespace' >&2\nexit 0\n")
    assert _python("print(1)") == Outcome("unavailable", reason="no namespace")
    assert (tmp_path / "tries").read_text().count("x") == 3


def test_a_machine_without_bubblewrap(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "_checked", {})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        RewardError, match=r"needs .* apt-get install .*Sandbox\(kind=\"rlimits\"\)"
    ):
        _python("print(1)")


def test_a_machine_without_namespaces(tmp_path, monkeypatch):
    _pretend(monkeypatch, tmp_path, bwrap="echo 'bwrap: No permissions to create' >&2; exit 1")
    with pytest.raises(RewardError, match=r"does not start on this machine .* No permissions"):
        _python("print(1)")


def test_rlimits_are_asked_for_by_name_and_warn(monkeypatch):
    monkeypatch.setattr(sandbox, "_checked", {})
    runner = Sandbox(kind="rlimits")
    with pytest.warns(UserWarning, match="your rights, your files"):
        assert _says("import os; print(os.listdir('.'))", runner=runner) == "['main.py']"
    assert _python("while True: pass", runner=runner).status == "timeout"
    assert _python("x = bytearray(2**30)", runner=runner).exit_code == 1
    assert _python("import sys, os; os.write(int(sys.argv[1]), b'r')", runner=runner).results == "r"
    daemon = "import os, time\nif os.fork() == 0: time.sleep(1000)\nprint('ended')"
    assert _python(daemon, runner=runner).stdout == "ended\n"


# ----------------------------------------------------------------------------
# Over HTTP
# ----------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("SANDBOX_TOKEN", "right")
    with SandboxServer(("127.0.0.1", 0), "right") as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_remote_sandbox_gives_the_same_outcomes(server, monkeypatch):
    remote = RemoteSandbox(f"http://127.0.0.1:{server.server_address[1]}")
    for text in ("print(input())", "raise SystemExit(3)", "while True: pass"):
        here, there = _python(text, stdin="é\n"), _python(text, stdin="é\n", runner=remote)
        assert (there.status, there.exit_code, there.stdout) == (
            here.status,
            here.exit_code,
            here.stdout,
        )
    monkeypatch.setenv("SANDBOX_TOKEN", "wrong")
    with pytest.raises(RewardError, match=r"wrong token .* SANDBOX_TOKEN"):
        remote.run(Job(("true",)))


def test_a_remote_sandbox_without_cpu_time_is_asked_once(server):
    runs = []

    class Starved:
        def run(self, job):
            runs.append(job)
            return Outcome("unavailable", reason=sandbox.NO_CPU_TIME)

    server.runner = Starved()
    remote = RemoteSandbox(f"http://127.0.0.1:{server.server_address[1]}")
    assert remote.run(Job(("true",))).status == "unavailable" and len(runs) == 1


def test_a_remote_sandbox_that_is_away(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.rewards.sandbox_http._PAUSE_S", 0.0)
    outcome = RemoteSandbox("http://127.0.0.1:9").run(Job(("true",)))
    assert outcome.status == "unavailable" and "refused" in outcome.reason
    with pytest.raises(RewardError, match="not a URL"):
        RemoteSandbox("sandbox-host")
    with pytest.raises(RewardError, match="needs a token"):
        SandboxServer(("127.0.0.1", 0), "")
