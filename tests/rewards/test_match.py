# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from jaxrl_llm.rewards.instructions import CONSTRAINTS, Instructions
from jaxrl_llm.rewards.json_schema import JsonSchema
from jaxrl_llm.rewards.match import ExactMatch, FuzzyMatch, MultipleChoice
from jaxrl_llm.types import Prompt, Rollout


def _judge(reward, completion, answer=None, **columns):
    none = np.zeros(0, np.int32)
    logp = np.zeros(0, np.float32)
    prompt = Prompt("p", (1,), "p", answer, columns)
    (verdict,) = reward([Rollout(prompt, 0, none, logp, none > 0, none, "stop", completion)])
    return verdict


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("B", True),
        ("(B)", True),
        ("b", True),
        ("B.", True),
        ("B)", True),
        ("(B) twelve", True),
        ("B: twelve", True),
        ("B. A cat is an animal", True),
        (r"\text{B}", True),
        (r"\textbf{(B)}\ 12", True),
        ("C", False),
        ("B or C", False),
        ("(B) or (C)", False),
        ("(B) (C)", False),
        ("A, B", False),
        ("B, C", False),
        ("AB", False),
        ("ABCD", False),
        ("Bees", False),
        ("B cat", False),
        ("not B", False),
        ("B) -5", True),
        ("(B) a red ball", True),
        ("(B) 25 °C", True),
        ("B. 5 g", True),
        ("B. I'm late", True),
        ("(B) c's", False),
        ("(B) or c", False),
        ("(b) or c", False),
        ("(b) maybe c", False),
        ("(B) C? D?", False),
        ("(B) C or D?", False),
        ("B. or a, c, d", False),
        ("B) c) d) a)", False),
        ("B: a or c or d", False),
        ("(B) / [C] / [D]", False),
        ("(B) or the third", False),
        ("(B) A maybe", False),
        ("(B) CD", False),
        ("(B) 12, D", False),
        ("B. \uff23", False),
        ("", False),
    ],
)
def test_multiple_choice(said, right):
    assert _judge(MultipleChoice(), f"Answer: {said}", "B") == float(right)
    assert _judge(MultipleChoice(whole=True), said, "(b)") == float(right)
    assert _judge(MultipleChoice(), f"I choose {said}", "B") == 0.0


def test_multiple_choice_needs_a_letter():
    with pytest.raises(ValueError, match="not a letter"):
        _judge(MultipleChoice(), "Answer: B", "twelve")


def test_exact_match():
    for said, right in (
        ("the Eiffel Tower", 1.0),
        ("Eiffel tower.", 1.0),
        ("Eiffel  Tower or Louvre", 0.0),
        ("Eiffel", 0.0),
        ("", 0.0),
        ("...", 0.0),
    ):
        assert _judge(ExactMatch(), f"Answer: {said}", "The Eiffel Tower") == right
        assert _judge(ExactMatch(), said, "The Eiffel Tower") == 0.0
        assert _judge(ExactMatch(whole=True), said, "The Eiffel Tower") == right
    assert _judge(ExactMatch(normalize=False), "Answer: a b", "a b") == 1.0
    assert _judge(ExactMatch(normalize=False), "Answer: A b", "a b") == 0.0
    assert _judge(ExactMatch(), "Answer: Paris", ["London", "Paris"]) == 1.0
    assert _judge(ExactMatch(), "Answer: 7", 7) == 1.0


def test_fuzzy_match_is_f1_over_words():
    assert _judge(FuzzyMatch(), "Answer: red green", "green red") == 1.0
    assert _judge(FuzzyMatch(), "Answer: red", "red green") == pytest.approx(2 / 3)
    assert _judge(FuzzyMatch(), "Answer: red red red red", "red green") == pytest.approx(2 / 6)
    assert _judge(FuzzyMatch(), "Answer: blue", ["red", "blue sky"]) == pytest.approx(2 / 3)
    assert _judge(FuzzyMatch(least=0.7), "Answer: red", "red green") == 0.0
    for nothing in ("Answer: blue", "red green", "Answer:", ""):
        assert _judge(FuzzyMatch(), nothing, "red green") == 0.0


