# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Steps in training are the steps that a reply is cut into when it is judged."""

import pytest

from jaxrl_llm.errors import DataError
from jaxrl_llm.text.steps import encode_marked_steps, single_steps, split_steps
from jaxrl_llm.text.tokenizer import bytes_tokenizer


def test_a_text_is_cut_at_separators_into_steps_that_are_not_empty():
    assert split_steps("a\n\nb\n", "\n") == ["a", "b"]


@pytest.mark.parametrize("separator", ["\n", "\n\n", " ки\n"])
def test_marks_of_given_steps_are_those_of_the_reply_that_they_make(separator):
    tokenizer = bytes_tokenizer()
    given = ["ab", f"c{separator}", f"{separator}d e{separator}{separator}"]
    reply = separator.join(["ab", "c", "d e"])
    trained = encode_marked_steps("p", single_steps(given, separator), tokenizer, separator)
    served = encode_marked_steps("p", split_steps(reply, separator), tokenizer, separator)
    assert trained == served and len(trained[1]) == 3


@pytest.mark.parametrize(
    ("steps", "separator"),
    [
        (["a\nb", "c"], "\n"),
        (["a", " "], "\n"),
        (["a", "\n"], "\n"),
        (["a\n", "b"], "\n\n"),
    ],
)
def test_steps_that_would_be_cut_otherwise_are_refused(steps, separator):
    with pytest.raises(DataError, match="cut at"):
        single_steps(steps, separator)
