# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""`--dry-run`: everything of a run but its weights, in seconds."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.checkpoint.pretrained import peek
from jaxrl_llm.data.encode import Part
from jaxrl_llm.data.pipeline import make_prompt
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kernels.choice import Case, choose_pages, choose_rows
from jaxrl_llm.models.placement import Placement
from jaxrl_llm.models.transformer import abstract_params
from jaxrl_llm.rewards.base import score
from jaxrl_llm.rollout.engines import engine_devices, engine_places, engine_share
from jaxrl_llm.rollout.settings import EngineConfig, default_pool
from jaxrl_llm.sharding.mesh import MeshConfig, row_parts
from jaxrl_llm.text.chat import encode_prompt
from jaxrl_llm.text.templates import with_template
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.trainers.build import (
    build_functions,
    engine_config,
    policy_form,
    split_weights,
    stop_ids,
)
from jaxrl_llm.trainers.build_data import build_data
from jaxrl_llm.trainers.build_supervised import check_context, check_micro_batch
from jaxrl_llm.trainers.encoders import encode_examples
from jaxrl_llm.trainers.optimizers import make_optimizer
from jaxrl_llm.trainers.roles import check_roles, place_for, row_planner
from jaxrl_llm.trainers.settings import RLConfig, resolve_algorithm, with_backend
from jaxrl_llm.types import Batch, Prompt, Reach, Rollout


def dry_run(config: RLConfig) -> None:
    """Build abstractly, trace the update; print sizes, three prompts and canned rewards."""
    model_config, tokenizer = peek(config.model.path)
    model_config = with_backend(model_config, config.model)
    check_roles(config, model_config)
    if config.rollouts.read is not None:
        config.rollouts.complete(config.train.steps)
    place = Placement.make(config.mesh, model_config)
    train, heldout, _ = build_data(config, tokenizer, model_config, seed=config.train.seed or 0)
    stops = stop_ids(config.sampler.stop, tokenizer)

    print(f"model      {config.model.path}: {model_config.num_params / 1e6:.1f} M parameters")
    print(f"task       {len(train)} training prompts, {len(heldout)} held out")
    device, sampler = place.mesh.devices.flat[0], config.sampler
    print(f"devices    {place.mesh.size} × {device.device_kind}")
    line = attention_line(
        model_config,
        config.model.dtype,
        device.platform,
        config.mesh,
        shared=config.train.layout == "shared_prefix",
        engine=engine_config(sampler),
        sampler_tensor=1 if sampler.mesh is None else sampler.mesh.tensor,
    )
    print(f"attention  {line}")
    print(f"stop ids   {', '.join(f'{i} ({tokenizer.decode([i])!r})' for i in stops)}")
    print("\nmemory, on each training device; and on each of the sampler's")
    for name, size in memory(config, model_config, place).items():
        print(f"  {size / 2**20:10.1f} MiB  {name}")

    prompts = [
        make_prompt(train[i], lambda p: encode_prompt(p, tokenizer))
        for i in range(min(3, len(train)))
    ]
    for prompt in prompts:
        print(f"\nprompt {prompt.id} ({len(prompt.tokens)} tokens)\n{_indent(prompt.text)}")
    print()
    for line in canned_rewards(config, tokenizer, prompts[0]):
        print(line)
    print("\ndry run: everything fits together; nothing was trained")


