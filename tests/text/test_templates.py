# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Templates with marks write what the templates without marks write."""

import itertools

import pytest

from jaxrl_llm.errors import DataError, ModelError
from jaxrl_llm.text.chat import render, render_with_spans
from jaxrl_llm.text.templates import CHAT_TEMPLATES, with_template
from jaxrl_llm.text.tokenizer import bytes_tokenizer

# What SmolLM2's own file holds.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def talks():
    said = lambda role: {"role": role, "content": f" {role} says\nthis "}  # noqa: E731
    for length in (1, 2, 3):
        for roles in itertools.product(("system", "user", "assistant"), repeat=length):
            yield [said(role) for role in roles]


def test_the_marked_template_of_smollm2_writes_what_its_own_does():
    own = bytes_tokenizer()
    own.chat_template = SMOLLM2
    marked = with_template(own, "smollm2")
    for talk in talks():
        for prompt in (True, False):
            assert render(talk, marked, prompt) == render(talk, own, prompt)


def test_a_template_is_a_name_or_a_file(tmp_path):
    own = bytes_tokenizer()
    assert with_template(own, None) is own
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    mine = with_template(own, str(tmp_path / "mine.jinja"))
    assert render([{"role": "user", "content": "hi"}], mine) == "hi"
    assert own.chat_template is None
    with pytest.raises(ModelError, match=", ".join(CHAT_TEMPLATES)):
        with_template(own, "no_such")
    for name in ("x" * 300, "~nosuchuserhere/x", "{{ messages }}" * 30):
        with pytest.raises(ModelError, match="no such chat template"):
            with_template(own, name)
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    with pytest.raises(ModelError, match="not a text in UTF-8"):
        with_template(own, str(tmp_path / "latin.jinja"))


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
KEEPING = (
    "{% for m in messages %}{% generation %}{{ m.content }}{{ m.tool_calls | tojson }}"
    "{% endgeneration %}{% endfor %}"
)


@pytest.mark.parametrize("content", ["", "I add.", None])
def test_calls_of_tools_are_written_or_refused(content):
    talk = [{"role": "user", "content": "1 + 1?", "tool_calls": None},
            {"role": "assistant", "content": content, "tool_calls": [CALL]}]  # fmt: skip
    own = bytes_tokenizer()
    for name in CHAT_TEMPLATES:
        for write in (render, render_with_spans):
            with pytest.raises(DataError, match="writes no calls of tools"):
                write(talk, with_template(own, name))
    own.chat_template = KEEPING.replace("{{ m.tool_calls | tojson }}", "")
    for write in (render, render_with_spans):
        with pytest.raises(ModelError, match="leaves out calls of tools"):
            write(talk, own)
    own.chat_template = KEEPING.replace("m.tool_calls |", "(m.tool_calls or []) |")
    assert '"name": "add"' in render(talk, own) and render_with_spans(talk, own)[1]
    no_calls = [talk[0], {"role": "assistant", "content": "2", "tool_calls": []}]
    assert render(no_calls, with_template(own, "plain")) == (
        "<bos>user: 1 + 1?\nassistant: 2<eos>\nassistant: "
    )
