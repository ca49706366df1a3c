# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""GGUF files written by the `gguf` package's own writer and quantised by its own code."""

from __future__ import annotations

import struct
import time

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from tiny_model import tiny_model

from jaxrl_llm.checkpoint.gguf import NAMES, load_gguf
from jaxrl_llm.checkpoint.gguf_file import DEQUANTISERS, GGUFFile
from jaxrl_llm.checkpoint.stacking import tensor_names
from jaxrl_llm.errors import ModelError

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


def write_gguf(path, config, params, kind=Kind.F32, *, drop=(), metadata=(), extra=()):
    """A Llama as a GGUF file; matrices of `kind`, norms in F32."""
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
            add = writer.add_string if isinstance(value, str) else writer.add_uint32
            add(key, value)
    for name, tensor in (*file_tensors(config, params).items(), *extra):
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


def file_tensors(config, params):
    heads = {"layers.q": config.num_heads, "layers.k": config.num_kv_heads}
    tensors = {}
    for leaf, names in tensor_names(config, NAMES["llama"]).items():
        group, _, key = leaf.rpartition(".")
        array = np.asarray((params[group] if group else params)[key], np.float32)
        for i, name in enumerate(names):
            part = array[i] if group else array
            tensors[name] = interleaved(part, heads[leaf]) if leaf in heads else part
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
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
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


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_dequantisers_equal_those_of_the_gguf_package_on_any_bytes(kind):
    block, size = gguf.constants.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (500, size), np.uint8)
    raw[:, 1] &= 0xBB  # no scale (nor minimum, below) is NaN or infinite
    raw[:, 3] &= 0xBB
    ours = DEQUANTISERS[kind](raw.reshape(-1))
    np.testing.assert_array_equal(ours, gguf.quants.dequantize(raw, kind))
    assert ours.shape == (500, block)


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
        ({"drop": ["blk.1.attn_k.weight"]}, r"lacks tensor blk\.1\.attn_k\.weight"),
        ({"drop": ["token_embd.weight"]}, r"lacks tensor token_embd\.weight"),
        ({"extra": [("rope_freqs.weight", np.ones(16))]}, r"tensor rope_freqs\.weight"),
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
