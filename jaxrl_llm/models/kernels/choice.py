# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which back end computes attention: by platform, or by name; XLA where no kernel serves.

    choose_rows("auto", case)     # Choice("splash", "") on a TPU
    choose_pages("triton", case)  # a ConfigError in one line where Triton can't

Every kernel equals the XLA form beside it (`attention.py`, `paged_attention.py`), which is the
reference. What a kernel can't serve is a row of its `_REFUSALS` below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from jaxtyping import Array

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kernels.cudnn import cudnn_found

RowBackend = Literal["auto", "xla", "splash", "cudnn", "triton"]
PageBackend = Literal["auto", "xla", "mosaic", "triton"]


@dataclasses.dataclass(frozen=True)
class Case:
    """What attention has to serve.

    Attributes:
        platform: "cpu", "tpu" or "gpu".
        dtype: of queries, keys and values.
        heads, kv_heads, head_dim: of the whole model.
        window, softcap: whether a layer has one.
        shared: whether rows hold prompts that several completions share.
        tensor, pipeline: in how many parts the mesh splits heads and layers.
        page_size: tokens of a page, of attention over pages.
        cudnn: whether cuDNN is there.
    """

    platform: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    window: bool = False
    softcap: bool = False
    shared: bool = False
    tensor: int = 1
    pipeline: int = 1
    page_size: int = 16
    cudnn: bool = True

    @classmethod
    def here(cls, q: Array, k: Array, **traits: Any) -> Case:
        """The case of queries [..., H, hd] and keys [..., K, hd] under the current mesh."""
        mesh = jax.sharding.get_abstract_mesh()
        sizes = {} if mesh.empty else mesh.shape
        platform = current_platform()
        return cls(
            platform=platform,
            cudnn=platform == "gpu" and cudnn_found(),
            dtype=q.dtype.name,
            heads=q.shape[-2],
            kv_heads=k.shape[-2],
            head_dim=q.shape[-1],
            tensor=sizes.get("tensor", 1),
            pipeline=sizes.get("pipeline", 1),
            **traits,
        )

    @classmethod
    def of(
        cls, config: ModelConfig, dtype: str, platform: str | None = None, **mesh_and_traits: Any
    ) -> Case:
        """The case of a model on a platform that need not be there; None: the current one."""
        platform = platform or current_platform()
        if "cudnn" not in mesh_and_traits:
            mesh_and_traits["cudnn"] = platform == "gpu" and cudnn_found()
        return cls(
            platform=platform,
            dtype=dtype,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=config.sliding_window is not None,
            softcap=config.attention_softcap is not None,
            **mesh_and_traits,
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """A back end, and why it is not a kernel ("" where it is, or where XLA was asked for)."""

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


def current_platform() -> str:
    """Of the current mesh, whose devices need not be there; else of the default device."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.abstract_device is not None:
        return mesh.abstract_device.platform
    device = jax.config.jax_default_device
    if device is not None:
        return device if isinstance(device, str) else device.platform
    return jax.default_backend()


def choose_rows(wanted: str, case: Case) -> Choice:
    """The back end of attention over rows (updates and log-probabilities).

    Raises:
        ConfigError: the one that was named can't serve the case.
    """
    return _choose("model.attention_backend", wanted, case, _ROWS)


def choose_pages(wanted: str, case: Case) -> Choice:
    """The back end of decoding over pages; chunks of prompts are XLA's.

    Raises:
        ConfigError: the one that was named can't serve the case.
    """
    return _choose("sampler.attention_backend", wanted, case, _PAGES)


Refusals = Callable[[Case], Iterator[str]]


def _choose(setting: str, wanted: str, case: Case, kernels: dict[str, Refusals]) -> Choice:
    if wanted == "xla":
        return Choice("xla")
    if wanted != "auto":
        if wanted not in kernels:
            raise ConfigError(
                f"bad {setting}", got=wanted, expected=", ".join(["auto", "xla", *kernels])
            )
        why = next(kernels[wanted](case), None)
        if why is not None:
            raise ConfigError(
                f"{setting}={wanted} can't serve this run: {why}", hint=f"--{setting}=auto"
            )
        return Choice(wanted)
    reasons = []
    for name, refusals in kernels.items():
        if _PLATFORM[name] == case.platform:
            why = next(refusals(case), None)
            if why is None:
                return Choice(name)
            reasons.append(f"{name}: {why}")
    return Choice("xla", "; ".join(reasons) or f"no kernel for {case.platform}")


_PLATFORM = {"splash": "tpu", "mosaic": "tpu", "cudnn": "gpu", "triton": "gpu"}
_PLATFORM_NAMES = {"tpu": "a TPU", "gpu": "a GPU", "cpu": "a CPU"}
_SHARED = "rows share prompts (--train.layout=packed lets it run)"


def _everywhere(name: str, case: Case, dtypes: tuple[str, ...]) -> Iterator[str]:
    if case.platform != _PLATFORM[name]:
        here = _PLATFORM_NAMES.get(case.platform, case.platform)
        yield f"it runs on {_PLATFORM_NAMES[_PLATFORM[name]]}, this is {here}"
    if case.dtype not in dtypes:
        yield f"it takes {' or '.join(dtypes)}, not {case.dtype}"
    if case.kv_heads % case.tensor:
        yield f"{case.kv_heads} key/value heads are not split over {case.tensor} devices"
    if case.pipeline > 1:
        yield "layers are stages of a pipeline"


def _splash(case: Case) -> Iterator[str]:
    yield from _everywhere("splash", case, ("bfloat16", "float32"))
    if case.shared:
        yield _SHARED


def _cudnn(case: Case) -> Iterator[str]:
    yield from _everywhere("cudnn", case, ("bfloat16", "float16"))
    if case.head_dim > 128 or case.head_dim % 8:
        yield f"heads are multiples of 8 up to 128, not {case.head_dim}"
    if case.softcap:
        yield "scores have a soft cap"
    if not case.cudnn:
        yield "cuDNN is not found"


def _triton_rows(case: Case) -> Iterator[str]:
    yield from _everywhere("triton", case, ("bfloat16", "float16", "float32"))
    if case.shared:
        yield _SHARED
    if case.window:
        yield "layers have a window"
    if case.softcap:
        yield "scores have a soft cap"
    if case.head_dim > 128 or case.head_dim < 16:
        yield f"heads are 16 to 128 wide, not {case.head_dim}"


def _mosaic(case: Case) -> Iterator[str]:
    yield from _everywhere("mosaic", case, ("bfloat16", "float32"))
    if case.head_dim % 128:
        yield f"heads are multiples of 128, not {case.head_dim}"
    each = case.kv_heads // case.tensor
    if each not in (1, 2, 4) and each % 8:
        # The cache then lies in another order: all of it would be copied for every layer and token.
        yield f"a device's key/value heads are 1, 2, 4 or a multiple of 8, not {each}"
    rows = case.page_size * each
    multiple = 8 if case.dtype == "float32" else 16
    if rows % multiple:
        yield f"a page's tokens × heads are a multiple of {multiple}, not {rows}"


def _triton_pages(case: Case) -> Iterator[str]:
    yield from _everywhere("triton", case, ("bfloat16", "float16", "float32"))
    for what, size in (("pages", case.page_size), ("heads", case.head_dim)):
        if size & (size - 1):
            yield f"sizes of {what} are powers of 2, not {size}"
    if not 16 <= case.head_dim <= 256:
        yield f"heads are 16 to 256 wide, not {case.head_dim}"


# In order of preference.
_ROWS: dict[str, Refusals] = {"splash": _splash, "cudnn": _cudnn, "triton": _triton_rows}
_PAGES: dict[str, Refusals] = {"mosaic": _mosaic, "triton": _triton_pages}
