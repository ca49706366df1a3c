# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from jaxrl_llm.text.chat import render
from jaxrl_llm.text.thinking import Thought, opens_thinking, split_thinking, thinking_mask
from jaxrl_llm.text.tokenizer import bytes_tokenizer


@pytest.mark.parametrize(
    ("completion", "opened", "expected"),
    [
        ("<think>\n2 + 2\n</think>\n\n4", False, Thought("2 + 2", "4", True)),
        ("2 + 2</think>4", True, Thought("2 + 2", "4", True)),
        ("2 + 2</think>4", False, Thought("2 + 2", "4", True)),
        ("<think></think>4", False, Thought("", "4", True)),
        ("4", False, Thought(None, "4", True)),
        ("2 + 2 is", True, Thought("2 + 2 is", "", False)),
        ("<think>2 + 2 is", False, Thought("2 + 2 is", "", False)),
        ("so <think>x</think> 4 </think>", False, Thought("x", "so  4 </think>", True)),
        ("a <think> b</think>4", True, Thought("a <think> b", "4", True)),
        ("", False, Thought(None, "", True)),
    ],
)
def test_thinking_and_answer(completion, opened, expected):
    assert split_thinking(completion, opened=opened) == expected


def test_other_tags():
    tags = ("[T]", "[/T]")
    assert split_thinking("[T]a[/T]b", tags=tags) == Thought("a", "b", True)


def test_mask_by_text():
    tokenizer = bytes_tokenizer()
    text = "a<think>b</think>c"
    mask = thinking_mask(tokenizer.encode(text), tokenizer)
    marked = "".join(char for char, inside in zip(text, mask, strict=True) if inside)
    assert marked == ">b</think>"  # the tag is one when its last byte is there
    inside = thinking_mask(tokenizer.encode("b</think>c"), tokenizer, opened=True)
    assert inside.tolist() == [True] * 9 + [False]


def test_mask_by_tokens():
    tokenizer = bytes_tokenizer()
    tokenizer.backend.add_tokens(["<think>", "</think>"])
    tokens = tokenizer.encode("a<think>b</think>c")
    assert len(tokens) == 5
    assert thinking_mask(tokens, tokenizer).tolist() == [False, True, True, True, False]
    assert thinking_mask(tokens[2:], tokenizer, opened=True).tolist() == [True, True, False]


# In the manner of the templates that Qwen3 and the R1 distillations carry.
SWITCHED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{% for t in tools %}{{ t.name }}{% endfor %}]{% endif %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% if open %}<think>\n{% endif %}{% endif %}"
)


def test_switches_reach_the_template():
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = SWITCHED
    ask = [{"role": "user", "content": "hi"}]
    plain = render(ask, tokenizer)
    off = render(ask, tokenizer, enable_thinking=False)
    on = render(ask, tokenizer, open=True, tools=[{"name": "search"}])
    assert plain == "<user>hi<assistant>" and not opens_thinking(plain)
    assert off.endswith("<think>\n\n</think>\n\n") and not opens_thinking(off)
    assert "[search]" in on and opens_thinking(on)
