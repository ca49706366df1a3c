# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_model import TINY, tiny_model, write_tiny_model

from jaxrl_llm.checkpoint import huggingface
from jaxrl_llm.checkpoint.huggingface import load_config, load_params, save_folder
from jaxrl_llm.errors import ModelError
from jaxrl_llm.text.tokenizer import bytes_tokenizer, from_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Q0 = "model.layers.0.self_attn.q_proj.weight"


def assert_same(left, right):
    def check(a, b):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)

    jax.tree.map(check, left, right)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_is_bitwise(dtype, tied, tmp_path):
    config, params = tiny_model(dtype=dtype, tie_word_embeddings=tied, rope_theta=123456.0)
    folder = save_folder(tmp_path / "deep" / "model", params, config, bytes_tokenizer())
    assert load_config(folder) == config
    assert_same(load_params(folder, config, dtype), params)
    assert from_folder(folder).encode("ab<eos>") == [97, 98, 257]
    assert json.loads((folder / "config.json").read_text())["dtype"] == jnp.dtype(dtype).name


def test_dtype_is_converted_on_the_way_in(tmp_path):
    folder = write_tiny_model(tmp_path / "m")
    wide = load_params(folder, TINY)
    half = load_params(folder, TINY, jnp.bfloat16)
    assert_same(half, jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide))


def test_shards_and_their_index(tmp_path):
    config, params = tiny_model(tie_word_embeddings=False)
    folder = save_folder(tmp_path, params, config, bytes_tokenizer(), max_shard_bytes=20_000)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 3 and not (folder / WEIGHTS).exists()
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((folder / INDEX).read_text())
    held = {name: shard.name for shard in shards for name in load_file(shard)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    for shard in shards:
        parts = load_file(shard)
        assert sum(x.nbytes for x in parts.values()) <= 20_000 or len(parts) == 1
    assert_same(load_params(folder, config), params)


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "m")


@pytest.fixture
def sharded(tmp_path):
    config, params = tiny_model()
    return save_folder(tmp_path / "s", params, config, bytes_tokenizer(), max_shard_bytes=20_000)


def change_tensors(folder, **tensors):
    held = load_file(folder / WEIGHTS)
    for name, value in tensors.items():
        held.pop(name, None)
        if value is not None:
            held[name] = value
    save_file(held, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (Q0, None, f"lacks tensor {Q0} of the model"),
        (Q0, np.zeros((32, 25), np.float32), rf"{Q0}.*\(32, 25\).*\(32, 24\)"),
        (Q0, np.zeros((24, 32), np.float32), rf"{Q0}.*wrong shape"),
        (Q0, np.zeros((32, 24), np.int8), f"{Q0}.*I8"),
        ("model.layers.2.mlp.up_proj.weight", np.zeros((32, 24), np.float32), "layers.2.*no place"),
        ("model.layers.0.self_attn.q_proj.bias", np.zeros(32, np.float32), "q_proj.bias.*no place"),
        ("lm_head.weight", np.zeros((259, 24), np.float32), "tied output head that differs"),
    ],
)
def test_wrong_tensors_are_named(folder, name, value, said):
    change_tensors(folder, **{name: value})
    with pytest.raises(ModelError, match=said):
        load_params(folder, TINY)


def test_what_older_writers_store_twice_is_fine(folder):
    before = load_params(folder, TINY)
    change_tensors(
        folder,
        **{
            "lm_head.weight": load_file(folder / WEIGHTS)["model.embed_tokens.weight"],
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        },
    )
    assert_same(load_params(folder, TINY), before)


def test_a_missing_shard_is_named(sharded):
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=victim.name):
        load_params(sharded, TINY)


def test_a_damaged_shard_is_named(sharded):
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(ModelError, match=f"{victim.name} is not a whole safetensors file"):
        load_params(sharded, TINY)


def test_an_index_that_lies(sharded):
    index = json.loads((sharded / INDEX).read_text())
    shards = sorted({*index["weight_map"].values()})
    index["weight_map"][Q0] = next(s for s in shards if s != index["weight_map"][Q0])
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"lacks tensor {Q0}"):
        load_params(sharded, TINY)
    index["weight_map"][Q0] = "../outside.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside its folder"):
        load_params(sharded, TINY)
    (sharded / INDEX).write_text("{}")
    with pytest.raises(ModelError, match="weight_map"):
        load_params(sharded, TINY)


def test_folders_without_their_parts(tmp_path, folder):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_config(tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_config(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load_params(folder, TINY)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_failed_export_leaves_nothing_and_harms_nothing(folder, monkeypatch):
    before = contents(folder)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "_write_weights", fail)
    config, params = tiny_model(seed=1)
    for target in (folder, folder.parent / "new"):
        with pytest.raises(ModelError, match="No space left on device"):
            save_folder(target, params, config, bytes_tokenizer())
    assert contents(folder) == before
    assert list(folder.parent.iterdir()) == [folder]


def test_an_older_export_is_replaced_as_a_whole(sharded):
    config, params = tiny_model(seed=1)
    save_folder(sharded, params, config, bytes_tokenizer())
    assert not list(sharded.glob("model-*")) and not (sharded / INDEX).exists()
    assert_same(load_params(sharded, config), params)
    assert list(sharded.parent.iterdir()) == [sharded]


def test_other_files_are_never_replaced(folder):
    (folder / "thesis.tex").write_text("years of work")
    config, params = tiny_model()
    with pytest.raises(ModelError, match=r"thesis\.tex"):
        save_folder(folder, params, config, bytes_tokenizer())
    with pytest.raises(ModelError, match="over a file"):
        save_folder(folder / "thesis.tex", params, config, bytes_tokenizer())
    assert (folder / "thesis.tex").read_text() == "years of work"


def test_several_eos_ids_and_no_pad(tmp_path):
    config, params = tiny_model()
    tokenizer = bytes_tokenizer()
    tokenizer.eos_ids, tokenizer.pad_id = (257, 10), None
    folder = save_folder(tmp_path / "m", params, config, tokenizer)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 256, "eos_token_id": [257, 10]}
    again = from_folder(folder)
    assert (again.eos_ids, again.pad_id) == ((257, 10), None)


def test_onto_eight_devices_and_back(folder, tmp_path):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("fsdp",))
    on = lambda *axes: jax.sharding.NamedSharding(mesh, jax.P(*axes))  # noqa: E731
    plain = load_params(folder, TINY)
    shardings = jax.tree.map(
        lambda x: on(None, "fsdp", None) if x.ndim == 3 else on(*[None] * x.ndim), plain
    )
    spread = load_params(folder, TINY, shardings=shardings)
    q = spread["layers"]["q"]
    assert q.sharding == shardings["layers"]["q"]
    assert {s.data.shape for s in q.addressable_shards} == {(2, 4, 24)}
    assert_same(spread, plain)
    again = save_folder(tmp_path / "again", spread, TINY, bytes_tokenizer())
    assert_same(load_params(again, TINY), plain)
