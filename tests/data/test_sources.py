# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import random
import re

import pytest

from jaxrl_llm.data.sources import ArithmeticTask, JsonlTask
from jaxrl_llm.errors import DataError


def _lines(path, *rows, end="\n"):
    path.write_bytes(end.join(json.dumps(row) for row in rows).encode())
    return str(path)


def _refused(match, load):
    with pytest.raises(DataError, match=match) as caught:
        load()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


# ------------------------------------------------------------------------------------- arithmetic


def test_arithmetic_quickstart_split():
    train, heldout = ArithmeticTask().load()
    assert (len(train), len(heldout)) == (900 - 2 - 150, 150)
    records = [train[i] for i in range(len(train))] + [heldout[i] for i in range(len(heldout))]
    assert len({r["id"] for r in records}) == 898
    for record in records:
        last = re.fullmatch(r"75\+4=79\n21\+4=25\n(\d\d)\+(\d)=", record["prompt"])
        a, b = int(last[1]), int(last[2])
        assert record["id"] == f"{a}+{b}" and record["answer"] == str(a + b)
        assert (a, b) not in ((75, 4), (21, 4)) and 10 <= a <= 99 and 0 <= b <= 9


def test_arithmetic_heldout_is_fixed_and_follows_the_split_seed():
    ids = [r["id"] for r in ArithmeticTask().load()[1]]
    assert ids == [r["id"] for r in ArithmeticTask().load()[1]]
    # Worked out apart from the code: sorted by sha256("0:a+b"). A change would move the split.
    assert ids[:3] == ["41+2", "28+1", "19+6"]
    assert ids != [r["id"] for r in ArithmeticTask(split_seed=1).load()[1]]


def test_arithmetic_mirrored_questions_do_not_leak():
    task = ArithmeticTask(first=(10, 30), second=(10, 30), shots=((11, 12),), heldout=40)
    train, heldout = task.load()
    questions = {frozenset(map(int, r["id"].split("+"))) for r in train}
    assert not questions & {frozenset(map(int, r["id"].split("+"))) for r in heldout}
    assert frozenset((11, 12)) not in questions
    assert len(heldout) == 40


def test_arithmetic_operations():
    train, _ = ArithmeticTask(
        operation="-", first=(3, 3), second=(8, 8), shots=(), heldout=0
    ).load()
    assert train[0] == {"id": "3-8", "prompt": "3-8=", "answer": "-5"}
    train, _ = ArithmeticTask(
        operation="*", first=(3, 3), second=(8, 8), shots=(), heldout=0
    ).load()
    assert train[0]["answer"] == "24"


def test_arithmetic_mistakes():
    _refused("left to train on", ArithmeticTask(heldout=898).load)
    _refused("left to train on", ArithmeticTask(heldout=2000).load)
    _refused("negative", lambda: ArithmeticTask(heldout=-1))
    _refused("empty", lambda: ArithmeticTask(first=(5, 4)))
    _refused("too many pairs", lambda: ArithmeticTask(first=(0, 99999), second=(0, 99999)))


# ------------------------------------------------------------------------------------- JSON lines


def test_jsonl_columns_bom_crlf_and_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "é\u2028?"}]
    rows = [
        json.dumps({"prompt": "one", "answer": 1, "level": "easy", "tests": [1, {"x": None}]}),
        "",
        "  ",
        json.dumps({"prompt": messages, "answer": "two", "id": 7}, ensure_ascii=False),
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode() + b"\r\n")
    train, heldout = JsonlTask(str(path)).load()
    assert list(train) == [
        {
            "id": "a.jsonl:1",
            "prompt": "one",
            "answer": 1,
            "level": "easy",
            "tests": [1, {"x": None}],
        },
        {"id": "7", "prompt": messages, "answer": "two"},
    ]
    assert len(heldout) == 0


def test_jsonl_chosen_columns(tmp_path):
    path = _lines(tmp_path / "a.jsonl", {"question": "q", "solution": "s", "uid": "u", "more": 1})
    task = JsonlTask(path, prompt_column="question", answer_column="solution", id_column="uid")
    assert list(task.load()[0]) == [{"id": "u", "prompt": "q", "answer": "s", "more": 1}]


def test_jsonl_answers_and_prompts_in_the_form_of_gsm8k(tmp_path):
    path = _lines(
        tmp_path / "a.jsonl",
        {"question": "How many?", "answer": "3 #### 4\nso\n#### 1,000 "},
        {"question": [{"role": "user", "content": "?"}], "answer": 7},
    )
    task = JsonlTask(
        path, prompt_column="question", answer_after="####", template="Q: {prompt}\nA: {x}"
    )
    train, _ = task.load()
    assert [(r["prompt"], r["answer"]) for r in train] == [
        ("Q: How many?\nA: {x}", "1,000"),
        ([{"role": "user", "content": "?"}], 7),
    ]
    _lines(tmp_path / "a.jsonl", {"question": "?", "answer": "4"})
    _refused("nothing after '####'", task.load)
    _refused("no place for the prompt", lambda: JsonlTask(path, template="Q:"))


