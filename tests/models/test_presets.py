# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

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
        ("model_type", ["llama"]),
        ("num_hidden_layers", 10**10),
        ("vocab_size", 10**400),
        ("rms_norm_eps", math.inf),
        ("rms_norm_eps", 10**400),
        ("rope_theta", math.inf),
        ("rope_theta", 1),
        ("rope_parameters", 5),
    ],
)
def test_what_is_not_understood_is_refused_by_name(attribute, value):
    with pytest.raises(ModelError) as caught:
        config_from_hf({**LLAMA, attribute: value}, "folder/config.json")
    said = str(caught.value)
    assert "folder/config.json" in said
    names = {"num_key_value_heads": "key heads", "architectures": "architecture"}
    names |= {"model_type": "family"}
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


def refused(model_type, **changes):
    """What the error says for a model of a family with these attributes."""
    base = {k: v for k, v in LLAMA.items() if k not in ("architectures", "model_type")}
    with pytest.raises(ModelError) as caught:
        config_from_hf({**base, "model_type": model_type, **changes})
    return str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "attribute", "values"),
    [
        ("qwen2", "max_window_layers", ["28", [28], 1.5, True, -3]),
        ("qwen2", "layer_types", [3, "full", [[]] * 3, ["full_attention"], {}]),
        ("qwen2", "num_hidden_layers", [10**10]),
        ("gemma2", "num_hidden_layers", [10**10]),
        ("gemma3_text", "num_hidden_layers", [10**10]),
        ("gemma3_text", "rope_scaling", [5, [1], "linear"]),
        ("gemma3_text", "rope_parameters", [{"full_attention": 5}, {"near": {}}, 5]),
        ("gemma2", "query_pre_attn_scalar", [math.inf, math.nan, 10**400]),
        ("smollm3", "num_hidden_layers", [10**10]),
        ("smollm3", "no_rope_layers", [5, "101", [1, 0], [1, 0, 2], [1, 0, "1"], [1.0, 0, 1]]),
        ("smollm3", "no_rope_layer_interval", [0, "a", 1.5, True]),
        ("phi3", "original_max_position_embeddings", [0, "x", -5, [1], True, 16.5]),
        ("phi3", "full_attn_mod", [2]),
        ("phi3", "interpolate_factor", [2]),
        ("phi3", "lm_head_bias", [True]),
        ("mixtral", "router_aux_loss_coef", [math.inf, -1, "0"]),
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(model_type, attribute, values):
    for value in values:
        said = refused(model_type, **{attribute: value})
        part = "full_attention" if value == {"full_attention": 5} else attribute
        assert part in said and "\n" not in said and len(said) < 400, said


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": ["yarn"], "factor": 2.0}, "rope_type"),
        ({"rope_type": "yarn", "factor": math.inf}, "factor"),
        ({"rope_type": "linear", "factor": math.nan}, "factor"),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0.5}, "original_max"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast"),
        (
            {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
            "high_freq_factor",
        ),
        ({"type": "longrope", "short_factor": [], "long_factor": []}, "short_factor"),
        (
            {
                "type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [1.0] * 4,
                "original_max_position_embeddings": 1,
            },
            "original_max_position_embeddings",
        ),
    ],
)
def test_scalings_that_have_no_frequencies_are_refused(rope, said):
    assert said in refused("llama", rope_scaling=rope)


def test_dynamic_scaling_of_one_pair_is_refused():
    rope = {"type": "dynamic", "factor": 2.0}
    assert "dynamic" in refused("llama", head_dim=2, rope_scaling=rope)


def test_contradictory_counts_of_experts_are_refused():
    changes = {"num_experts": 4, "num_local_experts": 8, "moe_intermediate_size": 8}
    assert "num_local_experts" in refused("qwen3_moe", **changes)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe"])
def test_a_window_in_use_is_4096_unless_told_and_never_null(model_type):
    base = {k: v for k, v in LLAMA.items() if k not in ("architectures", "model_type")}
    used = {**base, "model_type": model_type, "use_sliding_window": True}
    used |= {} if model_type == "qwen3_moe" else {"max_window_layers": 1}
    config = config_from_hf(used)
    assert config.sliding_window == 4096
    windows = [traits.window for traits in config.layers]
    assert windows[1:] == [4096, 4096]
    assert windows[0] == (4096 if model_type == "qwen3_moe" else None)
    assert config_from_hf({**used, "use_sliding_window": False}).sliding_window is None
    with pytest.raises(ModelError, match="sliding_window"):
        config_from_hf({**used, "sliding_window": None})


def test_phi_4_mini_is_read():
    factors = [1.0] * 48
    config = config_from_hf(
        {
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            "bos_token_id": 199999,
            "embd_pdrop": 0.0,
            "eos_token_id": 199999,
            "full_attn_mod": 1,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "initializer_range": 0.02,
            "intermediate_size": 8192,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "phi3",
            "num_attention_heads": 24,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096,
            "pad_token_id": 199999,
            "partial_rotary_factor": 0.75,
            "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": factors,
                "short_factor": factors,
                "type": "longrope",
            },
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 200064,
        }
    )
    assert 3.8e9 < config.num_params < 3.9e9
    assert config_from_hf(config_to_hf(config)) == config
