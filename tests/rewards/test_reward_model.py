# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Reward models in folders: the scores of transformers, on any batch, and mistakes."""

import json
import re

import numpy as np
import pytest
from golden_files import read_golden
from score_models import SEQUENCES, write_score_model
from tiny_model import write_tiny_model

from jaxrl_llm.checkpoint.score_folder import load_score_folder, padding_id
from jaxrl_llm.data.preprocess import TableData
from jaxrl_llm.errors import ModelError, RewardError
from jaxrl_llm.rewards.process import ProcessRewardModel
from jaxrl_llm.rewards.reward_model import RewardModel
from jaxrl_llm.rewards.scoring import scores_of
from jaxrl_llm.text.tokenizer import Tokenizer, bytes_tokenizer
from jaxrl_llm.trainers.build_supervised import gather, load_scoring
from jaxrl_llm.trainers.supervised_settings import RewardConfig

GOLDEN = read_golden("classifiers_transformers.json")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("classifiers")
    return {classes: write_score_model(place / str(classes), classes) for classes in (1, 2)}


def test_scores_are_those_of_transformers(folders):
    scores = scores_of(load_score_folder(folders[1]), SEQUENCES, rows=2)
    ours = [float(s[-1, 0]) for s in scores]
    theirs = [row[0] for row in GOLDEN["1"]]
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert np.ptp(theirs) > 0.1


def test_step_logits_are_those_of_transformers(folders):
    scores = scores_of(load_score_folder(folders[2]), SEQUENCES, rows=4)
    for ours, theirs in zip(scores, GOLDEN["2"], strict=True):
        np.testing.assert_allclose(ours, theirs[: len(ours)], atol=2e-5)


def test_models_of_the_wrong_kind_are_refused(folders):
    with pytest.raises(RewardError, match="judges steps"):
        RewardModel(str(folders[2]))([])
    with pytest.raises(RewardError, match="judges replies"):
        ProcessRewardModel(str(folders[1]))([])
    for kind in (RewardModel, ProcessRewardModel):
        with pytest.raises(RewardError, match="too small"):
            kind("x", rows=1)
    for sequences in ([[]], [[1] * 200]):
        with pytest.raises(RewardError, match="can't be scored"):
            scores_of(load_score_folder(folders[1]), sequences, rows=2)


def test_a_damaged_folder_is_named(folders, tmp_path):
    def copy(change):
        folder = tmp_path / re.sub(r"\W", "", str(change))[-20:]
        folder.mkdir()
        for file in folders[1].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        change(folder)
        return folder

    def without_head(folder):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        del index["weight_map"]["score.weight"]
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def as_tokens(folder):
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace("ForSequence", "ForToken"))

    def cut_short(folder):
        file = folder / "model-00001-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:100])

    for change, words in ((without_head, "score.weight"), (as_tokens, "number of labels"),
                          (cut_short, "safetensors")):  # fmt: skip
        with pytest.raises(ModelError, match=words):
            load_score_folder(copy(change))


def test_the_padding_token_never_ends_a_reply():
    backend = bytes_tokenizer().backend
    assert padding_id(Tokenizer(backend, eos_ids=(257,), pad_id=258)) == 258
    assert padding_id(Tokenizer(backend, eos_ids=(257,), pad_id=257, bos_id=256)) == 256
    with pytest.raises(ModelError, match="pad"):
        padding_id(Tokenizer(backend, eos_ids=(257,), pad_id=257))


@pytest.mark.parametrize("pad", [257, None])
def test_the_tokenizer_of_a_folder_pads_with_what_the_model_takes_for_padding(pad, tmp_path):
    """Else `transformers` would read the score at the padding of a batch."""
    settings = {"pad_token": "<eos>"} if pad else {}
    own = Tokenizer(
        bytes_tokenizer().backend, bos_id=256, eos_ids=(257,), pad_id=pad, settings=settings
    )
    folder = write_score_model(tmp_path / "m", 1, own)
    named = {name: json.loads((folder / f"{name}.json").read_text())
             for name in ("config", "generation_config", "tokenizer_config")}  # fmt: skip
    assert named["tokenizer_config"]["pad_token"] == "<bos>"
    assert named["config"]["pad_token_id"] == named["generation_config"]["pad_token_id"] == 256
    assert own.pad_id == pad and own.settings == settings
    assert load_score_folder(folder).tokenizer.pad_id == 256


def test_training_and_evaluation_take_no_reward_model_of_the_other_kind(folders, tmp_path):
    for classes, words in ((1, "judges replies, not steps"), (2, "judges steps, not replies")):
        own, other = str(folders[classes]), 3 - classes
        assert (
            load_scoring(own, classes, np.float32, 0).params["score"]["weight"].shape[0] == classes
        )
        with pytest.raises(ModelError, match=words):
            load_scoring(own, other, np.float32, 0)


def test_no_random_head_is_evaluated(tmp_path):
    config = RewardConfig(data=TableData(str(tmp_path / "never_read.jsonl")))
    model = write_tiny_model(tmp_path / "m")
    for path, words in (
        (str(model), "is no reward model"),
        (str(tmp_path / "no"), "no such model"),
    ):
        with pytest.raises(ModelError, match=words):
            gather(config, 0, trained=path)
