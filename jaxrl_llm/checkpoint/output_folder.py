# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A folder that appears whole or not at all, and that takes the place of nothing but its like.

All weights that are written carry a mark (`tensor_files.save_tensors`). No other program writes it,
and one that saves such a folder anew loses it, so a folder with the mark holds nothing but what was
written here.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import socket
from collections.abc import Iterator

import safetensors

from jaxrl_llm.checkpoint.tensor_files import kind_of_tensors
from jaxrl_llm.errors import ModelError


@contextlib.contextmanager
def output_folder(
    folder: str | pathlib.Path, files: re.Pattern[str], kind: str
) -> Iterator[pathlib.Path]:
    """A new folder to write into, which takes its place at `folder` when the block ends well.

    Until then it is a hidden sibling; after an error nothing of it is left and `folder` is as it
    was. An older folder there is replaced as a whole, if it is empty, or if every entry of it is a
    plain file with a name that `files` matches and all weights carry the mark of this `kind`. Of a
    link to a folder the target is replaced.

    Args:
        files: names of the files that are written.
        kind: "model", "reward model" or "adapter": the mark, and what the errors call it.

    Raises:
        ModelError: `folder` is something else, holds what was not written here, lies among the
            checkpoints of a run, or can't be written.
    """
    what = f"the {kind}"
    try:
        place = _place(pathlib.Path(folder), what)
        _refuse_strangers(place, files, kind)
        place.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            _clear_abandoned(place, files)
        building = _sibling(place, os.getpid())
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            yield building
            _refuse_strangers(place, files, kind)  # it may have been filled meanwhile
            _swap(building, place)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(
            f"{what} can't be written to {folder}: {getattr(error, 'strerror', None) or error}",
            hint="another folder, or make room",
        ) from error


def _place(folder: pathlib.Path, what: str) -> pathlib.Path:
    if folder.is_symlink() and not folder.exists():
        raise ModelError(
            f"{what} can't be written through a link that leads nowhere",
            got=folder,
            hint="a new folder",
        )
    place = folder.resolve()
    if place == pathlib.Path.cwd():
        raise ModelError(
            f"{what} can't take the place of the folder that the command runs in",
            got=place,
            hint="a new folder",
        )
    run = next((p.parent for p in (place, *place.parents) if _holds_steps(p)), None)
    if run is not None:
        raise ModelError(
            f"{what} can't be written among the checkpoints of a run",
            got=place,
            hint=f"{run / 'export'}, or any other folder",
        )
    return place


def _holds_steps(folder: pathlib.Path) -> bool:
    return folder.name == "checkpoints" and (folder.parent / "config.json").exists()


def _refuse_strangers(place: pathlib.Path, files: re.Pattern[str], kind: str) -> None:
    what = f"the {kind}"
    if place.exists() and not place.is_dir():
        raise ModelError(f"{what} can't be written over a file", got=place, hint="a new folder")
    strangers = _strangers(place, files)
    if strangers:
        raise ModelError(
            f"{what} can't replace {place}, which holds other files",
            got=", ".join(strangers[:3]),
            hint="a new folder",
        )
    found = _marks(place)
    if found != {kind} and place.exists() and any(place.iterdir()):
        raise ModelError(
            f"{what} can't replace {place}, which is not an older export of its kind",
            got=" and ".join(sorted(found)) or "files without weights",
            expected=f"a {kind} that was exported here",
            hint="a new folder, or remove this one",
        )


def _marks(folder: pathlib.Path) -> set[str]:
    """The kinds that the weights of a folder are marked with, or what is wrong with them."""
    found = set()
    for path in folder.glob("*.safetensors"):
        try:
            kind = kind_of_tensors(path)
        except ModelError:
            found.add(f"{path.name}, which is damaged")
        else:
            found.add(kind or f"{path.name}, which another program wrote")
    return found


def _strangers(folder: pathlib.Path, files: re.Pattern[str]) -> list[str]:
    """Entries that this module's callers never write: other names, folders, links, pipes."""
    if not folder.exists():
        return []
    return sorted(
        path.name
        for path in folder.iterdir()
        if not files.fullmatch(path.name) or path.is_symlink() or not path.is_file()
    )


def _sibling(place: pathlib.Path, process: int | str) -> pathlib.Path:
    host = re.sub(r"\W", "_", socket.gethostname())[:40]
    return place.with_name(f".{place.name}-{host}-{process}-partial")


def _clear_abandoned(place: pathlib.Path, files: re.Pattern[str]) -> None:
    """Remove what a process of this machine left that was killed while it wrote."""
    before, after = _sibling(place, "\0").name.split("\0")
    for path in place.parent.iterdir():
        process = path.name.removeprefix(before).removesuffix(after)
        if path.name != before + process + after or not re.fullmatch(r"[0-9]{1,9}", process):
            continue
        whole = path.is_dir() and not path.is_symlink() and not _strangers(path, files)
        if whole and not _is_running(int(process)):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return True


def _swap(building: pathlib.Path, place: pathlib.Path) -> None:
    """Move a finished folder into place; an older one is there until the instant of the swap."""
    if not place.exists():
        os.replace(building, place)
        return
    old = building.with_name(building.name.removesuffix("-partial") + "-old")
    os.replace(place, old)
    try:
        os.replace(building, place)
    except OSError:
        os.replace(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)
