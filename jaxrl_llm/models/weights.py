# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Matrices that are kept in a form of their own, where a plain array would be slower.

`layers.linear` multiplies with an array [out, in] or with anything that has this interface, so one
definition of the decoder serves every form. The sampler makes them (`rollout/weights.py`).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float


@runtime_checkable
class Weight(Protocol):
    """A matrix [out, in]."""

    def product(self, rows: Float[Array, "m i"]) -> Float[Array, "m o"]:
        """``rows @ w.T``, in at least float32."""
        ...
