# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Heads over hidden states: log-probability and entropy of tokens, by chunks of the vocabulary."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import accumulation_dtype
from jaxrl_llm.models.transformer import Params, for_use, forward, output_head
from jaxrl_llm.sharding.rules import constrain, splits
from jaxrl_llm.types import Reach

VOCAB_CHUNK = 8192


def token_logprobs(
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " M"],
    *,
    temperature: float = 1.0,
    chunk: int = VOCAB_CHUNK,
    divisor: float = 1.0,
    softcap: float | None = None,
) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
    """Log-probability of each target and entropy of its distribution, softmax(hidden·headᵀ/τ).

    ``logp = l_target − logsumexp(l)``, ``entropy = logsumexp(l) − Σ_v p_v l_v`` with ``l =
    hidden·headᵀ/τ``.
    The vocabulary is read in chunks with a running maximum, forward and backward (the chunk's
    logits are
    recomputed), so the largest array is [M, chunk]. Both outputs are differentiable, in at
    least float32, in nats.

    Args:
        temperature: τ > 0 of the policy.
        chunk: how many rows of the vocabulary are alive at a time.
        divisor, softcap: logits are divided by the one and kept within ± the other by
            ``softcap · tanh(logit / softcap)``, before the temperature.
    """
    chunk = min(chunk, head.shape[0])
    return _token_logprobs(hidden, head, targets, temperature, chunk, divisor, softcap)


def sequence_logprobs(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "N T"],
    positions: Int[Array, "N T"],
    segment_ids: Int[Array, "N T"],
    mask: Bool[Array, "N T"],
    prefix_ids: Int[Array, "N T"] | None = None,
    sources: Int[Array, "N T"] | None = None,
    *,
    num_targets: int,
    temperature: float = 1.0,
    reach: Reach | None = None,
    remat: bool = False,
) -> tuple[Float[Array, "N T"], Float[Array, "N T"]]:
    """Log-probability and entropy of the masked tokens given what stands before them; 0 elsewhere.

    ``logp[n, t] = log p(tokens[n, t] | what it follows)`` comes from the hidden state of the token
    before it: at t − 1, or at ``sources[n, t]``. Only the masked tokens pass through the output
    head: `num_targets` of them per row, so that a row's cost follows its completions and not its
    prompt.

    Args:
        mask: the tokens wanted; never the first of a sequence.
        prefix_ids: the segment of the prompt that a completion follows, as for `forward`.
        sources: where in its row the token before each token stands; needed where completions
            share a prompt.
        num_targets: at least the largest number of masked tokens in a row; a static number.
        reach: as for `forward`.
    """
    rows = tokens, positions, segment_ids, prefix_ids
    hidden = forward(params, config, *rows, reach=reach, remat=remat)
    return hidden_logprobs(
        params,
        config,
        hidden,
        tokens,
        mask,
        sources,
        num_targets=num_targets,
        temperature=temperature,
    )


def hidden_logprobs(
    params: Params,
    config: ModelConfig,
    hidden: Float[Array, "N T D"],
    tokens: Int[Array, "N T"],
    mask: Bool[Array, "N T"],
    sources: Int[Array, "N T"] | None = None,
    *,
    num_targets: int,
    temperature: float = 1.0,
) -> tuple[Float[Array, "N T"], Float[Array, "N T"]]:
    """`sequence_logprobs` from the final hidden states."""
    n, t, d = hidden.shape
    order = jnp.argsort(jnp.logical_not(mask), axis=-1, stable=True)[:, :num_targets]
    wanted = jnp.take_along_axis(mask, order, axis=-1)
    before = order - 1 if sources is None else jnp.take_along_axis(sources, order, axis=-1)
    read = jnp.take_along_axis(hidden, jnp.maximum(before, 0)[:, :, None], axis=1)
    targets = jnp.take_along_axis(tokens, order, axis=-1)
    with jax.named_scope("head"):
        logp, entropy = token_logprobs(
            constrain(read.reshape(-1, d), "head_rows", None),
            for_use(output_head(params), "head", config),
            targets.reshape(-1),
            temperature=temperature,
            divisor=config.logit_divisor,
            softcap=config.logit_softcap,
        )
    rows = jnp.arange(n)[:, None]

    def scatter(values):
        kept = jnp.where(wanted, values.reshape(n, -1), 0.0)
        return jnp.zeros((n, t), kept.dtype).at[rows, order].set(kept)

    return scatter(logp), scatter(entropy)


