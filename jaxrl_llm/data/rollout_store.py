# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a step in a file: sample once, train on them again; for debugging and comparison.

    store = RolloutStore("runs/grpo/rollouts")
    store.write(step, rollouts)
    rollouts = store.read(step)       # equal in every bit

A file is safetensors: what has an entry a token is in arrays, one after another; everything else is
JSON in a byte array beside them. Nothing in a file is executed, and everything is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.records import clip
from jaxrl_llm.errors import DataError, RunDirectoryError
from jaxrl_llm.types import Prompt, Reward, Rollout

_FORMAT = "jaxrl_llm rollouts 1"
# One entry a completion token, in `Rollout`'s own names.
_PER_TOKEN = {
    "tokens": np.dtype(np.int32),
    "logp_sampler": np.dtype(np.float32),
    "mask": np.dtype(bool),
    "weights_version": np.dtype(np.int32),
}
_ENDS = ("stop", "length")
# What reading JSON of another shape than ours can raise.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
_NAME = re.compile(r"step-(\d{8,})\.safetensors")


class RolloutStore:
    """A folder with one file a step.

    Args:
        folder: made by the first `write`.
        run: JSON values that tell the run which writes from all others; every file carries them.
            None: nobody asks.
    """

    def __init__(self, folder: str | os.PathLike[str], run: Mapping[str, Any] | None = None):
        self.folder = pathlib.Path(folder)
        self.run = run

    def path(self, step: int) -> pathlib.Path:
        return self.folder / f"step-{step:08d}.safetensors"

    def steps(self) -> list[int]:
        """The steps that are there, in order."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def check_own(self, steps: Sequence[int] | None = None) -> None:
        """That these steps, or all that are there, are of this store's run.

        Raises:
            DataError: another run wrote one of them.
        """
        for step in self.steps() if steps is None else steps:
            if read_run(self.path(step)) != self.run:
                raise DataError(
                    f"{self.folder} holds rollouts of another run",
                    got=self.path(step).name,
                    expected="an empty folder, or steps that this run wrote before it was stopped",
                    hint="--rollouts.write=… names another folder",
                )

    def write(self, step: int, rollouts: Sequence[Rollout]) -> pathlib.Path:
        """Writes a step, whole or not at all, over none of another run; see `write_rollouts`."""
        path = self.path(step)
        if path.exists():
            self.check_own([step])
        write_rollouts(path, rollouts, self.run)
        return path

    def digest(self, step: int) -> str:
        """Of a step's file, every byte."""
        with self.path(step).open("rb") as file:
            made = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return made.hexdigest()

    def read(self, step: int, *, vocab_size: int | None = None) -> list[Rollout]:
        """The rollouts of a step; see `read_rollouts`."""
        return read_rollouts(self.path(step), vocab_size=vocab_size)


def write_rollouts(
    path: str | os.PathLike[str],
    rollouts: Sequence[Rollout],
    run: Mapping[str, Any] | None = None,
) -> None:
    """Writes rollouts with their rewards, in order, whole or not at all.

    Args:
        run: JSON values that `read_run` gives back.

    Raises:
        DataError: an answer, a column or a note of a reward is of a type that JSON does not have
            (None, bool, int, float, str, list, tuple and dict are written exactly).
        RunDirectoryError: the file can't be written.
    """
    from safetensors.numpy import save

    prompts: dict[int, int] = {}
    unique: list[Prompt] = []
    for rollout in rollouts:
        if id(rollout.prompt) not in prompts:
            prompts[id(rollout.prompt)] = len(unique)
            unique.append(rollout.prompt)
    table = {
        "prompts": [_prompt_row(prompt) for prompt in unique],
        "rollouts": [_rollout_row(rollout, prompts[id(rollout.prompt)]) for rollout in rollouts],
    }
    arrays = {
        name: _joined([getattr(rollout, name) for rollout in rollouts], dtype)
        for name, dtype in _PER_TOKEN.items()
    }
    arrays["lengths"] = np.array([len(rollout.tokens) for rollout in rollouts], np.int64)
    arrays["prompt_tokens"] = _joined([prompt.tokens for prompt in unique], np.dtype(np.int32))
    arrays["prompt_lengths"] = np.array([len(prompt.tokens) for prompt in unique], np.int64)
    text = json.dumps(table, ensure_ascii=True)
    arrays["table"] = np.frombuffer(text.encode("ascii"), np.uint8)
    metadata = {"format": _FORMAT} | ({} if run is None else {"run": json.dumps(run)})
    path = pathlib.Path(path)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(save(arrays, metadata=metadata))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise RunDirectoryError(f"can't write {path}", got=error.strerror or error) from error


