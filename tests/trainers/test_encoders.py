# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a row each supervised trainer learns or reads."""

import numpy as np
import pytest

from jaxrl_llm.data.preprocess import TableData
from jaxrl_llm.errors import DataError, ModelError
from jaxrl_llm.text.steps import encode_marked_steps, split_steps
from jaxrl_llm.text.templates import with_template
from jaxrl_llm.text.tokenizer import bytes_tokenizer
from jaxrl_llm.trainers.encoders import make_encoder
from jaxrl_llm.trainers.supervised_settings import (
    PreferenceConfig,
    RewardConfig,
    RewardSettings,
    SFTConfig,
    SFTSettings,
)

DATA = TableData("x.jsonl")
TALK = [
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "goodbye"},
]
ROW = {"prompt": [{"role": "user", "content": "hi"}], "completion": TALK, "chosen": TALK,
       "rejected": TALK[:1]}  # fmt: skip
MARKLESS = "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def marked(part, tokenizer):
    return tokenizer.decode(part.tokens[part.mask].tolist())


def test_a_reply_of_several_messages_teaches_no_trainer_the_users_words():
    tokenizer = with_template(bytes_tokenizer(), "plain")
    for config, form, words in (
        (SFTConfig(data=DATA), "prompt_completion", "hello<eos>goodbye<eos>"),
        (PreferenceConfig(data=DATA), "preference", "hello<eos>goodbye<eos>"),
        (RewardConfig(data=DATA), "preference", "<eos>"),
    ):
        parts, _ = make_encoder(config, form, tokenizer)(ROW)
        assert marked(parts[0], tokenizer) == words


def test_marks_are_asked_for_only_where_the_mask_needs_them():
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = MARKLESS
    whole = SFTConfig(data=DATA, sft=SFTSettings(completion_only=False))
    (part,), _ = make_encoder(whole, "prompt_completion", tokenizer)(ROW)
    assert part.mask[1:].all()
    (part, _), _ = make_encoder(RewardConfig(data=DATA), "preference", tokenizer)(ROW)
    assert np.flatnonzero(part.mask).tolist() == [len(part.tokens) - 1]
    for config, form in ((SFTConfig(data=DATA), "prompt_completion"),
                         (PreferenceConfig(data=DATA), "preference")):  # fmt: skip
        with pytest.raises(ModelError, match="does not mark"):
            make_encoder(config, form, tokenizer)(ROW)


def test_steps_are_marked_in_training_where_they_are_judged_later():
    tokenizer = bytes_tokenizer()
    encode = make_encoder(
        RewardConfig(data=DATA, reward=RewardSettings(kind="steps")), "stepwise", tokenizer
    )
    (part,), _ = encode({"prompt": "p", "completions": ["a b", "c\n"], "labels": [True, False]})
    served = encode_marked_steps("p", split_steps("a b\nc\n", "\n"), tokenizer, "\n")
    assert (part.tokens.tolist(), np.flatnonzero(part.mask).tolist()) == served
    assert part.labels[part.mask].tolist() == [1, 0]
    with pytest.raises(DataError, match=r"not one step.*'a\\nb'"):
        encode({"prompt": "p", "completions": ["a\nb", "c\n"], "labels": [True, False]})