def token_values(
    hidden: Float[Array, "N T D"],
    weight: Float[Array, "1 D"],
    mask: Bool[Array, "N T"],
    sources: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
    """``V(s_t) = w · h`` of what stands before each masked token, in ≥ float32; 0 elsewhere.

    The value of a token is read where its log-probability is: at the token before it (PPO,
    https://arxiv.org/abs/1707.06347).
    """
    wide = accumulation_dtype(hidden.dtype)
    with jax.named_scope("value"):
        values = jnp.einsum("ntd,d->nt", hidden, weight[0], preferred_element_type=wide)
        before = jnp.arange(values.shape[1])[None, :] - 1 if sources is None else sources
        before = jnp.broadcast_to(jnp.maximum(before, 0), values.shape)
        return jnp.where(mask, jnp.take_along_axis(values, before, axis=1), 0.0)


def _parts(vocab: int, chunk: int) -> tuple[int, int, int]:
    """In how many parts the mesh splits the vocabulary, the rows of each, and of each in a chunk.

    A chunk takes its rows from all parts, so that no device waits or sends its rows to others.
    """
    parts = splits("vocab")
    parts = parts if vocab % parts == 0 else 1
    return parts, vocab // parts, min(max(chunk // parts, 1), vocab // parts)


def _chunk_logits(hidden, head, index, temperature, chunk, divisor, softcap):
    """Logits of one chunk and their slope over the products, its rows, ids, and which ids are new.

    The last chunk is moved back so that it ends with the vocabulary; what overlaps is not new.
    """
    parts, each, size = _parts(head.shape[0], chunk)
    start = jnp.minimum(index * size, each - size)
    rows = jax.lax.dynamic_slice_in_dim(head.reshape(parts, each, -1), start, size, 1)
    rows = rows.reshape(parts * size, -1)
    wide = accumulation_dtype(hidden.dtype)
    logits = jnp.einsum("md,vd->mv", hidden, rows, preferred_element_type=wide)
    logits = constrain(logits, "head_rows", "vocab")
    if divisor != 1.0:
        logits = logits / divisor
    slope = 1.0 / (divisor * temperature)
    if softcap is not None:
        bent = jnp.tanh(logits / softcap)
        logits, slope = softcap * bent, slope * (1.0 - jnp.square(bent))
    within = start + jnp.arange(size)
    ids = (each * jnp.arange(parts)[:, None] + within[None, :]).reshape(-1)
    return logits / temperature, slope, rows, ids, jnp.tile(within >= index * size, parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _token_logprobs(hidden, head, targets, temperature, chunk, divisor, softcap):
    how = (temperature, chunk, divisor, softcap)
    return _token_logprobs_fwd(hidden, head, targets, *how)[0]


def _token_logprobs_fwd(hidden, head, targets, *how):
    _, each, size = _parts(head.shape[0], how[1])
    wide = accumulation_dtype(hidden.dtype)
    count = -(-each // size)
    lowest = jnp.finfo(wide).min

    def step(carry, index):
        top, total, weighted, chosen = carry
        logits, _, _, ids, new = _chunk_logits(hidden, head, index, *how)
        masked = jnp.where(new[None, :], logits, lowest)
        new_top = jnp.maximum(top, jnp.max(masked, axis=-1))
        exp = jnp.where(new[None, :], jnp.exp(masked - new_top[:, None]), 0.0)
        scale = jnp.exp(top - new_top)
        total = total * scale + jnp.sum(exp, axis=-1)
        weighted = weighted * scale + jnp.sum(exp * logits, axis=-1)
        hit = (ids[None, :] == targets[:, None]) & new[None, :]
        chosen = chosen + jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
        return (new_top, total, weighted, chosen), None

    zeros = jnp.zeros(hidden.shape[0], wide)
    start = (jnp.full(hidden.shape[0], lowest, wide), zeros, zeros, zeros)
    (top, total, weighted, chosen), _ = jax.lax.scan(step, start, jnp.arange(count))
    # Differences of like numbers first: log(total) is small, a sum of it with `top` would be
    # rounded.
    log_total, mean_logit = jnp.log(total), weighted / total
    logp, entropy = (chosen - top) - log_total, (top - mean_logit) + log_total
    return (logp, entropy), (hidden, head, targets, top + log_total, mean_logit)


def _token_logprobs_bwd(*how_and_rest):
    *how, residuals, cotangents = how_and_rest
    hidden, head, targets, lse, mean_logit = residuals
    parts, each, size = _parts(head.shape[0], how[1])
    d_logp, d_entropy = cotangents
    wide = lse.dtype
    count = -(-each // size)

    def step(carry, index):
        d_hidden, d_head = carry
        logits, slope, rows, ids, new = _chunk_logits(hidden, head, index, *how)
        p = jnp.exp(logits - lse[:, None])
        hit = (ids[None, :] == targets[:, None]).astype(wide)
        d = d_logp[:, None] * (hit - p) - d_entropy[:, None] * p * (logits - mean_logit[:, None])
        d = jnp.where(new[None, :], d, 0.0) * slope
        d_hidden = d_hidden + jnp.einsum("mv,vd->md", d, rows.astype(wide))
        d_rows = jnp.einsum("mv,md->vd", d, hidden.astype(wide)).reshape(parts, size, -1)
        start = jnp.minimum(index * size, each - size)
        old = jax.lax.dynamic_slice_in_dim(d_head, start, size, 1)
        d_head = jax.lax.dynamic_update_slice_in_dim(d_head, old + d_rows, start, 1)
        return (d_hidden, d_head), None

    start = (jnp.zeros(hidden.shape, wide), jnp.zeros((parts, each, head.shape[1]), wide))
    (d_hidden, d_head), _ = jax.lax.scan(step, start, jnp.arange(count))
    d_head = d_head.reshape(head.shape)
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), None


_token_logprobs.defvjp(_token_logprobs_fwd, _token_logprobs_bwd)
