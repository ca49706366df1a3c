# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays from one layout to another, leaf by leaf: what is held beside the result is one leaf."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Change = Callable[[Any], Any]


def same(x: Any) -> Any:
    """No change but of the layout."""
    return x


def reshard(x: Any, sharding: jax.sharding.Sharding, change: Change = same) -> jax.Array:
    """An array in another layout, and `change` applied to it on the way.

    On the devices where it is, only the parts that a device lacks are moved; to other devices the
    result is copied. Arrays of numpy are handed to each device in parts; where several
    processes share a mesh, all must have the same.

    Args:
        change: a module's function or a `functools.partial` of one: it is compiled once.
    """
    if not isinstance(x, jax.Array):
        whole = change(np.asarray(x))
        return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])
    if change is same:
        return jax.device_put(x, sharding)
    if x.sharding.device_set == sharding.device_set:
        return _program(change, sharding)(x)
    return jax.device_put(jax.jit(change)(x), sharding)


@functools.cache
def _program(change: Change, sharding: jax.sharding.Sharding) -> Callable:
    return jax.jit(change, out_shardings=sharding)