def read_run(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What a file says of the run that wrote it, or None; its arrays are not read.

    Raises:
        DataError: as `read_rollouts`.
    """
    path = pathlib.Path(path)
    try:
        with _opened(path) as file:
            text = file.metadata().get("run")
        run = None if text is None else json.loads(text)
        _demand(run is None or isinstance(run, dict), "what it says of its run is no table")
        return run
    except (_Damaged, *_MALFORMED) as error:
        raise DataError(f"{path} does not hold rollouts", got=clip(str(error))) from error


def read_rollouts(path: str | os.PathLike[str], *, vocab_size: int | None = None) -> list[Rollout]:
    """The rollouts of a file, equal in every bit to those written; `completion` included.

    Rollouts that shared a prompt object share one again.

    Args:
        vocab_size: refuse token ids that the model does not have.

    Raises:
        DataError: the file is missing, cut, damaged, of another kind, or contradicts itself.
    """
    path = pathlib.Path(path)
    try:
        arrays = _arrays(path)
        _check_arrays(arrays, vocab_size)
        table = json.loads(arrays["table"].tobytes())
        prompts = _prompts(table["prompts"], arrays)
        rows = table["rollouts"]
        lengths = arrays["lengths"]
        _demand(isinstance(rows, list) and len(rows) == len(lengths), "rollouts and lengths differ")
        ends = np.cumsum(lengths)
        return [
            _rollout(row, prompts, arrays, slice(int(end - length), int(end)))
            for row, end, length in zip(rows, ends, lengths, strict=True)
        ]
    except _Damaged as error:
        raise DataError(f"{path} does not hold rollouts", got=clip(str(error))) from error
    except _MALFORMED as error:
        raise DataError(
            f"{path} does not hold rollouts",
            got=clip(f"{type(error).__name__}: {error}"),
            expected="a whole file as RolloutStore writes it",
        ) from error


class _Damaged(Exception):
    """What is wrong with a file."""


def _demand(condition: Any, otherwise: str) -> None:
    if not condition:
        raise _Damaged(otherwise)


# --- arrays --------------------------------------------------------------------------------------


def _joined(parts: Sequence[Any], dtype: np.dtype) -> np.ndarray:
    arrays = [np.asarray(part, dtype) if isinstance(part, tuple) else part for part in parts]
    for array in arrays:
        assert array.ndim == 1 and array.dtype == dtype, (array.shape, array.dtype)
    return np.concatenate([np.zeros(0, dtype), *arrays])


def _arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    names = {*_PER_TOKEN, "lengths", "prompt_tokens", "prompt_lengths", "table"}
    with _opened(path) as file:
        _demand(set(file.keys()) == names, "other arrays than those of rollouts")
        return {name: file.get_tensor(name) for name in names}


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[Any]:
    """A file of our kind."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            _demand((file.metadata() or {}).get("format") == _FORMAT, "another kind of file")
            yield file
    except FileNotFoundError:
        raise _Damaged("no such file") from None
    except (SafetensorError, OSError) as error:
        raise _Damaged(str(error) or type(error).__name__) from error


def _check_arrays(arrays: Mapping[str, np.ndarray], vocab_size: int | None) -> None:
    long = np.dtype(np.int64)
    dtypes = _PER_TOKEN | {
        "lengths": long,
        "prompt_lengths": long,
        "prompt_tokens": np.dtype(np.int32),
        "table": np.dtype(np.uint8),
    }
    for name, dtype in dtypes.items():
        array = arrays[name]
        _demand(array.ndim == 1 and array.dtype == dtype, f"{name} is {array.dtype}{array.shape}")
    for lengths, names in (("lengths", tuple(_PER_TOKEN)), ("prompt_lengths", ("prompt_tokens",))):
        counts = arrays[lengths]
        for name in names:
            size = len(arrays[name])
            # Each is checked by itself first: a sum of hostile int64 may wrap to the right one.
            fits = bool(((counts >= 0) & (counts <= size)).all())
            _demand(fits and sum(counts.tolist()) == size, f"{name} and {lengths} differ")
    for name in ("tokens", "prompt_tokens"):
        ids = arrays[name]
        _demand(not len(ids) or ids.min() >= 0, f"{name} has a negative id")
        if vocab_size is not None and len(ids) and ids.max() >= vocab_size:
            raise _Damaged(f"token {ids.max()}, but the model's vocabulary has {vocab_size}")
    _demand(not np.isnan(arrays["logp_sampler"]).any(), "logp_sampler has NaN")
    _demand((arrays["mask"].view(np.uint8) <= 1).all(), "mask has other values than 0 and 1")


# --- rows ----------------------------------------------------------------------------------------


def _prompt_row(prompt: Prompt) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "text": prompt.text,
        "answer": _to_json(prompt.answer, f"the answer of prompt {prompt.id}"),
        "columns": {
            name: _to_json(value, f"the column {name} of prompt {prompt.id}")
            for name, value in prompt.columns.items()
        },
    }


