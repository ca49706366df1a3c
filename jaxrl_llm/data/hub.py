# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face hub, or in a folder of theirs (extra `datasets`)."""

from __future__ import annotations

import dataclasses

from jaxrl_llm.data.records import Source, check_disjoint, check_ids, clip, split
from jaxrl_llm.data.sources import JsonlTask
from jaxrl_llm.errors import DataError


@dataclasses.dataclass(frozen=True)
class HubTask:
    """Prompts from a data set that `datasets.load_dataset` or `datasets.load_from_disk` reads.

    Rows are checked and split as lines of a file are: see `JsonlTask`.

    Attributes:
        path: the data set's name, such as openai/gsm8k, or a folder.
        name: its configuration, such as main.
        split: the split to train on.
        heldout_split: the split to hold out.
        heldout: or how many rows of `split` to hold out.
        rows: how the columns are read; its path and held-out settings are not used.
    """

    path: str
    name: str | None = None
    split: str = "train"
    heldout_split: str | None = None
    heldout: int = 0
    rows: JsonlTask = JsonlTask("")

    def load(self) -> tuple[Source, Source]:
        """Returns (training records, held-out records).

        Raises:
            DataError: the package or the data set can't be had, or a row is wrong as a line could
                be.
        """
        records = self._read(self.split)
        if self.heldout_split is None:
            train, heldout = split(records, self.heldout, self.rows.split_seed, self.path)
        else:
            train, heldout = records, self._read(self.heldout_split)
        check_ids([*train, *heldout])
        check_disjoint(train, heldout)
        return train, heldout

    def _read(self, part: str) -> list:
        try:
            import datasets
        except ImportError:
            raise DataError(
                "data sets of the hub need the package datasets",
                hint="pip install 'jaxrl_llm[datasets]', or a JSONL file",
            ) from None
        where = f"{self.path}/{part}"
        try:
            folder = datasets.load_from_disk(self.path)
            rows = folder[part] if isinstance(folder, dict) else folder
        except FileNotFoundError:
            rows = self._download(datasets, part)
        except KeyError:
            raise DataError(f"no split {part!r} in {self.path}", got=", ".join(folder)) from None
        records = [
            self.rows.record(dict(row), f"{where}:{index}", f"{part}:{index}")
            for index, row in enumerate(rows)
        ]
        if not records:
            raise DataError(f"{where} holds no prompts")
        return records

    def _download(self, datasets, part: str):
        try:
            return datasets.load_dataset(self.path, self.name, split=part)
        except Exception as error:  # of many kinds: network, names, formats
            raise DataError(
                f"can't load the data set {self.path!r}",
                got=f"{type(error).__name__}: {clip(str(error), 200)}",
                hint="the name of a data set of the hub, or a folder that save_to_disk wrote",
            ) from None
