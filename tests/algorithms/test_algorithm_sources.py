# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Every public function says where it comes from."""

import importlib
import inspect
import pkgutil
import re

import jaxrl_llm.algorithms
from jaxrl_llm.algorithms.presets import PRESETS

MODULES = [
    importlib.import_module(f"jaxrl_llm.algorithms.{module.name}")
    for module in pkgutil.iter_modules(jaxrl_llm.algorithms.__path__)
]


def public():
    for module in MODULES:
        for name, thing in vars(module).items():
            local = getattr(thing, "__module__", None) == module.__name__
            if name.startswith("_") or not local:
                continue
            if inspect.isfunction(thing) or inspect.isclass(thing):
                yield module.__name__.rpartition(".")[2], name, thing


def test_every_public_function_carries_its_source():
    named = list(public())
    assert len(named) > 70
    without = [
        f"{module}.{name}"
        for module, name, thing in named
        if name != "AlgoConfig" and not re.search(r"Source: .*https?://", thing.__doc__ or "", re.S)
    ]
    assert not without, without


def test_every_row_has_a_paper():
    for name, row in PRESETS.items():
        assert re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}|https://link\..*", row.source), (
            name
        )


def test_algorithms_know_no_model_mesh_config_or_logger():
    for module in MODULES:
        imports = re.findall(r"(?m)^(?:from|import) (jaxrl_llm\S*)", inspect.getsource(module))
        allowed = ("jaxrl_llm.algorithms", "jaxrl_llm.types", "jaxrl_llm.errors")
        assert all(name.startswith(allowed) for name in imports), module.__name__
