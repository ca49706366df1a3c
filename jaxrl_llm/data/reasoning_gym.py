# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Procedural tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym; its extra)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.data.records import Record, Source, check_prompt, clip
from jaxrl_llm.errors import DataError

ANSWER_IN_TAGS = "{question}\n\nGive your final answer between <answer> and </answer>."


@dataclasses.dataclass(frozen=True)
class ReasoningGymTask:
    """Questions of one reasoning-gym data set; score with
    `rewards.reasoning_gym.ReasoningGymScore`.

    Questions are generated with a seed of their own, so that the held-out ones are the same in
    every run. A question that is generated twice is used once.

    Attributes:
        dataset: its name, such as `basic_arithmetic` or `countdown`.
        options: settings of the generator, such as `{"max_terms": 2}`; see its documentation.
        train: how many questions to generate for training.
        heldout: how many to hold out.
        generator_seed: of the questions; not the seed of the run.
        template: the prompt, with `{question}` in it.
        messages: send the prompt as a chat message instead of plain text.
    """

    dataset: str = "basic_arithmetic"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    train: int = 1000
    heldout: int = 100
    generator_seed: int = 0
    template: str = ANSWER_IN_TAGS
    messages: bool = False

    def __post_init__(self) -> None:
        if "{question}" not in self.template:
            raise DataError(
                "the template has no place for the question",
                got=clip(repr(self.template)),
                expected="text with {question} in it",
            )
        if self.train < 1 or self.heldout < 0:
            raise DataError(
                "too few questions", got=f"train={self.train} and heldout={self.heldout}"
            )

    def load(self) -> tuple[Source, Source]:
        """Generates the questions; returns (training records, held-out records).

        The columns of a record are `dataset` and `entry`, which its scorer reads.

        Raises:
            DataError: reasoning-gym is missing, knows no such data set or option, or runs out of
                different questions.
        """
        count = self.train + self.heldout
        try:
            import reasoning_gym

            questions = reasoning_gym.create_dataset(
                self.dataset, size=2 * count, seed=self.generator_seed, **self.options
            )
        except ImportError:
            raise DataError(
                "tasks of reasoning-gym need the package reasoning-gym",
                hint="pip install 'jaxrl_llm[reasoning-gym]'",
            ) from None
        except (ValueError, TypeError, AssertionError) as error:
            raise DataError(
                f"reasoning-gym can't make the data set {self.dataset!r}",
                got=clip(str(error) or type(error).__name__),
                hint="a name of reasoning_gym.factory.DATASETS, and options that it has",
            ) from None
        records: dict[str, Record] = {}
        for index in range(2 * count):
            if len(records) == count:
                break
            entry = questions[index]
            records.setdefault(entry["question"], self._record(index, entry))
        if len(records) < count:
            raise DataError(
                f"reasoning-gym made too few different questions of {self.dataset!r}",
                got=len(records),
                expected=f"{count} for training and held out",
                hint="fewer questions, or options that allow more",
            )
        made = list(records.values())
        return made[self.heldout :], made[: self.heldout]

    def _record(self, index: int, entry: Mapping[str, Any]) -> Record:
        text = self.template.replace("{question}", entry["question"])
        prompt = [{"role": "user", "content": text}] if self.messages else text
        check_prompt(prompt, f"{self.dataset} {index}: the question")
        return {
            "id": f"{self.dataset}-{index}",
            "prompt": prompt,
            "answer": entry["answer"],
            "dataset": self.dataset,
            "entry": dict(entry),
        }
