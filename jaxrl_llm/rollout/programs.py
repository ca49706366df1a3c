# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The two programs that run the model over pages: prefill a chunk of prompts, decode some steps.

Both are compiled once per shape. What differs from call to call (tables, positions, temperatures,
stop ids, seeds, when to leave the loop) are array arguments. The cache is donated and comes back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.paged_attention import attend_pages, paged_attention, view_attention
from jaxrl_llm.models.rotary import rotary_tables
from jaxrl_llm.models.transformer import Params, block, embed_tokens, final_hidden, logits
from jaxrl_llm.rollout.kv_cache import KVPages, page_slots, write_tokens
from jaxrl_llm.rollout.sampling import (
    MAX_TOP_LOGPS,
    Filters,
    edit_logits,
    position_uniforms,
    sample_tokens,
    sequence_keys,
    token_logps,
    top_logps,
)
from jaxrl_llm.rollout.view import write_view
from jaxrl_llm.rollout.weights import Form, view_head, view_layer

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
class Drawn:
    """What a decode call drew; each row's first `count` entries mean something.

    Attributes:
        count: tokens that each row drew.
        tokens, logps: the tokens and their log-probabilities.
        top_tokens, top_logps: where asked for, the likeliest tokens at each place, and theirs.
    """

    # A loop carries it, so leaves are arrays, tracers or their shapes.
    count: Any  # int32 [S]
    tokens: Any  # int32 [S, n]
    logps: Any  # float32 [S, n]
    top_tokens: Any = None  # int32 [S, n, k]
    top_logps: Any = None  # float32 [S, n, k]

    @classmethod
    def empty(cls, rows: int, steps: int, likeliest: int) -> Drawn:
        """Room for `steps` tokens of each row, and for the `likeliest` tokens of each place."""
        zeros = lambda *more, dtype: jnp.zeros((rows, *more), dtype)  # noqa: E731 - shorthand
        out = cls(
            zeros(dtype=jnp.int32),
            zeros(steps, dtype=jnp.int32),
            zeros(steps, dtype=jnp.float32),
        )
        if not likeliest:
            return out
        return out.replace(
            top_tokens=zeros(steps, likeliest, dtype=jnp.int32),
            top_logps=zeros(steps, likeliest, dtype=jnp.float32),
        )

    def record(
        self,
        step: Int[Array, ""],
        active: Bool[Array, " S"],
        tokens: Int[Array, " S"],
        logps: Float[Array, " S"],
        top_tokens: Int[Array, "S k"] | None,
        top_logps: Float[Array, "S k"] | None,
    ) -> Drawn:
        """With the token that every row draws in this step; only `active` rows count it."""

        def at_step(all_, new):
            if new is None:
                return None
            return jax.lax.dynamic_update_index_in_dim(all_, new.astype(all_.dtype), step, 1)

        return Drawn(
            count=self.count + active.astype(jnp.int32),
            tokens=at_step(self.tokens, tokens),
            logps=at_step(self.logps, logps),
            top_tokens=at_step(self.top_tokens, top_tokens),
            top_logps=at_step(self.top_logps, top_logps),
        )


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
        targets: the token after each, and
        temperature: τ, for the log-probabilities of prompts.
    """

    tokens: Int[Rows, " N"]
    row: Int[Rows, " N"]
    column: Int[Rows, " N"]
    wanted: Bool[Rows, " N"]
    index: Int[Rows, "R C"]
    start: Int[Rows, " R"]
    tables: Int[Rows, "R M"]
    targets: Int[Rows, " N"]
    temperature: Float[Rows, " N"]


def _run_layers(
    params: Params,
    config: ModelConfig,
    form: Form,
    tokens: Int[Array, "S T"],
    positions: Int[Array, "S T"],
    cache: Cache,
    attend: Callable[..., tuple[Array, Any]],
    context: Any,
) -> tuple[Float[Array, "S T D"], Cache]:
    """Run tokens through the decoder, and what it keeps of them.

    ``attend(kept, q, k, v, context, window=…, softcap=…, scale=…, backend=…)`` returns what the
    queries see, and the layer's part of the cache with the new keys and values.
    """
    x = embed_tokens(params, config, tokens)
    kinds = sorted({traits.rope for traits in config.layers})

    def sines() -> dict[str, tuple[Array, Array]]:
        return {kind: rotary_tables(positions, config, x.dtype, kind) for kind in kinds}

    def never() -> dict[str, tuple[Array, Array]]:
        return jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), jax.eval_shape(sines))

    # XLA would compute them again in every layer, for every head; it can't look into a branch, and
    # it does not know that positions are never below 0.
    tables = jax.lax.cond(jnp.all(positions >= 0), sines, never)
    out = []
    for layer, kept, traits in zip(params["layers"], cache, config.layers, strict=True):
        x, kept = _layer(
            layer,
            kept,
            x,
            *tables[traits.rope],
            context,
            config=config,
            form=form,
            window=traits.window,
            attend=attend,
        )
        out.append(kept)
    return final_hidden(params, config, x), tuple(out)


# A program of its own inside the others, so that layers that are alike are traced once.
@functools.partial(jax.jit, static_argnames=("config", "form", "window", "attend"))
def _layer(
    layer: dict[str, Any],
    kept: tuple[Array, Array],
    x: Float[Array, "S T D"],
    cos: Float[Array, "S T half"],
    sin: Float[Array, "S T half"],
    context: Any,
    *,
    config: ModelConfig,
    form: Form,
    window: int | None,
    attend: Callable[..., tuple[Array, Any]],
) -> tuple[Float[Array, "S T D"], tuple[Array, Array]]:
    traits = {
        "window": window,
        "softcap": config.attention_softcap,
        "scale": config.attention_scale,
        "backend": config.attention_backend,
    }

    def seen(q: Array, k: Array, v: Array) -> Array:
        nonlocal kept
        out, kept = attend(kept, q, k, v, context, **traits)
        return out

    return block(view_layer(layer, config, form), config, x, cos, sin, seen), kept


def _attend_chunk(kept, q, k, v, context, *, backend, **traits):
    chunk, page, offset, positions = context
    kept = tuple(
        write_tokens(pages, new, page, offset) for pages, new in zip(kept, (k, v), strict=True)
    )
    out = paged_attention(q[0][chunk.index], *kept, chunk.tables, positions, **traits)
    return out[chunk.row, chunk.column][None], kept


def _attend_pages(kept, q, k, v, context, **traits):
    tables, places, at = context
    kept = tuple(write_tokens(pages, new, *places) for pages, new in zip(kept, (k, v), strict=True))
    return attend_pages(q, *kept, tables, at, **traits), kept


def _attend_view(kept, q, k, v, context, *, backend, **traits):
    position, wanted = context
    kept = write_view(kept, k[:, 0], v[:, 0], position, wanted)
    return view_attention(q[:, 0], *kept, position, **traits)[:, None], kept


@functools.partial(jax.jit, static_argnames=("config", "form", "scored"), donate_argnames="pages")
def prefill(
    params: Params,
    config: ModelConfig,
    form: Form,
    pages: KVPages,
    chunk: PrefillChunk,
    *,
    scored: bool = False,
) -> tuple[KVPages, Float[Array, " N"] | None]:
    """Keys and values of a chunk of prompts; logits only if it is `scored`.

    A row sees what earlier chunks, and earlier rows of this one, wrote to its prompt's pages.

    Returns:
        the pages, and where scored the log-probability of each token's target, else None.
    """
    positions = (chunk.start[chunk.row] + chunk.column)[:, None]
    page, offset = page_slots(
        chunk.tables[chunk.row], positions, chunk.wanted[:, None], pages[0][0].shape[1]
    )
    row_positions = (
        chunk.start[:, None] + jnp.arange(chunk.index.shape[1], dtype=jnp.int32)[None, :]
    )
    context = chunk, page.T, offset.T, row_positions
    hidden, pages = _run_layers(
        params, config, form, chunk.tokens[None], positions.T, pages, _attend_chunk, context
    )
    if not scored:
        return pages, None
    with jax.named_scope("score"):
        out = logits(view_head(params, form), hidden[0], config)
        logps = token_logps(out, chunk.targets, chunk.temperature)
    return pages, logps.astype(jnp.float32)


def _decode_layers(
    params: Params,
    config: ModelConfig,
    form: Form,
    cache: Cache,
    tables: Int[Array, "S M"] | None,
    token: Int[Array, " S"],
    position: Int[Array, " S"],
    wanted: Bool[Array, " S"],
) -> tuple[Float[Array, "S D"], Cache]:
    """One token of every row through the decoder, over pages or (no tables) over their view."""
    at = position[:, None]
    attend, context = _attend_view, (position, wanted)
    if tables is not None:
        places = page_slots(tables, at, wanted[:, None], cache[0][0].shape[1])
        attend, context = _attend_pages, (tables, places, at)
    hidden, cache = _run_layers(params, config, form, token[:, None], at, cache, attend, context)
    return hidden[:, 0], cache


def _edited(
    out: Float[Array, "S V"], slots: DecodeSlots, position: Int[Array, " S"]
) -> Float[Array, "S V"]:
    early = (position < slots.stop_from)[:, None]
    return edit_logits(
        out, slots.bias_ids, slots.biases, jnp.where(early, slots.stop_ids, jnp.int32(-1))
    )


@functools.partial(
    jax.jit, static_argnames=("config", "form", "steps", "edited", "tops"), donate_argnames="cache"
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
    tops: bool = False,
) -> tuple[Cache, Drawn]:
    """Up to `steps` tokens for each active row, in one loop on the device.

    A row ends with a stop id or at its last position. The loop leaves after `limit` steps (at most
    `steps`) or when at most `leave_at` rows are still active.

    Args:
        cache: the pages, read through `tables`, or with no tables the rows' view.
        edited: whether biases and `stop_from` are looked at.
        tops: whether the likeliest tokens of every place are recorded.
    """
    headed = view_head(params, form)
    keys = sequence_keys(slots.seed, slots.uid, slots.sample)

    def unfinished(state):
        step, _, _, _, active, _ = state
        return (step < jnp.minimum(limit, steps)) & (jnp.sum(active, dtype=jnp.int32) > leave_at)

    def one_step(state):
        step, cache, token, position, active, out = state
        wanted = active & (position >= slots.write_from)
        hidden, cache = _decode_layers(params, config, form, cache, tables, token, position, wanted)
        with jax.named_scope("sample"):
            uniform = position_uniforms(keys, position + 1)
            scores = logits(headed, hidden, config)
            changed = _edited(scores, slots, position + 1) if edited else None
            chosen, logp = sample_tokens(scores, uniform, slots.filters, changed)
            best = top_logps(scores, slots.filters.temperature) if tops else (None, None)
        out = out.record(step, active, chosen, logp, *best)
        token = jnp.where(active, chosen, token)
        position = position + active.astype(jnp.int32)
        stopped = jnp.any(chosen[:, None] == slots.stop_ids, axis=-1)
        active = active & ~stopped & (position < slots.last_position)
        return step + 1, cache, token, position, active, out

    likeliest = min(MAX_TOP_LOGPS, config.vocab_size) if tops else 0
    start = Drawn.empty(slots.token.shape[0], steps, likeliest)
    state = (jnp.int32(0), cache, slots.token, slots.position, slots.active, start)
    _, cache, _, _, _, out = jax.lax.while_loop(unfinished, one_step, state)
    return cache, out
