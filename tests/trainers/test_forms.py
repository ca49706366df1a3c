# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What of a policy is trained: adapters, a decoder shared with the critic, routers and experts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from float64_update import CONFIG as DENSE
from float64_update import distance, make_rollouts
from safetensors.numpy import load_file
from tiny_model import write_tiny_model

from jaxrl_llm.algorithms.presets import AlgoConfig, resolve
from jaxrl_llm.checkpoint.adapters import load_adapter
from jaxrl_llm.checkpoint.huggingface import load_config, load_params
from jaxrl_llm.cli.export import main as export
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import LoraConfig, init_adapter, merge
from jaxrl_llm.models.moe import load_balancing_loss, z_loss
from jaxrl_llm.models.transformer import init_params, routed_forward
from jaxrl_llm.train import main
from jaxrl_llm.trainers.batching import count_targets, pad_rollouts, plan_rows
from jaxrl_llm.trainers.critic import CriticConfig, make_critic_functions
from jaxrl_llm.trainers.policy import Form, RouterConfig, make_train_functions, whole_batch_shares

EXPERTS = ModelConfig(
    61,
    16,
    24,
    2,
    4,
    2,
    8,
    tie_word_embeddings=True,
    num_experts=4,
    experts_per_token=2,
    expert_size=24,
)
BASE = ["--config=tiny_grpo.py", "--mesh.data=1", "--train.seed=3", "--train.eval_every=0"]


def samples():
    """Rollouts of four prompts, one of them not judged, with advantages, values and returns."""
    rng = np.random.default_rng(1)
    batch = pad_rollouts(make_rollouts(rng), longest=16)
    drawn = rng.normal(size=(3, *batch.mask.shape)).astype(np.float32)
    return batch.replace(advantages=drawn[0], values=drawn[1], returns=drawn[2])


def random_params(config, seed=0):
    params = init_params(config, jax.random.key(seed))
    return jax.tree.map(lambda x: x * 3.0 if x.ndim > 1 else x, params)


def gradient(functions, trained, frozen, batch, *, layout, micro, routed=True):
    """The gradient of a batch, added up over its micro-batches, and the last metrics."""
    batch = jax.tree.map(np.asarray, batch)
    plan = plan_rows(batch, layout=layout, row_tokens=48, micro_tokens=micro, longest=16)
    rows = plan.pack(batch)
    counts = ALGORITHM.counts(rows.mask, rows.segment_ids)
    parts = list(plan.micro_batches(rows))
    shares = None
    if routed:
        weights = (trained, frozen)
        shares = whole_batch_shares([functions.router_stats(weights, part) for part in parts])
    grads = functions.state.zeros(trained)
    for part in parts:
        grads, (_, metrics) = functions.accumulate(
            grads, trained, frozen, part, counts, None, shares, {}, count_targets(rows.mask)
        )
    return grads, metrics


ALGORITHM = resolve(AlgoConfig(name="grpo"), group_size=4, max_tokens=8)


def functions_of(config, **more):
    return make_train_functions(
        config, ALGORITHM.loss, optax.sgd(0.1), temperature=1.0, remat=False, **more
    )


def test_router_losses_are_those_of_the_whole_batch_however_it_is_cut():
    params, batch = random_params(EXPERTS), jax.tree.map(jnp.asarray, samples())
    router = RouterConfig(balance_coef=0.3, z_coef=0.1)
    with_losses, without = functions_of(EXPERTS, router=router), functions_of(EXPERTS)

    def direct(params):
        _, stats = routed_forward(
            params, EXPERTS, batch.tokens, batch.positions, batch.segment_ids, counted=batch.mask
        )
        return 0.3 * load_balancing_loss(stats) + 0.1 * z_loss(stats)

    plain, metrics = gradient(without, params, None, batch, layout="padded", micro=1024)
    expected = jax.tree.map(jnp.add, plain, jax.grad(direct)(params))
    whole, _ = gradient(with_losses, params, None, batch, layout="padded", micro=1024)
    assert distance(whole, expected) < 1e-5
    # The longer list of cuts, without router losses, is that of test_update.py.
    for layout, micro in (("padded", 32), ("shared_prefix", 1)):
        cut, _ = gradient(with_losses, params, None, batch, layout=layout, micro=micro)
        assert distance(cut, whole) < 1e-5, layout
    assert distance(plain, whole) > 1e-2
    assert {"router/max_load/max", "router/idle_experts", "router/z_loss"} <= set(metrics)