def supervised_dry_run(config: Any) -> None:
    """Encode all data, print sizes, what was cut, and three examples with what is learnt marked."""
    model_config, own = peek(config.model.path)
    model_config = with_backend(model_config, config.model)
    place = Placement.make(config.mesh, model_config)
    check_micro_batch(config, place.layout, row_parts(place.mesh))
    check_context(config, model_config)
    tokenizer = with_template(own, config.rows.chat_template)
    data = encode_examples(config, tokenizer)
    units = [unit for table in data.train for unit in table]
    lengths = np.array([unit.length for unit in units])
    print(f"model      {config.model.path}: {model_config.num_params / 1e6:.1f} M parameters")
    print(f"data       {len(units)} training examples, {len(data.heldout)} held out")
    print(f"           {lengths.mean():.0f} tokens each, the longest {lengths.max()}")
    print("           " + (", ".join(f"{n} {why}" for why, n in data.notes.items()) or "none cut"))
    device = place.mesh.devices.flat[0]
    print(f"devices    {place.mesh.size} × {device.device_kind}")
    line = attention_line(
        model_config, config.model.dtype, device.platform, config.mesh, shared=False
    )
    print(f"attention  {line}")
    params = abstract_params(model_config, jnp.dtype(config.model.dtype))
    state = jax.eval_shape(make_optimizer(config.optimizer, config.train.steps).init, params)
    print("\nmemory, on each training device, without activations")
    for name, kind, tree in (
        ("parameters", "parameters", params),
        ("optimiser state", "optimizer", state),
        ("gradients", "gradients", params),
    ):
        print(f"  {place.device_bytes(tree, kind) / 2**20:10.1f} MiB  {name}")
    for unit in units[:3]:
        for part in unit.parts:
            print(f"\nexample {unit.index} ({len(part.tokens)} tokens; learnt or read: ⟦ ⟧)")
            print(_indent(marked_text(part, tokenizer)))
    print("\ndry run: everything fits together; nothing was trained")


def attention_line(
    model: ModelConfig,
    dtype: str,
    platform: str,
    layout: MeshConfig,
    *,
    shared: bool,
    engine: EngineConfig | None = None,
    sampler_tensor: int = 1,
    planned: bool = False,
) -> str:
    """What computes attention on a platform, and where it is no kernel, why.

    Args:
        planned: for machines elsewhere, which have what this one may lack.

    Raises:
        ConfigError: a back end that was named can't serve.
    """
    parts: dict[str, Any] = {"tensor": layout.tensor, "pipeline": layout.pipeline}
    if planned:
        parts["cudnn"] = True
    case = Case.of(model, dtype, platform, shared=shared, **parts)
    text = f"rows: {choose_rows(model.attention_backend, case)}"
    if engine is None:
        return text
    case = Case.of(model, dtype, platform, page_size=engine.page_size, tensor=sampler_tensor)
    decoding = choose_pages(engine.attention_backend, case)
    viewed = engine.attention == "view" or (engine.attention == "auto" and platform == "cpu")
    return f"{text}; decoding: {'xla (over a view of the pages)' if viewed else decoding}"


def marked_text(part: Part, tokenizer: Tokenizer) -> str:
    """The text of a part with ⟦ ⟧ around what its mask marks."""
    edges = np.flatnonzero(np.diff(part.mask.astype(np.int8), prepend=0, append=0))
    pieces = np.split(part.tokens, edges)
    texts = [tokenizer.decode(piece.tolist()) for piece in pieces]
    return "".join(f"⟦{text}⟧" if i % 2 else text for i, text in enumerate(texts))


