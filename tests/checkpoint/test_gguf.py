# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""GGUF files written by the `gguf` package's own writer and quantised by its own code."""

from __future__ import annotations

import dataclasses
import struct
import time

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_models import family_model
from gguf import GGMLQuantizationType as Kind
from tiny_model import tiny_model

from jaxrl_llm.checkpoint.gguf import NAMES, load_gguf
from jaxrl_llm.checkpoint.gguf_file import GGUFFile
from jaxrl_llm.checkpoint.gguf_quants import DEQUANTISERS
from jaxrl_llm.checkpoint.stacking import split_params
from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import RopeScaling
from jaxrl_llm.models.rotary import inverse_frequencies

# Rows of whole blocks of 32 values, three heads over one.
TRAITS = {
    "vocab_size": 48,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_heads": 3,
    "num_kv_heads": 1,
    "head_dim": 32,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as GGUF files hold them: row i of a head's halves side by side."""
    half = rows.shape[0] // heads // 2
    order = [
        head * 2 * half + i + part * half
        for head in range(heads)
        for i in range(half)
        for part in (0, 1)
    ]
    return rows[order]


def write_gguf(path, config, params, kind=Kind.F32, *, drop=(), metadata=(), extra=(), **layout):
    """A model as a GGUF file (a Llama, unless told otherwise); matrices of `kind`, norms in F32."""
    writer = gguf.GGUFWriter(path, dict(metadata).pop("general.architecture", "llama"))
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in dict(metadata).items():
        if key != "general.architecture":
            adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
            adders[type(value)](key, value)
    for name, tensor in (*file_tensors(config, params, **layout).items(), *extra):
        if name in drop:
            continue
        of = kind if tensor.ndim == 2 else Kind.F32
        if of in (Kind.F32, Kind.F16):
            writer.add_tensor(name, tensor.astype("<f4" if of == Kind.F32 else "<f2"))
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def file_tensors(config, params, permuted=True, plus_one=False):
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if permuted else {}
    tensors = {}
    for name, fetch in split_params(params, config, NAMES).items():
        part, array = name.split(".")[-2], fetch().astype(np.float32)
        array = interleaved(array, heads[part]) if part in heads else array
        tensors[name] = array + 1 if plus_one and part.endswith("norm") else array
    return tensors


@pytest.fixture(scope="module")
def model():
    return tiny_model(**TRAITS)


def quantised(array, kind):
    """What a matrix is after storage in `kind`, by the gguf package."""
    if kind == Kind.F16:
        return np.asarray(array, np.float16).astype(np.float32)
    return gguf.quants.dequantize(gguf.quants.quantize(np.asarray(array), kind), kind)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_configuration_and_parameters_come_back(kind, tied, tmp_path):
    config, params = tiny_model(**TRAITS, tie_word_embeddings=tied)
    again, loaded = load_gguf(write_gguf(tmp_path / "m.gguf", config, params, kind))
    assert again == config
    expected = jax.tree.map(
        lambda x: x if x.shape[-1:] == x.shape or _is_norm(x) else quantised(x, kind), params
    )
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def _is_norm(array):
    return array.ndim == 2 and array.shape == (TRAITS_LAYERS, TRAITS["hidden_size"])


TRAITS_LAYERS = tiny_model()[0].num_layers


def test_parameters_in_bfloat16(model, tmp_path):
    config, params = model
    _, loaded = load_gguf(write_gguf(tmp_path / "m.gguf", config, params), jnp.bfloat16)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    jax.tree.map(np.testing.assert_array_equal, loaded, rounded)


QUANTISED = [Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]


def any_blocks(kind, rows, blocks):
    """Random bytes whose scales and minima are finite."""
    size = gguf.constants.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(0).integers(0, 256, (rows, blocks, size), np.uint8)
    for high_byte in {1, min(3, size - 1), size - 1}:
        raw[..., high_byte] &= 0xBB
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", QUANTISED)
def test_dequantisers_equal_those_of_the_gguf_package_on_any_bytes(kind):
    raw = any_blocks(kind, 500, 1)
    ours = DEQUANTISERS[kind](raw.reshape(-1))
    np.testing.assert_array_equal(ours.reshape(500, -1), gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_a_model_with_a_matrix_of_large_blocks(kind, tmp_path):
    config, params = tiny_model(**{**TRAITS, "hidden_size": 256, "num_heads": 8})
    name, raw = "blk.1.ffn_up.weight", any_blocks(kind, config.intermediate_size, 1)
    path = tmp_path / "m.gguf"
    original = gguf.GGUFWriter.add_tensor

    def add(self, key, tensor, raw_dtype=None):
        swap = (raw, kind) if key == name else (tensor, raw_dtype)
        original(self, key, swap[0], raw_dtype=swap[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        write_gguf(path, config, params)
    _, loaded = load_gguf(path)
    np.testing.assert_array_equal(loaded["layers"]["up"][1], gguf.quants.dequantize(raw, kind))
    np.testing.assert_array_equal(loaded["layers"]["up"][0], params["layers"]["up"][0])


_GEMMA = {
    "attention.key_length": 8,
    "attention.value_length": 8,
    "attention.sliding_window": 8,
}
# Golden case → architecture, keys beyond those of all, and how its tensors lie in the file.
FAMILY_FILES = {
    "mistral": ("llama", {"attention.key_length": 8, "attention.sliding_window": 8}, {}),
    "qwen3": ("qwen3", {"attention.key_length": 8}, {"permuted": False}),
    "gemma2": (
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0},
        {"permuted": False, "plus_one": True},
    ),
    "gemma3": (
        "gemma3",
        {**_GEMMA, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        {"permuted": False, "plus_one": True},
    ),
}


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16])
@pytest.mark.parametrize("case", FAMILY_FILES)
def test_other_families_come_back(case, kind, tmp_path):
    architecture, keys, layout = FAMILY_FILES[case]
    config, params = family_model(case)
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    metadata["general.architecture"] = architecture
    path = write_gguf(tmp_path / "m.gguf", config, params, kind, metadata=metadata, **layout)
    again, loaded = load_gguf(path)
    told = {"context": None}
    if case == "gemma2":  # the file can't say that this query scale is not head_dim^(−1/2)
        told["attention_scale"] = 8**-0.5
    if case == "gemma3":  # nor that the pattern is another than five windowed layers and a full one
        told["window_layers"] = ()
    assert again == dataclasses.replace(config, **told)
    tolerance = {Kind.F32: 1e-6, Kind.BF16: 2**-8}[kind]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-7), loaded, params
    )


