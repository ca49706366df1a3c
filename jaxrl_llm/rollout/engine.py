# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler: continuous batching over a paged cache.

    engine = Engine(model_config, params, EngineConfig(max_prompt_tokens=256, max_new_tokens=64))
    for rollout in engine.generate([Request(prompt, SamplingParams(max_tokens=64), n=8, uid=0)]):
        ...
    engine.set_params(new_params, version=1)

One round of `generate` is: admit samples (scheduler), prefill their prompts, copy partial pages,
decode on the device until a slot is free and someone waits for it, collect. What is decided depends
on tokens and never on time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import NonFinite, RequestError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kernels.choice import Case, choose_pages
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout.checks import check_request
from jaxrl_llm.rollout.kv_cache import KVPages, copy_pages, init_pages
from jaxrl_llm.rollout.layout import decode_slots, prefill_chunks
from jaxrl_llm.rollout.page_pool import NULL_PAGE, PageAllocator, PrefixCache
from jaxrl_llm.rollout.placement import Placement
from jaxrl_llm.rollout.programs import Drawn, decode, prefill
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.rollout.scheduler import Admission, Request, Sample, Scheduler, check_pages
from jaxrl_llm.rollout.settings import EngineConfig, EngineStats, default_pool
from jaxrl_llm.rollout.weights import Form, cast, pack
from jaxrl_llm.types import Rollout

# Rows of every program are a multiple: XLA's CPU code for other numbers of rows, and for one row,
# adds in another order, so a sample's last bits would depend on its company.
ROW_MULTIPLE = 16
# Those who wait are let in when their prompts fill a chunk, but not before the first and not after
# the second of these shares of the slots is free.
FREE_SHARES = (1 / 16, 1 / 10)
STOP_STRING_STEPS = 8  # between two looks at the text, where stop strings are wanted
WORTH_FEWER_ROWS = 16  # steps that must remain before the host turns to a program of fewer rows

__all__ = ["Engine", "EngineConfig", "EngineStats", "Request", "SamplingParams"]


@functools.partial(jax.jit, static_argnames=("form", "dtype"))
def _pack(params: Params, form: Form, dtype: str | None) -> Params:
    return pack(cast(params, dtype), form)


