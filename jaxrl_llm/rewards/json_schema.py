# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A reward for completions that are JSON of a given schema."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards.code import last_fenced_block
from jaxrl_llm.types import Rollout

_MOST_CHARACTERS = 200_000


@dataclasses.dataclass(frozen=True)
class JsonSchema:
    """1 where the completion is JSON that the schema allows, otherwise 0.

    The JSON is the last fenced block, or the whole completion if it has no fence. Duplicate keys,
    NaN and Infinity are not JSON. The schema is the column `schema` of the prompt
    (https://json-schema.org); it may refer to itself only.

    Attributes:
        column: the name of that column.
    """

    column: str = "schema"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [self._verdict(rollout) for rollout in rollouts]

    def _verdict(self, rollout: Rollout) -> float:
        validator = _validator(rollout.prompt.columns[self.column])
        fenced = "```" in rollout.completion or "~~~" in rollout.completion
        text = last_fenced_block(rollout) if fenced else rollout.completion
        if text is None or len(text) > _MOST_CHARACTERS:
            return 0.0
        try:
            value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
            return float(validator.is_valid(value))
        except (ValueError, RecursionError):
            return 0.0


def _validator(schema: Any) -> Any:
    try:
        import jsonschema
        import referencing
    except ImportError:
        raise RewardError(
            "judging by a JSON schema needs the package jsonschema",
            hint="pip install 'jaxrl_llm[json]'",
        ) from None
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from None
    return kind(schema, registry=referencing.Registry())  # an empty one: nothing is fetched


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
