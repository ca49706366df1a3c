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
        (["--prompt", "a", "--n", "0"], "--n is too small"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens is too small"),
        (["--prompt", "a", "--input", "b.jsonl"], "both --prompt and --input"),
        (["--prompt", "a", "--resume"], "--resume without --output"),
        (["--prompt", "a", "--output", "no/folder/out.jsonl"], "can't be written"),
        (["--prompt", "a", "--output", "."], "exists"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, told, tiny, capsys):
    assert main([*tiny, *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err and err.startswith("error: ") and err.count("\n") == 1


def test_an_output_that_exists_stays_and_is_gone_on_with(tiny, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in "abcdef"))
    arguments = [*tiny, "--input", str(source), "--output", str(target), "--n", "2"]
    assert main(arguments) == 0
    whole = target.read_text()
    assert main(arguments) == 2 and target.read_text() == whole
    assert "--resume" in capsys.readouterr().err
    lines = whole.splitlines(keepends=True)
    target.write_text("".join(lines[:5]) + lines[5][:10])  # killed in the middle of a line
    assert main([*arguments, "--resume", "--seed", "4"]) == 2
    assert main([*arguments, "--resume"]) == 0
    assert sorted(target.read_text().splitlines(keepends=True)) == sorted(lines)


def test_a_prompt_that_can_t_be_completed_stops_no_other(tiny, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = ["ab", "", "a" * 5000, 5, "cd"]
    source.write_text(
        "".join(json.dumps({"prompt": p, "row": i}) + "\n" for i, p in enumerate(prompts))
    )
    assert main([*tiny, "--input", str(source), "--output", str(target)]) == 2
    lines = {line["row"]: line for line in map(json.loads, target.read_text().splitlines())}
    assert sorted(lines) == [0, 1, 2, 3, 4]
    assert [i for i in lines if "error" in lines[i]] and all("error" in lines[i] for i in (1, 2, 3))
    assert all(lines[i]["completion"] is not None for i in (0, 4))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"prompt": "a"}\n{"text": "b"}\n', "in.jsonl:2 has no prompt"),
        ('{"prompt": "a"}\n{"prompt": }\n', "in.jsonl:2 is not JSON"),
        ('{"prompt": "a", "note": "\\ud83d"}\n', "in.jsonl:1 has half of a character"),
        ('{"prompt": "a", "sample": 1}\n', "rename them"),
        ("\n", "no lines"),
    ],
)
def test_mistakes_in_the_input_are_told_with_their_line(text, told, tiny, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    assert main([*tiny, "--input", str(source), "--output", str(target)]) == 2
    assert told in capsys.readouterr().err and not target.exists()


@pytest.mark.parametrize(
    "text",
    [
        "no line of ours",
        "a stranger\n",
        '{"prompt": "b", "index": 0, "sample": 0, "seed": 3, "completion": ""}\n',
        '{"prompt": "a", "index": 7, "sample": 0, "seed": 3, "completion": ""}\nhalf',
        "[1]\nhalf",
    ],
)
def test_only_an_output_of_the_same_prompts_is_gone_on_with(text, tiny, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    target.write_text(text)
    assert main([*tiny, "--input", str(source), "--output", str(target), "--resume"]) == 2
    assert "is not what these prompts" in capsys.readouterr().err and target.read_text() == text


def test_an_output_of_which_nothing_came_is_not_left_behind(tiny, tmp_path):
    target = tmp_path / "out.jsonl"
    wrong = ["--model", str(tmp_path / "none.gguf")]
    assert main([*tiny, *wrong, "--prompt", "a", "--output", str(target)]) == 2
    assert not target.exists()
