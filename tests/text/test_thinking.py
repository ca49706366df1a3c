# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
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
        ("", True, Thought("", "", False)),
        (" <think>x</think>4", True, Thought("x", "4", True)),
        ("x</think>I used the <think> tag.", True, Thought("x", "I used the <think> tag.", True)),
        ("x</think>I used the <think> tag.", False, Thought("x", "I used the <think> tag.", True)),
        ("a</think>b<think>c</think>d", True, Thought("a", "b<think>c</think>d", True)),
        ("a</think>b<think>c</think>d", False, Thought("a", "b<think>c</think>d", True)),
        ("a<think>b", False, Thought("b", "a", False)),
    ],
)
def test_thinking_and_answer(completion, opened, expected):
    assert split_thinking(completion, opened=opened) == expected
    marked, tokenizer = [], bytes_tokenizer()
    for _ in range(2):  # the tags in pieces, then as tokens
        tokens = tokenizer.encode(completion)
        mask = thinking_mask(tokens, tokenizer, opened=opened)
        marked.append([])
        for token, inside in zip(tokens, mask, strict=True):
            marked[-1] += [(c, bool(inside)) for c in tokenizer.decode([token])]
        tokenizer.backend.add_tokens(["<think>", "</think>"])
    assert marked[0] == marked[1]
    thought = "".join(char for char, inside in marked[0] if inside).strip()
    if expected.thinking is None:
        assert not thought
    else:
        body = thought.removeprefix("<think>").removesuffix("</think>").strip()
        assert body == expected.thinking and thought.endswith("</think>") == expected.closed


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|user|>hi<|assistant|><think>\n", True),
        ("<think>", True),
        ("<|user|>What does the <think> tag mean?<|assistant|>", False),
        ("<|user|><think><|assistant|>", False),
        ("<|assistant|><think>\n\n</think>\n\n", False),
        ("", False),
    ],
)
def test_only_the_end_of_a_prompt_opens_a_thought(prompt, opens):
    assert opens_thinking(prompt) is opens


def test_the_mask_by_text_decodes_few_prefixes(monkeypatch):
    tokenizer = bytes_tokenizer()
    tokens = tokenizer.encode("é<think>" + "abc 🙂 " * 600 + "</think>4")
    calls, decode = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: calls.append(1) or decode(ids))
    mask = thinking_mask(tokens, tokenizer)
    assert np.flatnonzero(~mask).tolist() == [0, 1, len(tokens) - 1]
    assert len(calls) < 40


def test_other_tags():
    tags = ("[T]", "[/T]")
    assert split_thinking("[T]a[/T]b", tags=tags) == Thought("a", "b", True)


def test_mask_by_text():
    tokenizer = bytes_tokenizer()
    text = "a<think>b</think>c"
    mask = thinking_mask(tokenizer.encode(text), tokenizer)
    marked = "".join(char for char, inside in zip(text, mask, strict=True) if inside)
    assert marked == "<think>b</think>"
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
