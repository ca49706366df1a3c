# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The command line of bubblewrap: what a sandboxed program sees of this machine.

Run by an ordinary user, bubblewrap makes a user namespace in which the program is `nobody`. Run by
root, that would leave the program root's number of processes without a limit (the kernel exempts
user 0) and files that only root can reach: so bubblewrap mounts as root, and the program then
becomes a user that exists nowhere else, without capabilities, in a user namespace of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import random
import sys
from collections.abc import Mapping, Sequence

PROGRAMS = ("bwrap", "setpriv", "unshare")
FOLDER = "/tmp"
_NOBODY = 65534
_PACKAGES = "/packages"
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SHARED_MEMORY_BYTES = 1 << 20


def argv(
    files: Mapping[str, int], tell: int, disk_bytes: int, packages: Sequence[str]
) -> list[str]:
    """The command that starts another command, appended to it, in a fresh sandbox.

    Args:
        files: descriptors of the contents of files, by name.
        tell: descriptor to which bubblewrap writes the number of the sandbox's first process.
        disk_bytes: size of the one folder that can be written, which holds the files.
        packages: names of Python packages that can be imported.
    """
    placed = [
        part
        for name, descriptor in files.items()
        for part in ("--perms", "0444", "--file", str(descriptor), f"{FOLDER}/{name}")
    ]
    as_root = _privileged()
    return [
        *("bwrap", "--info-fd", str(tell)),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--hostname", "sandbox"),
        *(() if as_root else ("--unshare-user", "--disable-userns")),
        *(() if as_root else ("--uid", str(_NOBODY), "--gid", str(_NOBODY))),
        *_environment_options(packages),
        *_system(),
        *_packages(tuple(packages)),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"),
        *("--perms", "1777", "--size", str(disk_bytes), "--tmpfs", FOLDER, "--chdir", FOLDER),
        *placed,
        *("--remount-ro", "/dev", "--remount-ro", "/", "--"),
        *(_become_nobody() if as_root else ()),
    ]


def environment(folder: str, packages: Sequence[str]) -> dict[str, str]:
    """All environment variables that a program gets."""
    return {
        "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **({"PYTHONPATH": _PACKAGES} if packages and folder == FOLDER else {}),
    }


def package_folder(name: str) -> pathlib.Path | None:
    """Where an importable package lies; None if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return pathlib.Path(places[0]) if places else None


def _environment_options(packages: Sequence[str]) -> list[str]:
    options = ["--clearenv"]
    for name, value in environment(FOLDER, packages).items():
        options += ["--setenv", name, value]
    return options


@functools.cache
def _system() -> tuple[str, ...]:
    """System programs and the interpreter, read-only, without the packages installed beside
    them.
    """
    options = ["--ro-bind", "/usr", "/usr"]
    for folder in _SYSTEM_FOLDERS:
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            options += ["--ro-bind", folder, folder]
    options += ["--perms", "0755", "--dir", "/etc"]
    for path in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        options += ["--ro-bind-try", path, path]
    prefix = pathlib.Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        for path in {prefix, pathlib.Path(sys.base_prefix)}:
            for parent in reversed(
                path.parents[:-1]
            ):  # or they are made as closed as they are here
                options += ["--perms", "0755", "--dir", str(parent)]
            options += ["--ro-bind", str(prefix), str(path)]
    # Data of this or another package may hold expected outputs.
    for root in {prefix, pathlib.Path("/usr"), pathlib.Path("/usr/local")}:
        for name in ("site-packages", "dist-packages"):
            for path in (*root.glob(f"lib*/python3*/{name}"), *root.glob(f"lib*/{name}")):
                hide = ("--perms", "0555", "--size", "4096", "--tmpfs", str(path))
                options += [*hide, "--remount-ro", str(path)] if path.is_dir() else []
    return tuple(options)


@functools.cache
def _packages(names: tuple[str, ...]) -> tuple[str, ...]:
    options = ["--perms", "0755", "--dir", _PACKAGES]
    for name in names:
        folder = package_folder(name)
        options += ["--ro-bind", str(folder), f"{_PACKAGES}/{name}"]
        libraries = folder.parent / f"{name}.libs"  # where wheels keep their shared libraries
        options += ["--ro-bind-try", str(libraries), f"{_PACKAGES}/{name}.libs"]
    return tuple(options)


@functools.cache
def _privileged() -> bool:
    return os.geteuid() == 0 and _user_ids() > 1


@functools.cache
def _user_ids() -> int:
    """How many user ids there are from 0 on: fewer than 2³² in a container."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        rows = [tuple(map(int, line.split())) for line in file]
    return next((count for inside, _, count in rows if inside == 0), 0)


def _become_nobody() -> tuple[str, ...]:
    # Drawn by the system: a seeded random module elsewhere must not make two runs share a user.
    most = min(_user_ids(), 2**31) - 1
    user = str(random.SystemRandom().randrange(most // 2, most))
    return (
        *("setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs"),
        *("--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"),
        *("unshare", "--user", f"--map-user={_NOBODY}", f"--map-group={_NOBODY}"),
    )
