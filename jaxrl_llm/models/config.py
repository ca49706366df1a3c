# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The traits of a decoder. One definition covers every family; a trait's default means "off"."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal


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
        rms_norm_eps: ε of the RMS norms.
        rope_theta: base of the rotary embedding.
        tie_word_embeddings: the output head is the embedding matrix.
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
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    family: Literal["llama"] = "llama"

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, (self.num_heads, self.num_kv_heads)

    @property
    def num_params(self) -> int:
        """Number of distinct parameters (tied weights once)."""
        d, f, hd = self.hidden_size, self.intermediate_size, self.head_dim
        attention = 2 * self.num_heads * hd * d + 2 * self.num_kv_heads * hd * d
        layer = attention + 3 * d * f + 2 * d
        head = 0 if self.tie_word_embeddings else self.vocab_size * d
        return self.vocab_size * d + self.num_layers * layer + d + head

    def flops_per_token(self, context: float = 0.0) -> float:
        """FLOPs of a forward pass for one token that attends to `context` others.

        Two for each multiply-add. The embedding look-up counts as nothing, the output head in full.
        """
        d, f, hd = self.hidden_size, self.intermediate_size, self.head_dim
        attention = 2 * self.num_heads * hd * d + 2 * self.num_kv_heads * hd * d
        products = self.num_layers * (attention + 3 * d * f) + self.vocab_size * d
        return 2.0 * products + 4.0 * self.num_layers * self.num_heads * hd * context

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token occupies in the cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
