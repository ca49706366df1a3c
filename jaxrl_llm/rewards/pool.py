# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Scores finished rollouts in other processes while the device still samples the rest."""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards.base import RewardFn, RewardRows, combine, judge
from jaxrl_llm.rewards.workers import WorkerFailed, WorkerLost, Workers
from jaxrl_llm.types import Reward, Rollout

_PROTOCOL = pickle.HIGHEST_PROTOCOL


class ScoringPool:
    """Rewards of rollouts as they finish: `submit` each, then `gather` the verdicts on all.

        pool = ScoringPool(rows)
        rollouts = []
        for rollout in engine.generate(requests):
            pool.submit(rollout)
            rollouts.append(rollout)
        rewards = pool.gather(rollouts)

    A reward travels if it has the attribute `judges_alone = True`, which says that its verdict on a
    rollout depends on no other rollout, and can be pickled: then each rollout is judged alone, in a
    worker process. One that also has `stays = True`, as a model on this process's devices has, is
    called in `gather`. Any other reward is called there with all rollouts at once. The time spent
    in `gather` is what was not hidden behind sampling.

    `gather` is `alone` and `together`: who has several processes calls `alone` with the rollouts of
    each, and `together` with all of them.

    Args:
        rows: as for `jaxrl_llm.rewards.base.score`.
        workers: worker processes, started only if a reward travels; 0: none travels.
        cpu_s: CPU seconds for one rollout.
        wall_s: seconds for one rollout, for rewards that wait for something.

    Attributes:
        local: names of the rewards that are judged in this process.
    """

    def __init__(
        self,
        rows: RewardRows,
        *,
        workers: int,
        cpu_s: float = 60.0,
        wall_s: float = 600.0,
    ):
        self._rows = dict(rows)
        self._compared = {name: row for name, row in self._rows.items() if not _alone(row)}
        travelling = {name: _packed(row) if workers else None for name, row in self._rows.items()}
        self.local = tuple(name for name, packed in travelling.items() if packed is None)
        self._packed = {name: packed for name, packed in travelling.items() if packed is not None}
        self._pending: dict[int, futures.Future] = {}
        self._workers: Workers | None = None
        if self._packed:
            self._start(workers, cpu_s, wall_s)

    def _start(self, count: int, cpu_s: float, wall_s: float) -> None:
        self._workers = Workers(
            "jaxrl_llm.rewards.pool:judge_one",
            count=count,
            cpu_s=cpu_s,
            wall_s=wall_s,
            # The accelerator is the sampler's; modules are found where they are found here.
            environment={
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )
        self._threads = futures.ThreadPoolExecutor(count, thread_name_prefix="scoring")
        for _ in range(count):  # they import while the model still loads
            self._threads.submit(self._start_one)

    @property
    def lost(self) -> int:
        """Rollouts so far whose functions used up their time or ended the process; they are not
        judged (None), and their worker is replaced."""
        return self._workers.lost if self._workers else 0

    def submit(self, rollout: Rollout) -> None:
        """Begins to score a rollout; returns at once."""
        if self._packed:
            self._pending[id(rollout)] = self._threads.submit(self._judge, rollout)

    def gather(self, rollouts: Sequence[Rollout]) -> list[Reward | None]:
        """Waits for the verdicts on these rollouts, in this order; scores what was not submitted.

        Raises:
            RewardError: as `score` does, or if no worker process can be started.
        """
        if not rollouts:
            return []
        return self.combine(self.alone(rollouts) | self.together(rollouts), rollouts)

    def alone(self, rollouts: Sequence[Rollout]) -> dict[str, list[Reward | None]]:
        """What the rewards that judge each rollout by itself say, by name; raises as `gather`."""
        if not rollouts:
            return {name: [] for name in self._rows if name not in self._compared}
        pending = {}
        for rollout in rollouts:
            if id(rollout) not in self._pending:
                self.submit(rollout)
            if self._packed:
                pending[id(rollout)] = self._pending.pop(id(rollout))
        judged: dict[str, list[Reward | None]] = {name: [] for name in self._packed}
        try:
            for rollout in rollouts if self._packed else ():
                verdicts = pending[id(rollout)].result()
                for name in self._packed:
                    judged[name].append(verdicts[name])
        finally:
            for future in pending.values():
                future.cancel()
        here = [name for name in self.local if name not in self._compared]
        return judged | judge({name: self._rows[name] for name in here}, rollouts)

    def together(self, rollouts: Sequence[Rollout]) -> dict[str, list[Reward | None]]:
        """What all other rewards say of all these rollouts at once; raises as `gather`."""
        return (
            judge(self._compared, rollouts) if rollouts else {name: [] for name in self._compared}
        )

    def combine(
        self, judged: Mapping[str, Sequence[Reward | None]], rollouts: Sequence[Rollout]
    ) -> list[Reward | None]:
        """One verdict for each rollout from what all rewards say; raises as `gather`."""
        return combine(self._rows, judged, rollouts)

    def close(self) -> None:
        """Ends the worker processes."""
        if self._workers is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._workers.close()

    def __enter__(self) -> ScoringPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _judge(self, rollout: Rollout) -> dict[str, Reward | None]:
        request = pickle.dumps((self._packed, pickle.dumps(rollout, _PROTOCOL)), _PROTOCOL)
        try:
            verdicts, complaint = pickle.loads(self._workers.call(request))
        except WorkerLost:
            return dict.fromkeys(self._packed)
        except WorkerFailed as error:
            raise RewardError(
                "the processes that score rollouts don't start", got=str(error)
            ) from None
        if complaint is not None:
            what, rest = complaint
            raise RewardError(what, **rest)
        return verdicts

    def _start_one(self) -> None:
        with contextlib.suppress(WorkerFailed, WorkerLost, RuntimeError):
            self._workers.call(b"")


def _function(row: Any) -> RewardFn:
    return row[0] if isinstance(row, tuple) else row


def _alone(row: Any) -> bool:
    """Whether a reward's verdict on a rollout depends on no other rollout."""
    return bool(getattr(_function(row), "judges_alone", False))


def _packed(row: Any) -> bytes | None:
    """A reward as bytes, or None if it has to stay in this process."""
    import cloudpickle

    fn = _function(row)
    if not _alone(row) or getattr(fn, "stays", False):
        return None
    module = sys.modules.get(getattr(fn, "__module__", None) or type(fn).__module__)
    by_value = module is not None and not _importable(module)
    if by_value:  # a config file, which the worker could not import by name
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(fn)
    except Exception:  # whatever an object says that can't be pickled
        return None
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _importable(module: Any) -> bool:
    """Whether a worker, which looks in the same places, finds this module under its name."""
    top = module.__name__.partition(".")[0]
    if top == "__main__":
        return True  # cloudpickle knows what to do
    try:
        spec = importlib.machinery.PathFinder.find_spec(top)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == getattr(sys.modules.get(top), "__file__", None)


# ----------------------------------------------------------------------------
# The worker's side
# ----------------------------------------------------------------------------

_unpacked: dict[bytes, RewardFn] = {}


def judge_one(request: bytes) -> bytes:
    """What a worker does: (packed rewards, rollout) → (verdicts by name, complaint), all
    pickled.
    """
    if not request:
        return b""
    packed, rollout = pickle.load(io.BytesIO(request))
    rollouts: Sequence[Rollout] = [pickle.loads(rollout)]
    verdicts: dict[str, Reward | None] = {}
    complaint = None
    try:
        for name, data in packed.items():
            if data not in _unpacked:
                _unpacked[data] = pickle.loads(data)
            verdicts[name] = judge({name: _unpacked[data]}, rollouts)[name][0]
    except RewardError as error:
        rest = {"got": error.got, "expected": error.expected, "hint": error.hint}
        complaint = error.what, {key: text and str(text) for key, text in rest.items()}
    return pickle.dumps((verdicts, complaint), _PROTOCOL)
