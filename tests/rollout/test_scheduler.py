# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The scheduler without a device: pages, sharing, order, and no deadlock."""

from __future__ import annotations

import collections
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.errors import RequestError
from jaxrl_llm.rollout.page_pool import NULL_PAGE, PageAllocator, PrefixCache
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.rollout.scheduler import PageNeed, Prefill, Request, Scheduler
from jaxrl_llm.types import Prompt


def request(prompt_tokens: int, max_tokens: int, n: int = 1, uid: int = 0) -> Request:
    prompt = Prompt(id=f"r{uid}", tokens=tuple(range(prompt_tokens)), text="")
    return Request(prompt, SamplingParams(max_tokens=max_tokens), n=n, uid=uid)


def owners(scheduler: Scheduler) -> collections.Counter:
    """How often each page is held, counted from the running samples and the group under way."""
    held = collections.Counter()
    for sample in scheduler.running:
        held.update(sample.pages)
    for group in scheduler._waiting:
        held.update(group.pages or [])
    if scheduler._prefixes:
        held.update(scheduler._prefixes.pages)
    return held


def check_pages(scheduler: Scheduler) -> None:
    allocator = scheduler.allocator
    held = owners(scheduler)
    assert NULL_PAGE not in held
    assert all(held[page] == allocator.references[page] for page in range(allocator.num_pages))
    free = allocator._free
    assert len(set(free)) == len(free) and not set(free) & set(held)
    assert len(free) + len(held) == allocator.num_pages - 1