def memory(config: RLConfig, model_config: ModelConfig, place: Placement) -> dict[str, int]:
    """Bytes on one device by purpose, from the run's own shapes; tracing proves that it builds."""
    dtype = jnp.dtype(config.model.dtype)
    params = abstract_params(model_config, dtype)
    algorithm = resolve_algorithm(config)
    functions = build_functions(config, algorithm, model_config)
    form = policy_form(config, algorithm)
    trained, frozen = jax.eval_shape(
        lambda params: split_weights(form, model_config, params, 0), params
    )
    state = jax.eval_shape(functions.state.init, trained)
    grads = jax.eval_shape(functions.state.zeros, trained)
    plan = row_planner(config, place.row_multiple)(longest_samples(config))
    width = plan.sample.shape[1]
    flags = {
        "needs_ref": algorithm.needs_ref,
        "valued": form.scored,
        "shared": config.train.layout == "shared_prefix",
    }
    batch = abstract_batch(plan.micro, width, plan.reach, **flags)
    counts = algorithm.counts(np.ones((1, 2), bool), np.ones((1, 2), np.int32))
    if not algorithm.needs_batch_stats:
        jax.eval_shape(
            lambda *arrays: functions.accumulate(*arrays, None, None, {}, width - 1),
            grads,
            trained,
            frozen,
            batch,
            counts,
        )
    tokens = plan.micro // row_parts(place.mesh) * width
    layer = 6 * model_config.hidden_size + 4 * model_config.intermediate_size
    kept = 1 if config.model.remat else -(-model_config.num_layers // place.layout.pipeline)
    result = {
        "parameters": place.device_bytes(state.params, "parameters"),
        "optimiser state": place.device_bytes(state.opt_state, "optimizer"),
        "gradients": place.device_bytes(grads, "gradients"),
        "activations of a micro-batch (estimate)": tokens * layer * kept * dtype.itemsize,
    }
    sampler = sampler_memory(config, model_config, params)
    apart = sampler_apart(config, place)
    if not apart:
        result |= sampler
    if frozen is not None:
        result["parameters under the adapter"] = place.device_bytes(frozen, "parameters")
    elif algorithm.needs_ref:
        other = place_for(config, config.ref_mesh, "ref_mesh", model_config)
        result["reference policy"] = other.device_bytes(params, "parameters")
    result["sum"] = sum(result.values())
    return result | sampler | {"sum, sampler": sum(sampler.values())} if apart else result


def sampler_apart(config: RLConfig, place: Placement) -> bool:
    """Whether no device of the sampler is one of the policy's."""
    if config.sampler.mesh is None:
        return False
    used = engine_devices(config.sampler.mesh).flat
    return not {device.id for device in used} & {device.id for device in place.mesh.devices.flat}


def sampler_memory(config: RLConfig, model_config: ModelConfig, params: Any) -> dict[str, int]:
    """Bytes on one device of the sampler."""
    layout, sizes = config.sampler.mesh, engine_config(config.sampler)
    weights, heads_in = _bytes(params), 1
    if layout is not None:
        places = engine_places(layout, model_config)
        sizes = engine_share(sizes, len(places))
        weights = places[0].device_bytes(params, "parameters")
        heads_in = layout.tensor if model_config.num_kv_heads % layout.tensor == 0 else 1
    tokens = (sizes.num_pages or default_pool(sizes)) * sizes.page_size
    itemsize = jnp.dtype(config.model.dtype).itemsize
    return {
        "sampler: its own layout of the parameters": weights,
        "sampler: key/value pages": tokens * model_config.kv_bytes_per_token(itemsize) // heads_in,
    }


def longest_samples(config: RLConfig) -> Batch:
    """A step's samples, every prompt and completion as long as they can be."""
    sampler = config.sampler
    prompts, length = config.train.prompts_per_step, sampler.max_prompt_tokens
    shape = (prompts * sampler.group_size, length + sampler.max_new_tokens)
    tokens = np.repeat(np.arange(prompts, dtype=np.int32), sampler.group_size)
    ones = np.ones(shape, np.int32)
    floats = np.zeros(shape, np.float32)
    return Batch(
        tokens=tokens[:, None] * ones,
        positions=ones,
        segment_ids=ones,
        mask=np.broadcast_to(np.arange(shape[1]) >= length, shape),
        advantages=floats,
        logp_sampler=floats,
    )


def abstract_batch(
    rows: int, width: int, reach: Reach | None, *, needs_ref: bool, valued: bool, shared: bool
) -> Batch:
    """The shapes of a micro-batch; `shared`: of rows that hold prompts once."""
    ints = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    floats = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return Batch(
        tokens=ints,
        positions=ints,
        segment_ids=ints,
        mask=jax.ShapeDtypeStruct((rows, width), jnp.bool_),
        advantages=floats,
        logp_sampler=floats,
        logp_ref=floats if needs_ref else None,
        values=floats if valued else None,
        returns=floats if valued else None,
        prefix_ids=ints if shared else None,
        sources=ints,
        reach=reach,
    )


def canned_rewards(config: RLConfig, tokenizer: Tokenizer, prompt: Prompt) -> list[str]:
    """Each reward on the right answer, written as it stands, and on an empty completion."""
    lines = []
    for completion in (str(prompt.answer), ""):
        tokens = np.array(tokenizer.encode(completion), np.int32)
        rollout = Rollout(
            prompt=prompt,
            sample=0,
            tokens=tokens,
            logp_sampler=np.zeros(tokens.shape, np.float32),
            mask=np.ones(tokens.shape, bool),
            weights_version=np.zeros(tokens.shape, np.int32),
            finish_reason="stop",
            completion=completion,
        )
        (reward,) = score(config.rewards, [rollout])
        verdict = "not judged" if reward is None else f"{reward.value:g}  {dict(reward.parts)}"
        lines.append(f"reward of the canned answer {completion!r}: {verdict}")
    return lines


def _bytes(tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
