# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The GGUF container: metadata at once, tensors dequantised on demand.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file is not trusted: no
length in it is believed before the bytes that it promises are seen to be there. (The reader of the
`gguf` package makes an array object for every string of the vocabulary, which takes seconds.)
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import struct
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT
from gguf.constants import GGMLQuantizationType as Kind
from gguf.constants import GGUFValueType as Value

from jaxrl_llm.checkpoint.gguf_quants import DEQUANTISERS
from jaxrl_llm.errors import ModelError


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is row-major; `kind` is a plain number if unknown."""

    shape: tuple[int, ...]
    kind: Kind | int
    start: int
    size: int


class GGUFFile:
    """An open GGUF file: `metadata` as plain values, `tensors` by name; weights are read on demand.

    Raises:
        ModelError: no such file, or not a whole GGUF file.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        if not self.path.is_file():
            raise ModelError("the GGUF file does not exist", got=self.path, hint="check the path")
        try:
            self._data = np.memmap(self.path, mode="r")
            self.metadata, self.tensors = _parse(_Cursor(memoryview(self._data)))
        except (_Damaged, ValueError) as error:  # ValueError: an empty file, or not UTF-8
            raise ModelError(
                f"{self.path} is not a whole GGUF file: {error}", hint="fetch the file again"
            ) from error
        except OSError as error:
            raise ModelError(f"{self.path} can't be read: {error.strerror or error}") from error

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32 (F16 stays float16).

        Raises:
            ModelError: it is of a type that we don't read.
        """
        self.check_kind(name)
        tensor = self.tensors[name]
        data = np.asarray(self._data[tensor.start : tensor.start + tensor.size])
        return DEQUANTISERS[tensor.kind](data).reshape(tensor.shape)

    def check_kind(self, name: str) -> None:
        """Raise ModelError if a tensor is of a type that we don't read."""
        tensor = self.tensors[name]
        if tensor.kind not in DEQUANTISERS:
            raise ModelError(
                f"tensor {name} of {self.path.name} is of a type that is not supported",
                got=tensor.kind.name if isinstance(tensor.kind, Kind) else tensor.kind,
                expected="one of " + ", ".join(kind.name for kind in DEQUANTISERS),
                hint="another quantisation of the model, or its HF folder",
            )


class _Damaged(Exception):
    """What is wrong with the file."""


class _Cursor:
    """Reads forward through bytes and never past their end."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise _Damaged(f"it ends in the middle of its header, at byte {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def string(self) -> str:
        return str(self.take(self.u64()), "utf-8")

    def value(self, kind: int) -> Any:
        if kind == Value.STRING:
            return self.string()
        if kind == Value.ARRAY:
            return self.array()
        return _plain(np.frombuffer(self.take(_scalar(kind).itemsize), _scalar(kind)))[0]

    def array(self) -> list[Any]:
        kind, count = self.u32(), self.u64()
        if kind == Value.STRING:
            return [self.string() for _ in range(count)]
        scalar = _scalar(kind)
        return _plain(np.frombuffer(self.take(count * scalar.itemsize), scalar))


def _scalar(kind: int) -> np.dtype:
    if kind not in _SCALARS:
        raise _Damaged(f"a metadata value is of unknown type {kind}")
    return np.dtype(_SCALARS[kind])


def _plain(values: np.ndarray) -> list[Any]:
    """Python values; a float32 becomes the shortest decimal that means it, 1e-05 for example."""
    return [float(str(v)) for v in values] if values.dtype == np.float32 else values.tolist()


_SCALARS = {
    Value.UINT8: "<u1",
    Value.INT8: "<i1",
    Value.UINT16: "<u2",
    Value.INT16: "<i2",
    Value.UINT32: "<u4",
    Value.INT32: "<i4",
    Value.UINT64: "<u8",
    Value.INT64: "<i8",
    Value.FLOAT32: "<f4",
    Value.FLOAT64: "<f8",
    Value.BOOL: "?",
}
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    if len(cursor.data) < 4 or bytes(cursor.take(4)) != b"GGUF":
        raise _Damaged("it does not begin with GGUF")
    version = cursor.u32()
    if version not in _VERSIONS:
        raise _Damaged(f"its version is {version}, versions {_VERSIONS} are read")
    tensor_count, value_count = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        name = cursor.string()
        metadata[name] = cursor.value(cursor.u32())
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Damaged(f"its alignment is {alignment!r}")
    base = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, info in infos:
        start = base + info.start
        if name in tensors:
            raise _Damaged(f"tensor {name} occurs twice")
        if start + info.size > len(cursor.data):
            raise _Damaged(f"it ends at byte {len(cursor.data)}, before the end of tensor {name}")
        tensors[name] = dataclasses.replace(info, start=start)
    return metadata, tensors


def _tensor_info(cursor: _Cursor) -> tuple[str, TensorInfo]:
    """Name and place of one tensor; `start` counts from the beginning of the tensor data."""
    name, rank = cursor.string(), cursor.u32()
    if rank > _MAX_DIMENSIONS:
        raise _Damaged(f"tensor {name} has {rank} dimensions")
    shape = tuple(reversed([cursor.u64() for _ in range(rank)]))
    number, start = cursor.u32(), cursor.u64()
    if number not in set(Kind):
        return name, TensorInfo(shape, number, start, 0)
    kind = Kind(number)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape and shape[-1] % block:
        raise _Damaged(f"the rows of tensor {name} are no whole blocks of {kind.name}")
    return name, TensorInfo(shape, kind, start, math.prod(shape) // block * block_bytes)