def test_a_shared_decoder_gets_the_gradients_of_policy_and_values():
    params, batch = random_params(DENSE), samples()
    head = {"weight": jax.random.normal(jax.random.key(5), (1, 16))}
    trained = {"decoder": params, "score": head}
    ppo = resolve(AlgoConfig(name="ppo"), group_size=4, max_tokens=8)

    def value_loss(values, batch, counts):
        loss, metrics = ppo.value_loss(values, batch.values, batch.returns, batch.mask, counts)
        return 0.7 * loss, metrics

    shared = functions_of(DENSE, form=Form(scored=True), value_loss=value_loss)
    both, _ = gradient(shared, trained, None, batch, layout="shared_prefix", micro=1, routed=False)
    alone = functions_of(DENSE)
    policy, _ = gradient(alone, params, None, batch, layout="padded", micro=1024, routed=False)
    critic = make_critic_functions(DENSE, ppo, CriticConfig(), remat=False)
    counts = ppo.counts(batch.mask, batch.segment_ids)
    values, _ = critic.accumulate(critic.state.zeros(trained), trained, batch, counts)
    decoder = jax.tree.map(lambda p, v: p + 0.7 * v, policy, values["decoder"])
    expected = {"decoder": decoder, "score": jax.tree.map(lambda v: 0.7 * v, values["score"])}
    assert distance(both, expected) < 1e-5
    np.testing.assert_allclose(
        shared.values((trained, None), batch), critic.values(trained, batch), atol=1e-5
    )


def test_an_adapter_is_what_changes_and_its_base_is_the_reference():
    params, batch, lora = random_params(DENSE), samples(), LoraConfig(rank=2)
    adapter = init_adapter(DENSE, lora, jax.random.key(1), params)
    functions, form = functions_of(DENSE, form=Form(lora)), Form(lora)
    adapter = jax.tree.map(lambda x: x + 0.1, adapter)
    grads, _ = gradient(
        functions, adapter, params, batch, layout="shared_prefix", micro=1, routed=False
    )
    assert jax.tree.structure(grads) == jax.tree.structure(adapter)
    targets = count_targets(batch.mask)
    plain = functions_of(DENSE)
    of = lambda weights, f=functions: f.logprobs(weights, batch, targets)[0]  # noqa: E731
    np.testing.assert_array_equal(of((None, params)), of((params, None), plain))
    merged = form.merged((adapter, params))
    np.testing.assert_allclose(of((adapter, params)), of((merged, None), plain), atol=1e-4)
    assert float(jnp.max(jnp.abs(of((adapter, params)) - of((None, params))))) > 1e-2


def rows(run_dir):
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "reward" in row]


def test_a_run_with_an_adapter_moves_its_targets_alone(tmp_path, capsys):
    base = write_tiny_model(tmp_path / "base")
    more = [f"--model.path={base}", "--lora.rank=2", "--lora.targets=q,down", "--lora.dora=True"]
    run = tmp_path / "run"
    args = [*BASE, *more, "--algo.kl_coef=0.01", "--train.steps=4", f"--run-dir={run}"]
    assert main(args) == 0
    found = rows(run)
    assert found[0]["kl"] == pytest.approx(0, abs=1e-9) and found[-1]["kl"] > 1e-7
    gaps = [row["sampling/sampling_logp_difference/max"] for row in found]
    assert max(gaps) < 1e-4  # the sampler has the adapter merged in
    config = load_config(base)
    before, after = load_params(base, config), load_params(run / "export", config)
    moved = {
        name for name, x in after["layers"].items() if not np.array_equal(x, before["layers"][name])
    }
    assert moved == {"q", "down"}
    np.testing.assert_array_equal(before["embed"], after["embed"])

    # ---- the same out of the checkpoint, merged and as an adapter ----
    capsys.readouterr()
    assert export([str(run), str(tmp_path / "merged")]) == 0
    assert export([str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    one, other = (load_file(x / "model.safetensors") for x in (run / "export", tmp_path / "merged"))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    adapter, lora = load_adapter(tmp_path / "adapter", config)
    assert lora.rank == 2 and lora.dora and set(adapter) == {"q", "down"}
    again = jax.jit(merge, static_argnums=2)(before, adapter, lora)
    np.testing.assert_array_equal(again["layers"]["q"], after["layers"]["q"])


def test_a_run_with_a_critic_on_the_policys_decoder(tmp_path):
    base = write_tiny_model(tmp_path / "base")
    args = [*BASE, f"--model.path={base}", "--algo.name=ppo", "--critic.shared_trunk=True"]
    assert main([*args, "--train.steps=3", f"--run-dir={tmp_path / 'ppo'}"]) == 0
    found = rows(tmp_path / "ppo")
    assert found[0]["value/mean"] == 0.0 != found[-1]["value/mean"]
    assert all({"value/loss", "value/explained_variance"} <= set(row) for row in found)
    assert export([str(tmp_path / "ppo"), str(tmp_path / "out")]) == 0
    one, other = (
        load_file(x / "model.safetensors") for x in (tmp_path / "ppo" / "export", tmp_path / "out")
    )
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--router.balance_coef=0.1"], "the model has no experts"),
        (["--algo.name=ppo", "--critic.value_coef=0.2"], "has no effect"),
        (
            ["--algo.name=ppo", "--critic.shared_trunk=True", "--critic.path=x"],
            "no effect",
        ),
        (["--critic.shared_trunk=True"], "no critic"),
        (["--lora.rank=0"], "LoRA"),
        (["--lora.targets=q,z"], "unknown LoRA targets"),
    ],
)
def test_settings_without_effect_are_refused(wrong, message, tmp_path, capsys):
    assert main([*BASE, *wrong, f"--run-dir={tmp_path / 'x'}"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
