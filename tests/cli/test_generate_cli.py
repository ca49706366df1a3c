# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxrl_llm.cli.generate`: text, chat, JSON lines, stop strings, mistakes."""

from __future__ import annotations

import json

import pytest
from tiny_model import write_tiny_model

from jaxrl_llm.cli.generate import main


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> list[str]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    return ["--model", str(folder), "--max-tokens", "6", "--seed", "3"]


def test_prints_a_completion_that_the_seed_decides(tiny, capsys):
    assert main([*tiny, "--prompt", "ab"]) == 0
    first = capsys.readouterr()
    assert main([*tiny, "--prompt", "ab"]) == 0
    assert capsys.readouterr().out == first.out != ""
    assert "seed 3" in first.err and "tok/s" in first.err


def test_json_lines_in_and_out(tiny, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": "bc", "answer": 2}\n')
    arguments = ["--input", str(source), "--output", str(target), "--n", "2"]
    assert main([*tiny, *arguments]) == 0
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted((line["answer"], line["sample"]) for line in lines) == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert all(isinstance(line["completion"], str) and line["finish"] for line in lines)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--prompt", "a", "--top-p", "0"], "bad top_p"),
        (["--prompt", "a", "--temperature", "-1"], "bad temperature"),
        (["--input", "missing.jsonl"], "missing.jsonl"),
        (["--prompt", "a", "--model", "no/such.gguf"], "no such model"),
        (["--prompt", "a", "--chat"], "template"),
        (["--prompt", "a", "--n", "0"], "group_size"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, told, tiny, capsys):
    assert main([*tiny, *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err and err.startswith("error: ") and err.count("\n") == 1
