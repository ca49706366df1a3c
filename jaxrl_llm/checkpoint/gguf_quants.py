# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The block formats of GGUF tensors, back to float32.

A row is a run of blocks. With one scale for 32 values: Q8_0 is a float16 scale d and 32 × int8 q:
x = d·q. Q4_0 is d and 16 bytes of which the low halves are values 0–15 and the high ones 16–31:
x = d·(q − 8). Q4_1 is d, a float16 minimum m, then the same: x = d·q + m.

The K formats have blocks of 256 values with scales of their own for parts. Q4_K and Q5_K: float16
d and e, 12 bytes with a 6-bit scale s and minimum m for each of 8 parts of 32, then the values (for
Q5_K their fifth bits first): x = d·s·q − e·m. Q6_K: low four bits, high two bits, 16 × int8 scales
for parts of 16, d: x = d·s·(q − 32).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from jaxtyping import Float, UInt8

Raw = UInt8[np.ndarray, " bytes"]
Blocks = UInt8[np.ndarray, "n size"]


def _half(blocks: Blocks, start: int) -> Float[np.ndarray, "n 1"]:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: UInt8[np.ndarray, "n 16"]) -> Float[np.ndarray, "n 32"]:
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _q8_0(data: Raw) -> Float[np.ndarray, "n 32"]:
    blocks = data.reshape(-1, 34)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _q4_0(data: Raw) -> Float[np.ndarray, "n 32"]:
    blocks = data.reshape(-1, 18)
    return (_nibbles(blocks[:, 2:]) - np.float32(8)) * _half(blocks, 0)


def _q4_1(data: Raw) -> Float[np.ndarray, "n 32"]:
    blocks = data.reshape(-1, 20)
    return _nibbles(blocks[:, 4:]) * _half(blocks, 0) + _half(blocks, 2)


def _bf16(data: Raw) -> Float[np.ndarray, " n"]:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _scales_and_minima(
    packed: UInt8[np.ndarray, "n 12"],
) -> tuple[Float[np.ndarray, "n 8 1"], Float[np.ndarray, "n 8 1"]]:
    """Six bits each: parts 0–3 whole in bytes 0–3 (scales) and 4–7 (minima); of parts 4–7 the low
    four bits share bytes 8–11 and the high two lie on top of bytes 0–3 and 4–7."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales.astype(np.float32)[..., None], minima.astype(np.float32)[..., None]


def _parts_of_32(packed: UInt8[np.ndarray, "n 128"]) -> UInt8[np.ndarray, "n 8 32"]:
    """Each run of 32 bytes holds two parts: the low halves, then the high ones."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _with_minima(blocks: Blocks, q: UInt8[np.ndarray, "n 8 32"]) -> Float[np.ndarray, "n 256"]:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    d, e = _half(blocks, 0)[..., None], _half(blocks, 2)[..., None]
    return (d * scales * q.astype(np.float32) - e * minima).reshape(-1, 256)


def _q4_k(data: Raw) -> Float[np.ndarray, "n 256"]:
    blocks = data.reshape(-1, 144)
    return _with_minima(blocks, _parts_of_32(blocks[:, 16:]))


def _q5_k(data: Raw) -> Float[np.ndarray, "n 256"]:
    blocks = data.reshape(-1, 176)
    part = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (blocks[:, None, 16:48] >> part) & 1
    return _with_minima(blocks, _parts_of_32(blocks[:, 48:]) | (fifth << 4))


def _q6_k(data: Raw) -> Float[np.ndarray, "n 256"]:
    blocks = data.reshape(-1, 210)
    low = blocks[:, :128].reshape(-1, 2, 2, 32)  # halves of the block, then runs of 32
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    four = np.concatenate([low & 15, low >> 4], axis=2)  # parts of 32 in order, [n, 2, 4, 32]
    two = (high >> np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]) & 3
    q = (four | (two << 4)).astype(np.float32).reshape(-1, 16, 16) - np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)[..., None]
    return (_half(blocks, 208)[..., None] * scales * q).reshape(-1, 256)


DEQUANTISERS: dict[Kind, Callable[[np.ndarray], np.ndarray]] = {
    Kind.F32: lambda data: data.view("<f4"),
    Kind.F16: lambda data: data.view("<f2"),
    Kind.BF16: _bf16,
    Kind.Q8_0: _q8_0,
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
