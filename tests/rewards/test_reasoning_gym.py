# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
import sys

import numpy as np
import pytest

from jaxrl_llm.data.reasoning_gym import ReasoningGymTask
from jaxrl_llm.errors import DataError
from jaxrl_llm.rewards.reasoning_gym import EVALUATING, ReasoningGymScore, harmless
from jaxrl_llm.types import Prompt, Rollout

pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")


def _judge(record, *completions, **options):
    none = np.zeros(0, np.int32)
    logp = np.zeros(0, np.float32)
    columns = {"dataset": record["dataset"], "entry": record["entry"]}
    prompt = Prompt(record["id"], (1,), "p", record["answer"], columns)
    rollouts = [
        Rollout(prompt, i, none, logp, none > 0, none, "stop", text)
        for i, text in enumerate(completions)
    ]
    return [reward.value for reward in ReasoningGymScore(**options)(rollouts)]


def test_questions_are_different_fixed_and_split():
    task = ReasoningGymTask("basic_arithmetic", {"max_terms": 2}, train=50, heldout=20)
    train, heldout = task.load()
    assert (len(train), len(heldout)) == (50, 20)
    prompts = [record["prompt"] for record in [*train, *heldout]]
    assert len(set(prompts)) == 70 and all("<answer>" in prompt for prompt in prompts)
    assert heldout == task.load()[1]
    assert ReasoningGymTask("basic_arithmetic", generator_seed=1).load()[1] != heldout
    (message,) = ReasoningGymTask(messages=True, train=1, heldout=0).load()[0][0]["prompt"]
    assert message["role"] == "user"


def test_task_mistakes(monkeypatch):
    for task, message in (
        (ReasoningGymTask("no_such_data_set"), "no_such_data_set"),
        (ReasoningGymTask("basic_arithmetic", {"no_such_option": 1}), "no_such_option"),
        (
            ReasoningGymTask(
                "basic_arithmetic", {"min_terms": 2, "max_terms": 2, "max_digits": 1}, 5000
            ),
            "too few different questions",
        ),
    ):
        with pytest.raises(DataError, match=message):
            task.load()
    with pytest.raises(DataError, match="no place for the question"):
        ReasoningGymTask(template="Solve it.")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"jaxrl_llm\[reasoning-gym\]"):
        ReasoningGymTask().load()


def test_the_right_answer_in_the_right_place_scores():
    (record,), _ = ReasoningGymTask("basic_arithmetic", train=1, heldout=0).load()
    right = record["answer"]
    tagged = _judge(
        record,
        f"So <answer> {right} </answer>.",
        f"<answer>x</answer> no, <answer>{right}</answer>",
        f"<answer>{right}</answer> no, <answer>x</answer>",
        f"<answer>{right}",
        f"<answer>{right}</answer><answer>",
        right,
        "<answer></answer>",
    )
    assert tagged[:2] == [1.0, 1.0] and max(tagged[2:]) < 0.5 and tagged[3:] == [0.0] * 4
    assert _judge(record, f" {right}\nmore", f"is {right}", "", answer="line")[0] == 1.0


@pytest.mark.parametrize("dataset", sorted(EVALUATING))
def test_scorers_that_evaluate_are_given_no_programs(dataset):
    (record,), _ = ReasoningGymTask(dataset, train=1, heldout=0).load()
    attacks = (
        'entry["answer"]',
        'entry["answer"].split()',
        "answer.__class__",
        "__import__('os').system('true')",
        "[i for i in entry['answer']]",
        "list(entry['answer'].split())",
        "open('/etc/passwd')",
        "exit()",
        "(1).__class__",
        "x.diff",
        "lambda: 1",
        "[1][0]" + "+entry['answer']",
    )
    assert _judge(record, *(f"<answer>{a}</answer>" for a in attacks)) == [0.0] * len(attacks)
    assert not any(harmless(attack, EVALUATING[dataset]) for attack in attacks)


def test_answers_of_those_data_sets_still_score():
    for dataset in sorted(EVALUATING):
        train, _ = ReasoningGymTask(dataset, train=3, heldout=0).load()
        for record in train:
            said = record["entry"]["metadata"].get("expression") or record["answer"]
            assert harmless(str(said), EVALUATING[dataset]), (dataset, said)
    (record,), _ = ReasoningGymTask("simple_integration", train=1, heldout=0).load()
    assert _judge(record, f"<answer>{record['answer']}</answer>") == [1.0]
    assert harmless('["AB", "C"]', "literal") and harmless("1 2 3", "literal")
    assert harmless("(7 + 5)*2 - 3", "arithmetic") and harmless("x**2/2 + exp(x) + C", "arithmetic")


def test_every_scorer_that_evaluates_is_known():
    from reasoning_gym.factory import DATASETS

    words = ("eval(", "exec(", "parse_expr(", "sympify(", "literal_eval(")
    found = {
        name
        for name, (kind, _) in DATASETS.items()
        if any(word in inspect.getsource(kind.score_answer) for word in words)
    }
    # number_sorting evaluates the right answer, which is its own.
    assert found <= {*EVALUATING, "number_sorting"}


def test_an_answer_that_never_ends_scores_nothing():
    (record,), _ = ReasoningGymTask("countdown", train=1, heldout=0).load()
    assert _judge(record, "<answer>9**9**9**9</answer>") == [0.0]
