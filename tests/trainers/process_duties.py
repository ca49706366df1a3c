# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Run by test_process_duties.py: one of two processes that do together what a run does, but for
its programs: ``python process_duties.py PORT INDEX FOLDER DUTY``. Tells in JSON what it found."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import sys
import time

import numpy as np

from jaxrl_llm.data.stored_runs import RunIdentity
from jaxrl_llm.types import Prompt, Rollout

IDENTITY = RunIdentity.of(0, "", {}, 1, 1.0)


def rollout(sample: int) -> Rollout:
    """One with as many tokens as its number."""
    none = np.zeros(sample, np.int32)
    logp = np.zeros(sample, np.float32)
    prompt = Prompt("p", (1,), "p", "7")
    return Rollout(prompt, sample, none, logp, none == 0, none, "length")


def longest(rollouts):
    most = max(len(r.completion) for r in rollouts)
    return [float(len(r.completion) == most) for r in rollouts]


def order(rollouts):
    return [float(i) for i in range(len(rollouts))]


def letters(rollouts):
    return [float(len(r.completion)) for r in rollouts]


def crowd(rollouts):
    return [float(len(rollouts)) for _ in rollouts]


letters.judges_alone = crowd.judges_alone = True
REWARDS = {"letters": (letters, 0.5), "longest": longest, "order": (order, 0.0)}


def judged(rewards, samples):
    """(sample, reward, its parts) of rollouts that this process hands over, and of all others."""
    from jaxrl_llm.trainers.scoring import Scorer

    scorer = Scorer(rewards, lambda tokens: "a" * len(tokens), workers=0)
    done = [scorer.submit(rollout(sample)) for sample in samples]
    found = scorer.finish(done, lambda r: r.sample)
    return [(r.sample, r.reward.value, r.reward.parts) for r in found]


class Kept:
    """A run directory that forgets."""

    def keep(self, *facts):
        pass


def talk(index: int, folder: pathlib.Path) -> dict:
    """Rewards; what does not match; a directory that process 1 can't write to."""
    from tiny_model import write_tiny_model

    from jaxrl_llm.checkpoint.pretrained import peek
    from jaxrl_llm.config import find_config, load_config
    from jaxrl_llm.data.curriculum import CurriculumConfig
    from jaxrl_llm.data.rollout_store import RolloutStore
    from jaxrl_llm.data.stored_runs import StoredConfig
    from jaxrl_llm.errors import UserError
    from jaxrl_llm.sharding.processes import exchange
    from jaxrl_llm.trainers import run_directory
    from jaxrl_llm.trainers.build import keep_base
    from jaxrl_llm.trainers.build_data import build_data, open_stored

    with open("/proc/self/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:")).split()[1]
    found = {
        "sigterm": int(caught, 16) >> 14 & 1,
        # Process 0 has nothing, as where there are fewer prompts than processes.
        "judged": judged(REWARDS | {"crowd": (crowd, 0.0)}, [[3, 1], [4, 0, 2]][index]),
        "nothing": judged(REWARDS, [[], [1]][index]),
    }

    def refuse(**how):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    if index == 1:
        run_directory.tempfile.TemporaryFile = refuse
    (folder / str(index)).mkdir()
    os.chdir(folder / str(index))  # the same names of other things
    RolloutStore("store", dataclasses.asdict(IDENTITY)).write(1, [rollout(3 + index)])
    write_tiny_model("critic", seed=index)
    pathlib.Path("rates").write_text(json.dumps({"id": "p", "passes": index, "n": 2}))
    _, config = load_config(find_config("tiny_grpo.py"))
    rates = CurriculumConfig(enabled=True, table="rates")
    config = dataclasses.replace(config, curriculum=rates)
    base, tokenizer = peek("tiny-random")
    open_stored(StoredConfig(read=str(folder / "store")), 1, IDENTITY)
    duties = (
        lambda: exchange(index, ["rewards", "signal"][index]),
        lambda: run_directory.open_together(folder / "run", {}, diff=lambda old, new: [], seed=0),
        lambda: open_stored(StoredConfig(read="store"), 1, IDENTITY),
        lambda: keep_base(Kept(), "./critic", "critic.json", "critic"),
        lambda: build_data(config, tokenizer, base, 0),
    )
    found["errors"] = []
    for duty in duties:
        try:
            duty()
        except UserError as error:
            found["errors"].append(str(error))
    # Process 0 is done long before.
    time.sleep(3.0 * index)
    return found


def save(index: int, folder: pathlib.Path) -> None:
    """Two checkpoints; where process 1 should write there is a file."""
    import jax

    from jaxrl_llm.checkpoint.manager import CheckpointManager
    from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh

    place = folder / f"checkpoints.{index}"
    place.mkdir()
    if index == 1:
        (place / "1.orbax-checkpoint-tmp").write_text("in the way")
    split = jax.sharding.NamedSharding(make_mesh(MeshConfig()), jax.P("data"))
    array = jax.make_array_from_callback((2,), split, lambda at: np.arange(2.0)[at])
    manager = CheckpointManager(place)
    for step in (1, 2):
        manager.save(step, {"x": array}, {"step": step})
    manager.wait()


def main(port: str, index: int, folder: str, duty: str) -> int:
    from jaxrl_llm.errors import UserError
    from jaxrl_llm.sharding.joining import start
    from jaxrl_llm.sharding.processes import ProcessConfig, Watchdog

    start(ProcessConfig(f"localhost:{port}", 2, index, lost_after=5.0))
    try:
        with Watchdog(5.0):
            found = {"talk": talk, "save": save}[duty](index, pathlib.Path(folder))
            print(json.dumps(found), flush=True)
            return 143
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    from jaxrl_llm.train import leave

    leave(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
