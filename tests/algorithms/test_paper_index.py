# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The README's paper index: paper → function → preset → test, all of which exist."""

import importlib
import pathlib
import re

from jaxrl_llm.algorithms.presets import PRESETS

ROOT = pathlib.Path(__file__).parents[2]
LINES = (ROOT / "README.md").read_text().splitlines()
# paper, function, preset, test
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in LINES
    if re.match(r"\| \[.*\]\(https?://.*\) \| `\w+\.\w+`", line)
]


def names(cell):
    return re.findall(r"`([^`]+)`", cell)


def test_every_preset_has_a_row_with_its_paper():
    papers = {name: row[0] for row in ROWS for name in names(row[2])}
    for name, preset in PRESETS.items():
        assert name in papers, name
        assert preset.source in papers[name], (name, preset.source)


def test_every_function_and_test_exists():
    assert len(ROWS) > len(PRESETS)
    for paper, functions, presets, tests in ROWS:
        assert names(functions) and names(tests), paper
        for function in names(functions):
            module, name = function.split(".")
            thing = getattr(importlib.import_module(f"jaxrl_llm.algorithms.{module}"), name)
            links = re.findall(r"\((https?://[^)]+)\)", paper)
            assert any(link in thing.__doc__ for link in links), (function, links)
        for test in names(tests):
            assert (ROOT / "tests" / "algorithms" / test).exists(), test
        for preset in names(presets):
            assert preset.startswith("--algo.") or preset in PRESETS, preset