def test_json_schema():
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0}, "of": {"$ref": "#/$defs/t"}},
        "required": ["n"],
        "additionalProperties": False,
        "$defs": {"t": {"type": "string"}},
    }
    for text, right in (
        ('{"n": 1}', 1.0),
        ('```json\n{"n": 1, "of": "x"}\n```\nDone.', 1.0),
        ('{"n": 1.5}', 0.0),
        ('{"n": true}', 0.0),
        ('{"n": NaN}', 0.0),
        ('{"n": -1}', 0.0),
        ('{"n": 1, "n": 2}', 0.0),
        ('{"n": 1, "of": 3}', 0.0),
        ('{"n": 1, "more": 3}', 0.0),
        ('{"n": 1} and more', 0.0),
        ('Here: {"n": 1}', 0.0),
        ('```json\n{"n": 1}', 0.0),
        ("{}", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ):
        assert _judge(JsonSchema(), text, schema=schema) == right
    with pytest.raises(ValueError, match="not a JSON schema"):
        _judge(JsonSchema(), "{}", schema={"type": "nothing"})


def test_a_json_schema_fetches_nothing():
    with pytest.raises(Exception, match=r"Unresolvable|192\.0\.2\.1"):
        _judge(JsonSchema(), "{}", schema={"$ref": "http://192.0.2.1/schema.json"})


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        ({"kind": "words", "least": 2, "most": 3}, "one two", "one"),
        ({"kind": "characters", "most": 3}, "abc", "abcd"),
        ({"kind": "sentences", "least": 2, "most": 2}, "One. Two!", "One 1.5 two."),
        ({"kind": "paragraphs", "least": 2}, "a\n\nb", "a\nb"),
        ({"kind": "lines", "most": 1}, "a\n\n", "a\nb"),
        ({"kind": "bullets", "least": 2, "most": 2}, "- a\n2. b", "- a\n-b\n* c\n+ d"),
        ({"kind": "keyword", "word": "cat"}, "A Cat!", "catalogue"),
        ({"kind": "keyword", "word": "c++", "least": 2}, "c++ c++", "c++"),
        ({"kind": "forbidden", "words": ["cat", "dog"]}, "dogma", "a DOG"),
        ({"kind": "case", "case": "upper"}, "ABC 1", "ABc"),
        ({"kind": "case", "case": "lower"}, "abc", "Abc"),
        ({"kind": "begins", "prefix": "Dear"}, "Dear you", "dear you"),
        ({"kind": "ends", "suffix": "bye"}, "good bye \n", "bye now"),
        ({"kind": "no_commas"}, "a b", "a, b"),
    ],
)
def test_instructions(constraint, good, bad):
    assert _judge(Instructions(), good, constraints=[constraint]).value == 1.0
    assert _judge(Instructions(), bad, constraints=[constraint]).value == 0.0
    both = _judge(Instructions(), bad, constraints=[constraint, {"kind": "words", "least": 1}])
    assert (both.value, both.parts["followed"]) == (0.5, 0.0)
    # Saying nothing follows nothing.
    assert _judge(Instructions(), " \n", constraints=[constraint]).value == 0.0


def test_instructions_that_are_malformed_are_the_tasks_fault():
    assert len(CONSTRAINTS) == 12
    for constraints in (
        [],
        [{"kind": "unknown"}],
        [{"kind": "words", "max": 3}],
        [{"kind": "keyword"}],
    ):
        with pytest.raises(ValueError, match="constraint"):
            _judge(Instructions(), "text", constraints=constraints)
    with pytest.raises(ValueError, match="unknown case"):
        _judge(Instructions(), "text", constraints=[{"kind": "case", "case": "title"}])
