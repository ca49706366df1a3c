# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What a supervised run would do nothing with is refused; what helps when memory runs out."""

import pytest

from jaxrl_llm.cli.eval import main as evaluate
from jaxrl_llm.data.preprocess import Examples
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.text.tokenizer import bytes_tokenizer
from jaxrl_llm.train import out_of_memory_told
from jaxrl_llm.trainers.encoders import encode_examples
from jaxrl_llm.trainers.runs import KINDS
from jaxrl_llm.trainers.settings import RLConfig
from jaxrl_llm.trainers.supervised_settings import FitConfig, RowConfig, SFTConfig


class TwoRows:
    """A row to train on, and perhaps one to hold out."""

    def __init__(self, *heldout):
        self.rows = [{"text": text} for text in heldout]

    def load(self, formats):
        return [(Examples("text", [{"text": "short"}], self.rows, {}), 1.0)]


@pytest.mark.parametrize(
    ("heldout", "settings", "words"),
    [
        ((), {"train": FitConfig(eval_every=5)}, "train.eval_every has no effect"),
        (("much too long",), {"rows": RowConfig(8, "drop")}, "no held-out example of a table fits"),
    ],
)
def test_an_evaluation_of_nothing_is_refused(heldout, settings, words):
    with pytest.raises(ConfigError, match=words):
        encode_examples(SFTConfig(TwoRows(*heldout), **settings), bytes_tokenizer())
    good = SFTConfig(TwoRows("held"), rows=RowConfig(8, "drop"), train=FitConfig(eval_every=5))
    assert len(encode_examples(good, bytes_tokenizer()).heldout) == 1
    without = [FitConfig(), FitConfig(eval_every=0)]
    for train in without:
        assert not encode_examples(SFTConfig(TwoRows(), train=train), bytes_tokenizer()).heldout


@pytest.mark.parametrize(
    "words", [["--samples=9"], ["--pass-at=1"], ["--correct=foo"], ["--seed=1"], ["--json=/no/x"]]
)
def test_options_of_the_evaluation_command_that_nothing_reads_are_refused(words, capsys):
    assert evaluate(["tiny-random", "--config=sft.py", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and ("no effect" in error or "can't be written" in error)


@pytest.mark.parametrize(
    ("kind", "named"), [(SFTConfig, "micro_batch"), (RLConfig, "micro_tokens")]
)
def test_out_of_memory_names_the_settings_of_the_run(kind, named):
    told = pytest.raises(UserError, match=rf"out of memory .*--train.{named}")
    with told, out_of_memory_told(KINDS[kind].sizes):
        raise RuntimeError("RESOURCE_EXHAUSTED: 3 bytes\nmore")
    with pytest.raises(RuntimeError, match="other"), out_of_memory_told("x"):
        raise RuntimeError("other")
