# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (RoPE, https://arxiv.org/abs/2104.09864) and its stretched forms.

The frequencies depend on the configuration alone, so they are NumPy constants of the program.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig, RopeScaling
from jaxrl_llm.models.hf_rope import BETA_FAST, BETA_SLOW
from jaxrl_llm.models.layers import accumulation_dtype

Frequencies = Float[np.ndarray, " half"]


def inverse_frequencies(
    config: ModelConfig,
    kind: str = "global",
    dtype: jnp.dtype = jnp.float32,
    length: int | None = None,
) -> tuple[Frequencies, float]:
    """Radians per position of each rotated pair, and the factor on cos and sin.

    ``θ^(−2i/r)`` for the r rotated entries of a head, then stretched by the model's scaling.

    Args:
        kind: "global", or "local" for the embedding of windowed layers, which is never stretched.
        length: no position is as large; it decides where the frequencies depend on the length of
            the context and `config.context` is None.

    Raises:
        ModelError: they depend on the length of the context, and that isn't known.
    """
    rotated = int(config.head_dim * config.partial_rotary_factor)
    theta = config.rope_theta
    if kind == "local":
        assert config.local_rope_theta is not None
        theta = config.local_rope_theta
    exponents = np.arange(0, rotated, 2, dtype=dtype) / np.asarray(rotated, dtype)
    plain = 1.0 / np.asarray(theta, dtype) ** exponents
    scaling = config.rope_scaling
    if scaling is None or kind == "local":
        return plain, 1.0
    if scaling.kind in _BY_LENGTH:
        config = _BY_LENGTH[scaling.kind](scaling, config, length)
    stretched, factor = SCALINGS[scaling.kind](plain, scaling, config)
    return stretched.astype(dtype), float(factor)


def rotary_tables(
    positions: Int[Array, "*n"],
    config: ModelConfig,
    dtype: jnp.dtype = jnp.float32,
    kind: str = "global",
    length: int | None = None,
) -> tuple[Float[Array, "*n half"], Float[Array, "*n half"]]:
    """cos and sin of every position's angles, in at least float32; kind "none": no rotation.

    Args:
        length: as in `inverse_frequencies`, where "length" decides.
    """
    wide = accumulation_dtype(dtype)
    if kind == "none":
        half = int(config.head_dim * config.partial_rotary_factor) // 2
        shape = (*positions.shape, half)
        return jnp.ones(shape, wide), jnp.zeros(shape, wide)
    frequencies, factor = inverse_frequencies(config, kind, wide, length)
    frequencies = frequencies.reshape((1,) * positions.ndim + (-1,))
    angles = positions.astype(wide)[..., None] * frequencies
    if factor == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rotary(
    x: Float[Array, "*n h d"], cos: Float[Array, "*n half"], sin: Float[Array, "*n half"]
) -> Float[Array, "*n h d"]:
    """Rotate the pairs (x_i, x_{i+r/2}) among the first r entries of every head, r = 2·half.

    The half-split layout of HF checkpoints. Entries beyond r stay.
    """
    half = cos.shape[-1]
    wide = x.astype(cos.dtype)
    first, second, rest = jnp.split(wide, (half, 2 * half), axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    parts += [rest] if rest.shape[-1] else []
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def _linear(plain: Frequencies, scaling: RopeScaling, config: ModelConfig):
    """Position interpolation (https://arxiv.org/abs/2306.15595): every position ÷ factor."""
    return plain / scaling.factor, 1.0


def _dynamic(plain: Frequencies, scaling: RopeScaling, config: ModelConfig):
    """NTK-aware base: ``θ' = θ·(s·n/m − (s − 1))^(r/(r−2))`` for n > m tokens; m: the trained."""
    trained = config.max_position_embeddings
    length = max(config.context or trained, trained)
    rotated = 2 * plain.size
    growth = scaling.factor * length / trained - (scaling.factor - 1)
    theta = config.rope_theta * growth ** (rotated / (rotated - 2))
    exponents = np.arange(0, rotated, 2, dtype=plain.dtype) / rotated
    return 1.0 / np.asarray(theta, plain.dtype) ** exponents, 1.0


def _yarn(plain: Frequencies, scaling: RopeScaling, config: ModelConfig):
    """YaRN (https://arxiv.org/abs/2309.00071): slow pairs are interpolated, fast ones are kept.

    The ramp between them runs over the pairs that turn between β_slow and β_fast times within the
    original context.
    """
    original = _original(scaling, config)
    factor = _factor(scaling, config)
    rotated, theta = 2 * plain.size, config.rope_theta

    def pair_of(turns: float) -> float:
        """The (fractional) pair that turns so often within the original context."""
        return rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast or BETA_FAST), pair_of(scaling.beta_slow or BETA_SLOW)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(plain.size, dtype=plain.dtype) - low) / width, 0.0, 1.0)
    magnitude = scaling.attention_factor
    if magnitude is None:
        grown = lambda m: 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0  # noqa: E731 - short
        if scaling.mscale and scaling.mscale_all_dim:
            magnitude = grown(scaling.mscale) / grown(scaling.mscale_all_dim)
        else:
            magnitude = grown(1.0)
    return plain / factor * ramp + plain * (1.0 - ramp), magnitude


