# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Run by test_process_runs.py: `jaxrl_llm.train`, which tells what this process did.

``python process_run.py OUT HANG …``: prompts that were sampled here and whether the parameters lie
on devices of this process alone, as JSON in the file OUT. After step HANG it waits for good.
"""

import json
import sys
import time

from jaxrl_llm import train as program
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.trainers import loop


def main(out: str, hang: str, *args: str) -> int:
    sampled, told = [], {}
    generate, train = Engine.generate, loop.train

    def noted(engine, requests):
        requests = list(requests)
        sampled.append([request.prompt.id for request in requests])
        return generate(engine, requests)

    def watched(run):
        step = run.trainer.train_step

        def train_step():
            if run.trainer.step == int(hang):
                time.sleep(1000)
            return step()

        run.trainer.train_step = train_step
        code = train(run)
        leaf = run.trainer.updater.params["embed"]
        told["addressable"] = leaf.is_fully_addressable
        return code

    Engine.generate, loop.train = noted, watched
    code = program.main(args)
    with open(out, "w") as file:
        json.dump({**told, "sampled": sampled}, file)
    return code


if __name__ == "__main__":
    program.leave(main(*sys.argv[1:]))