class Engine:
    """Samples completions from one set of weights; see the module's docstring.

    Args:
        model_config: the decoder's traits.
        params: its parameters in the stacked layout of `models.transformer`; copied.
        config: sizes.
        version: the number that every token drawn from these weights carries.
        decode_text: from a completion's tokens to its text; only stop strings need it.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: Params,
        config: EngineConfig,
        *,
        version: int = 0,
        decode_text: Callable[[Sequence[int]], str] | None = None,
    ):
        self._decode_text = decode_text
        # Scalings of rotary frequencies that depend on the length are the same for all requests.
        context = model_config.context or config.max_prompt_tokens + config.max_new_tokens
        model_config = dataclasses.replace(
            model_config, context=context, attention_backend=config.attention_backend
        )
        self.model_config, self.config = model_config, config
        self.num_pages = config.num_pages or default_pool(config)
        self.stats = EngineStats()
        self._programs: set[tuple] = set()
        self._prefixes: PrefixCache | None = None
        if config.prefix_cache:
            self._prefixes = PrefixCache(PageAllocator(self.num_pages), config.page_size)
        self._prompt_logps: dict[int, np.ndarray] = {}  # by the request's identity
        self._generating = False
        self._table_width = -(
            -(config.max_prompt_tokens + config.max_new_tokens) // config.page_size
        )
        self._dtype = "bfloat16" if config.weights == "bfloat16" else None
        dtype = jnp.dtype(self._dtype or params["embed"].dtype)
        on_cpu = jax.default_backend() == "cpu"
        self._form: Form = "left" if on_cpu and jnp.finfo(dtype).bits >= 32 else "plain"
        if config.weights == "int8":
            self._form = "int8"
        self._params: Params | None = None
        self.set_params(params, version)
        self._make_pages = functools.partial(
            init_pages, model_config, self.num_pages, config.page_size, dtype
        )
        self._pages: KVPages | None = None
        viewed = config.attention == "view" or (config.attention == "auto" and on_cpu)
        if not viewed or config.attention_backend not in ("auto", "xla"):
            case = Case.of(model_config, dtype.name, page_size=config.page_size)
            choose_pages(config.attention_backend, case)
        self._placement = Placement(
            model_config,
            dtype,
            table_width=self._table_width,
            page_size=config.page_size,
            viewed=viewed,
            count_program=self._count_program,
        )

    def set_params(self, params: Params, version: int) -> None:
        """New weights, from the next decode call on; legal while `generate` is under way.

        They are copied (layer by layer into separate buffers, by one compiled program), so the
        caller may donate its own. The old ones are freed first, and pages kept of earlier prompts
        are forgotten.
        """
        if self._prefixes:
            self._prefixes.clear()
        self._params = None
        self._params = self._packed(params)
        self.version = version

    def _packed(self, params: Params) -> Params:
        """The engine's own copy of parameters."""
        return _pack(params, self._form, self._dtype)

    def release(self) -> None:
        """Free weights, pages and their view until the next `set_params`: room for an update.

        Raises:
            RequestError: a `generate` is under way.
        """
        if self._generating:
            raise RequestError(
                "the engine is generating", hint="finish or close the iterator first"
            )
        if self._prefixes:
            self._prefixes.clear()
        self._params = self._pages = None

    def check(self, request: Request) -> None:
        """Raises RequestError if `request` can never be served by this engine."""
        reads = self._decode_text is not None
        check_request(request, self.config, self.model_config, reads_text=reads)
        check_pages(request, self.config.page_size, self.num_pages)

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Complete every request; rollouts come as they finish, those of a group in any order.

        All requests are checked before anything runs: the first that can never be served raises
        RequestError from this very call, and the engine is as before, so the caller can leave that
        request out (or find all such with `check`) and call again. One call at a time runs on an
        engine; closing the iterator ends it. `completion` is left empty.

        Raises:
            RequestError: a request can never be served, or another `generate` is under way.
            NonFinite: the model gave logits that are not numbers.
        """
        requests = list(requests)
        for request in requests:
            self.check(request)
        return self._generate(requests)

    def _generate(self, requests: list[Request]) -> Iterator[Rollout]:
        if self._generating:
            raise RequestError(
                "this engine is already generating", hint="finish or close the other iterator first"
            )
        if self._params is None:
            raise RequestError("the engine's weights were released", hint="set_params(…) first")
        if self._pages is None:
            self._pages = self._make_pages()
        self._generating = True
        scheduler = self._scheduler()
        try:
            for request in requests:
                scheduler.add(request)
            while scheduler.has_work:
                preempted = scheduler.grow()
                self.stats.preempted += len(preempted)
                self._placement.forget(preempted)
                admission = scheduler.admit()
                self.stats.cached_tokens += scheduler.cached_tokens
                scheduler.cached_tokens = 0
                self.stats.peak_pages = max(self.stats.peak_pages, scheduler.allocator.used)
                self._prefill(admission)
                for sample, reason in self._decode(scheduler):
                    scheduler.finish(sample)
                    yield _rollout(sample, reason, self._prompt_logps.get(id(sample.request)))
        except GeneratorExit:
            raise
        except BaseException:  # Ctrl-C, too: pages may not hold what they should, or be donated
            if self._prefixes:
                self._prefixes.clear()
            self._pages = None
            raise
        finally:
            self._generating = False
            self._placement.clear()
            self._prompt_logps.clear()
            scheduler.abandon()

    # ---- one round ----

    def _prefill(self, admission: Admission) -> None:
        """Compute new prompts in chunks, then copy partial pages to those who write on them."""
        for chunk in prefill_chunks(
            admission.prefills, self.config.prefill_tokens, self._table_width
        ):
            self._count_program("prefill", chunk.scored)
            self._pages, logps = prefill(
                self._params,
                self.model_config,
                self._form,
                self._pages,
                chunk.arrays,
                scored=chunk.scored,
            )
            if logps is not None:
                for request, first, values in chunk.scores(np.asarray(logps)):
                    known = self._prompt_logps.setdefault(
                        id(request), np.empty(len(request.prompt.tokens) - 1, np.float32)
                    )
                    known[first : first + len(values)] = values[: len(known) - first]
            self.stats.prefill_tokens += chunk.tokens
            self.stats.prefill_slots += self.config.prefill_tokens
        size = self.config.slots
        for first in range(0, len(admission.copies), size):
            part = admission.copies[first : first + size]
            pairs = np.full((size, 2), NULL_PAGE, np.int32)
            pairs[: len(part)] = part
            self._count_program("copy", size)
            self._pages = copy_pages(self._pages, pairs[:, 0], pairs[:, 1])
            self.stats.copied_pages += len(part)

    def _decode(self, scheduler: Scheduler) -> list[tuple[Sample, str]]:
        """Decode the running samples for a while; those that ended, with the reason."""
        running = list(scheduler.running)
        rows, fewer = self._rows(len(running))
        if scheduler.has_waiting:
            least, most = (max(1, int(self.config.slots * share)) for share in FREE_SHARES)
            filling = scheduler.startable(self.config.prefill_tokens)
            leave_at = len(running) - min(max(filling, least), most)
        else:
            longest = max(sample.last_position - sample.position for sample in running)
            leave_at = fewer if longest >= WORTH_FEWER_ROWS else 0
        steps = self._steps
        self._pages = self._placement.place(running, rows, steps, self._pages)
        version, placement = self.version, self._placement
        cache, tables = placement.cache(self._pages)
        width = placement.width if tables is None else 0
        edited = any(sample.request.params.edits for sample in running)
        matching = any(sample.request.params.stop_strings for sample in running)
        tops = any(sample.request.params.top_logprobs for sample in running)
        self._count_program("decode", rows, steps, width, edited, tops)
        cache, out = decode(
            self._params,
            self.model_config,
            self._form,
            cache,
            tables,
            decode_slots(placement.rows),
            np.int32(max(leave_at, 0)),
            np.int32(STOP_STRING_STEPS if matching else steps),
            steps=steps,
            edited=edited,
            tops=tops,
        )
        self._pages = placement.keep(cache, self._pages)
        return self._collect(jax.device_get(out), version)

    def _collect(self, drawn: Drawn, version: int) -> list[tuple[Sample, str]]:
        """Hand the rows' tokens to their samples; those that ended, with the reason."""
        steps, rows = int(drawn.count.max()), self._placement.rows
        self.stats.decode_calls += 1
        self.stats.decode_steps += steps
        self.stats.decoded_slots += steps * len(rows)
        self.stats.useful_tokens += int(drawn.count.sum())
        ended = []
        for row, sample in enumerate(rows):
            if sample is None:
                continue
            count = int(drawn.count[row])
            before = len(sample.tokens)
            sample.tokens += drawn.tokens[row, :count].tolist()
            sample.logps += drawn.logps[row, :count].tolist()
            sample.versions += [version] * count
            if wanted := sample.request.params.top_logprobs:
                both = drawn.top_tokens, drawn.top_logps
                sample.tops += zip(*(x[row, :count, :wanted] for x in both), strict=True)
            if not np.isfinite(drawn.logps[row, :count]).all():
                raise NonFinite("the model gave logits that are not finite numbers")
            if (sample.request.params.stop_strings and self._cut(sample, before)) or sample.tokens[
                -1
            ] in sample.request.params.stop_ids:
                ended.append((sample, "stop"))
            elif sample.position >= sample.last_position:
                ended.append((sample, "length"))
        return ended

    def _cut(self, sample: Sample, before: int) -> bool:
        """Whether a token drawn since completes a stop string; what comes after it is dropped.

        Every token is looked at, whatever the decode calls: only tokens decide.
        """
        params = sample.request.params
        for count in range(max(before, params.min_tokens - 1, 0) + 1, len(sample.tokens) + 1):
            text = self._decode_text(sample.tokens[:count])
            if any(stop in text for stop in params.stop_strings):
                self.stats.useful_tokens -= len(sample.tokens) - count
                for values in (sample.tokens, sample.logps, sample.versions, sample.tops):
                    del values[count:]
                return True
        return False

    def _scheduler(self) -> Scheduler:
        config = self.config
        return Scheduler(
            slots=config.slots,
            page_size=config.page_size,
            num_pages=self.num_pages,
            ahead=self._steps,
            prefixes=self._prefixes,
        )

    def _rows(self, running: int) -> tuple[int, int]:
        """Rows of the decode program for so many samples, and of the next smaller one (or 0).

        Programs have all the slots' rows, half of them, and so on down to 16: the tail of the work
        costs what it holds.
        """
        rows = _round_up(self.config.slots)
        while rows > ROW_MULTIPLE and _round_up(rows // 2) >= running:
            rows = _round_up(rows // 2)
        return rows, _round_up(rows // 2) if rows > ROW_MULTIPLE else 0

    @property
    def _steps(self) -> int:
        return min(self.config.decode_steps, self.config.max_new_tokens)

    def _count_program(self, *shape: object) -> None:
        self._programs.add(shape)
        self.stats.programs = len(self._programs)


def _round_up(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _rollout(sample: Sample, reason: str, prompt_logps: np.ndarray | None) -> Rollout:
    tops = [np.stack(x) for x in zip(*sample.tops, strict=True)] or (None, None)
    return Rollout(
        prompt=sample.request.prompt,
        sample=sample.index,
        tokens=np.asarray(sample.tokens, np.int32),
        logp_sampler=np.asarray(sample.logps, np.float32),
        mask=np.ones(len(sample.tokens), np.bool_),
        weights_version=np.asarray(sample.versions, np.int32),
        finish_reason=reason,
        top_tokens=tops[0],
        top_logps=tops[1],
        prompt_logps=prompt_logps,
    )
