# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Columns, tables, cleaning and mixing of supervised data."""

import datetime
import json
import re

import pytest

from jaxrl_llm.data.formats import FORMATS, check_row, find_format, ranking_pairs
from jaxrl_llm.data.preprocess import Mixture, TableData
from jaxrl_llm.data.tables import read_table
from jaxrl_llm.errors import ConfigError, DataError

ALL = tuple(FORMATS)
NESTED = json.loads("[" * 600 + "]" * 600)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (["text"], "text"),
        (["messages", "id"], "messages"),
        (["prompt", "completion"], "prompt_completion"),
        (["prompt", "chosen", "rejected", "margin"], "preference"),
        (["chosen", "rejected"], "preference"),
        (["prompt", "completions", "scores"], "ranking"),
        (["prompt", "completion", "label"], "unpaired"),
        (["prompt", "completions", "labels"], "stepwise"),
    ],
)
def test_a_format_is_known_by_its_columns(columns, name):
    assert find_format(columns, ALL, "t") == name


def test_wrong_columns_are_named_with_the_formats_that_fit():
    with pytest.raises(DataError) as error:
        find_format(["question", "answer"], ("preference", "ranking"), "t.jsonl")
    for words in ("t.jsonl", "answer, question", "chosen, rejected[, prompt]", "scores"):
        assert words in str(error.value)


def test_columns_of_two_formats_are_refused_until_one_is_named(tmp_path):
    row = {"text": "a", "messages": [{"role": "user", "content": "b"}]}
    path = write(tmp_path / "t.jsonl", [row])
    with pytest.raises(DataError, match=r"several ways .*--data.format=text or messages"):
        TableData(path).load(ALL)
    for name in ("text", "messages"):
        assert TableData(path, format=name).load(ALL)[0][0].format == name


@pytest.mark.parametrize("suffix", ["jsonl", "json", "array"])
def test_a_key_that_stands_twice_is_refused(suffix, tmp_path):
    path = tmp_path / f"t.{suffix.replace('array', 'json')}"
    line = '{"text": "a", "x": {"k": 1, "k": 2}}'
    path.write_text(f"[{line}]" if suffix == "array" else line)
    with pytest.raises(DataError, match="the key 'k' stands twice"):
        read_table(str(path))


def test_a_held_out_table_of_which_nothing_is_left_is_refused(tmp_path):
    paths = [write(tmp_path / f"{n}.jsonl", [{"text": t}]) for n, t in (("a", "long"), ("b", "b"))]
    with pytest.raises(DataError, match=r"left to hold out .*too short"):
        TableData(paths[0], heldout_path=paths[1], min_chars=3).load(ALL)


