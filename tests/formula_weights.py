# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Weights that follow from a tensor's name and shape, so that no file has to store them."""

from __future__ import annotations

import zlib

import numpy as np


def formula_weight(name: str, shape: tuple[int, ...] | list[int], norm_centre: float) -> np.ndarray:
    """Normal with deviation 0.3; norms around `norm_centre` (0 where a model adds 1 itself)."""
    draw = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    return (0.3 * draw + (norm_centre if "norm" in name else 0.0)).astype(np.float32)


def projections(name: str, gradient: np.ndarray) -> list[float]:
    """Three numbers that a gradient can hardly have by chance: products with random directions."""
    rng = np.random.default_rng(zlib.crc32(name.encode()) + 1)
    wide = np.asarray(gradient, np.float64)
    return [float(np.sum(wide * rng.standard_normal(wide.shape))) for _ in range(3)]
