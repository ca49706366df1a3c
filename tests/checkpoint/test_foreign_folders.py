# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Folders of reward models and adapters that others wrote or damaged: one line, nothing written."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from score_models import write_score_model
from tiny_model import TINY, tiny_model

from jaxrl_llm.checkpoint.adapters import load_adapter, save_adapter
from jaxrl_llm.checkpoint.huggingface import load_params, save_folder
from jaxrl_llm.checkpoint.score_folder import is_score_folder, load_score_folder
from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.lora import LoraConfig, adapter_shapes
from jaxrl_llm.text.tokenizer import bytes_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.norm.weight"


def change_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def refused(read, said):
    with pytest.raises(ModelError, match=said) as caught:
        read()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.fixture(scope="module")
def scoring(tmp_path_factory):
    return write_score_model(tmp_path_factory.mktemp("score") / "m", 1)


@pytest.fixture
def score(scoring, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    for file in scoring.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def sharded(tmp_path):
    config, params = tiny_model()
    return save_folder(tmp_path / "m", params, config, bytes_tokenizer(), max_shard_bytes=20_000)


@pytest.mark.parametrize("tensor", [NORM, "score.weight"])
@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("../outside.safetensors", "outside its folder"),
        ("/tmp/outside.safetensors", "outside its folder"),
        ("sub/model.safetensors", "outside its folder"),
        (INDEX, "not a safetensors file"),
        ("config.json", "not a safetensors file"),
        ("", "not a safetensors file"),
        ("..", "not a safetensors file"),
        ("a\0.safetensors", "not a safetensors file"),
        ("x" * 300 + ".safetensors", "not a safetensors file"),
        ("sub.safetensors", "missing"),
        ("away.safetensors", "missing"),
        (5, "weight_map"),
        ([1], "weight_map"),
    ],
)
def test_an_index_names_files_of_its_folder_alone(score, tmp_path, tensor, file, said):
    save_file({tensor: np.zeros(24, np.float32)}, tmp_path / "outside.safetensors")
    (score / "sub.safetensors").mkdir()
    change_json(score / INDEX, lambda index: index["weight_map"].update({tensor: file}))
    before = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    refused(lambda: load_score_folder(score), said)
    assert {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("wrong", [[1], 5, "x", {}, None, {"a": None}])
def test_an_index_without_a_map(score, wrong):
    change_json(score / INDEX, lambda index: index.update(weight_map=wrong))
    refused(lambda: load_score_folder(score), "no usable weight_map")


def test_shards_hold_what_the_index_says_and_no_more(sharded):
    expected = load_params(sharded, TINY)
    whole = json.loads((sharded / INDEX).read_text())["weight_map"]
    change_json(sharded / INDEX, lambda index: index["weight_map"].pop(NORM))
    refused(lambda: load_params(sharded, TINY), f"holds tensor {NORM}.*got nothing there")
    change_json(sharded / INDEX, lambda index: index.update(weight_map=whole))
    other = next(file for file in whole.values() if file != whole[NORM])
    held = load_file(sharded / other)
    save_file({**held, NORM: np.zeros(24, np.float32)}, sharded / other)
    refused(lambda: load_params(sharded, TINY), f"{other} holds tensor {NORM}")
    save_file(held, sharded / other)
    for name, value in expected.items():
        if name != "layers":
            np.testing.assert_array_equal(load_params(sharded, TINY)[name], value)


def test_a_single_file_comes_before_an_index(sharded):
    tensors = {}
    for shard in sharded.glob("model-*.safetensors"):
        tensors |= load_file(shard)
    save_file({**tensors, NORM: np.full(24, 7, np.float32)}, sharded / WEIGHTS)
    assert (load_params(sharded, TINY)["final_norm"] == 7).all()


@pytest.mark.parametrize("named", [5, {}, [], [5], [None], "LlamaForCausalLM", None])
def test_a_class_that_config_json_does_not_name(score, named):
    change_json(score / "config.json", lambda config: config.update(architectures=named))
    assert not is_score_folder(score)
    refused(lambda: load_score_folder(score), "no reward model")


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"score.weight": ()}, "score.weight.*wrong shape"),
        ({"score.weight": (24,)}, "score.weight.*wrong shape"),
        ({"score.weight": (1, 7)}, r"score.weight.*\(1, 7\).*\(1, 24\)"),
        ({"score.weight": (1, 24, 1)}, "score.weight.*wrong shape"),
        ({"score.weight": (3, 24)}, "number of labels"),
        ({"score.weight": (1, 24), "score.bias": (2,)}, "score.bias.*wrong shape"),
        ({"score.weight": (1, 24), "score.bias": ()}, "score.bias.*wrong shape"),
        ({"score.weight": (1, 24), "score.other": (1,)}, "score.other.*no place"),
        ({"score.dense.weight": (24, 24)}, "no tensor score.weight"),
    ],
)
def test_heads_of_other_shapes(score, tensors, said):
    held = {}
    for file in score.glob("*.safetensors"):
        held |= load_file(file)
        file.unlink()
    del held["score.weight"]
    drawn = {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
    save_file(held | drawn, score / WEIGHTS)
    refused(lambda: load_score_folder(score), said)


def test_a_bias_that_its_shard_lacks(score):
    file = json.loads((score / INDEX).read_text())["weight_map"]["score.weight"]
    change_json(score / INDEX, lambda index: index["weight_map"].update({"score.bias": file}))
    refused(lambda: load_score_folder(score), "lacks tensor score.bias")


LORA = LoraConfig(rank=2, alpha=8, targets=("q", "v"))


@pytest.fixture
def adapter(tmp_path):
    values = {
        target: {
            part: jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
            for part, shape in parts.items()
        }
        for target, parts in adapter_shapes(TINY, LORA).items()
    }
    return save_adapter(tmp_path / "a", values, LORA, TINY)


GONE = object()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("init_lora_weights", x) for x in ("pissa", "pissa_niter_4", "olora", "corda", "loftq")),
        ("alora_invocation_tokens", [1, 2]),
        ("use_qalora", True),
        ("use_bdlora", {"a": 1}),
        ("velora_config", {"a": 1}),
        ("arrow_config", {"a": 1}),
        ("target_parameters", ["experts.weight"]),
        ("modules_to_save", ["score"]),
        ("task_type", "SEQ_CLS"),
        ("bias", "all"),
        ("bias", True),
        ("rank_pattern", {"q_proj": 4}),
        ("layers_to_transform", 1),
        ("layers_to_transform", 0),
        ("fan_in_fan_out", 1),
        ("anything_new", True),
        ("use_rslora", "no"),
        ("use_rslora", 1),
        ("use_dora", []),
        *(("r", x) for x in (GONE, None, "4", 4.0, 2.0, True, 0, -1, 10**400)),
        *(("lora_alpha", x) for x in (GONE, None, "x", True, 0, -1, 10**400)),
        *(("lora_alpha", x) for x in (float("nan"), float("inf"))),
        *(("target_modules", x) for x in (GONE, None, [], [["q_proj"]], [{}], {}, 5, "q_proj")),
        ("target_modules", ["q_proj", "lm_head"]),
        ("peft_type", "LOHA"),
        ("peft_type", ["LORA"]),
    ],
)
def test_settings_that_an_adapter_is_not_read_with(adapter, key, value):
    def change(settings):
        settings.pop(key, None)
        if value is not GONE:
            settings[key] = value

    change_json(adapter / "adapter_config.json", change)
    refused(lambda: load_adapter(adapter, TINY), f"adapter_config.json.*{key}|not of a LoRA")