@pytest.mark.parametrize(
    ("row", "name", "words"),
    [
        ({"prompt": "a"}, "prompt_completion", "no column 'completion'"),
        ({"text": 3}, "text", "wrong type"),
        ({"messages": "hello"}, "messages", "wrong type"),
        ({"messages": [{"role": "user"}]}, "messages", "wrong type"),
        ({"prompt": "a", "completion": [{"role": "x", "content": "b"}]}, "prompt_completion",
         "different kinds"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "preference", "same"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, "preference", "'margin'"),
        ({"chosen": [{"role": "user", "content": "a"}],
          "rejected": [{"role": "user", "content": "a"}, {"role": "x", "content": "b"}]},
         "preference", "beginning of the other"),
        ({"prompt": "a", "completion": "b", "label": 1}, "unpaired", "'label'"),
        ({"prompt": "a", "completions": ["b", "c"], "labels": [True]}, "stepwise", "'labels'"),
        ({"prompt": "a", "completions": ["b", "c"], "scores": [1, 1]}, "ranking", "no reply"),
        ({"prompt": "a", "completions": ["b", "c"], "scores": [1, None]}, "ranking", "'scores'"),
        ({"prompt": [{"role": "user", "content": "a"}], "completions": ["b", "c"],
          "scores": [1, 2]}, "ranking", "different kinds"),
        ({"prompt": "a", "completions": ["b", [{"role": "assistant", "content": "c"}]],
          "scores": [1, 2]}, "ranking", "different kinds"),
        ({"prompt": "a", "completions": ["b", "c", "b"], "scores": [1, 1, 2]}, "ranking",
         "equal replies have different scores"),
        ({"prompt": "a", "completions": ["b", "c"], "scores": [1, 10**400]}, "ranking", "'scores'"),
        ({"prompt": "a", "completions": ["b", "c"], "scores": [-1e308, 1e308]}, "ranking",
         "'scores'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 10**400}, "preference",
         "'margin'"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages", "wrong type"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages", "wrong type"),
        ({"text": "\ud800"}, "text", "Unicode"),
        ({"messages": [{"role": "user", "content": "a", "at": datetime.date(2026, 1, 2)}]},
         "messages", "not JSON"),
        ({"messages": [{"role": "user", "content": "a", "at": NESTED}]}, "messages", "too deeply"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_refused_and_named(row, name, words):
    with pytest.raises(DataError, match=re.escape(words)) as error:
        check_row(row, name, "t.jsonl:7")
    assert "t.jsonl:7" in str(error.value)


def test_an_implicit_prompt_is_what_both_replies_begin_with():
    row = check_row({"chosen": "Q: x\nA: yes", "rejected": "Q: x\nA: yeah"}, "preference", "t")
    assert row == {"prompt": "Q: x\nA:", "chosen": " yes", "rejected": " yeah"}
    said = lambda role, text: {"role": role, "content": text}  # noqa: E731
    start = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    row = check_row(
        {"chosen": [*start, said("assistant", "d")], "rejected": [*start, said("assistant", "e")]},
        "preference",
        "t",
    )
    assert row["prompt"] == start
    assert [m["content"] for m in row["chosen"] + row["rejected"]] == ["d", "e"]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("问题是什么？答案：好", "问题是什么？答案：坏", "问题是什么？答案："),
        ("User: 问题是什么？答案：好", "User: 问题是什么？答案：坏", "User: 问题是什么？答案："),
        ("何色？青", "何色？青い", "何色？"),
        ("สีอะไรแดง", "สีอะไรดำ", "สีอะไร"),
        ("答：yes", "答：yeah", "答："),
        ("f(x)=1", "f(x)=2", "f(x)="),
        ("a e\u0301", "a e\u0300", "a"),
        ("Q: a yes", "Q: a yes!", "Q: a"),
        ("yes", "no", ""),
    ],
)
def test_an_implicit_prompt_needs_no_blanks(chosen, rejected, prompt):
    row = check_row({"chosen": chosen, "rejected": rejected}, "preference", "t")
    assert row["prompt"] == prompt
    assert (prompt + row["chosen"], prompt + row["rejected"]) == (chosen, rejected)
    assert row["chosen"] and row["rejected"]


def test_conversations_that_begin_alike_are_held_out_together(tmp_path):
    said = lambda role, text: {"role": role, "content": text}  # noqa: E731
    start = [said("system", "s"), said("user", "the same")]
    rows = [[*start, said("assistant", f"a{i}"), said("user", "u")] for i in range(3)]
    rows += [[start[0], said("user", f"u{i}"), said("assistant", "a")] for i in range(6)]
    path = write(tmp_path / "t.jsonl", [{"messages": row} for row in rows])
    for seed in range(8):
        ((examples, _),) = TableData(path, heldout=2, split_seed=seed).load(ALL)
        asked = [{row["messages"][1]["content"] for row in part}
                 for part in (examples.train, examples.heldout)]  # fmt: skip
        assert not asked[0] & asked[1]
    same = write(tmp_path / "same.jsonl", [{"messages": row} for row in rows[:3]])
    with pytest.raises(DataError, match="1 different prompts"):
        TableData(same, heldout=1).load(ALL)
    # Where nobody asks before the assistant speaks, the whole conversation is the prompt.
    first = [{"messages": [start[0], said("assistant", f"a{i}")]} for i in range(3)]
    ((examples, _),) = TableData(write(tmp_path / "f.jsonl", first), heldout=1).load(ALL)
    assert len(examples.heldout) == 1


def test_a_message_that_calls_a_tool_need_not_say_anything():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    for message in ({"tool_calls": [call]}, {"content": None, "tool_calls": [call]}):
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", **message}]
        assert check_row({"messages": talk}, "messages", "t")["messages"] == talk
        row = {"prompt": talk[:1], "completion": talk[1:]}
        assert check_row(row, "prompt_completion", "t") == row


def test_rankings_become_every_better_against_every_worse():
    row = {"prompt": "p", "completions": ["a", "b", "c"], "scores": [1, 3, 1]}
    pairs = ranking_pairs(row)
    assert [(p["chosen"], p["rejected"], p["margin"]) for p in pairs] == [
        ("b", "a", 2.0), ("b", "c", 2.0),
    ]  # fmt: skip


def test_tables_are_cleaned_and_split_by_prompt(tmp_path):
    rows = [{"prompt": f"p{i // 2}", "completion": f"c{i}"} for i in range(20)]
    path = write(tmp_path / "t.jsonl", [*rows, rows[3], {"prompt": "q", "completion": "x" * 50}])
    data = TableData(
        path, heldout=4, max_chars=20, min_chars=3, keep=lambda row: row["prompt"] != "p9"
    )
    ((examples, weight),) = data.load(ALL)
    assert weight == 1.0 and examples.format == "prompt_completion"
    assert examples.left_out == {"double": 1, "too long": 1, "not kept": 2}
    assert len(examples.train) == 14 and len(examples.heldout) == 4
    prompts = [{row["prompt"] for row in part} for part in (examples.train, examples.heldout)]
    assert not prompts[0] & prompts[1]
    assert data.load(ALL)[0][0] == examples
    # What is not kept need not be right.
    odd = write(tmp_path / "odd.jsonl", [*rows, {"prompt": 3, "completion": ""}])
    kept = TableData(odd, keep=lambda row: row["prompt"] != 3).load(ALL)[0][0]
    assert len(kept.train) == 20 and kept.left_out == {"not kept": 1}
    again = TableData(write(tmp_path / "r.jsonl", rows[::-1]), heldout=4).load(ALL)[0][0]
    assert {r["prompt"] for r in again.heldout} == {
        r["prompt"] for r in TableData(path, heldout=4, max_chars=20).load(ALL)[0][0].heldout
    }


def test_a_filter_that_raises_is_named_with_the_row(tmp_path):
    path = write(tmp_path / "t.jsonl", [{"text": "a", "n": 1}, {"text": "b"}])
    with pytest.raises(DataError, match=r"data.keep fails on t.jsonl:2 · got KeyError: 'n'"):
        TableData(path, keep=lambda row: row["n"]).load(ALL)


def test_array_record_holds_json_objects(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    path = str(tmp_path / "t.array_record")
    writer = ArrayRecordWriter(path, "group_size:1")
    rows = [{"text": "one"}, {"text": "two"}]
    for row in rows:
        writer.write(json.dumps(row).encode())
    writer.close()
    assert [row for _, row in read_table(path)] == rows


def test_a_json_file_holds_an_array_or_lines(tmp_path):
    rows = [{"text": "é"}, {"text": "two"}]
    path = tmp_path / "t.json"
    lines = "\n".join(json.dumps(row) for row in rows)
    for content in (json.dumps(rows, indent=1), "\ufeff" + json.dumps(rows), lines):
        path.write_text(content, encoding="utf-8")
        assert [row for _, row in read_table(str(path))] == rows
    for content, words in (("[1]", "t.json:0 is not a JSON object"), ("[{", "is not JSON"),
                           ("[]", "holds no rows"), (" ", "holds no rows")):  # fmt: skip
        path.write_text(content)
        with pytest.raises(DataError, match=words):
            read_table(str(path))


@pytest.mark.parametrize("name", ["t.parquet", "some/dataset", "t.csv", "t.jsonl"])
def test_a_table_that_is_not_there_is_one_clear_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("a,b\n")
    with pytest.raises(DataError) as error:
        read_table(name)
    assert "\n" not in str(error.value)


def test_mixtures_and_their_mistakes(tmp_path):
    one = TableData(write(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}]))
    two = TableData(write(tmp_path / "b.jsonl", [{"prompt": "p", "completion": "c"}]))
    parts = Mixture((one, two), (3.0, 1.0)).load(ALL)
    assert [(p.format, w) for p, w in parts] == [("text", 3.0), ("prompt_completion", 1.0)]
    for bad in (lambda: Mixture((one,), (1.0, 2.0)), lambda: Mixture((one,), (0.0,)),
                lambda: TableData("x", heldout=1, heldout_path="y")):  # fmt: skip
        with pytest.raises(ConfigError):
            bad()
    with pytest.raises(DataError, match="also trained on"):
        TableData(one.path, heldout_path=one.path).load(ALL)
    # What one table of a mixture holds out, another one must not train on.
    other = TableData(write(tmp_path / "c.jsonl", [{"text": "c"}]), heldout_path=one.path)
    with pytest.raises(DataError, match="also trained on"):
        Mixture((one, other), (1.0, 1.0)).load(ALL)
    assert Mixture((two, other), (1.0, 1.0)).load(ALL)[1][0].heldout


