# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The two programs that run the model over pages: prefill a chunk of prompts, decode some steps.

Both are compiled once per shape. What differs from call to call (tables, positions, temperatures,
stop ids, seeds, when to leave the loop) are array arguments. Pages are donated and come back.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrl_llm.models.attention import paged_attention
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import rms_norm, rotary_tables
from jaxrl_llm.models.transformer import Params, block, logits
from jaxrl_llm.rollout.kv_cache import KVPages, page_slots, write_tokens
from jaxrl_llm.rollout.sampling import position_uniforms, sample_tokens, sequence_keys

Rows = jax.Array | np.ndarray  # the host makes them as numpy, the programs see device arrays


@struct.dataclass
class DecodeSlots:
    """One row per slot; a row that is not active computes along and changes nothing.

    Attributes:
        tables: block tables.
        token: the last token of the sequence, whose successor is drawn next.
        position: its position.
        active: whether the row holds a sequence.
        write_from: positions below it are never written (the prompt: its pages may be shared).
        last_position: position of the last token that may be drawn.
        stop_ids: padded with −1.
        seed, uid, sample: what the draws depend on, beside the position.
    """

    tables: Int[Rows, "S M"]
    token: Int[Rows, " S"]
    position: Int[Rows, " S"]
    active: Bool[Rows, " S"]
    write_from: Int[Rows, " S"]
    last_position: Int[Rows, " S"]
    temperature: Float[Rows, " S"]
    top_p: Float[Rows, " S"]
    stop_ids: Int[Rows, "S E"]
    seed: UInt[Rows, " S"]
    uid: UInt[Rows, " S"]
    sample: UInt[Rows, " S"]


def _run_layers(
    params: Params,
    config: ModelConfig,
    pages: KVPages,
    tokens: Int[Array, "S T"],
    positions: Int[Array, "S T"],
    wanted: Bool[Array, "S T"],
    tables: Int[Array, "S M"],
) -> tuple[Float[Array, "S T D"], KVPages]:
    """Run tokens through the decoder, writing their keys and values where wanted."""
    x = params["embed"][tokens]
    cos, sin = rotary_tables(positions, config.head_dim, config.rope_theta, x.dtype)
    page, offset = page_slots(tables, positions, wanted, pages[0][0].shape[1])
    written = []

    def attend(q, k, v):
        k_pages, v_pages = pages[len(written)]
        k_pages = write_tokens(k_pages, k, page, offset)
        v_pages = write_tokens(v_pages, v, page, offset)
        written.append((k_pages, v_pages))
        return paged_attention(q, k_pages, v_pages, tables, positions)

    for layer in params["layers"]:
        x = block(layer, config, x, cos, sin, attend)
    return rms_norm(x, params["final_norm"], config.rms_norm_eps), tuple(written)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="pages")
def prefill(
    params: Params,
    config: ModelConfig,
    pages: KVPages,
    tokens: Int[Array, "R C"],
    start: Int[Array, " R"],
    length: Int[Array, " R"],
    tables: Int[Array, "R M"],
) -> KVPages:
    """Keys and values of a chunk of each row's prompt: `length` tokens from position `start` on.

    Earlier chunks of the same prompt are read from the pages. No logits are computed.
    """
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    positions = start[:, None] + index
    _, pages = _run_layers(
        params, config, pages, tokens, positions, index < length[:, None], tables
    )
    return pages


@functools.partial(jax.jit, static_argnames=("config", "steps"), donate_argnames="pages")
def decode(
    params: Params,
    config: ModelConfig,
    pages: KVPages,
    slots: DecodeSlots,
    leave_at: Int[Array, ""],
    *,
    steps: int,
) -> tuple[KVPages, Int[Array, "S n"], Float[Array, "S n"], Int[Array, " S"]]:
    """Up to `steps` tokens for each active row, in one loop on the device.

    A row ends with a stop id or at its last position. The loop leaves after `steps` steps or when
    at most `leave_at` rows are still active.

    Returns:
        the pages, the tokens drawn, their log-probabilities, and how many of them each row drew
        (the first entries of its row).
    """
    rows = slots.token.shape[0]
    keys = sequence_keys(slots.seed, slots.uid, slots.sample)

    def unfinished(state):
        step, _, _, _, active, *_ = state
        return (step < steps) & (jnp.sum(active, dtype=jnp.int32) > leave_at)

    def one_step(state):
        step, pages, token, position, active, tokens, logps, drawn = state
        wanted = active & (position >= slots.write_from)
        hidden, pages = _run_layers(
            params,
            config,
            pages,
            token[:, None],
            position[:, None],
            wanted[:, None],
            slots.tables,
        )
        with jax.named_scope("sample"):
            uniform = position_uniforms(keys, position + 1)
            chosen, logp = sample_tokens(
                logits(params, hidden[:, 0, :]), uniform, slots.temperature, slots.top_p
            )
        tokens = jax.lax.dynamic_update_slice(tokens, chosen[:, None], (0, step))
        logps = jax.lax.dynamic_update_slice(logps, logp.astype(jnp.float32)[:, None], (0, step))
        drawn = drawn + active.astype(jnp.int32)
        token = jnp.where(active, chosen, token)
        position = position + active.astype(jnp.int32)
        stopped = jnp.any(chosen[:, None] == slots.stop_ids, axis=-1)
        active = active & ~stopped & (position < slots.last_position)
        return step + 1, pages, token, position, active, tokens, logps, drawn

    state = (
        jnp.int32(0),
        pages,
        slots.token,
        slots.position,
        slots.active,
        jnp.zeros((rows, steps), jnp.int32),
        jnp.zeros((rows, steps), jnp.float32),
        jnp.zeros(rows, jnp.int32),
    )
    _, pages, _, _, _, tokens, logps, drawn = jax.lax.while_loop(unfinished, one_step, state)
    return pages, tokens, logps, drawn
