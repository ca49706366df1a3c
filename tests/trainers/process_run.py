# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Run by test_process_runs.py: `jaxrl_llm.train`, which tells what this process did.

``python process_run.py OUT HANG …``: as JSON in the file OUT, prompts that were sampled here,
examples that were tokenised here, rows of each micro-batch that came to devices of this process
(first, behind the last, of how many), and whether the parameters lie on its devices alone. After
step HANG it waits for good.
"""

import functools
import json
import sys
import time

from jaxrl_llm import train as program
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.trainers import encoders, loop


def main(out: str, hang: str, *args: str) -> int:
    sampled, read, rows, told = [], [], [], {}
    generate, train, encode = Engine.generate, loop.train, encoders.encode_rows

    def noted(engine, requests):
        requests = list(requests)
        sampled.append([request.prompt.id for request in requests])
        return generate(engine, requests)

    def encode_noted(records, *args, **how):
        read.append([repr(record) for record in records])
        return encode(records, *args, **how)

    def put_noted(put, batch):
        placed = put(batch)
        tokens = placed.tokens
        slices = [shard.index[0].indices(tokens.shape[0]) for shard in tokens.addressable_shards]
        rows.append(sorted({(first, last, tokens.shape[0]) for first, last, _ in slices}))
        return placed

    def watched(run):
        step = run.trainer.train_step
        learner = run.trainer.updater
        if hasattr(learner, "put"):
            learner.put = functools.partial(put_noted, learner.put)

        def train_step():
            if run.trainer.step == int(hang):
                time.sleep(1000)
            return step()

        run.trainer.train_step = train_step
        code = train(run)
        leaf = run.trainer.updater.params["embed"]
        told["addressable"] = leaf.is_fully_addressable
        return code

    Engine.generate, loop.train, encoders.encode_rows = noted, watched, encode_noted
    code = program.main(args)
    with open(out, "w") as file:
        json.dump({**told, "sampled": sampled, "read": read, "rows": rows}, file)
    return code


if __name__ == "__main__":
    program.leave(main(*sys.argv[1:]))
