# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The README's table of model families, from the tests that passed.

    JAXRL_LLM_PARITY_PYTHON=… pytest --junitxml=report.xml -m "full or not full" \\
        tests/models tests/checkpoint
    python scripts/family_table.py report.xml

A cell is ticked if every test behind it passed, for every tiny model of the family; a test that did
not run, or was skipped, leaves it empty.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import xml.etree.ElementTree

# Family → the models that people know it by, and the golden cases that stand for it.
FAMILIES = {
    "llama": (
        "Llama 2, 3, 3.1, 3.2; SmolLM2",
        ("llama", "llama31", "llama_linear", "llama_dynamic", "llama_yarn"),
    ),
    "mistral": ("Mistral", ("mistral",)),
    "qwen2": ("Qwen2, Qwen2.5", ("qwen2",)),
    "qwen3": ("Qwen3", ("qwen3",)),
    "gemma2": ("Gemma 2", ("gemma2",)),
    "gemma3_text": ("Gemma 3 (text)", ("gemma3",)),
    "olmo2": ("OLMo 2", ("olmo2",)),
    "phi3": ("Phi-3, Phi-3.5, Phi-4", ("phi3", "phi3_longrope")),
    "granite": ("Granite 3", ("granite",)),
    "smollm3": ("SmolLM3", ("smollm3",)),
    "mixtral": ("Mixtral", ("mixtral",)),
    "qwen3_moe": ("Qwen3-MoE", ("qwen3_moe", "qwen3_moe_plain")),
}
# Cases whose frequencies depend on the length: the stored greedy tokens are of the others.
NOT_DECODED = {"llama_linear", "llama_dynamic", "llama_yarn", "qwen3_moe_plain"}
# Column → tests by case.
COLUMNS = {
    "import": (
        "test_logits_equal_those_of_transformers_padded_left_and_packed",
        "test_configuration_and_count",
    ),
    "export": ("test_import_export_import_is_bitwise_under_the_same_names",),
    "sampler": ("test_greedy_decoding_equals_that_of_transformers",),
    "train": ("test_all_parameters_train",),
    "LoRA": ("test_an_adapter_trains_and_merges",),
}
LIVE = "test_transformers_loads_every_export_with_equal_logits"
GGUF = {
    "llama": ("test_configuration_and_parameters_come_back", None),
    "qwen2": ("test_a_qwen2_file", None),
    "mistral": ("test_other_families_come_back", "mistral"),
    "qwen3": ("test_other_families_come_back", "qwen3"),
    "gemma2": ("test_other_families_come_back", "gemma2"),
    "gemma3_text": ("test_other_families_come_back", "gemma3"),
}


def read_results(paths: list[pathlib.Path]) -> dict[tuple[str, str], bool]:
    """(test, its parameters) → whether it passed; skipped counts as not."""
    results = {}
    for path in paths:
        for case in xml.etree.ElementTree.parse(path).iter("testcase"):
            name, _, parameters = case.get("name", "").partition("[")
            bad = any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
            results[name, parameters.removesuffix("]")] = not bad
    return results


def passed(results: dict, test: str, case: str | None) -> bool:
    """All runs of a test that belong to a case passed, and there is one."""
    found = [
        good
        for (name, parameters), good in results.items()
        if name == test and (case is None or case in parameters.split("-"))
    ]
    return bool(found) and all(found)


def table(results: dict[tuple[str, str], bool]) -> str:
    lines = ["| Family | " + " | ".join([*COLUMNS, "GGUF"]) + " |"]
    lines.append("|---|" + ":-:|" * (len(COLUMNS) + 1))
    for family, (models, cases) in FAMILIES.items():
        cells = []
        for column, tests in COLUMNS.items():
            counted = [c for c in cases if column != "sampler" or c not in NOT_DECODED]
            good = all(passed(results, test, case) for test in tests for case in counted)
            if column == "export":
                good = good and passed(results, LIVE, None)
            cells.append("✓" if good else "")
        gguf = family in GGUF and passed(results, *GGUF[family])
        lines.append(f"| {models} | " + " | ".join([*cells, "✓" if gguf else ""]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=pathlib.Path, help="JUnit files of pytest")
    print(table(read_results(parser.parse_args().reports)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
