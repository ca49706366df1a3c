# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of every role of a run lie, and how large each device's part is."""

import dataclasses
import gc
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jaxrl_llm.algorithms.presets import AlgoConfig
from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.checkpoint.pretrained import peek
from jaxrl_llm.config import load_config
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import placement
from jaxrl_llm.models.lora import LoraConfig
from jaxrl_llm.models.placement import Placement
from jaxrl_llm.rollout import engines
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.trainers import policy
from jaxrl_llm.trainers.build import build_trainer, total_updates
from jaxrl_llm.trainers.build_data import build_data
from jaxrl_llm.trainers.offload import check_offload
from jaxrl_llm.trainers.optimizers import make_schedule
from jaxrl_llm.trainers.roles import check_reads, check_same_tokens, load_at

CONFIG = load_config(pathlib.Path(__file__).with_name("ppo_digits.py"))[1]


def build(config):
    model_config, tokenizer = peek(config.model.path)
    _, _, stream = build_data(config, tokenizer, model_config, 0)
    model_config = dataclasses.replace(model_config, context=64)
    params = load_at(Placement.make(config.mesh, model_config), config.model.path, jnp.float32)
    return build_trainer(config, model_config, params, tokenizer, 0, stream)


def lies(tree):
    """Devices of a tree, and the part of its bytes that the fullest of them holds."""
    held, whole = {}, 0
    for leaf in jax.tree.leaves(tree):
        whole += leaf.nbytes
        for shard in leaf.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return sorted(held), max(held.values()) / whole


def test_what_waits_in_the_hosts_memory_comes_back_unchanged():
    algo = AlgoConfig(name="ppo", kl_coef=0.05)
    config = dataclasses.replace(CONFIG, algo=algo, mesh=MeshConfig(data=1))
    after = {}
    for offload in (False, True):
        train = dataclasses.replace(config.train, offload=offload, reward_workers=0)
        trainer = build(dataclasses.replace(config, train=train))
        rests = "pinned_host" if offload else "device"
        for _ in range(2):
            trainer.train_step()
            updater = trainer.updater
            waiting = updater.policy.opt_state, updater.critic.state, trainer.reference.weights
            assert {x.sharding.memory_kind for x in jax.tree.leaves(waiting)} == {rests}
            assert {x.sharding.memory_kind for x in jax.tree.leaves(updater.params)} == {"device"}
        after[offload] = trainer.updater.state
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(after[offload])}
        assert kinds == {"device"}
    jax.tree.map(np.testing.assert_array_equal, after[False], after[True])


def test_a_cpu_has_no_memory_beside_the_hosts():
    with pytest.raises(ConfigError, match="offload has no effect on a CPU"):
        check_offload("cpu")


def test_every_role_lies_on_its_mesh():
    trainer = build(
        dataclasses.replace(
            CONFIG,
            algo=AlgoConfig(name="ppo", kl_coef=0.05),
            mesh=MeshConfig(data=1, pipeline=2, tensor=2),
            ref_mesh=MeshConfig(data=1, fsdp=8),
            critic=dataclasses.replace(CONFIG.critic, mesh=MeshConfig(data=1, tensor=2)),
            sampler=dataclasses.replace(CONFIG.sampler, mesh=MeshConfig(data=3)),
        )
    )
    policy, critic = trainer.updater.policy, trainer.updater.critic.state
    layers = policy.params["layers"]
    # Stages hold their layers, half of them, in two parts; the embedding is in two parts.
    matrices = {name: layers[name] for name in ("q", "gate", "down")}
    assert lies(matrices) == ([0, 1, 2, 3], 1 / 4)
    assert lies(policy.params["embed"])[0] == [0, 1, 2, 3]
    assert lies(policy.opt_state)[0] == [0, 1, 2, 3]
    devices, part = lies(trainer.reference.weights)
    assert devices == list(range(8)) and part == pytest.approx(1 / 8, rel=0.01)
    devices, part = lies(critic.params["decoder"]["layers"]["q"])
    assert (devices, part) == ([0, 1], 1 / 2)
    assert lies(critic.opt_state)[0] == [0, 1]
    assert [lies(engine._params)[0] for engine in trainer.engine.engines] == [[0], [1], [2]]


def held():
    """Bytes on each device, arrays that share a buffer counted once."""
    found = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            place = shard.data.unsafe_buffer_pointer()
            found.setdefault(shard.device.id, {})[place] = shard.data.nbytes
    return {device: sum(sizes.values()) for device, sizes in found.items()}


def apart(config):
    """The policy on the first half of the devices, the sampler on the other."""
    sampler = MeshConfig(data=2, tensor=2, devices=(4, 4))
    return dataclasses.replace(
        config,
        mesh=MeshConfig(fsdp=2, pipeline=2, devices=(0, 4)),
        sampler=dataclasses.replace(config.sampler, mesh=sampler),
    )