def _llama3(plain: Frequencies, scaling: RopeScaling, config: ModelConfig):
    """Llama 3.1: wavelengths beyond original/low are ÷ factor, those below original/high stay."""
    original, factor = _original(scaling, config), _factor(scaling, config)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = original * plain / (2 * np.pi)  # within the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 - smooth) * plain / factor + smooth * plain, 1.0


def _dynamic_length(scaling: RopeScaling, config: ModelConfig, length: int | None) -> ModelConfig:
    """Unstretched up to the trained context, without which no sampler goes on."""
    if config.context is None and (length or 0) > config.max_position_embeddings:
        raise _unknown_length(scaling, config.max_position_embeddings)
    return config


def _longrope_length(scaling: RopeScaling, config: ModelConfig, length: int | None) -> ModelConfig:
    """Rows within the original context take the short factors. Of longer rows it isn't known how
    long the texts that are packed into them are."""
    original = _original(scaling, config)
    if config.context is not None or scaling.short_factor == scaling.long_factor:
        return config
    if config.max_position_embeddings <= original or (length is not None and length <= original):
        return dataclasses.replace(config, context=original)
    raise _unknown_length(scaling, original)


def _unknown_length(scaling: RopeScaling, original: int) -> ModelError:
    return ModelError(
        f"the model's rotary embedding ({scaling.kind}) depends on how long the longest sequence "
        "is, which nothing says here",
        expected=f"rows of at most {original} tokens, or ModelConfig.context set",
    )


def _longrope(plain: Frequencies, scaling: RopeScaling, config: ModelConfig):
    """LongRoPE (https://arxiv.org/abs/2402.13753): a searched factor for every pair."""
    original, factor = _original(scaling, config), _factor(scaling, config)
    long = (config.context or config.max_position_embeddings) > original  # `_longrope_length`
    chosen = scaling.long_factor if long else scaling.short_factor
    magnitude = scaling.attention_factor
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return plain / np.asarray(chosen, plain.dtype), magnitude


def _original(scaling: RopeScaling, config: ModelConfig) -> int:
    return scaling.original_context or config.max_position_embeddings


def _factor(scaling: RopeScaling, config: ModelConfig) -> float:
    if scaling.factor is not None:
        return scaling.factor
    return config.max_position_embeddings / _original(scaling, config)


# Kinds whose frequencies depend on the length of the context → the configuration that tells it.
_BY_LENGTH: dict[str, Callable[[RopeScaling, ModelConfig, int | None], ModelConfig]] = {
    "dynamic": _dynamic_length,
    "longrope": _longrope_length,
}
# Kind → (frequencies, scaling, config) → (stretched frequencies, factor on cos and sin).
SCALINGS: dict[str, Callable] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
