# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of supervised data from JSONL, parquet, array_record, and Hugging Face data sets."""

from __future__ import annotations

import codecs
import json
import pathlib
from collections.abc import Callable
from typing import Any

from jaxrl_llm.data.records import clip
from jaxrl_llm.data.sources import json_lines, unique_keys
from jaxrl_llm.errors import DataError

Table = list[tuple[str, dict[str, Any]]]


def read_table(path: str, split: str = "train") -> Table:
    """Every row of a table with the name that errors give it: `file:line` or `file:row`.

    Args:
        path: a file ending in .jsonl, .json, .parquet or .array_record; a folder that
            `datasets.save_to_disk` wrote; or the name of a data set of the hub.
        split: of a folder or data set.

    Raises:
        DataError: it is not there, empty, or can't be read.
    """
    file = pathlib.Path(path).expanduser()
    reader = READERS.get(file.suffix)
    if reader is not None:
        if not file.is_file():
            raise DataError(
                f"no file {file}",
                got=f"the working directory {pathlib.Path.cwd()}"
                if not file.is_absolute()
                else None,
                hint="a full path",
            )
        rows = reader(file)
    elif file.is_file():
        raise DataError(
            f"{file} is of a kind that is not read", expected=", ".join(READERS) + " or a folder"
        )
    else:
        rows = _read_datasets(path, split)
    if not rows:
        raise DataError(f"{path} holds no rows")
    return rows


def _read_jsonl(path: pathlib.Path) -> Table:
    rows = json_lines(path, '{"messages": …}, or the columns of another format')
    return [(f"{path.name}:{number}", row) for number, row in rows]


def _read_json(path: pathlib.Path) -> Table:
    """One array of objects, or one object a line."""
    start = path.read_bytes()[:64].removeprefix(codecs.BOM_UTF8).lstrip()
    if not start.startswith(b"["):
        return _read_jsonl(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not JSON",
            got=clip(str(error) or type(error).__name__),
            expected="an array of objects, or one object a line",
        ) from None
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path.name}:{number} is not a JSON object", got=clip(repr(row), 60))
    return [(f"{path.name}:{number}", row) for number, row in enumerate(rows)]


def _read_parquet(path: pathlib.Path) -> Table:
    try:
        import pyarrow.parquet
    except ImportError:
        raise _missing("parquet files") from None
    try:
        names = pyarrow.parquet.read_schema(path).names
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a parquet file", got=clip(str(error))) from None
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path} has columns of the same name", got=", ".join(twice))
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"the rows of {path} can't be read", got=clip(str(error))) from None
    return [(f"{path.name}:{number}", row) for number, row in enumerate(rows)]


def _read_array_record(path: pathlib.Path) -> Table:
    """Records are JSON objects in UTF-8."""
    import grain

    try:
        source = grain.sources.ArrayRecordDataSource([str(path)])
        records = [source[index] for index in range(len(source))]
    except (RuntimeError, ValueError, OSError) as error:
        raise DataError(f"{path} is not an array_record file", got=clip(str(error))) from None
    rows = []
    for number, record in enumerate(records):
        try:
            row, why = json.loads(record, object_pairs_hook=unique_keys), ""
        except (ValueError, RecursionError) as error:
            row, why = None, f" ({error or type(error).__name__})"
        if not isinstance(row, dict):
            raise DataError(
                f"{path.name}:{number} is not a JSON object", got=clip(repr(record), 60) + why
            )
        rows.append((f"{path.name}:{number}", row))
    return rows


def _read_datasets(path: str, split: str) -> Table:
    try:
        import datasets
    except ImportError:
        raise _missing(f"{path!r}, which is no file here: data sets") from None
    folder = pathlib.Path(path).expanduser()
    try:
        if folder.is_dir():
            found = datasets.load_from_disk(str(folder))
            if not isinstance(found, dict) and split != "train":
                raise DataError(f"the data set {path!r} has no splits", got=f"split={split!r}")
            table = found[split] if isinstance(found, dict) else found
        else:
            table = datasets.load_dataset(path, split=split)
    except DataError:
        raise
    except Exception as error:  # of many kinds: network, names, formats
        raise DataError(
            f"can't load the data set {path!r}, split {split!r}",
            got=f"{type(error).__name__}: {clip(str(error), 200)}",
            hint="a file, a folder of save_to_disk, or the name of a data set of the hub",
        ) from None
    return [(f"{path}:{number}", dict(row)) for number, row in enumerate(table)]


def _missing(what: str) -> DataError:
    return DataError(
        f"{what} need the package datasets",
        hint="pip install 'jaxrl_llm[datasets]', or a JSONL file",
    )


READERS: dict[str, Callable[[pathlib.Path], Table]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".array_record": _read_array_record,
}