def test_jsonl_split_by_number_survives_reordering(tmp_path):
    rows = [{"id": i, "prompt": f"p{i % 90}", "answer": i} for i in range(100)]
    train, heldout = JsonlTask(_lines(tmp_path / "a.jsonl", *rows), heldout=20).load()
    assert (len(train), len(heldout)) == (80, 20)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in heldout}
    random.Random(0).shuffle(rows)
    again = JsonlTask(_lines(tmp_path / "b.jsonl", *rows), heldout=20).load()[1]
    assert [r["id"] for r in again] == [r["id"] for r in heldout]
    other = JsonlTask(str(tmp_path / "b.jsonl"), heldout=20, split_seed=1).load()[1]
    assert [r["id"] for r in other] != [r["id"] for r in heldout]


def test_jsonl_heldout_file_of_the_same_name(tmp_path):
    for folder, prompt in (("train", "a"), ("test", "b")):
        (tmp_path / folder).mkdir()
        _lines(tmp_path / folder / "data.jsonl", {"prompt": prompt})
    task = JsonlTask(
        str(tmp_path / "train/data.jsonl"), heldout_path=str(tmp_path / "test/data.jsonl")
    )
    train, heldout = task.load()
    assert (train[0]["id"], heldout[0]["id"]) == ("data.jsonl:1", "heldout/data.jsonl:1")


def test_jsonl_file_mistakes(tmp_path):
    path = tmp_path / "x.jsonl"
    load = JsonlTask(str(path)).load
    _refused(r"no file .*x\.jsonl", load)
    _refused("is a folder", JsonlTask(str(tmp_path)).load)
    for nothing in (b"", b"\n \r\n", b"\xef\xbb\xbf"):
        path.write_bytes(nothing)
        _refused("holds no prompts", load)
    for binary in (b"\x1f\x8b\x08\x00", b"\xff\xfe{\x00", b'{"prompt": "\xe9"}'):
        path.write_bytes(binary)
        _refused("not UTF-8 text", load)
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"\n')
    _refused(r"x\.jsonl:2 is not JSON", load)
    path.write_bytes(b'[\n{"prompt": "a"}\n]')
    _refused(r"x\.jsonl:1 is not JSON.*not one array", load)
    for row in (
        b'{"prompt": "a", "x": NaN}',
        b"[" * 100_000,
        b"\0\0",
        b"{'prompt': 'a'}",
        b"x" * 9**7,
    ):
        path.write_bytes(row)
        _refused(r"x\.jsonl:1 is not JSON", load)
    path.write_bytes(b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}")
    _refused(r"x\.jsonl:1 is not JSON", load)
    path.write_bytes(b'"prompt"')
    _refused("not a JSON object", load)


def test_jsonl_row_mistakes(tmp_path):
    path = tmp_path / "x.jsonl"
    load = JsonlTask(str(path)).load
    message = {"role": "user", "content": "a"}
    _lines(path, {"prompt": "a"}, {"question": "b", "level": 2})
    assert "question, level" in _refused(r"x\.jsonl:2 has no column 'prompt'", load)
    for prompt in (None, 3, [], {}, ["a"], [message, {"role": "user"}], [{"content": "a"}], [[]]):
        _lines(path, {"prompt": prompt})
        _refused("of the wrong type", load)
    for prompt in ("", " \n", [{"role": "user", "content": " "}]):
        _lines(path, {"prompt": prompt})
        _refused("is empty", load)
    _lines(path, {"prompt": "a\ud800"})
    _refused("not valid Unicode", load)
    for identity in (None, True, 1.5, "", [1]):
        _lines(path, {"prompt": "a", "id": identity})
        _refused("the id is of the wrong type", load)
    _lines(path, {"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"})
    _refused("same id", load)
    _lines(path, {"prompt": "a", "answer": 1}, {"prompt": "b"})
    _refused("have no answer", load)
    _lines(path, {"question": "a", "prompt": "b"})
    _refused("would hide", JsonlTask(str(path), prompt_column="question").load)


def test_jsonl_split_mistakes(tmp_path):
    train = _lines(tmp_path / "train.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "b"})
    test = _lines(tmp_path / "test.jsonl", {"prompt": "c"}, {"prompt": "b"})
    message = _refused("also trained on", JsonlTask(train, heldout_path=test).load)
    assert "test.jsonl:2 = training train.jsonl" in message
    for heldout in (2, 3, 4):
        _refused("can't hold out that many", JsonlTask(train, heldout=heldout).load)
    assert [r["prompt"] for r in JsonlTask(train, heldout=1).load()[1]] == ["a"]
    _refused("both a held-out file", lambda: JsonlTask(train, heldout_path=test, heldout=1))
    _refused("negative", lambda: JsonlTask(train, heldout=-1))
