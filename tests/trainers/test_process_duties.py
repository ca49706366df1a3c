# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What two processes of a run do together, or tell each other when they can't."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

from process_duties import IDENTITY, REWARDS, judged, rollout
from process_group import free_port, killed_at_the_end

from jaxrl_llm.data.rollout_store import RolloutStore

SCRIPT = pathlib.Path(__file__).with_name("process_duties.py")
PLACES = os.pathsep.join(filter(None, sys.path))


def ended(folder, duty):
    """(exit code, output, lines of errors) of both processes."""
    port = free_port()
    group = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(port), str(index), str(folder), duty],
            env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": PLACES},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    with killed_at_the_end(group):
        texts = [process.communicate(timeout=100) for process in group]
    return [
        (process.returncode, out, [x for x in errors.splitlines() if x.startswith("error: ")])
        for process, (out, errors) in zip(group, texts, strict=True)
    ]


def test_together(tmp_path):
    RolloutStore(tmp_path / "store", dataclasses.asdict(IDENTITY)).write(1, [rollout(3)])
    (code, out, errors), (code1, out1, errors1) = ended(tmp_path, "talk")
    # All end with the code of an agreed stop, though the first has nothing more to do.
    assert (code, code1, errors, errors1) == (143, 143, [], [])
    first, second = (json.loads(text.splitlines()[-1]) for text in (out, out1))
    # Until training begins SIGTERM ends a process, as it does a single one.
    assert first["sigterm"] == second["sigterm"] == 0
    # Rewards of all rollouts see all of them, in order; those of each see what is sampled here.
    alone = [[sample, value, parts] for sample, value, parts in judged(REWARDS, [2, 0, 4, 1, 3])]
    for found in (first, second):
        assert [parts.pop("crowd") for _, _, parts in found["judged"]] == [3.0, 2.0, 3.0, 2.0, 3.0]
        assert found["judged"] == alone
        assert found["nothing"] == [[1, 1.5, {"letters": 1.0, "longest": 1.0, "order": 0.0}]]
    places = "the processes are at different places of the program · got "
    assert first["errors"][0].startswith(places + "'rewards' in process 0, 'signal' in process 1")
    assert second["errors"][0].startswith(places + "'signal' in process 1, 'rewards' in process 0")
    told = "process 1 can't write (Read-only file system) in the run directory of process 0 · got "
    assert first["errors"][1].startswith(told) and second["errors"][1] == first["errors"][1]
    another = "process 1 has another set of stored rollouts than process 0 · "
    assert first["errors"][2].startswith(another) and second["errors"][2] == first["errors"][2]
    another = "process 1 has another critic under the name ./critic than process 0 · "
    assert first["errors"][3].startswith(another) and second["errors"][3] == first["errors"][3]
    another = "process 1 has another table of pass rates than process 0 · "
    assert first["errors"][4].startswith(another) and second["errors"][4] == first["errors"][4]
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_one_process_can_not_write_ends_all(tmp_path):
    (code, _, errors), (code1, _, errors1) = ended(tmp_path, "save")
    assert (code, code1, len(errors), len(errors1)) == (2, 2, 1, 1), (errors, errors1)
    told = "a checkpoint can't be written · got "
    assert errors1[0].startswith(f"error: {told}") and "in the way" not in errors1[0]
    assert errors[0].startswith(f"error: process 1 of 2 ended with an error · got {told}")
