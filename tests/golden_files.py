# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Reading the stored numbers in tests/golden: `from golden_files import …`."""

from __future__ import annotations

import base64
import json
import pathlib
from typing import Any

import numpy as np

GOLDEN = pathlib.Path(__file__).parent / "golden"


def read_golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def unpack(entry: dict[str, Any]) -> np.ndarray:
    """An array stored as {"shape": […], "float32": base64 of little-endian values}."""
    data = np.frombuffer(base64.b64decode(entry["float32"]), "<f4")
    return data.reshape(entry["shape"])
