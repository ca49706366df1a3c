# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler on a mesh: engines side by side over `data`, each split over `tensor`.

    engines = Engines(model_config, params, config, MeshConfig(data=4, tensor=2), devices)
    for rollout in engines.generate(requests):
        ...

Each engine has slots, pages and weights of its own on its part of the mesh, where heads of queries,
keys and values, the columns of the MLP and the vocabulary are split. Requests are dealt out; what a
request draws does not depend on who serves it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.axes import axis_sizes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.placement import Placement
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout.engine import Engine, Request
from jaxrl_llm.rollout.settings import EngineConfig
from jaxrl_llm.rollout.weights import Form, cast, pack_layers, pack_rest, together
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.sharding.reshard import now
from jaxrl_llm.sharding.rules import spec
from jaxrl_llm.types import Rollout


class SplitEngine(Engine):
    """An engine whose weights and pages are split over the devices of `place`."""

    def __init__(
        self, model_config: ModelConfig, params: Params, config: EngineConfig, place: Placement
    ):
        self.place = place
        super().__init__(model_config, params, config)
        heads = spec(
            (None, None, "kv_heads", None), axis_sizes(model_config), place.mesh, split_fsdp=False
        )
        self._make_pages = jax.jit(self._make_pages, out_shardings=NamedSharding(place.mesh, heads))

    def _packed(self, params: Params) -> Params:
        """Group by group of arrays, whose stacked form is gone when the next one comes: no device
        ever holds parameters twice. Leaves may be `sharding.reshard.Later`."""
        stacked, how = params["layers"], {"form": self._form, "dtype": self._dtype}
        rest = {name: leaf for name, leaf in params.items() if name != "layers"}
        packed = _pack_rest(self._here(rest), **how)
        layers: tuple[dict[str, Any], ...] = ({},) * self.model_config.num_layers
        for names in together(stacked):
            part = self._here({"layers": {name: stacked[name] for name in names}})
            packed_part = _pack_layers(part["layers"], **how)
            layers = tuple({**a, **b} for a, b in zip(layers, packed_part, strict=True))
        return {**packed, "layers": layers}

    def _here(self, tree: Any) -> Any:
        return self.place.put(jax.tree.map(now, tree))

    def _generate(self, requests: list[Request]) -> Iterator[Rollout]:
        # A mesh is set for a thread: whoever takes the rollouts should not find it set.
        steps = super()._generate(requests)
        try:
            while True:
                with jax.set_mesh(self.place.mesh):
                    rollout = next(steps, None)
                if rollout is None:
                    return
                yield rollout
        finally:
            steps.close()


@functools.partial(jax.jit, static_argnames=("form", "dtype"))
def _pack_rest(rest: Params, form: Form, dtype: str | None) -> Params:
    return pack_rest(cast(rest, dtype), form)


@functools.partial(jax.jit, static_argnames=("form", "dtype"))
def _pack_layers(layers: Any, form: Form, dtype: str | None) -> tuple[dict[str, Any], ...]:
    return pack_layers(cast(layers, dtype), form)


class Engines:
    """Engines that serve requests together; used like one `Engine`.

    Args:
        model_config, params: as for `Engine`; parameters on any devices.
        config: sizes; `slots` are those of all engines together, `num_pages` of each.
        The rest is as for `engine_places`.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: Params,
        config: EngineConfig,
        layout: MeshConfig,
        devices: Sequence[jax.Device] | None = None,
        *,
        name: str = "sampler.mesh",
    ):
        places = engine_places(layout, model_config, devices, name)
        self.config = engine_share(config, len(places))
        self.engines = [SplitEngine(model_config, params, self.config, place) for place in places]

    @property
    def version(self) -> int:
        return self.engines[0].version

    def set_params(self, params: Params, version: int) -> None:
        """New weights for all, one engine after the other; as `Engine.set_params`.

        Args:
            params: on any devices; leaves may be `sharding.reshard.Later`.
        """
        for engine in self.engines:
            engine.set_params(params, version)

    def release(self) -> None:
        """Free weights and pages of all until the next `set_params`."""
        for engine in self.engines:
            engine.release()

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """As `Engine.generate`; what an engine raises ends all."""
        requests = list(requests)
        for request in requests:
            self.engines[0].check(request)
        return self._merged([requests[i :: len(self.engines)] for i in range(len(self.engines))])

    def _merged(self, shares: list[list[Request]]) -> Iterator[Rollout]:
        found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        over = threading.Event()
        threads = [
            threading.Thread(target=functools.partial(_serve, engine, share, found, over))
            for engine, share in zip(self.engines, shares, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            left = len(threads)
            while left:
                item = found.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            over.set()
            for thread in threads:
                thread.join()


Sampler = Engine | Engines


def engine_places(
    layout: MeshConfig,
    model_config: ModelConfig,
    devices: Sequence[jax.Device] | None = None,
    name: str = "sampler.mesh",
) -> list[Placement]:
    """Where each engine of a data × tensor mesh lives.

    Args:
        devices: of this process; default: all.
        name: of the setting, for errors.

    Raises:
        ConfigError: another axis than these two, or the mesh fits neither devices nor model.
    """
    grid = engine_devices(layout, devices, name)
    own = dataclasses.replace(layout, data=1, devices=None)
    return [
        Placement.make(own, model_config, part, name)
        for part in grid.reshape(-1, layout.tensor).tolist()
    ]


def engine_devices(
    layout: MeshConfig, devices: Sequence[jax.Device] | None = None, name: str = "sampler.mesh"
) -> np.ndarray:
    """The devices of a data × tensor mesh; as `engine_places`."""
    check_layout(layout, name)
    return make_mesh(layout, list(devices or jax.local_devices()), name).devices


def engine_share(config: EngineConfig, engines: int) -> EngineConfig:
    """The sizes of one of so many engines."""
    return dataclasses.replace(config, slots=max(-(-config.slots // engines), 2))


def check_layout(layout: MeshConfig, name: str = "sampler.mesh") -> None:
    """Raises ConfigError for what a sampler is not split over, and as `MeshConfig.check`."""
    if layout != MeshConfig(data=layout.data, tensor=layout.tensor, devices=layout.devices):
        raise ConfigError(
            f"{name} is data × tensor",
            got=", ".join(
                f"{field.name} {getattr(layout, field.name)}"
                for field in dataclasses.fields(layout)
                if getattr(layout, field.name) != field.default and field.name != "devices"
            ),
            hint=f"--{name}.data and --{name}.tensor alone",
        )
    layout.check(name)


def _serve(
    engine: Engine, share: list[Request], found: queue.SimpleQueue[Any], over: threading.Event
) -> None:
    """Puts rollouts as they finish, then None; or what was raised."""
    try:
        with contextlib.closing(engine.generate(share)) as rollouts:
            for rollout in rollouts:
                if over.is_set():
                    return
                found.put(rollout)
        found.put(None)
    except BaseException as error:
        found.put(error)
