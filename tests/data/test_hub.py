# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
import types

import pytest

from jaxrl_llm.data.hub import HubTask
from jaxrl_llm.data.sources import JsonlTask
from jaxrl_llm.errors import DataError

_ROWS = {
    "train": [{"question": f"q{i}", "answer": f"so #### {i}", "level": i} for i in range(9)],
    "test": [{"question": "t", "answer": "#### 1", "level": 0}],
}


@pytest.fixture
def package(monkeypatch):
    """Stands for the package `datasets`: the two functions that are used of it."""
    module = types.ModuleType("datasets")

    def load_from_disk(path):
        if path != "folder":
            raise FileNotFoundError(path)
        return dict(_ROWS)

    def load_dataset(path, name, split):
        if path != "openai/gsm8k":
            raise ConnectionError("no\nnetwork")
        assert name == "main"
        return _ROWS[split]

    module.load_from_disk, module.load_dataset = load_from_disk, load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)


_READ = JsonlTask("", prompt_column="question", answer_after="####")


def test_rows_of_the_hub_and_of_a_folder(package):
    for path, name in (("openai/gsm8k", "main"), ("folder", None)):
        train, heldout = HubTask(path, name, heldout_split="test", rows=_READ).load()
        assert (len(train), len(heldout)) == (9, 1)
        assert train[2] == {"id": "train:2", "prompt": "q2", "answer": "2", "level": 2}
        assert heldout[0]["id"] == "test:0"
    train, heldout = HubTask("folder", heldout=3, rows=_READ).load()
    assert (len(train), len(heldout)) == (6, 3)


def test_mistakes(package, monkeypatch):
    for task, message in (
        (HubTask("nowhere"), "can't load the data set 'nowhere' · got ConnectionError: no network"),
        (
            HubTask("folder", split="validation"),
            "no split 'validation' in folder · got train, test",
        ),
        (HubTask("folder"), "no column 'prompt' · got the columns question, answer, level"),
        (HubTask("folder", heldout=9, rows=_READ), "can't hold out that many"),
    ):
        with pytest.raises(DataError, match=message):
            task.load()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"jaxrl_llm\[datasets\]"):
        HubTask("folder").load()
