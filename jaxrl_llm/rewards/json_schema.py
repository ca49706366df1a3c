# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A reward for completions that are JSON of a given schema."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
from collections.abc import Sequence
from concurrent import futures
from typing import ClassVar

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards.code import last_fenced_block
from jaxrl_llm.rewards.json_schema_worker import validator
from jaxrl_llm.rewards.workers import WorkerFailed, WorkerLost, Workers
from jaxrl_llm.types import Rollout

_MOST_CHARACTERS = 200_000
_MEMORY_BYTES = 2 << 30


@dataclasses.dataclass(frozen=True)
class JsonSchema:
    """1 where the completion is JSON that the schema allows, otherwise 0.

    The JSON is the last fenced block, or the whole completion if it has no fence. Duplicate keys,
    NaN, Infinity and numbers that no float can hold are not JSON. The schema is the column `schema`
    of the prompt (https://json-schema.org); it may refer to itself only.

    JSON of more than 200,000 characters, or that takes too long to judge (by a bad `pattern`, say),
    gets 0. None where no worker process could be started.

    Attributes:
        column: the name of that column.
        cpu_s: CPU seconds for one completion.
    """

    column: str = "schema"
    cpu_s: float = 2.0

    judges_alone: ClassVar[bool] = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        if not rollouts:
            return []
        if importlib.util.find_spec("jsonschema") is None:
            raise RewardError(
                "judging by a JSON schema needs the package jsonschema",
                hint="pip install 'jaxrl_llm[json]'",
            )
        with futures.ThreadPoolExecutor(min(len(rollouts), _workers(self.cpu_s).count)) as pool:
            return list(pool.map(self._verdict, rollouts))

    def _verdict(self, rollout: Rollout) -> float | None:
        schema = json.dumps(rollout.prompt.columns[self.column])
        validator(schema)  # a schema that is none is the task's fault, and stops the run
        fenced = "```" in rollout.completion or "~~~" in rollout.completion
        text = last_fenced_block(rollout) if fenced else rollout.completion
        if text is None or len(text) > _MOST_CHARACTERS:
            return 0.0
        request = f"[{schema}, {json.dumps(text)}]".encode()
        try:
            return float(_workers(self.cpu_s).call(request) == b"true")
        except WorkerLost:
            return 0.0  # the text is what took too long
        except WorkerFailed:
            return None


@functools.cache
def _workers(cpu_s: float) -> Workers:
    return Workers(
        "jaxrl_llm.rewards.json_schema_worker:judge",
        count=os.cpu_count() or 1,
        cpu_s=cpu_s,
        memory_bytes=_MEMORY_BYTES,
    )
