# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Pages by number: who holds how many of them, and which prompts' pages are worth keeping."""

from __future__ import annotations

import collections
import itertools

NULL_PAGE = 0


class PageAllocator:
    """Pages 1 .. num_pages − 1 with reference counts; page 0 takes the writes that nobody wants."""

    def __init__(self, num_pages: int):
        assert num_pages >= 2, num_pages
        self.num_pages = num_pages
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_pages - 1 - len(self._free)

    def allocate(self, count: int) -> list[int]:
        assert count <= self.free, (count, self.free)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            assert self.references[page] == 0, page
            self.references[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        for page in pages:
            assert self.references[page] > 0, page
            self.references[page] += 1

    def release(self, pages: list[int]) -> None:
        for page in pages:
            assert self.references[page] > 0, page
            self.references[page] -= 1
            if self.references[page] == 0:
                self._free.append(page)


class PrefixCache:
    """Full pages of prompts that outlive their requests, for later prompts that begin the same.

    A page is known by its tokens and by the page before it, so that it stands for the whole prompt
    up to its end. The cache holds a reference to each; when there is no room, those that nobody
    else holds go, those first that were not asked for longest, and of one prompt its last first.
    """

    def __init__(self, allocator: PageAllocator, page_size: int):
        self.allocator, self.page_size = allocator, page_size
        # (number of the entry before, tokens) → (number, page), least recently used first
        self._entries: collections.OrderedDict[tuple[int, tuple[int, ...]], tuple[int, int]] = (
            collections.OrderedDict()
        )
        self._numbers = itertools.count(1)

    @property
    def pages(self) -> list[int]:
        return [page for _, page in self._entries.values()]

    def lookup(self, tokens: tuple[int, ...]) -> list[int]:
        """Pages of the longest known beginning of a prompt, now also held by the caller."""
        keys, pages, before = [], [], 0
        for key_tokens in self._full_pages(tokens):
            entry = self._entries.get((before, key_tokens))
            if entry is None:
                break
            keys.append((before, key_tokens))
            before, page = entry
            pages.append(page)
        self._used(keys)
        self.allocator.share(pages)
        return pages

    def keep(self, tokens: tuple[int, ...], pages: list[int]) -> None:
        """Remember the full pages of a prompt."""
        keys, before = [], 0
        for key_tokens, page in zip(self._full_pages(tokens), pages, strict=True):
            key = (before, key_tokens)
            if key not in self._entries:
                self.allocator.share([page])
                self._entries[key] = (next(self._numbers), page)
            keys.append(key)
            before = self._entries[key][0]
        self._used(keys)

    def make_room(self, count: int) -> None:
        """Give up pages that nobody else holds until `count` are free, if that many there are."""
        allocator = self.allocator
        unused = [k for k, (_, page) in self._entries.items() if allocator.references[page] == 1]
        missing = count - allocator.free
        if missing <= len(unused):
            for key in unused[: max(missing, 0)]:
                allocator.release([self._entries.pop(key)[1]])

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self.allocator.release(self.pages)
        self._entries.clear()

    def _full_pages(self, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        size = self.page_size
        return [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]

    def _used(self, keys: list[tuple[int, tuple[int, ...]]]) -> None:
        for key in reversed(keys):
            self._entries.move_to_end(key)