@pytest.mark.parametrize(
    "make",
    [
        lambda: TableData("x.jsonl", split="test"),
        lambda: TableData("x.jsonl", split_seed=3),
        lambda: TableData("x.jsonl", min_chars=9, max_chars=3),
        lambda: TableData("x.jsonl", min_chars=-1),
    ],
)
def test_settings_that_select_nothing_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_parquet_and_data_sets_hold_the_same_rows(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "set"))
    for path in ("t.parquet", "set"):
        assert [row for _, row in read_table(str(tmp_path / path))] == rows
    with pytest.raises(DataError, match="has no splits"):
        read_table(str(tmp_path / "set"), "test")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [row for _, row in read_table("~/set")] == rows
    double = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    parquet.write_table(double, tmp_path / "double.parquet")
    with pytest.raises(DataError, match="columns of the same name · got text"):
        read_table(str(tmp_path / "double.parquet"))
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match="not a parquet file"):
        read_table(str(tmp_path / "bad.parquet"))


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("messages", {"messages": [{"role": "us\ud83d", "content": "a"}]}),
        ("messages", {"messages": [{"role": "user", "content": "a", "name": "\ude00"}]}),
        ("messages", {"messages": [{"role": "user", "content": "a", "\ud83d": 1}]}),
        (
            "preference",
            {"prompt": "a", "chosen": "b\ud83d", "rejected": "c"},
        ),
        ("ranking", {"prompt": "a", "completions": ["b", "\ud83d"], "scores": [1, 2]}),
        ("stepwise", {"prompt": "a", "completions": ["b\ud83d"], "labels": [True]}),
    ],
)
def test_half_of_a_character_is_told_with_its_row(form, row):
    with pytest.raises(DataError, match=r"^data\.jsonl:7.* is not valid Unicode · got a lone"):
        check_row(row, form, "data.jsonl:7")
