# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays from one layout to another, leaf by leaf: what is held beside the result is one leaf."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

Change = Callable[[Any], Any]


def same(x: Any) -> Any:
    """No change but of the layout."""
    return x


@dataclasses.dataclass(frozen=True)
class Later:
    """An array that is made when `now` asks for it: a tree of them takes no memory as a whole."""

    make: Callable[[], jax.Array]


def now(x: Any) -> Any:
    """The array itself."""
    return x.make() if isinstance(x, Later) else x


def reshard(x: Any, sharding: Sharding, change: Change = same) -> jax.Array:
    """An array in another layout, and `change` applied to it on the way.

    On the devices where it is, only the parts that a device lacks are moved; to other devices the
    result is copied. Arrays of numpy are handed to each device in parts. Where several processes
    share a mesh all call this together, with the same arrays of numpy or of their own devices; to
    the devices of one process alone comes all of what lies on those of many.

    Args:
        change: a module's function or a `functools.partial` of one: it is compiled once.
    """
    if isinstance(x, jax.Array) and x.is_fully_addressable and not sharding.is_fully_addressable:
        x = np.asarray(x)
    if not isinstance(x, jax.Array):
        whole = change(np.asarray(x))
        return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])
    if x.sharding.device_set == sharding.device_set:
        if change is same and x.is_fully_addressable:
            return jax.device_put(x, sharding)
        return _program(change, sharding)(x)
    if not x.is_fully_addressable:
        x = _whole(x, change).addressable_data(0)
    elif change is not same:
        x = jax.jit(change)(x)
    return jax.device_put(x, sharding)


def fetch(tree: Any) -> Any:
    """Arrays as numpy. Where they lie on devices of several processes, all call this together."""
    here = jax.tree.map(
        lambda x: x if getattr(x, "is_fully_addressable", True) else _whole(x, same), tree
    )
    return jax.device_get(here)


def _whole(x: jax.Array, change: Change) -> jax.Array:
    """All of an array on every device that has a part of it."""
    return _program(change, NamedSharding(x.sharding.mesh, PartitionSpec()))(x)


@functools.cache
def _program(change: Change, sharding: Sharding) -> Callable:
    return jax.jit(change, out_shardings=sharding)
