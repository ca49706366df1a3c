# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which row of the decode program each running sample has, and the rows' view of their pages."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.rollout.kv_cache import KVPages
from jaxrl_llm.rollout.layout import block_tables
from jaxrl_llm.rollout.page_pool import NULL_PAGE
from jaxrl_llm.rollout.programs import Cache
from jaxrl_llm.rollout.scheduler import Sample
from jaxrl_llm.rollout.view import (
    ROWS_AT_A_TIME,
    KVView,
    init_view,
    load_rows,
    store_rows,
    view_width,
)


class Placement:
    """Rows of samples. With a view a sample keeps its row until the view is made anew, with other
    rows or for longer samples; without one they are the running samples in order.

    Args:
        table_width: pages of the longest sequence.
        viewed: whether decoding reads a view, or the pages themselves.
        count_program: told the shapes of every program that is used.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        *,
        table_width: int,
        page_size: int,
        viewed: bool,
        count_program: Callable[..., None],
    ):
        self.rows: list[Sample | None] = []
        self.width = 0
        self._config, self._dtype = config, dtype
        self._table_width, self._page_size = table_width, page_size
        self._viewed, self._count = viewed, count_program
        self._view: KVView | None = None

    def clear(self) -> None:
        """Nobody runs: the view is given back."""
        self.rows, self._view, self.width = [], None, 0

    def forget(self, samples: list[Sample]) -> None:
        """These were preempted: should they run again, they are read from their pages anew."""
        self.rows = [None if sample in samples else sample for sample in self.rows]

    def place(self, running: list[Sample], rows: int, steps: int, pages: KVPages) -> KVPages:
        """Give every running sample a row, with room for `steps` more tokens."""
        if not self._viewed:
            self.rows = [*running, *[None] * (rows - len(running))]
            return pages
        needed = max(sample.reach(steps) for sample in running)
        width = view_width(needed, self._table_width * self._page_size)
        present = set(running)
        self.rows = [sample if sample in present else None for sample in self.rows]
        if self._view is None or len(self.rows) != rows or self.width < width:
            pages = self._store(pages)
            self.rows, self.width, self._view = [None] * rows, width, None
            self._view = init_view(self._config, rows, width, self._dtype)
        placed = set(self.rows)
        self._load([sample for sample in running if sample not in placed], pages)
        return pages

    def cache(self, pages: KVPages) -> tuple[Cache, np.ndarray | None]:
        """What the decode program reads: the view, or the pages and their block tables."""
        if self._viewed:
            return self._view, None
        return pages, block_tables(self.rows, self._table_width)

    def keep(self, cache: Cache, pages: KVPages) -> KVPages:
        """Take back what the decode program returned; the pages."""
        if not self._viewed:
            return cache
        self._view = cache
        return pages

    def _load(self, samples: list[Sample], pages: KVPages) -> None:
        free = [row for row, sample in enumerate(self.rows) if sample is None]
        for first in range(0, len(samples), ROWS_AT_A_TIME):
            part = samples[first : first + ROWS_AT_A_TIME]
            rows = np.full(ROWS_AT_A_TIME, len(self.rows), np.int32)
            for i, sample in enumerate(part):
                rows[i] = free[first + i]
                self.rows[rows[i]] = sample
            tables = block_tables([*part, *[None] * (ROWS_AT_A_TIME - len(part))], self._pages)
            self._count("load", len(self.rows), self.width)
            self._view = load_rows(self._view, pages, tables, rows)

    def _store(self, pages: KVPages) -> KVPages:
        """Write the rows back; full pages of prompts, which may be shared, are left alone."""
        held = [(row, sample) for row, sample in enumerate(self.rows) if sample is not None]
        for first in range(0, len(held), ROWS_AT_A_TIME):
            part = held[first : first + ROWS_AT_A_TIME]
            rows = np.zeros(ROWS_AT_A_TIME, np.int32)
            rows[: len(part)] = [row for row, _ in part]
            samples = [sample for _, sample in part]
            tables = block_tables([*samples, *[None] * (ROWS_AT_A_TIME - len(part))], self._pages)
            for i, sample in enumerate(samples):
                tables[i, : len(sample.request.prompt.tokens) // self._page_size] = NULL_PAGE
            self._count("store", len(self.rows), self.width)
            pages = store_rows(pages, self._view, tables, rows)
        return pages

    @property
    def _pages(self) -> int:
        """Pages of a row of the view."""
        return -(-self.width // self._page_size)
