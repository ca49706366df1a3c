# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Who runs, and on which pages: plain Python without a device.

A request of n samples is one *group*. Its prompt is prefilled once, into pages that its samples
share by reference count. The last page of a prompt that does not fill it is a template: each sample
gets a copy to write on, the last sample the template itself.

A sample is admitted, in order of arrival, when a slot is free and the pages for its next tokens
are; more pages come as it grows. When there are none left, the sample that was admitted last is
*preempted*: its pages go to others, and what it has drawn is kept and prefilled again, together
with its prompt, once there is room. The oldest sample is never preempted while another runs, and
can have the whole pool, so every sample ends.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from jaxrl_llm.errors import RequestError
from jaxrl_llm.rollout.page_pool import PageAllocator, PrefixCache
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.types import Prompt


@dataclasses.dataclass(frozen=True)
class Request:
    """Sample `n` completions of `prompt`.

    Attributes:
        prompt: its tokens are read as they are.
        params: how to sample.
        n: completions to draw; they share the prompt's pages.
        uid: a number in 0 .. 2³² − 1 that stays the same wherever and whenever the request runs:
            the draws depend on (params.seed, uid, sample, position) alone.
    """

    prompt: Prompt
    params: SamplingParams
    n: int = 1
    uid: int = 0


@dataclasses.dataclass(frozen=True)
class PageNeed:
    """Pages of one request: `shared` by its samples, `own` of each sample, `partial`: the prompt
    ends within a page, so that each sample's first own page begins as a copy of it."""

    shared: int
    own: int
    partial: bool

    @classmethod
    def of(cls, prompt_tokens: int, max_tokens: int, page_size: int) -> PageNeed:
        """The last token that is drawn is never read, so it needs no room."""
        shared, rest = divmod(prompt_tokens, page_size)
        own = -(-(rest + max_tokens - 1) // page_size)
        return cls(shared, own, rest > 0)

    def least(self, n: int) -> int:
        """The smallest pool (null page aside) in which n samples can run, one after the other."""
        return self.shared + self.own + (1 if self.partial and n > 1 else 0)


@dataclasses.dataclass(eq=False)
class Sample:
    """One completion under way. `pages[i]` holds positions i·page_size and up.

    `prefilled`: how many tokens the prefill computes (again, after a preemption); the keys and
    values of later ones are written as they are drawn. `order`: of arrival.
    """

    request: Request
    index: int
    pages: list[int]
    order: int = 0
    prefilled: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    logps: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    tops: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)

    @property
    def next_input(self) -> int:
        """The token whose successor is drawn next: the last of prompt and completion."""
        return self.tokens[-1] if self.tokens else self.request.prompt.tokens[-1]

    @property
    def position(self) -> int:
        """The position of `next_input`."""
        return len(self.request.prompt.tokens) + len(self.tokens) - 1

    @property
    def last_position(self) -> int:
        """The position of the last token that may be drawn."""
        return len(self.request.prompt.tokens) + self.request.params.max_tokens - 1

    def reach(self, ahead: int) -> int:
        """How many positions are kept once `ahead` more tokens are drawn: the last is never read,
        so it needs no room."""
        return min(self.last_position, self.position + ahead)


