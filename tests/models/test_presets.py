# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from golden_files import read_golden

from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_config import config_from_hf, config_to_hf

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}


def test_every_trait_arrives():
    assert config_from_hf(LLAMA) == ModelConfig(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=64,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        family="llama",
    )


def test_absent_attributes_mean_what_transformers_assumes():
    needed = {k: v for k, v in LLAMA.items() if k not in _OPTIONAL}
    config = config_from_hf(needed)
    assert (config.num_kv_heads, config.head_dim) == (6, 8)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (2048, 1e-6)
    assert (config.rope_theta, config.tie_word_embeddings) == (10000.0, False)


_OPTIONAL = {
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
}


def test_both_spellings_of_the_rotary_base_mean_the_same():
    old = {**LLAMA, "torch_dtype": "bfloat16", "rope_scaling": None}
    new = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert config_from_hf(old) == config_from_hf(new)


@pytest.mark.parametrize("name", ["mha_tied", "gqa_untied", "wide_heads"])
def test_configs_written_by_transformers_are_read(name):
    golden = read_golden(f"llama_{name}_transformers.json")
    config = config_from_hf(golden["config"])
    assert config == config_from_hf(golden["config_short"])
    assert config.rope_theta == golden["config"]["rope_parameters"]["rope_theta"]
    assert config.head_dim == golden["config"]["head_dim"]


def test_round_trip():
    config = config_from_hf({**LLAMA, "head_dim": 16})
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("hidden_act", "gelu"),
        ("rope_interleaved", True),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "gptq"}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0, "strength": 1}),
        ("rope_scaling", {"type": "made_up", "factor": 2.0}),
        ("rope_scaling", "dynamic"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "speed": 4.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "factor": 4.0}),
        ("num_key_value_heads", 4),
        ("hidden_size", 0),
        ("hidden_size", "48"),
        ("num_hidden_layers", True),
        ("rms_norm_eps", -1e-5),
        ("rope_theta", "big"),
        ("tie_word_embeddings", 1),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("sliding_window", 4096),
        ("made_up_trait", 3),
    ],
)
def test_what_is_not_understood_is_refused_by_name(attribute, value):
    with pytest.raises(ModelError) as caught:
        config_from_hf({**LLAMA, attribute: value}, "folder/config.json")
    said = str(caught.value)
    assert "folder/config.json" in said
    names = {"num_key_value_heads": "key heads", "architectures": "architecture"}
    assert names.get(attribute, attribute) in said


@pytest.mark.parametrize("attribute", ["vocab_size", "hidden_size", "num_attention_heads"])
def test_a_missing_attribute_is_named(attribute):
    with pytest.raises(ModelError, match=attribute):
        config_from_hf({k: v for k, v in LLAMA.items() if k != attribute})


PUBLIC = read_golden("model_configs.json")["models"]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_have_their_parameter_count(name):
    config = config_from_hf(PUBLIC[name]["config"], name)
    assert config.num_params == PUBLIC[name]["parameters"]
    assert config_from_hf(config_to_hf(config)) == config


def test_the_sixteen_public_models_are_of_ten_families():
    assert len(PUBLIC) == 16
    assert len({model["config"]["model_type"] for model in PUBLIC.values()}) == 10