def writable(sample, page_size: int) -> list[int]:
    """Pages on which the sample writes: those at or after the prompt's end."""
    return sample.pages[len(sample.request.prompt.tokens) // page_size :]


def test_page_need():
    """10 tokens fill 2.5 pages of 4; of 5 new ones the last is never read: they end with page 4."""
    assert PageNeed.of(10, 5, 4) == PageNeed(shared=2, own=2, partial=True)
    assert PageNeed.of(8, 1, 4) == PageNeed(shared=2, own=0, partial=False)
    assert PageNeed.of(8, 2, 4) == PageNeed(shared=2, own=1, partial=False)
    assert PageNeed.of(1, 1, 4) == PageNeed(shared=0, own=1, partial=True)
    assert PageNeed.of(10, 5, 4).least(1) == 4
    assert PageNeed.of(10, 5, 4).least(2) == 5  # the second sample needs the pristine template
    assert PageNeed.of(8, 5, 4).least(2) == 3


def test_how_many_can_start_with_so_many_tokens_of_prompts():
    scheduler = Scheduler(slots=2, page_size=4, num_pages=64)
    for uid, (tokens, n) in enumerate([(10, 3), (7, 1), (5, 2)]):
        scheduler.add(request(tokens, 5, n=n, uid=uid))
    counts = {9: 0, 10: 3, 16: 3, 17: 4, 21: 4, 22: 6, 99: 6}
    assert {tokens: scheduler.startable(tokens) for tokens in counts} == counts
    scheduler.admit()  # two of the first three: the third costs no prompt
    assert [scheduler.startable(tokens) for tokens in (0, 6, 7, 12)] == [1, 1, 2, 4]


def test_siblings_share_full_prompt_pages_and_own_the_rest():
    scheduler = Scheduler(slots=4, page_size=4, num_pages=64)
    scheduler.add(request(10, 5, n=3))
    admission = scheduler.admit()
    tables = [sample.pages for sample in admission.samples]
    assert len(tables) == 3 and all(len(table) == 4 for table in tables)
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    rest = [page for table in tables for page in table[2:]]
    assert len(set(rest)) == 6
    (prefill,) = admission.prefills
    prompt_pages = prefill.pages
    assert len(prefill.tokens) == 10 and len(prompt_pages) == 3  # computed once
    # two copies of the template; the last sample writes on the template itself
    template = prompt_pages[2]
    assert admission.copies == [(template, tables[0][2]), (template, tables[1][2])]
    assert tables[2][2] == template
    check_pages(scheduler)


def test_a_sample_admitted_late_still_shares_the_prompt():
    scheduler = Scheduler(slots=2, page_size=4, num_pages=64)
    scheduler.add(request(9, 3, n=4))
    first = scheduler.admit()
    prompt_pages = first.prefills[0].pages
    for sample in first.samples:
        scheduler.finish(sample)
        check_pages(scheduler)
    second = scheduler.admit()
    assert second.prefills == []
    assert [sample.index for sample in second.samples] == [2, 3]
    assert all(sample.pages[:2] == prompt_pages[:2] for sample in second.samples)
    for sample in second.samples:
        scheduler.finish(sample)
    assert scheduler.allocator.used == 0 and not scheduler.has_work


def test_freed_pages_are_used_again():
    scheduler = Scheduler(slots=2, page_size=4, num_pages=5)
    seen: set[int] = set()
    for uid in range(4):
        scheduler.add(request(5, 4, uid=uid))
    while scheduler.has_work:
        for sample in scheduler.admit().samples:
            seen |= set(sample.pages)
        check_pages(scheduler)
        scheduler.finish(scheduler.running[0])
    assert seen == {1, 2, 3, 4}  # total demand: 8 pages


def test_first_come_first_served():
    """A small request does not overtake a large one that waits for pages."""
    scheduler = Scheduler(slots=4, page_size=4, num_pages=7)
    for uid, tokens in enumerate([12, 20, 2]):
        scheduler.add(request(tokens, 4, uid=uid))
    assert [s.request.uid for s in scheduler.admit().samples] == [0]
    scheduler.finish(scheduler.running[0])
    assert [s.request.uid for s in scheduler.admit().samples] == [1]
    scheduler.finish(scheduler.running[0])
    assert [s.request.uid for s in scheduler.admit().samples] == [2]


def test_a_request_that_never_fits_is_refused():
    scheduler = Scheduler(slots=2, page_size=4, num_pages=5)
    scheduler.add(request(10, 5, n=1))
    with pytest.raises(RequestError, match="got 5 pages"):
        scheduler.add(request(10, 5, n=2))
    assert [s.request.n for s in scheduler.admit().samples] == [1]


def test_allocator_refuses_a_double_release():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.release(pages)
    with pytest.raises(AssertionError):
        allocator.release(pages)


def test_the_newest_gives_its_pages_to_the_oldest():
    """Two samples of 4 + 12 tokens on 6 pages of 4, four tokens at a time: at 8 tokens each both
    ask for a third page; later the pool is one's alone."""
    scheduler = Scheduler(slots=2, page_size=4, num_pages=6, ahead=4)
    for uid in range(2):
        scheduler.add(request(4, 12, uid=uid))
    old, new = scheduler.admit().samples
    assert [len(sample.pages) for sample in (old, new)] == [2, 2]
    for sample in (old, new):
        sample.tokens += [7, 8, 9, 10]
    assert scheduler.grow() == [new]
    assert scheduler.running == [old] and new.pages == [] and new.tokens == [7, 8, 9, 10]
    assert scheduler.admit().samples == []  # 2 free pages, and the other may want one
    check_pages(scheduler)
    scheduler.finish(old)
    admission = scheduler.admit()
    assert admission.samples == [new] and new.prefilled == 8
    # what was drawn is computed again, not drawn again
    assert admission.prefills == [Prefill((0, 1, 2, 3, 7, 8, 9, 10), new.pages)]
    check_pages(scheduler)


@settings(max_examples=300, deadline=None)
@given(
    slots=st.integers(2, 6),
    page_size=st.sampled_from([1, 2, 4, 16]),
    num_pages=st.integers(2, 40),
    ahead=st.integers(1, 20),
    sizes=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(1, 7)), max_size=12
    ),
    cached=st.booleans(),
    data=st.data(),
)
def test_every_sample_runs_once_and_no_page_is_lost(
    slots, page_size, num_pages, ahead, sizes, cached, data
):
    """Random requests arrive while others run, draw tokens, and end early or at their last. With a
    prefix cache (all prompts here begin the same) pages stay, stand for the tokens that were
    computed into them, and go when others need them or the weights change."""
    prefixes = PrefixCache(PageAllocator(num_pages), page_size) if cached else None
    scheduler = Scheduler(
        slots=slots, page_size=page_size, num_pages=num_pages, ahead=ahead, prefixes=prefixes
    )
    computed: dict = {}  # what each page holds of a prompt
    expected, done = [], []
    known: dict = {}  # what each sample has drawn: it stands, whatever happens to its pages
    arrivals = collections.deque(
        request(prompt, new, n, uid) for uid, (prompt, new, n) in enumerate(sizes)
    )
    while arrivals or scheduler.has_work:
        if arrivals and data.draw(st.booleans() if scheduler.has_work else st.just(True)):
            arriving = arrivals.popleft()
            need = PageNeed.of(len(arriving.prompt.tokens), arriving.params.max_tokens, page_size)
            if need.least(arriving.n) > num_pages - 1:
                with pytest.raises(RequestError):
                    scheduler.add(arriving)
            else:
                scheduler.add(arriving)
                expected += [(arriving.uid, index) for index in range(arriving.n)]
        oldest = min(scheduler.running, key=lambda s: s.order, default=None)
        preempted = scheduler.grow()
        assert oldest is None or oldest not in preempted
        assert all(sample.pages == [] for sample in preempted)
        admission = scheduler.admit()
        check_pages(scheduler)
        for prefill in admission.prefills:
            for i, page in enumerate(prefill.pages):
                if i * page_size >= prefill.start:
                    computed[page] = prefill.tokens[i * page_size : (i + 1) * page_size]
        for sample in admission.samples:
            tokens = sample.request.prompt.tokens
            for i in range(len(tokens) // page_size):
                full = tokens[i * page_size : (i + 1) * page_size]
                assert computed[sample.pages[i]] == full
        if cached and data.draw(st.integers(0, 7)) == 0:
            prefixes.clear()
            check_pages(scheduler)
        assert len(scheduler.running) <= slots
        assert scheduler.running or not scheduler.has_waiting  # never stuck
        written = [page for s in scheduler.running for page in writable(s, page_size)]
        assert len(set(written)) == len(written)  # nobody writes on another's page
        for sample in scheduler.running:
            assert sample.tokens == known.get((sample.request.uid, sample.index), [])
            assert len(sample.pages) * page_size >= sample.reach(ahead)  # room to draw
        for sample in admission.samples:
            assert sample.prefilled == sample.position + 1
        targets = [target for _, target in admission.copies]
        assert len(set(targets)) == len(targets)
        for sample in list(scheduler.running):
            count = data.draw(st.integers(1, ahead))
            count = min(count, sample.last_position - sample.position)
            sample.tokens += [len(sample.tokens) + i for i in range(count)]
            known[sample.request.uid, sample.index] = list(sample.tokens)
            if sample.position == sample.last_position or data.draw(st.integers(0, 9)) == 0:
                scheduler.finish(sample)
                done.append((sample.request.uid, sample.index))
        check_pages(scheduler)
    assert sorted(done) == sorted(expected)
    assert scheduler.allocator.used == len(prefixes.pages if prefixes else [])


def test_a_known_beginning_is_not_computed_again():
    """A second prompt of which two pages are known, then one that is known to its end."""
    prefixes = PrefixCache(PageAllocator(30), 4)
    scheduler = Scheduler(slots=4, page_size=4, num_pages=30, prefixes=prefixes)
    scheduler.add(request(10, 4, uid=0))
    (first,) = scheduler.admit().prefills
    scheduler.finish(scheduler.running[0])
    scheduler.add(request(14, 4, n=2, uid=1))
    (second,) = scheduler.admit().prefills
    assert (first.start, second.start) == (0, 8) and second.pages[:2] == first.pages[:2]
    scheduler.add(request(12, 4, uid=2))
    assert scheduler.admit().prefills == [] and scheduler.cached_tokens == 8 + 12
    check_pages(scheduler)
    scheduler.abandon()
    assert not scheduler.has_work and scheduler.allocator.used == len(prefixes.pages) == 3
    prefixes.clear()
    assert scheduler.allocator.used == 0


def test_what_was_not_asked_for_longest_goes_first():
    """Two prompts of two pages each are known; the first is asked for again, room is needed."""
    prefixes = PrefixCache(PageAllocator(6), 4)
    pages = {}
    for start in (0, 100):
        tokens = tuple(range(start, start + 8))
        pages[start] = prefixes.allocator.allocate(2)
        prefixes.keep(tokens, pages[start])
        prefixes.allocator.release(pages[start])
    prefixes.allocator.release(prefixes.lookup(tuple(range(8))))
    prefixes.make_room(2)
    assert prefixes.pages == [pages[100][0], *reversed(pages[0])]  # the second's last page went
    prefixes.make_room(6)  # there are not so many: nothing goes
    assert len(prefixes.pages) == 3


@pytest.mark.parametrize("num_pages", [30, pytest.param(90, marks=pytest.mark.full)])
def test_ten_thousand_arrivals_through_sixteen_slots(num_pages):
    """A long run with a scarce pool: every sample once, all pages back, the queue in order."""
    draw = random.Random(num_pages)
    scheduler = Scheduler(slots=16, page_size=4, num_pages=num_pages, ahead=8)
    left, uid, done, preempted = 10_000, 0, collections.Counter(), 0
    while left or scheduler.has_work:
        for _ in range(min(left, draw.randrange(6))):
            scheduler.add(request(draw.randint(1, 30), draw.randint(1, 24), 1 + uid % 3, uid))
            uid, left = uid + 1, left - 1
        preempted += len(scheduler.grow())
        scheduler.admit()
        assert scheduler.allocator.used < num_pages
        for sample in list(scheduler.running):
            count = min(draw.randint(1, 8), sample.last_position - sample.position)
            sample.tokens += [0] * count
            if sample.position == sample.last_position or draw.random() < 0.05:
                scheduler.finish(sample)
                done[sample.request.uid, sample.index] += 1
    assert len(done) == sum(1 + uid % 3 for uid in range(10_000)) and set(done.values()) == {1}
    assert scheduler.allocator.used == 0 and preempted > 100
