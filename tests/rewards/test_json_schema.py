# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import time

import numpy as np
import pytest

from jaxrl_llm.rewards.json_schema import JsonSchema
from jaxrl_llm.types import Prompt, Rollout


def _judge(text, schema, **options):
    none = np.zeros(0, np.int32)
    prompt = Prompt("p", (1,), "p", None, {"schema": schema})
    rollout = Rollout(prompt, 0, none, none.astype(np.float32), none > 0, none, "stop", text)
    (verdict,) = JsonSchema(**options)([rollout])
    return verdict


@pytest.mark.parametrize(
    ("schema", "text", "right"),
    [
        ({"type": "number"}, "1e999", 0.0),
        ({"type": "number"}, "-1e999", 0.0),
        ({"type": "integer"}, "1e999", 0.0),
        ({"type": "number", "multipleOf": 0.5}, "1e999", 0.0),
        ({"type": "number", "multipleOf": 0.1}, "1" + "0" * 400, 0.0),
        ({"type": "array", "items": {"multipleOf": 1}}, "[1, 1e999]", 0.0),
        ({"type": "number"}, "1" + "0" * 5000, 0.0),
        ({"type": "number", "multipleOf": 0.5}, "1.5", 1.0),
        ({"type": "number", "multipleOf": 0.5}, "1.25", 0.0),
        ({"type": "number"}, "1e300", 1.0),
        ({"type": "string", "pattern": "^a"}, '"a\\ud800"', 1.0),
        ({"uniqueItems": True}, "[1, 2]", 1.0),
        ({"uniqueItems": True}, "[1, 1.0]", 0.0),
        ({"$ref": "#"}, "1", 0.0),
        (True, "1", 1.0),
        (False, "1", 0.0),
    ],
)
def test_numbers_beyond_floats_and_other_edges(schema, text, right):
    assert _judge(text, schema) == right


def test_what_takes_too_long_gets_nothing():
    begin = time.process_time()
    schema = {"patternProperties": {"^(a+)+$": {}}}
    assert _judge('{"' + "a" * 40 + '!": 1}', schema, cpu_s=0.5) == 0.0
    assert time.process_time() - begin < 2.0  # of this process: the work is done elsewhere
    assert _judge("{}", schema, cpu_s=0.5) == 1.0


@pytest.mark.parametrize(
    ("items", "right"),
    [
        ([{"a": i} for i in range(15_000)], 1.0),
        ([{"a": i} for i in range(9_999)] + [{"a": 7}], 0.0),
        ([[i] for i in range(15_000)], 1.0),
        ([{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}], 0.0),
        ([{"a": 1}, {"a": True}, {"a": "1"}, {"a": None}, {"a": [1]}, ["a", 1], 0, False], 1.0),
        ([[1], [True], [], {}, "", None], 1.0),
        ([["array"], "array", ["array", "array"]], 1.0),
        ([-0.0, 0], 0.0),
    ],
)
def test_unique_items_are_told_apart_in_linear_time(items, right):
    assert _judge(json.dumps(items), {"uniqueItems": True}) == right
    assert _judge(json.dumps([items]), {"items": {"uniqueItems": True}}) == right
    assert _judge(json.dumps(items), {"uniqueItems": False}) == 1.0


def test_it_judges_alone():
    assert JsonSchema().judges_alone and JsonSchema()([]) == []
