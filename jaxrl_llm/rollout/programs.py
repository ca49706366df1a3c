# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The two programs that run the model over pages: prefill a chunk of prompts, decode some steps.

Both are compiled once per shape. What differs from call to call (tables, positions, temperatures,
stop ids, seeds, when to leave the loop) are array arguments. Pages are donated and come back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.paged_attention import paged_attention
from jaxrl_llm.models.rotary import rotary_tables
from jaxrl_llm.models.transformer import Params, block, embed_tokens, final_hidden, logits
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


@struct.dataclass
class PrefillChunk:
    """N tokens of some prompts, laid out twice: flat for the products, so that little is padded,
    and as R rows of up to C consecutive tokens of one prompt for attention.

    Attributes:
        tokens: the tokens, flat.
        row, column: where each token stands among the rows.
        wanted: False on the padding at the end.
        index: the inverse of (row, column): which flat token stands there (any, where none does).
        start: position of each row's first token within its prompt.
        tables: block table of each row's prompt.
    """

    tokens: Int[Rows, " N"]
    row: Int[Rows, " N"]
    column: Int[Rows, " N"]
    wanted: Bool[Rows, " N"]
    index: Int[Rows, "R C"]
    start: Int[Rows, " R"]
    tables: Int[Rows, "R M"]


def _run_layers(
    params: Params,
    config: ModelConfig,
    pages: KVPages,
    tokens: Int[Array, "S T"],
    positions: Int[Array, "S T"],
    places: tuple[Int[Array, "S T"], Int[Array, "S T"]],
    read: Callable[..., Array],
) -> tuple[Float[Array, "S T D"], KVPages]:
    """Run tokens through the decoder: write their keys and values to `places` (page and offset),
    then attend by ``read(q, k_pages, v_pages, window=…, softcap=…, scale=…)``."""
    x = embed_tokens(params, config, tokens)
    kinds = {traits.rope for traits in config.layers}
    tables = {kind: rotary_tables(positions, config, x.dtype, kind) for kind in kinds}
    written = []

    def attend(q, k, v):
        k_pages, v_pages = pages[len(written)]
        k_pages = write_tokens(k_pages, k, *places)
        v_pages = write_tokens(v_pages, v, *places)
        window = config.layers[len(written)].window
        written.append((k_pages, v_pages))
        softcap, scale = config.attention_softcap, config.attention_scale
        return read(q, k_pages, v_pages, window=window, softcap=softcap, scale=scale)

    for layer, traits in zip(params["layers"], config.layers, strict=True):
        x = block(layer, config, x, *tables[traits.rope], attend)
    return final_hidden(params, config, x), tuple(written)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="pages")
def prefill(params: Params, config: ModelConfig, pages: KVPages, chunk: PrefillChunk) -> KVPages:
    """Keys and values of a chunk of prompts. No logits are computed.

    A row sees what earlier chunks, and earlier rows of this one, wrote to its prompt's pages.
    """
    positions = (chunk.start[chunk.row] + chunk.column)[:, None]
    page, offset = page_slots(
        chunk.tables[chunk.row], positions, chunk.wanted[:, None], pages[0][0].shape[1]
    )
    row_positions = (
        chunk.start[:, None] + jnp.arange(chunk.index.shape[1], dtype=jnp.int32)[None, :]
    )

    def read(q, k_pages, v_pages, **traits):
        by_row = q[0][chunk.index]
        out = paged_attention(by_row, k_pages, v_pages, chunk.tables, row_positions, **traits)
        return out[chunk.row, chunk.column][None]

    _, pages = _run_layers(
        params, config, pages, chunk.tokens[None], positions.T, (page.T, offset.T), read
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
    first = jnp.int32(0)
    keys = sequence_keys(slots.seed, slots.uid, slots.sample)

    def unfinished(state):
        step, _, _, _, active, *_ = state
        return (step < steps) & (jnp.sum(active, dtype=jnp.int32) > leave_at)

    def one_step(state):
        step, pages, token, position, active, tokens, logps, drawn = state
        wanted = active & (position >= slots.write_from)
        at = position[:, None]
        places = page_slots(slots.tables, at, wanted[:, None], pages[0][0].shape[1])

        def read(q, k_pages, v_pages, **traits):
            return paged_attention(q, k_pages, v_pages, slots.tables, at, **traits)

        hidden, pages = _run_layers(params, config, pages, token[:, None], at, places, read)
        with jax.named_scope("sample"):
            uniform = position_uniforms(keys, position + 1)
            chosen, logp = sample_tokens(
                logits(params, hidden[:, 0, :], config), uniform, slots.temperature, slots.top_p
            )
        tokens = jax.lax.dynamic_update_slice(tokens, chosen[:, None], (first, step))
        logps = jax.lax.dynamic_update_slice(
            logps, logp.astype(jnp.float32)[:, None], (first, step)
        )
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
