# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's sizes, and what it counts."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args, get_origin, get_type_hints

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.kernels.choice import PageBackend
from jaxrl_llm.rollout.kv_cache import default_num_pages

POOL_TOKENS = 512  # of prompt and of completion, for which the default pool has room in every slot


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of the sampler.

    Attributes:
        max_prompt_tokens: the longest prompt.
        max_new_tokens: the most tokens of a completion.
        slots: sequences decoded at a time.
        page_size: tokens in a page of the cache.
        num_pages: pages in all; None: enough that groups of requests of up to 512 + 512 tokens
            fill every slot (`default_num_pages`).
        group_size: samples per prompt that the default pool is made for.
        decode_steps: the most tokens per slot between two looks of the host.
        prefill_tokens: prompt tokens computed at a time (more suits an accelerator); a multiple
            of 16, so that on a CPU a prompt's numbers don't depend on it.
        weights: "native", as they are handed over; "bfloat16", rounded; "int8", each row of a
            matrix rounded to 8 bits, and what it is multiplied with, too: the log-probabilities
            are then those of another model, so training needs a correction.
        prefix_cache: keep the full pages of prompts, while nobody else needs them, for prompts to
            come that begin the same, until the weights change.
        attention: "pages" reads the cache through block tables, "view" through a dense copy of
            the running rows (`view.py`); "auto" is the view on a CPU.
        attention_backend: what decodes over pages: "xla", a kernel ("mosaic" on a TPU, "triton" on
            a GPU), or "auto", the platform's kernel where it can serve.
    """

    max_prompt_tokens: int
    max_new_tokens: int
    slots: int = 64
    page_size: int = 16
    num_pages: int | None = None
    group_size: int = 1
    decode_steps: int = 64
    prefill_tokens: int = 256
    weights: Literal["native", "bfloat16", "int8"] = "native"
    attention: Literal["auto", "view", "pages"] = "auto"
    attention_backend: PageBackend = "auto"
    prefix_cache: bool = False

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if get_origin(kinds[name]) is Literal:
                allowed = get_args(kinds[name])
                if value not in allowed:
                    raise ConfigError(f"bad {name}", got=value, expected=", ".join(allowed))
            elif kinds[name] is bool:
                if not isinstance(value, bool):
                    raise ConfigError(f"bad {name}", got=repr(value), expected="True or False")
            elif not (name == "num_pages" and value is None):
                least = {"num_pages": 2, "prefill_tokens": 16}.get(name, 1)
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    raise ConfigError(
                        f"bad {name}", got=repr(value), expected=f"an integer ≥ {least}"
                    )
        if self.attention == "view" and self.attention_backend != "auto":
            raise ConfigError(
                "attention_backend has no effect: a view is read, not pages",
                got=self.attention_backend,
                hint="attention=pages",
            )
        if self.prefill_tokens % 16:
            raise ConfigError(
                "bad prefill_tokens", got=self.prefill_tokens, expected="a multiple of 16"
            )


@dataclasses.dataclass
class EngineStats:
    """Counts since the engine was made; `snapshot()` and subtract for the counts of a part.

    Attributes:
        decode_steps: steps of the decode loop.
        decoded_slots: slots computed in them, idle ones included: the work that was done.
        useful_tokens: tokens that ended up in rollouts.
        prefill_tokens: tokens prefilled (a prompt once per group; preempted samples again).
        cached_tokens: tokens of prompts that were found in the prefix cache instead.
        prefill_slots: places computed for them, padding included.
        copied_pages: partial pages copied for samples of a group.
        preempted: samples that lost their pages to others for a while.
        decode_calls: times the host started the decode loop.
        peak_pages: the most pages in use at a time (those kept for prompts to come included).
        programs: distinct programs (by shape) that were needed, so compiled at most once each.
    """

    decode_steps: int = 0
    decoded_slots: int = 0
    useful_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    prefill_slots: int = 0
    copied_pages: int = 0
    preempted: int = 0
    decode_calls: int = 0
    peak_pages: int = 0
    programs: int = 0

    def snapshot(self) -> EngineStats:
        return dataclasses.replace(self)

    def since(self, earlier: EngineStats) -> EngineStats:
        """Counts since a snapshot (`peak_pages` stays the peak of all time)."""
        counts = {
            f.name: getattr(self, f.name) - getattr(earlier, f.name)
            for f in dataclasses.fields(self)
        }
        return EngineStats(**{**counts, "peak_pages": self.peak_pages})


def default_pool(config: EngineConfig) -> int:
    """Pages that fill every slot with requests of up to 512 + 512 tokens, or one of the longest:
    what could be asked for beyond that costs no memory until it is, and then samples wait."""
    sizes = {"page_size": config.page_size, "group_size": config.group_size}
    usual = default_num_pages(
        slots=config.slots,
        max_prompt_tokens=min(config.max_prompt_tokens, POOL_TOKENS),
        max_new_tokens=min(config.max_new_tokens, POOL_TOKENS),
        **sizes,
    )
    longest = default_num_pages(
        slots=1,
        max_prompt_tokens=config.max_prompt_tokens,
        max_new_tokens=config.max_new_tokens,
        **sizes,
    )
    return max(usual, longest)