@dataclasses.dataclass(eq=False)
class _Group:
    """A request whose samples are not all admitted; holds its prompt's pages once they exist."""

    request: Request
    need: PageNeed
    admitted: int = 0
    pages: list[int] | None = None


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Tokens whose keys and values are to be computed, from number `start` on, and all their pages.

    `scored`: the request whose prompt is to be scored, if so.
    """

    tokens: tuple[int, ...]
    pages: list[int]
    start: int = 0
    scored: Request | None = None


@dataclasses.dataclass(frozen=True)
class Admission:
    """What the device has to do, in this order, before the samples decode.

    Attributes:
        prefills: prompts to compute.
        copies: pages to copy: (from, to).
        samples: the samples that now run.
    """

    prefills: list[Prefill]
    copies: list[tuple[int, int]]
    samples: list[Sample]


def check_pages(request: Request, page_size: int, num_pages: int) -> None:
    """Raises RequestError if `request` could not run even with the whole pool to itself."""
    need = PageNeed.of(len(request.prompt.tokens), request.params.max_tokens, page_size)
    least = need.least(request.n)
    if least > num_pages - 1:
        raise RequestError(
            f"request {request.uid} ({request.prompt.id!r}) needs more pages than there are",
            got=f"{least} pages of {page_size} tokens",
            expected=f"at most {num_pages - 1}",
            hint="a shorter prompt, fewer max_tokens, or a larger num_pages",
        )


class Scheduler:
    """First come, first served, over `slots` places and one pool of pages.

    Args:
        ahead: tokens for which a sample gets room at a time.
        prefixes: pages of earlier prompts, whose pool is then used.
    """

    def __init__(
        self,
        *,
        slots: int,
        page_size: int,
        num_pages: int,
        ahead: int = 64,
        prefixes: PrefixCache | None = None,
    ):
        self.slots, self.page_size, self.ahead = slots, page_size, ahead
        self.allocator = prefixes.allocator if prefixes else PageAllocator(num_pages)
        self._prefixes = prefixes
        self.cached_tokens = 0  # of prompts, that were not computed again
        self.running: list[Sample] = []
        self._preempted: list[Sample] = []
        self._waiting: collections.deque[_Group] = collections.deque()
        self._arrivals = 0

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting or self._preempted)

    @property
    def has_work(self) -> bool:
        return bool(self.has_waiting or self.running)

    def check(self, request: Request) -> None:
        """Raises RequestError if the request could not run even with the whole pool to itself."""
        check_pages(request, self.page_size, self.allocator.num_pages)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.check(request)
        self._waiting.append(_Group(request, self._need(request)))

    def admit(self) -> Admission:
        """Start as many samples as there are slots and pages for, in order of arrival; those that
        were preempted come first."""
        admission = Admission([], [], [])
        while self._preempted and len(self.running) < self.slots:
            if not self._resume(self._preempted[0], admission):
                return admission
            del self._preempted[0]
        while self._waiting and len(self.running) < self.slots:
            group = self._waiting[0]
            if not self._start_next(group, admission):
                break
            if group.admitted == group.request.n:
                self._waiting.popleft()
        return admission

    def startable(self, tokens: int) -> int:
        """How many of those that wait can start with at most so many tokens to be prefilled."""
        count = 0
        for sample in self._preempted:
            tokens -= sample.position
            if tokens < 0:
                return count
            count += 1
        for group in self._waiting:
            tokens -= 0 if group.admitted else len(group.request.prompt.tokens)
            if tokens < 0:
                break
            count += group.request.n - group.admitted
        return count

    def grow(self) -> list[Sample]:
        """Room for the next `ahead` tokens of every running sample; those preempted for it."""
        preempted = []
        for sample in sorted(self.running, key=lambda s: s.order):
            while sample in self.running and (missing := self._missing(sample)):
                if self._room(missing):
                    sample.pages += self.allocator.allocate(missing)
                elif len(self.running) > 1:
                    preempted.append(self._preempt(max(self.running, key=lambda s: s.order)))
                else:
                    self._drop_waiting_pages()
        return preempted

    def finish(self, sample: Sample) -> None:
        """The sample is complete: its slot and its pages are free."""
        self.running.remove(sample)
        self.allocator.release(sample.pages)

    def abandon(self) -> None:
        """Nobody waits for what is left: all its pages are free."""
        for sample in list(self.running):
            self.finish(sample)
        self._release_waiting()
        self._waiting.clear()
        self._preempted.clear()

    def _room(self, pages: int) -> bool:
        """Whether so many pages are free, once those kept for prompts to come have gone."""
        if self._prefixes and pages > self.allocator.free:
            self._prefixes.make_room(pages)
        return pages <= self.allocator.free

    def _need(self, request: Request) -> PageNeed:
        return PageNeed.of(len(request.prompt.tokens), request.params.max_tokens, self.page_size)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _missing(self, sample: Sample) -> int:
        return max(0, self._pages_for(sample.reach(self.ahead)) - len(sample.pages))

    def _preempt(self, sample: Sample) -> Sample:
        self.finish(sample)
        sample.pages = []
        self._preempted.append(sample)
        self._preempted.sort(key=lambda s: s.order)
        return sample

    def _drop_waiting_pages(self) -> None:
        """A group that waits gives up its prompt's pages; its next sample prefills them again."""
        held = self._release_waiting()
        assert held, "the whole pool is too small for one sample"

    def _release_waiting(self) -> int:
        held = [group for group in self._waiting if group.pages is not None]
        for group in held:
            self.allocator.release(group.pages)
            group.pages = None
        return len(held)

    def _resume(self, sample: Sample, admission: Admission) -> bool:
        """Start a preempted sample again, with some room to spare for those that run."""
        known = (*sample.request.prompt.tokens, *sample.tokens)
        pages = self._pages_for(max(len(known), sample.reach(self.ahead)))
        if self.running:
            if not self._room(pages + len(self.running)):
                return False
        elif not self._room(pages):
            self._drop_waiting_pages()
            self._room(pages)
        sample.pages = self.allocator.allocate(pages)
        sample.prefilled = len(known)
        admission.prefills.append(Prefill(known, list(sample.pages)))
        self.running.append(sample)
        admission.samples.append(sample)
        return True

    def _start_next(self, group: _Group, admission: Admission) -> bool:
        """Admit the group's next sample, if the pages for its next tokens are free."""
        need, allocator, request = group.need, self.allocator, group.request
        last = group.admitted == request.n - 1
        template = 1 if need.partial else 0
        sample = Sample(request, group.admitted, [], self._arrivals, len(request.prompt.tokens))
        own = max(template, self._pages_for(sample.reach(self.ahead)) - need.shared)
        fresh = own - (template if last else 0)
        if group.pages is None:
            if not self._start_prompt(group, fresh, admission):
                return False
        elif not self._room(fresh):
            return False
        pages = allocator.allocate(fresh)
        if last:  # the group's own hold on its pages passes to its last sample
            sample.pages = group.pages + pages
            group.pages = None
        else:
            shared = group.pages[: need.shared]
            allocator.share(shared)
            sample.pages = shared + pages
            if need.partial:
                admission.copies.append((group.pages[-1], pages[0]))
        group.admitted += 1
        self._arrivals += 1
        self.running.append(sample)
        admission.samples.append(sample)
        return True

    def _start_prompt(self, group: _Group, spare: int, admission: Admission) -> bool:
        """Pages for the group's prompt, known ones as far as there are, if `spare` are left."""
        tokens, need = group.request.prompt.tokens, group.need
        scored = group.request if group.request.params.prompt_logprobs else None
        known = self._prefixes.lookup(tokens) if self._prefixes and not scored else []
        more = need.shared - len(known) + (1 if need.partial else 0)
        if not self._room(more + spare):
            self.allocator.release(known)
            return False
        group.pages = known + self.allocator.allocate(more)
        start = len(known) * self.page_size
        self.cached_tokens += start
        if start < len(tokens):
            admission.prefills.append(Prefill(tokens, list(group.pages), start, scored))
        if self._prefixes:
            self._prefixes.keep(tokens, group.pages[: need.shared])
        return True