def test_a_qwen2_file(tmp_path):
    config, params = tiny_model(**TRAITS, qkv_bias=True, family="qwen2")
    path = write_gguf(
        tmp_path / "m.gguf",
        config,
        params,
        metadata={"general.architecture": "qwen2"},
        permuted=False,
    )
    again, loaded = load_gguf(path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_divisors_of_frequencies_become_the_rule_that_made_them(model, tmp_path):
    config, params = model
    rule = RopeScaling("llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    ruled = dataclasses.replace(config, rope_scaling=rule)
    divisors = inverse_frequencies(config)[0] / inverse_frequencies(ruled)[0]
    assert divisors[0] == 1 and divisors[-1] == 32
    write = lambda name, values: write_gguf(  # noqa: E731
        tmp_path / name, config, params, extra=[("rope_freqs.weight", values)]
    )
    assert load_gguf(write("a.gguf", divisors))[0] == ruled
    assert load_gguf(write("b.gguf", np.ones(16)))[0] == config
    odd = np.linspace(1, 3, 16, dtype=np.float32)
    free = load_gguf(write("c.gguf", odd))[0]
    np.testing.assert_allclose(
        inverse_frequencies(config)[0] / inverse_frequencies(free)[0], odd, rtol=1e-6
    )


def test_metadata_equals_that_of_the_gguf_package(model, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", *model, metadata={"general.name": "naïve 世界"})
    ours = GGUFFile(path).metadata
    theirs = {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items()}
    assert ours["general.name"] == "naïve 世界"
    assert ours["llama.attention.layer_norm_rms_epsilon"] == 1e-5  # not 9.999999747378752e-06
    for key, value in ours.items():
        same = value == theirs[key]
        assert same or value == pytest.approx(theirs[key], rel=1e-6), key


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metadata": {"general.architecture": "mamba"}}, "architecture.*'mamba'"),
        ({"kind": Kind.Q5_0}, "Q5_0"),
        ({"metadata": {"llama.new_trait": 1}}, r"llama\.new_trait"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, r"llama\.rope\.scaling\.type.*'yarn'"),
        ({"metadata": {"llama.expert_count": 8}}, r"llama\.expert_count"),
        ({"metadata": {"llama.attention.value_length": 16}}, r"llama\.attention\.value_length"),
        ({"metadata": {"llama.context_length": "long"}}, "context_length.*'long'"),
        ({"metadata": {"llama.attention.head_count_kv": 2}}, "key heads"),
        ({"metadata": {"llama.attention.key_length": 7}}, "key_length.*7"),
        ({"metadata": {"llama.block_count": 10**9}}, "block_count"),
        ({"metadata": {"llama.vocab_size": 10**6}}, "vocab_size"),
        ({"metadata": {"llama.rope.freq_base": float("inf")}}, "freq_base"),
        ({"drop": ["blk.1.attn_k.weight"]}, r"lacks tensor blk\.1\.attn_k\.weight"),
        ({"drop": ["token_embd.weight"]}, r"lacks tensor token_embd\.weight"),
        ({"extra": [("rope_freqs.weight", np.ones(15))]}, r"tensor rope_freqs\.weight"),
        ({"extra": [("blk.2.attn_norm.weight", np.ones(96))]}, r"tensor blk\.2\.attn_norm"),
    ],
)
def test_files_that_are_refused_by_name(model, changes, said, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", *model, **changes)
    with pytest.raises(ModelError, match=said):
        load_gguf(path)


def test_a_tensor_of_the_wrong_shape_is_named(model, tmp_path):
    config, params = model
    wide = {**params, "final_norm": jnp.ones(128, jnp.float32)}
    path = write_gguf(tmp_path / "m.gguf", config, wide)
    with pytest.raises(ModelError, match=r"output_norm\.weight.*\(128,\).*\(96,\)"):
        load_gguf(path)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        GGUFFile(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        GGUFFile(tmp_path / "empty.gguf")


def test_a_file_cut_anywhere_is_refused(model, tmp_path):
    data = write_gguf(tmp_path / "m.gguf", *model).read_bytes()
    draw = np.random.default_rng(0)
    header = len(data) - sum(x.nbytes for x in file_tensors(*model).values())
    cuts = [*range(1, 64), *draw.integers(64, header, 200), *draw.integers(header, len(data), 50)]
    for cut in cuts:
        (tmp_path / "cut.gguf").write_bytes(data[:cut])
        with pytest.raises(ModelError, match="not a whole GGUF file"):
            GGUFFile(tmp_path / "cut.gguf")


def test_flipped_bytes_give_a_model_error_or_a_model(model, tmp_path):
    data = write_gguf(tmp_path / "m.gguf", *model).read_bytes()
    draw = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for at in draw.integers(0, 2500, 3):
            damaged[at] = draw.integers(0, 256)
        (tmp_path / "bad.gguf").write_bytes(damaged)
        try:
            load_gguf(tmp_path / "bad.gguf")
        except ModelError:
            refused += 1
    assert refused > 200


def test_promised_lengths_are_not_believed(tmp_path):
    huge = 2**60
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    bodies = [
        struct.pack("<IQ", gguf.GGUFValueType.STRING, huge),
        struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8, huge),
        struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, huge),
        struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.ARRAY, huge),
        struct.pack("<I", 99),
    ]
    files = [start + body for body in bodies]
    files += [b"GGUF" + struct.pack("<IQQ", 3, huge, 0), b"GGUF" + struct.pack("<IQQ", 3, 0, huge)]
    files += [b"GGUF" + struct.pack(">IQQ", 3, 0, 0), b"ELF?" + bytes(100)]
    begin = time.perf_counter()
    for data in files:
        (tmp_path / "bad.gguf").write_bytes(data)
        with pytest.raises(ModelError, match="not a whole GGUF file"):
            GGUFFile(tmp_path / "bad.gguf")
    assert time.perf_counter() - begin < 5
