# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The two programs that run the model over pages: prefill a chunk of prompts, decode some steps.

Both are compiled once per shape. What differs from call to call (tables, positions, temperatures,
stop ids, seeds, when to leave the loop) are array arguments. The cache is donated and comes back.
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
from jaxrl_llm.models.paged_attention import paged_attention, view_attention
from jaxrl_llm.models.rotary import rotary_tables
from jaxrl_llm.models.transformer import Params, block, embed_tokens, final_hidden, logits
from jaxrl_llm.rollout.kv_cache import KVPages, page_slots, write_tokens
from jaxrl_llm.rollout.sampling import (
    Filters,
    edit_logits,
    position_uniforms,
    sample_tokens,
    sequence_keys,
)
from jaxrl_llm.rollout.view import write_view
from jaxrl_llm.rollout.weights import Form, views

Cache = tuple[tuple[Float[Array, "..."], Float[Array, "..."]], ...]  # KVPages or KVView
Rows = jax.Array | np.ndarray  # the host makes them as numpy, the programs see device arrays


@struct.dataclass
class DecodeSlots:
    """One row per slot; a row that is not active computes along and changes nothing.

    Attributes:
        token: the last token of the sequence, whose successor is drawn next.
        position: its position.
        active: whether the row holds a sequence.
        write_from: positions below it are never written (they were prefilled).
        last_position: position of the last token that may be drawn.
        filters: temperature and what else decides the set drawn from.
        stop_ids: padded with −1.
        bias_ids, biases: logits to change, ids padded with −1.
        stop_from: no stop id is drawn at positions below it.
        seed, uid, sample: what the draws depend on, beside the position.
    """

    token: Int[Rows, " S"]
    position: Int[Rows, " S"]
    active: Bool[Rows, " S"]
    write_from: Int[Rows, " S"]
    last_position: Int[Rows, " S"]
    filters: Filters
    stop_ids: Int[Rows, "S E"]
    bias_ids: Int[Rows, "S B"]
    biases: Float[Rows, "S B"]
    stop_from: Int[Rows, " S"]
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
    tokens: Int[Array, "S T"],
    positions: Int[Array, "S T"],
    attend: Callable[..., Array],
) -> Float[Array, "S T D"]:
    """Run tokens through the decoder. ``attend(layer, q, k, v, window=…, softcap=…, scale=…)``
    keeps the layer's new keys and values and returns what the queries see."""
    x = embed_tokens(params, config, tokens)
    kinds = {traits.rope for traits in config.layers}
    tables = {kind: rotary_tables(positions, config, x.dtype, kind) for kind in kinds}
    softcap, scale = config.attention_softcap, config.attention_scale
    for index, (layer, traits) in enumerate(zip(params["layers"], config.layers, strict=True)):
        part = functools.partial(attend, index, window=traits.window, softcap=softcap, scale=scale)
        x = block(layer, config, x, *tables[traits.rope], part)
    return final_hidden(params, config, x)


@functools.partial(jax.jit, static_argnames=("config", "form"), donate_argnames="pages")
def prefill(
    params: Params, config: ModelConfig, form: Form, pages: KVPages, chunk: PrefillChunk
) -> KVPages:
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
    layers = list(pages)

    def attend(layer, q, k, v, **traits):
        k_pages, v_pages = layers[layer]
        k_pages = write_tokens(k_pages, k, page.T, offset.T)
        v_pages = write_tokens(v_pages, v, page.T, offset.T)
        layers[layer] = (k_pages, v_pages)
        by_row = q[0][chunk.index]
        out = paged_attention(by_row, k_pages, v_pages, chunk.tables, row_positions, **traits)
        return out[chunk.row, chunk.column][None]

    _run_layers(views(params, config, form), config, chunk.tokens[None], positions.T, attend)
    return tuple(layers)


