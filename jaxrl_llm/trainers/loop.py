# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Repeat the step: resume, train, evaluate, save, show, stop. Knows nothing of the algorithm."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.checkpoint.manager import CheckpointManager, abstract_like
from jaxrl_llm.errors import NonFinite, UserError
from jaxrl_llm.sharding.processes import exchange, of_first, several
from jaxrl_llm.trainers.run_directory import RunDirectory

Samples = list[Any]  # what a trainer lets people look at; its own `show` knows the kind


@runtime_checkable
class Trainer(Protocol):
    """What the loop repeats.

    Attributes:
        step: steps done.
        updater: its `state` is the pytree of arrays that a checkpoint holds.
    """

    step: int
    updater: Any

    def train_step(self) -> tuple[dict[str, float], Samples]:
        """One step: its metrics and samples."""
        ...

    def host_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the arrays, as JSON values."""
        ...

    def set_host_state(self, state: dict[str, Any]) -> None:
        """Continue where `host_state` was called; the arrays are restored already."""
        ...


@dataclasses.dataclass
class Run:
    """A built run: the trainer and everything around it.

    Attributes:
        trainer: makes the steps.
        total_steps: when the run is done.
        eval_every: steps between held-out evaluations; 0 means before and after only.
        checkpoint_every: steps between checkpoints; the last step is always saved.
        data_state, set_data_state: position in the data, as JSON values, and what else goes on from
            where it was.
        evaluate: → held-out metrics and samples.
        export: writes the HF folder and returns its path.
        show: everything that a person sees; see `monitor`.
        release: ends the processes that the run started.
    """

    directory: RunDirectory
    trainer: Trainer
    checkpoints: CheckpointManager
    total_steps: int
    eval_every: int
    checkpoint_every: int
    data_state: Callable[[], dict[str, Any]]
    set_data_state: Callable[[dict[str, Any]], None]
    evaluate: Callable[[], tuple[dict[str, float], Samples]]
    export: Callable[[], Any]
    show: Any
    release: Callable[[], None] = lambda: None


def train(run: Run) -> int:
    """Train to the end, or until a signal. Returns 0, or 130 / 143 after SIGINT / SIGTERM.

    Raises:
        UserError: what stopped the run; FAILED.txt then tells it too.
    """
    together = True
    try:
        with stop_signals() as stop:
            return _train(run, stop)
    except BaseException as error:
        text = str(error) if isinstance(error, UserError) else traceback.format_exc()
        run.directory.write_text("FAILED.txt", text + "\n")
        # Others may know nothing of it, and wait where this process never comes.
        together = not several()
        raise
    finally:
        with contextlib.suppress(KeyboardInterrupt):
            if together:
                run.checkpoints.close()
            run.release()
            run.show.close()


def _train(run: Run, stop: StopFlag) -> int:
    trainer = run.trainer
    run.directory.begin()
    saved = resume(run)
    if trainer.step == 0:
        metrics, samples = run.evaluate()
        run.show.evaluation(0, metrics, samples)

    while trainer.step < run.total_steps and not stop.agreed():
        # ── one step ──────────────────────────────────────────────────────────────────────────────
        try:
            metrics, samples = trainer.train_step()
        except NonFinite as error:
            run.checkpoints.wait()  # what is said to be kept is on disk
            kept = f"the last good checkpoint is step {saved}" if saved else "none was saved yet"
            raise NonFinite(
                f"{error.what}; steps {saved + 1}–{trainer.step + 1} are lost, {kept}",
                got=error.got,
                hint=error.hint,
            ) from error
        step, last = trainer.step, trainer.step == run.total_steps

        # ── held-out evaluation, curves, samples ──────────────────────────────────────────────────
        if last or (run.eval_every and step % run.eval_every == 0):
            heldout, heldout_samples = run.evaluate()
            metrics |= heldout
            run.show.evaluation(step, {}, heldout_samples)
        run.show.step(step, metrics, samples)

        # ── checkpoint: parameters, optimiser, data position, all of the same step ────────────────
        if last or step % run.checkpoint_every == 0:
            save(run)
            saved = step

    if saved < trainer.step:
        save(run)
    run.checkpoints.wait()
    if trainer.step < run.total_steps:
        run.show.stopped(trainer.step)
        return stop.exit_code
    result = run.show.result(run.export())
    run.directory.write_result(result)
    run.directory.write_text("DONE", time.strftime("%Y-%m-%d %H:%M:%S\n"))
    run.show.finished(result)
    return 0


def resume(run: Run) -> int:
    """Continue from the newest checkpoint, if there is one; returns its step, or 0."""
    # A disk that hosts share may show a checkpoint to some of them later.
    step = of_first(run.checkpoints.latest_step, "newest checkpoint")
    if step is None:
        run.show.start(0)
        return 0
    trainer = run.trainer
    updater = trainer.updater
    updater.state, host = run.checkpoints.restore(step, abstract_like(updater.state))
    trainer.set_host_state(host["trainer"])
    run.set_data_state(host["data"])
    run.show.start(step)
    return step


def save(run: Run) -> None:
    """One checkpoint of everything that the next step depends on."""
    host = {"trainer": run.trainer.host_state(), "data": run.data_state()}
    run.checkpoints.save(run.trainer.step, run.trainer.updater.state, host)


@dataclasses.dataclass
class StopFlag:
    """Set by the first SIGINT or SIGTERM; the step at hand is finished and saved."""

    signum: int | None = None

    @property
    def requested(self) -> bool:
        return self.signum is not None

    def agreed(self) -> bool:
        """Whether any process was told to stop: then all do, after the same step."""
        told = [signum for signum in exchange(self.signum, "signal") if signum is not None]
        if told:
            self.signum = told[0]
        return bool(told)

    @property
    def exit_code(self) -> int:
        return 128 + (self.signum or 0)


@contextlib.contextmanager
def stop_signals() -> Iterator[StopFlag]:
    """Turn the first SIGINT or SIGTERM into a flag; a second SIGINT interrupts at once."""
    flag = StopFlag()

    def handle(signum, frame):
        if flag.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        flag.signum = signum
        print(f"\n{signal.Signals(signum).name}: finishing this step, then saving …", flush=True)

    old = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