def test_settings_that_change_nothing(adapter):
    expected, _ = load_adapter(adapter, TINY)
    idle = {
        "alora_invocation_tokens": None,
        "anything_new": None,
        "arrow_config": None,
        "auto_mapping": None,
        "eva_config": None,
        "init_lora_weights": "gaussian",
        "layers_pattern": None,
        "loftq_config": {},
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_version": "0.18.0",
        "qalora_group_size": 16,
        "rank_pattern": {},
        "revision": "main",
        "target_parameters": None,
        "use_qalora": False,
        "use_rslora": None,
    }
    change_json(adapter / "adapter_config.json", lambda settings: settings.update(idle))
    again, lora = load_adapter(adapter, TINY)
    assert lora == LORA and type(lora.rank) is int
    for target, parts in expected.items():
        for part, value in parts.items():
            np.testing.assert_array_equal(again[target][part], value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: {k: v.astype(np.int32) for k, v in held.items()}, "type.*I32"),
        (lambda held: {k: v[..., None] for k, v in held.items()}, "wrong shape"),
        (lambda held: dict(list(held.items())[1:]), "missing or of the wrong shape"),
        (lambda held: held | {"other": np.ones(1, np.float32)}, "no place.*other"),
    ],
)
def test_tensors_that_an_adapter_does_not_have(adapter, change, said):
    file = adapter / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    refused(lambda: load_adapter(adapter, TINY), said)
    file.write_bytes(file.read_bytes()[:50])
    refused(lambda: load_adapter(adapter, TINY), "not a whole safetensors file")
    file.unlink()
    refused(lambda: load_adapter(adapter, TINY), "no adapter_model")


def test_an_adapter_keeps_its_dtype(adapter, tmp_path):
    values, lora = load_adapter(adapter, TINY, jnp.bfloat16)
    folder = save_adapter(tmp_path / "half", values, lora, TINY)
    stored = load_file(folder / "adapter_model.safetensors")
    assert {str(x.dtype) for x in stored.values()} == {"bfloat16"}