def _decode_layers(
    params: Params,
    config: ModelConfig,
    cache: Cache,
    tables: Int[Array, "S M"] | None,
    token: Int[Array, " S"],
    position: Int[Array, " S"],
    wanted: Bool[Array, " S"],
) -> tuple[Float[Array, "S D"], Cache]:
    """One token of every row through the decoder, over pages or (no tables) over their view."""
    layers, at = list(cache), position[:, None]
    if tables is not None:
        places = page_slots(tables, at, wanted[:, None], cache[0][0].shape[1])

    def over_pages(layer, q, k, v, **traits):
        k_pages, v_pages = layers[layer]
        layers[layer] = write_tokens(k_pages, k, *places), write_tokens(v_pages, v, *places)
        return paged_attention(q, *layers[layer], tables, at, **traits)

    def over_view(layer, q, k, v, **traits):
        layers[layer] = write_view(layers[layer], k[:, 0], v[:, 0], position, wanted)
        return view_attention(q[:, 0], *layers[layer], position, **traits)[:, None]

    attend = over_view if tables is None else over_pages
    hidden = _run_layers(params, config, token[:, None], at, attend)
    return hidden[:, 0], tuple(layers)


def _edited(
    out: Float[Array, "S V"], slots: DecodeSlots, position: Int[Array, " S"]
) -> Float[Array, "S V"]:
    early = (position < slots.stop_from)[:, None]
    return edit_logits(
        out, slots.bias_ids, slots.biases, jnp.where(early, slots.stop_ids, jnp.int32(-1))
    )


@functools.partial(
    jax.jit, static_argnames=("config", "form", "steps", "edited"), donate_argnames="cache"
)
def decode(
    params: Params,
    config: ModelConfig,
    form: Form,
    cache: Cache,
    tables: Int[Rows, "S M"] | None,
    slots: DecodeSlots,
    leave_at: Int[Rows, ""],
    limit: Int[Rows, ""],
    *,
    steps: int,
    edited: bool = False,
) -> tuple[Cache, Int[Array, "S n"], Float[Array, "S n"], Int[Array, " S"]]:
    """Up to `steps` tokens for each active row, in one loop on the device.

    A row ends with a stop id or at its last position. The loop leaves after `limit` steps (at most
    `steps`) or when at most `leave_at` rows are still active.

    Args:
        cache: the pages, read through `tables`, or with no tables the rows' view.
        edited: whether biases and `stop_from` are looked at.

    Returns:
        the cache, the tokens drawn, their log-probabilities, and how many of them each row drew
        (the first entries of its row).
    """
    params = views(params, config, form)
    rows = slots.token.shape[0]
    first = jnp.int32(0)
    keys = sequence_keys(slots.seed, slots.uid, slots.sample)

    def unfinished(state):
        step, _, _, _, active, *_ = state
        return (step < jnp.minimum(limit, steps)) & (jnp.sum(active, dtype=jnp.int32) > leave_at)

    def one_step(state):
        step, cache, token, position, active, tokens, logps, drawn = state
        wanted = active & (position >= slots.write_from)
        hidden, cache = _decode_layers(params, config, cache, tables, token, position, wanted)
        with jax.named_scope("sample"):
            uniform = position_uniforms(keys, position + 1)
            out = logits(params, hidden, config)
            changed = _edited(out, slots, position + 1) if edited else None
            chosen, logp = sample_tokens(out, uniform, slots.filters, changed)
        tokens = jax.lax.dynamic_update_slice(tokens, chosen[:, None], (first, step))
        logps = jax.lax.dynamic_update_slice(
            logps, logp.astype(jnp.float32)[:, None], (first, step)
        )
        drawn = drawn + active.astype(jnp.int32)
        token = jnp.where(active, chosen, token)
        position = position + active.astype(jnp.int32)
        stopped = jnp.any(chosen[:, None] == slots.stop_ids, axis=-1)
        active = active & ~stopped & (position < slots.last_position)
        return step + 1, cache, token, position, active, tokens, logps, drawn

    state = (
        jnp.int32(0),
        cache,
        slots.token,
        slots.position,
        slots.active,
        jnp.zeros((rows, steps), jnp.int32),
        jnp.zeros((rows, steps), jnp.float32),
        jnp.zeros(rows, jnp.int32),
    )
    _, cache, _, _, _, tokens, logps, drawn = jax.lax.while_loop(unfinished, one_step, state)
    return cache, tokens, logps, drawn