def _rollout_row(rollout: Rollout, prompt: int) -> dict[str, Any]:
    reward = rollout.reward
    return {
        "prompt": prompt,
        "sample": int(rollout.sample),
        "end": rollout.finish_reason,
        "completion": rollout.completion,
        "thinking": rollout.thinking,
        "reply": rollout.reply,
        "reward": None
        if reward is None
        else {
            "value": _number(reward.value),
            "parts": {name: _number(value) for name, value in reward.parts.items()},
            "info": {
                name: _to_json(value, f"the note {name} of a reward")
                for name, value in reward.info.items()
            },
        },
    }


def _number(value: Any) -> int | float:
    return value if type(value) is int else float(value)


def _prompts(rows: Any, arrays: Mapping[str, np.ndarray]) -> list[Prompt]:
    lengths = arrays["prompt_lengths"].tolist()
    _demand(isinstance(rows, list) and len(rows) == len(lengths), "prompts and lengths differ")
    prompts, start = [], 0
    for row, length in zip(rows, lengths, strict=True):
        tokens = tuple(arrays["prompt_tokens"][start : start + length].tolist())
        start += length
        _demand(isinstance(row["id"], str) and isinstance(row["text"], str), "a prompt is no text")
        columns = {name: _from_json(value) for name, value in row["columns"].items()}
        prompts.append(Prompt(row["id"], tokens, row["text"], _from_json(row["answer"]), columns))
    return prompts


def _rollout(
    row: Any, prompts: list[Prompt], arrays: Mapping[str, np.ndarray], place: slice
) -> Rollout:
    prompt, sample, end = row["prompt"], row["sample"], row["end"]
    _demand(type(prompt) is int and 0 <= prompt < len(prompts), f"no prompt {prompt!r}")
    _demand(type(sample) is int and sample >= 0, f"no sample {sample!r}")
    _demand(end in _ENDS, f"unknown end {end!r}")
    texts = row["completion"], row["reply"], row["thinking"] or ""
    _demand(all(isinstance(text, str) for text in texts), "a completion is no text")
    return Rollout(
        prompt=prompts[prompt],
        sample=sample,
        **{name: arrays[name][place].copy() for name in _PER_TOKEN},
        finish_reason=end,
        completion=row["completion"],
        thinking=row["thinking"],
        reply=row["reply"],
        reward=None if row["reward"] is None else _reward(row["reward"]),
    )


def _reward(row: Any) -> Reward:
    value, parts = row["value"], row["parts"]
    numbers = [value, *parts.values()]
    _demand(all(type(number) in (int, float) for number in numbers), "a reward is no number")
    _demand(math.isfinite(value), f"a reward is {value}")
    return Reward(value, parts, {name: _from_json(note) for name, note in row["info"].items()})


# --- values that JSON has no words for: a list and a tuple must not become the same ---------------


def _to_json(value: Any, what: str) -> Any:
    """The value with tuples as {"$tuple": […]}, other than plain dicts as {"$dict": [[k, v]]}."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_to_json(item, what) for item in value]
    if type(value) is tuple:
        return {"$tuple": [_to_json(item, what) for item in value]}
    if type(value) is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _to_json(item, what) for key, item in value.items()}
        pairs = [[_to_json(key, what), _to_json(item, what)] for key, item in value.items()]
        return {"$dict": pairs}
    raise DataError(
        f"{what} can't be stored",
        got=f"a {type(value).__name__}",
        expected="None, numbers, text, lists, tuples and dicts of them",
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"$tuple"}:
            return tuple(_from_json(item) for item in value["$tuple"])
        if value.keys() == {"$dict"}:
            return {_from_json(key): _from_json(item) for key, item in value["$dict"]}
        return {key: _from_json(item) for key, item in value.items()}
    return value
