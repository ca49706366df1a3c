# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import datetime
import json

import pytest

from jaxrl_llm.errors import DataError, ModelError
from jaxrl_llm.text.chat import encode_prompt, render, render_with_spans
from jaxrl_llm.text.tokenizer import bytes_tokenizer

ASK = [{"role": "user", "content": "hi"}]
TURNS = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"


def with_template(template):
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_messages_and_variables_reach_the_template():
    template = TURNS + "{% if add_generation_prompt %}assistant:{% endif %}{{ mood }}{{ tools }}"
    assert render(ASK, with_template(template), mood="!") == "<bos>user:hi|assistant:!None"
    assert render(ASK, with_template(template), add_generation_prompt=False, tools=[1]) == (
        "<bos>user:hi|[1]"
    )


def test_generation_marks_render_as_their_body():
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}"
    )
    assert render([*ASK, *ASK], with_template(template)) == "hi.hi."


def test_what_templates_expect_beside_jinja():
    year = str(datetime.datetime.now().year)
    template = "{{ strftime_now('%Y') }}{{ messages | tojson }}"
    template += "{% for i in [1, 2] %}{% break %}{% endfor %}"
    assert render(ASK, with_template(template)) == year + '[{"role": "user", "content": "hi"}]'


def test_a_run_keeps_its_date():
    form = "%d %b %Y %H"
    template = "{% macro day() %}{{ strftime_now('" + form + "') }}{% endmacro %}"
    template += "{% if strftime_now is defined %}{{ day() }}|{{ strftime_now('%j') }}{% endif %}"
    begun = datetime.datetime(2024, 2, 29, 23, 59)
    tokenizer = with_template(template)
    assert render(ASK, tokenizer.at_time(begun)) == "29 Feb 2024 23|060"
    assert render(ASK, tokenizer) != "29 Feb 2024 23|060"  # the same compiled template


def test_absent_and_none_are_the_same():
    template = "{{ 'absent' if messages[0].content is undefined }}"
    assert render([{"role": "user", "content": None}], with_template(template)) == "absent"


def test_no_template():
    with pytest.raises(ModelError, match=r"no chat template.*try:"):
        render(ASK, bytes_tokenizer())


@pytest.mark.parametrize(
    ("template", "error", "said"),
    [
        ("{{ raise_exception('no system please') }}", DataError, "no system please"),
        ("line one\n{% for x in %}", ModelError, "line 2"),
        ("{{ nothing.at.all }}", ModelError, "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", ModelError, "may not"),
        ("{{ messages.append(1) }}", ModelError, "may not"),
        ("{{ messages[0].update({'a': 1}) }}", ModelError, "may not"),
        ("{{ cycler.__init__.__globals__ }}", ModelError, "may not"),
        ("{{ lipsum.__globals__['os'].system('true') }}", ModelError, "may not"),
        ("{{ raise_exception.__globals__['json'] }}", ModelError, "may not"),
        ("{{ 1 // 0 }}", ModelError, "ZeroDivisionError"),
    ],
)
def test_bad_and_hostile_templates(template, error, said):
    with pytest.raises(error, match=said):
        render(ASK, with_template(template))


class Impostor(str):
    """A string with a method that a template must not reach."""

    def erase(self):
        raise AssertionError("reached")


def test_the_template_sees_plain_values_only():
    message = {"role": "user", "content": Impostor("hi")}
    with pytest.raises(ModelError, match="failed"):
        render([message], with_template("{{ messages[0].content.erase() }}"))
    with pytest.raises(DataError, match="not JSON"):
        render([{"role": "user", "content": open}], with_template(TURNS))


@pytest.mark.parametrize("messages", [[], {}, None, [1], [{"content": "x"}], [{"role": 1}]])
def test_messages_that_are_none(messages):
    with pytest.raises(DataError, match="message"):
        render(messages, with_template(TURNS))


def test_prompt_of_plain_text():
    tokenizer = bytes_tokenizer()
    assert encode_prompt("ab", tokenizer) == ([97, 98], "ab")
    tokenizer.adds_bos = True
    assert encode_prompt("ab", tokenizer) == ([256, 97, 98], "ab")
    assert encode_prompt("", tokenizer) == ([256], "")
    assert encode_prompt("<bos>ab", tokenizer) == ([256, 97, 98], "<bos>ab")


def test_a_conversation_has_exactly_the_bos_of_its_template():
    tokenizer = with_template(TURNS)
    tokenizer.adds_bos = True
    tokens, text = encode_prompt(ASK, tokenizer)
    assert text == "<bos>user:hi|"
    assert tokens == [256, *b"user:hi|"]
    tokens, _ = encode_prompt(ASK, with_template("{{ messages[0].content }}"))
    assert tokens == list(b"hi")


BODY = "{% generation %}{{ messages[0].content }}{% endgeneration %}"


@pytest.mark.parametrize(
    ("template", "text", "spans"),
    [
        ("a" + BODY + "b" + BODY, "ahibhi", [(1, 3), (4, 6)]),
        ("{% generation %}a" + BODY + "b{% endgeneration %}c", "ahibc", [(0, 4)]),
        ("{% set x %}" + BODY + "{% endset %}a{{ x }}", "ahi", [(1, 3)]),
        ("{% generation %}{% endgeneration %}a", "a", []),
    ],
)
def test_spans_of_marks(template, text, spans):
    assert render_with_spans(ASK, with_template(template)) == (text, spans)


@pytest.mark.parametrize(
    "template",
    [
        "{% set x %}" + BODY + "{% endset %}{{ x[:-1] }}",
        "{% set x %}" + BODY + "{% endset %}{{ x | length }}",
        "{% set x %}" + BODY + "{% endset %}{{ x | reverse }}",
        BODY + "\U0010fd02",
        BODY + "\U0010fd01",
        "\U0010fd02" + BODY + "\U0010fd01",
    ],
)
def test_templates_that_lose_their_marks_are_refused(template):
    with pytest.raises(ModelError, match="marks as the assistant's words"):
        render_with_spans(ASK, with_template(template))


def test_a_message_that_is_nested_too_deeply_is_refused():
    nested = json.loads("[" * 600 + "]" * 600)
    messages = [{"role": "user", "content": "a", "tool_calls": nested}]
    with pytest.raises(DataError, match="nested too deeply"):
        render(messages, with_template("{{ messages[0].role }}"))
