# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens and exact masks: prompts as the sampler sees them, ends learnt, one BOS."""

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxrl_llm.data.encode import (
    cut,
    encode_messages,
    encode_reply,
    encode_rows,
    encode_steps,
    encode_text,
    ends_only,
    everything,
)
from jaxrl_llm.errors import DataError, ModelError
from jaxrl_llm.text.chat import encode_prompt, render_with_spans
from jaxrl_llm.text.templates import CHAT_TEMPLATES, with_template
from jaxrl_llm.text.tokenizer import Tokenizer, bytes_tokenizer

BOS, EOS = 256, 257
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "goodbye <eos>"},
]


def byte_tokenizer(*, adds_bos=False, template="plain", pad_id=258):
    own = bytes_tokenizer()
    return with_template(
        Tokenizer(own.backend, bos_id=BOS, eos_ids=(EOS,), pad_id=pad_id, adds_bos=adds_bos),
        template,
    )


def learnt(part, tokenizer):
    """The text of each learnt run."""
    edges = np.flatnonzero(np.diff(part.mask.astype(int), prepend=0, append=0))
    runs = np.split(part.tokens, edges)[1::2]
    return [tokenizer.decode(run.tolist()) for run in runs]


def test_assistant_spans_and_their_end_of_turn_are_learnt_and_nothing_else():
    tokenizer = byte_tokenizer()
    part = encode_messages(
        TALK[:2] + TALK[2:3] + [{"role": "assistant", "content": "x"}], tokenizer
    )
    assert learnt(part, tokenizer) == ["hello<eos>", "x<eos>"]
    ends = np.flatnonzero(np.diff(part.mask.astype(int), append=0) == -1)
    assert (part.tokens[ends] == EOS).all()
    assert part.tokens[-1] == EOS


def test_an_end_token_spelled_by_a_message_does_not_end_the_mask():
    tokenizer = byte_tokenizer()
    part = encode_messages(TALK, tokenizer)
    assert learnt(part, tokenizer)[1] == "goodbye <eos><eos>"


def test_a_mark_that_stops_before_the_end_of_turn_is_widened_to_it():
    template = CHAT_TEMPLATES["plain"].replace(
        "+ eos_token }}{% endgeneration %}", "}}{% endgeneration %}{{ eos_token }}"
    )
    tokenizer = byte_tokenizer(template=None)
    tokenizer.chat_template = template
    assert learnt(encode_messages(TALK[:2], tokenizer), tokenizer) == ["hello<eos>"]
    tokenizer.chat_template = template.replace("{{ eos_token }}", "")
    with pytest.raises(ModelError, match="does not end in an end token"):
        encode_messages(TALK[:2], tokenizer)


def test_a_template_without_marks_is_an_error_and_never_all_ones():
    tokenizer = byte_tokenizer(template=None)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    with pytest.raises(ModelError, match="does not mark"):
        encode_messages(TALK, tokenizer)
    with pytest.raises(DataError, match="says nothing"):
        encode_messages(TALK[:1], byte_tokenizer())


def test_spans_point_into_the_text_that_is_rendered_without_marks():
    from jaxrl_llm.text.chat import render

    tokenizer = byte_tokenizer()
    text, spans = render_with_spans(TALK, tokenizer)
    assert text == render(TALK, tokenizer, False)
    assert [text[a:b] for a, b in spans] == ["hello<eos>", "goodbye <eos><eos>"]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("prints", [False, True])
def test_one_bos_through_every_path(adds_bos, prints):
    tokenizer = byte_tokenizer(adds_bos=adds_bos)
    if not prints:
        tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", "")
    prompt, reply = TALK[:1], TALK[1:2]
    chat = [
        encode_messages(TALK, tokenizer),
        encode_reply(prompt, reply, tokenizer),
    ]
    plain = [
        encode_text("text", tokenizer),
        encode_reply("prompt", " reply", tokenizer),
        encode_steps("prompt", ["a", "b"], [True, False], tokenizer, "\n"),
    ]
    if adds_bos:
        plain.append(encode_text("<bos>text", tokenizer))
        plain.append(encode_reply("<bos>prompt", " reply", tokenizer))
    for parts, expected in ((chat, prints), (plain, adds_bos)):
        for part in parts:
            assert (part.tokens == BOS).sum() == expected
            assert not expected or part.tokens[0] == BOS
    # What the sampler would be given is what the trainer saw before the reply.
    for prompt_of, part in ((prompt, chat[1]), ("prompt", plain[1])):
        seen = encode_prompt(prompt_of, tokenizer)[0]
        first = int(np.flatnonzero(part.mask)[0])
        assert part.tokens[:first].tolist() == seen


def test_pad_that_is_eos_changes_nothing():
    one, other = byte_tokenizer(), byte_tokenizer(pad_id=EOS)
    for encode in (lambda t: encode_messages(TALK, t), lambda t: encode_text("abc", t),
                   lambda t: encode_reply(TALK[:1], TALK[1:2], t)):  # fmt: skip
        a, b = encode(one), encode(other)
        assert (a.tokens == b.tokens).all() and (a.mask == b.mask).all()
        assert a.mask[-1] and a.tokens[-1] == EOS


def merging_tokenizer():
    """Byte-pair merges in which "b" and "c" become one token, also across a prompt's end."""
    vocabulary = {"a": 0, "b": 1, "c": 2, "bc": 3, "!": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("b", "c")]))
    backend.pre_tokenizer = pre_tokenizers.Split("!", "isolated")
    return Tokenizer(backend, eos_ids=(4,))


