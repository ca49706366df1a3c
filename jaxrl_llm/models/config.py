# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The traits of a decoder. One definition covers every family; a trait's default means "off"."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from jaxrl_llm.models.shapes import layer_shapes


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of the rotary embedding are stretched; `rotary.py` has the equations.

    Attributes:
        kind: linear (positions ÷ factor), dynamic (NTK-aware base, by the context), yarn, llama3,
            longrope (a factor per frequency, one set for short and one for long contexts).
        factor: how much longer the context became; None: the ratio of the two contexts.
        original_context: the context before stretching, in tokens.
        low_freq_factor, high_freq_factor: llama3.
        beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate: yarn; longrope
            takes attention_factor, too.
        short_factor, long_factor: longrope.
    """

    kind: Literal["linear", "dynamic", "yarn", "llama3", "longrope"]
    factor: float | None = None
    original_context: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class LayerTraits:
    """What may differ from layer to layer.

    Attributes:
        window: tokens that a query sees, itself included; None: all before it.
        rope: which rotary embedding: the model's own, the one of windowed layers, or none.
    """

    window: int | None
    rope: Literal["global", "local", "none"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder-only transformer.

    Attributes:
        vocab_size: rows of the embedding matrix, V.
        hidden_size: width of the residual stream, D.
        intermediate_size: width of the gated MLP, F.
        num_layers: L.
        num_heads: query heads, H.
        num_kv_heads: key/value heads, K; H is a multiple of K.
        head_dim: width of one head.
        max_position_embeddings: the longest context that the model was trained for.
        context: the longest sequence of this run, prompt and completion. Only the scalings
            "dynamic" and "longrope" look at it: it fixes their frequencies once, so that sampler
            and trainer agree at every token. None: rows within the original context are computed,
            longer ones are refused.
        microbatches: of this run: pieces of a batch of rows that are on their way through layers
            stacked as stages of a pipeline; other layers don't look at it.
        attention_backend: of this run: what computes attention over rows, or over the sampler's
            pages: "auto", "xla", or a kernel of `kernels/choice.py`.
        rms_norm_eps: ε of the RMS norms.
        rope_theta: base of the rotary embedding.
        rope_scaling: how its frequencies are stretched, in layers that use it.
        local_rope_theta: base in windowed layers, unscaled; None: as the others.
        partial_rotary_factor: the part of each head that is rotated, its first entries.
        rope_layers: which layers rotate at all; empty: all (the others are NoPE layers).
        sliding_window: tokens that a query sees in windowed layers, itself included.
        window_layers: which layers are windowed; empty: all, if there is a window.
        qkv_bias, o_bias, mlp_bias: the linear maps add a bias.
        qk_norm: RMS norm of queries and keys before rotation: each head by itself, or all as one.
        pre_norms, post_norms: RMS norm before, and after, attention and MLP.
        norm_offset: norms multiply with 1 + weight.
        wide_norm: norms multiply with their weight in float32, before rounding.
        activation: of the MLP's gate.
        attention_scale: what q·k is multiplied with; None: head_dim^(−1/2).
        attention_softcap: c: scores s become c·tanh(s/c).
        logit_softcap: the same for the logits.
        embedding_multiplier, residual_multiplier: factors on embeddings and on what each half layer
            adds.
        logit_divisor: what logits are divided by, before their soft cap.
        tie_word_embeddings: the output head is the embedding matrix.
        num_experts: E of a mixture-of-experts MLP; 0: one dense MLP.
        experts_per_token: how many of them each token uses.
        expert_size: width of each expert.
        renormalize_experts: the weights of the chosen experts are made to sum to 1.
        router_aux_coef: coefficient of the load-balancing loss that the model came with.
        family: the row in `presets.py` that this model came from; decides names at export.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    context: int | None = None
    microbatches: int = 1
    attention_backend: str = "auto"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    partial_rotary_factor: float = 1.0
    rope_layers: tuple[bool, ...] = ()
    sliding_window: int | None = None
    window_layers: tuple[bool, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: bool = False
    wide_norm: bool = False
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    tie_word_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    renormalize_experts: bool = True
    router_aux_coef: float = 0.0
    family: str = "llama"

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, (self.num_heads, self.num_kv_heads)
        for layers in (self.rope_layers, self.window_layers):
            assert len(layers) in (0, self.num_layers), (len(layers), self.num_layers)
        assert self.pre_norms or self.post_norms
        assert 0 <= self.experts_per_token <= self.num_experts
        assert not (self.num_experts and self.mlp_bias)

    @property
    def layers(self) -> tuple[LayerTraits, ...]:
        """The traits of each layer."""
        every = (True,) * self.num_layers
        windowed = self.window_layers or every
        rotated = self.rope_layers or every
        traits = []
        for use_window, use_rope in zip(windowed, rotated, strict=True):
            window = self.sliding_window if use_window else None
            local = window is not None and self.local_rope_theta is not None
            traits.append(
                LayerTraits(window, "none" if not use_rope else "local" if local else "global")
            )
        return tuple(traits)

    @property
    def num_params(self) -> int:
        """Number of distinct parameters (tied weights once)."""
        layer = sum(math.prod(shape) for shape in layer_shapes(self).values())
        tables = 1 if self.tie_word_embeddings else 2
        vocabulary = tables * self.vocab_size * self.hidden_size
        return vocabulary + self.num_layers * layer + self.hidden_size

    def flops_per_token(self, context: int | float = 0.0) -> float:
        """FLOPs of a forward pass for one token that attends to `context` tokens.

        Two for each multiply-add of the matrix products. The embedding look-up counts as nothing,
        the output head in full; of the experts only those that a token uses; windowed layers attend
        to at most their window.
        """
        products = 0.0
        for shape in layer_shapes(self).values():
            used = self.experts_per_token / self.num_experts if len(shape) == 3 else 1.0
            products += used * math.prod(shape) if len(shape) > 1 else 0.0
        attended = sum(min(context, t.window or context) for t in self.layers)
        linear = self.num_layers * products + self.vocab_size * self.hidden_size
        return 2.0 * linear + 4.0 * self.num_heads * self.head_dim * attended

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token occupies in the cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