def test_roles_lie_apart():
    config = dataclasses.replace(
        apart(CONFIG),
        algo=AlgoConfig(name="ppo", kl_coef=0.05),
        ref_mesh=MeshConfig(tensor=2, devices=(6, 2)),
        critic=dataclasses.replace(CONFIG.critic, mesh=MeshConfig(fsdp=2, devices=(4, 2))),
    )
    trainer = build(config)
    trainer.engine.set_params(trainer.to_sampler(), 1)
    assert lies(trainer.updater.policy.params)[0] == [0, 1, 2, 3]
    assert lies(trainer.updater.policy.opt_state)[0] == [0, 1, 2, 3]
    assert lies(trainer.reference.weights)[0] == [6, 7]
    assert lies(trainer.updater.critic.state)[0] == [4, 5]
    assert [lies(e._params)[0] for e in trainer.engine.engines] == [[4, 5], [6, 7]]
    # What the sampler got is the policy.
    weights = jax.device_get(trainer.updater.merged())
    own = jax.device_get(trainer.engine.engines[1]._params)
    np.testing.assert_array_equal(own["embed"], weights["embed"])
    for one, layer in enumerate(own["layers"]):
        np.testing.assert_array_equal(layer["attn_norm"], weights["layers"]["attn_norm"][one])


ADAPTED = dataclasses.replace(CONFIG, algo=AlgoConfig(name="grpo"), lora=LoraConfig(rank=2))
ACROSS = dataclasses.replace(CONFIG, mesh=MeshConfig(pipeline=2))
HANDOVERS = {
    "to the first device": ACROSS,
    "to other devices": apart(CONFIG),
    "merged": dataclasses.replace(ADAPTED, mesh=MeshConfig()),
}


@pytest.mark.parametrize("name", HANDOVERS)
def test_the_sampler_gets_weights_without_a_second_copy(name, monkeypatch):
    trainer = build(HANDOVERS[name])
    updater, engine, most = trainer.updater, trainer.engine, {}
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(updater.merged()))

    def watched(function):
        def call(*args, **how):
            result = jax.block_until_ready(function(*args, **how))
            for device, size in held().items():
                most[device] = max(most.get(device, 0), size)
            return result

        return call

    for module, function in (
        (placement, "reshard"),
        (policy, "_merge_one"),
        (engines, "_pack_rest"),
        (engines, "_pack_layers"),
    ):
        monkeypatch.setattr(module, function, watched(getattr(module, function)))
    engine.release()
    gc.collect()
    engine.set_params(trainer.to_sampler(), 1)
    gc.collect()
    after = held()
    assert most.keys() == after.keys()
    # The largest array, and its copy, are a third each.
    assert all(most[device] - after[device] < 0.7 * whole for device in most), (most, after, whole)


def test_a_mesh_without_effect_is_refused():
    lora = dataclasses.replace(CONFIG, lora=LoraConfig(rank=2), ref_mesh=MeshConfig(fsdp=8))
    with pytest.raises(ConfigError, match="under an adapter the reference is its base"):
        build(lora)
    with pytest.raises(ConfigError, match="none is used"):
        build(dataclasses.replace(CONFIG, ref_mesh=MeshConfig(fsdp=8)))


@pytest.mark.parametrize("positions", [32, 64])
def test_a_critic_reads_as_far_as_the_policy_writes(positions, tmp_path):
    config, tokenizer = peek("tiny-random")
    short = dataclasses.replace(config, max_position_embeddings=positions)
    params = load_at(Placement.make(CONFIG.mesh, config), "tiny-random", jnp.float32)
    folder = save_folder(tmp_path / "critic", params, short, tokenizer)
    sampler = dataclasses.replace(CONFIG.sampler, max_prompt_tokens=48, max_new_tokens=16)
    run = dataclasses.replace(CONFIG, sampler=sampler)
    if positions < 64:
        with pytest.raises(ConfigError, match=r"can't read as far .* got 32 .* at least 64"):
            check_reads(run, config, peek(folder)[0], str(folder))
        critic = dataclasses.replace(CONFIG.critic, path=str(folder))
        with pytest.raises(ConfigError, match="can't read as far"):
            build(dataclasses.replace(run, critic=critic))
    else:
        check_reads(run, config, peek(folder)[0], str(folder))
    # A policy that is as short has shorter prompts.
    check_reads(run, short, short, None)


def test_a_critic_spells_tokens_as_the_policy_does():
    def spelled(*words):
        vocabulary = {word: index for index, word in enumerate(words)}
        return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, words[0])))

    policy = spelled("a", "b", "c")
    for fine in (spelled("a", "b", "c"), spelled("a", "b", "c", "d"), policy):
        check_same_tokens(policy, fine, "critic")
    with pytest.raises(ConfigError, match=r"another tokenizer .* token 1 is 'c' in critic"):
        check_same_tokens(policy, spelled("a", "c", "b"), "critic")


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_ends_with_the_run_though_the_policy_waits_for_its_critic(schedule):
    train = dataclasses.replace(CONFIG.train, steps=6, epochs=2, minibatches=2)
    critic = dataclasses.replace(CONFIG.critic, warmup_steps=2)
    rates = dataclasses.replace(CONFIG.optimizer, schedule=schedule, warmup_steps=0)
    run = dataclasses.replace(CONFIG, train=train, critic=critic, optimizer=rates)
    assert total_updates(run) == 16
    rate = make_schedule(rates, total_updates(run))
    assert float(rate(16)) == pytest.approx(0.0, abs=1e-12)
    assert float(rate(15)) > 0
    assert total_updates(dataclasses.replace(run, critic=CONFIG.critic)) == 24