def test_where_tokens_would_join_prompt_and_reply_they_are_cut():
    tokenizer = merging_tokenizer()
    assert tokenizer.encode("abc") == [0, 3]
    joined = encode_reply("ab", "ca", tokenizer)
    assert joined.tokens.tolist() == [0, 1, 2, 0, 4]
    assert joined.mask.tolist() == [False, False, True, True, True]
    apart = encode_reply("a", "bca", tokenizer)
    assert apart.tokens.tolist() == [0, 3, 0, 4] and apart.mask.tolist() == [False] + [True] * 3


def test_the_first_token_of_a_sequence_follows_nothing_and_is_not_learnt():
    tokenizer = byte_tokenizer()
    for part in (encode_text("abc", tokenizer), encode_reply("", "abc", tokenizer)):
        assert part.mask.tolist() == [False, True, True, True]
    assert everything(encode_reply("ab", "c", tokenizer)).mask.tolist() == [False, *[True] * 3]


def test_a_score_is_read_at_the_end_and_steps_at_their_marks():
    tokenizer = byte_tokenizer()
    part = ends_only(encode_reply("<eos>?", "yes", tokenizer))
    assert np.flatnonzero(part.mask).tolist() == [len(part.tokens) - 1]
    steps = encode_steps("p", ["ab", "c"], [True, False], tokenizer, "\n")
    assert np.flatnonzero(steps.mask).tolist() == [3, 5]
    assert steps.labels.tolist() == [-1, -1, -1, 1, -1, 0]


def test_truncation_rules():
    tokenizer = byte_tokenizer(adds_bos=True)
    part = encode_reply("abcdef", "xyz", tokenizer)  # <bos>abcdef xyz<eos>: 11 tokens
    text = lambda p: tokenizer.decode(p.tokens.tolist())  # noqa: E731
    assert text(cut(part, 9, "end", BOS)) == "<bos>abcdefxy"
    assert text(cut(part, 9, "prompt", BOS)) == "<bos>cdefxyz<eos>"[: 5 + 7] + "<eos>"
    assert cut(part, 9, "prompt", BOS).mask.sum() == 4
    assert text(cut(part, 4, "prompt", BOS)) == "<bos>xyz"
    assert cut(part, 7, "end", BOS) is None
    assert cut(part, 9, "drop", BOS) is None
    assert cut(part, 11, "error", BOS) is part


def test_examples_that_do_not_fit_are_counted_or_named():
    tokenizer = byte_tokenizer(adds_bos=False)
    rows = [{"text": "abc"}, {"text": "abcdefghi"}, {"text": "<eos>"}]

    def units(rule, counts):
        return encode_rows(
            rows, lambda row: ((encode_text(row["text"], tokenizer),), ()), most=8, rule=rule,
            bos_id=None, counts=counts,
        )  # fmt: skip

    for rule, told, left in (
        ("end", {"cut": 1, "nothing to learn": 1}, 2),
        ("drop", {"too many tokens": 1, "nothing to learn": 1}, 1),
    ):
        counts = {}
        kept = units(rule, counts)
        assert counts == told and [unit.index for unit in kept] == list(range(left))
    with pytest.raises(DataError, match=r"too long.*10 tokens in .*abcdefghi"):
        units("error", {})


def test_a_template_that_rewrites_the_prompt_is_refused():
    tokenizer = byte_tokenizer(template=None)
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    with pytest.raises(ModelError, match="differently when its reply follows"):
        encode_reply(TALK[:1], TALK[1:2], tokenizer)


MARKLESS = "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def test_of_a_reply_in_several_messages_only_the_assistants_words_are_learnt():
    tokenizer = byte_tokenizer()
    for others in ("user", "tool"):
        reply = [TALK[1], {"role": others, "content": "and <eos> then"}, TALK[3]]
        part = encode_reply(TALK[:1], reply, tokenizer)
        assert learnt(part, tokenizer) == ["hello<eos>", "goodbye <eos><eos>"]
        whole = encode_messages([TALK[0], *reply], tokenizer)
        assert part.tokens.tolist() == whole.tokens.tolist()
        assert part.mask.tolist() == whole.mask.tolist()
    # What the assistant said in the prompt is not part of the reply.
    part = encode_reply(TALK[:3], [TALK[1], TALK[2], TALK[1]], tokenizer)
    assert learnt(part, tokenizer) == ["hello<eos>"] * 2
    # The beginning of a second turn is written by the template.
    part = encode_reply(TALK[:1], [TALK[1], TALK[1]], tokenizer)
    assert learnt(part, tokenizer) == ["hello<eos>"] * 2


def test_without_marks_a_reply_is_one_message_unless_only_its_end_is_read():
    tokenizer = byte_tokenizer(template=None)
    tokenizer.chat_template = MARKLESS
    assert learnt(encode_reply(TALK[:1], TALK[1:2], tokenizer), tokenizer) == ["hello<eos>"]
    with pytest.raises(ModelError, match="does not mark"):
        encode_reply(TALK[:1], TALK[1:], tokenizer)
    part = ends_only(encode_reply(TALK[:1], TALK[1:], tokenizer, assistant_only=False))
    assert tokenizer.decode(part.tokens.tolist()).endswith("assistant:goodbye <eos><eos>")


@pytest.mark.parametrize("reply", [TALK[2:3], TALK[1:3], TALK[2:4]])
def test_a_reply_begins_and_ends_with_the_assistant(reply):
    for only in (True, False):
        with pytest.raises(DataError, match=r"begin and end with .* role 'user'"):
            encode_reply(TALK[:1], reply, byte_tokenizer(), assistant_only=only)
