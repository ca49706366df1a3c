# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The embedded SmolLM2 against the published tokenizer and against transformers' stored numbers.

Fetches the model once (98 MB) into the cache that the package itself uses.
"""

from __future__ import annotations

import copy
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import read_golden, unpack

from jaxrl_llm.checkpoint.huggingface import load_params, save_folder
from jaxrl_llm.checkpoint.pretrained import load, peek
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import forward, output_head
from jaxrl_llm.text.chat import encode_prompt, render
from jaxrl_llm.text.tokenizer import from_folder

NAME = "smollm2-135m-instruct"
GOLDEN = read_golden("smollm2_transformers.json")


@pytest.fixture(scope="module")
def peeked():
    return peek(NAME)


@pytest.fixture
def tokenizer(peeked):
    return copy.copy(peeked[1])


@pytest.fixture(scope="module")
def model():
    return load(NAME)


def test_configuration_is_the_published_one(peeked):
    config = peeked[0]
    assert config == ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        family="llama",
    )
    assert config.num_params == 134515008


def test_tokenizer_is_the_published_file_byte_for_byte(tokenizer):
    """The SHA-256 is that of tokenizer.json of HuggingFaceTB/SmolLM2-135M-Instruct."""
    rebuilt = json.loads(tokenizer.backend.to_str())
    pairs = rebuilt["model"]["merges"]
    rebuilt["model"]["merges"] = [" ".join(pair) for pair in pairs]  # how the file spells them
    text = json.dumps(rebuilt, indent=2, ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c"
    )


def test_known_ids(tokenizer):
    assert tokenizer.encode("\n") == [198]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, (2,), 2)
    assert not tokenizer.adds_bos
    assert len(encode_prompt("75+4=79\n21+4=25\n13+4=", tokenizer)[0]) == 21
    assert tokenizer.encode("<|im_start|><|im_end|>") == [1, 2]


def test_tokens_are_those_of_transformers_on_the_export(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    for reader in (tokenizer, from_folder(tmp_path)):
        for case in (*GOLDEN["strings"], *GOLDEN["cases"]):
            assert reader.encode(case["text"]) == case["ids"], case["text"]
        assert [reader.decode([i]) for i in range(0, 49152, 997)] == GOLDEN["decoded"]
    for case in GOLDEN["strings"]:
        assert tokenizer.decode(case["ids"]) == case["text"]
    special = GOLDEN["special"]
    assert (special["bos"], special["eos"], special["pad"]) == (1, 2, 2)
    assert special["generation_eos"] == 2
    assert special["with_special_tokens"] == encode_prompt("hi", tokenizer)[0]


def test_conversations_are_rendered_as_transformers_renders_them(tokenizer):
    for messages, expected in zip(GOLDEN["conversations"], GOLDEN["rendered"], strict=True):
        assert render(messages, tokenizer) == expected


def test_jinja_is_set_up_as_in_transformers(tokenizer):
    """Templates with generation marks, line trimming, tojson, break and namespaces."""
    for entry in GOLDEN["templates"]:
        tokenizer.chat_template = entry["template"]
        for messages, expected in zip(GOLDEN["conversations"], entry["rendered"], strict=True):
            assert render(messages, tokenizer, add_generation_prompt=False) == expected


def test_logits_are_those_of_transformers_on_the_export(model):
    """All texts as one packed row, so that one program is compiled."""
    cases = GOLDEN["cases"]
    tokens = jnp.asarray([i for case in cases for i in case["ids"]])
    lengths = [len(case["ids"]) for case in cases]
    positions = jnp.concatenate([jnp.arange(n) for n in lengths])
    segments = jnp.concatenate([jnp.full(n, i + 1) for i, n in enumerate(lengths)])
    run = jax.jit(forward, static_argnums=1)
    hidden = run(model.params, model.config, tokens[None], positions[None], segments[None])[0]
    head = output_head(model.params)
    worst = 0.0
    for case, end in zip(cases, np.cumsum(lengths), strict=True):
        ours = np.asarray(hidden[end - 3 : end]) @ np.asarray(head)[case["columns"]].T
        expected = unpack(case["logits"])
        assert np.std(expected) > 1
        worst = max(worst, float(np.max(np.abs(ours - expected))))
    assert worst < 1e-3, worst


@pytest.mark.full
def test_export_comes_back_bitwise(model, tmp_path):
    folder = save_folder(
        tmp_path / "m", model.params, model.config, model.tokenizer, max_shard_bytes=2e8
    )
    again = load_params(folder, model.config)
    jax.tree.map(np.testing.assert_array_equal, again, model.params)
