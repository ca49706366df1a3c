# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A run whose metrics, samples and report another process shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxrl_llm.sharding.processes import is_first


class Quiet:
    """Stands for `show.Show` and `show_supervised.SupervisedShow`, and shows nothing."""

    def start(self, step: int) -> None: ...

    def evaluation(self, step: int, metrics: Any, samples: Any) -> None: ...

    def step(self, step: int, metrics: Any, samples: Any) -> None: ...

    def stopped(self, step: int) -> None: ...

    def result(self, export: Any) -> dict[str, Any]:
        return {}

    def finished(self, result: Any) -> None: ...

    def close(self) -> None: ...

    def get_state(self) -> dict[str, Any]:
        """Checkpoints hold the state of the process that shows."""
        return {}

    def set_state(self, state: Any) -> None: ...


def shown(make: Callable[[], Any]) -> Any:
    """What shows a run: made by the first process; `Quiet` in the others."""
    return make() if is_first() else Quiet()
