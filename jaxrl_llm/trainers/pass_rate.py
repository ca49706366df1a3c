# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""How often a model passes each training prompt, measured before training and written as it goes.

The run's own sampler and rewards are used. A row is written as soon as its prompt is judged, and a
prompt that has its row is not sampled again: a measurement that was stopped goes on, and its rows
are those of an undisturbed one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.checkpoint.pretrained import Pretrained, load
from jaxrl_llm.data.curriculum import CurriculumConfig
from jaxrl_llm.data.pass_rates import count_passes, drop_half_line, read_pass_rates
from jaxrl_llm.data.pipeline import check_lengths, make_prompt
from jaxrl_llm.errors import ConfigError, DataError, RunDirectoryError
from jaxrl_llm.monitor.progress import duration
from jaxrl_llm.rollout.engine import Engine, Request, SamplingParams
from jaxrl_llm.text.chat import encode_prompt
from jaxrl_llm.trainers.build import engine_config, scoring_workers, stop_ids
from jaxrl_llm.trainers.scoring import Scorer
from jaxrl_llm.trainers.settings import RLConfig
from jaxrl_llm.types import Prompt

_ROUNDS = 4  # slots are filled so often by one call: few idle at its end, little lost by a kill


def with_passes(config: RLConfig) -> RLConfig:
    """The config with a curriculum that goes by pass rates, so that what passes can be set."""
    curriculum = config.curriculum
    band = curriculum.keep or CurriculumConfig().keep
    by_rates = dataclasses.replace(curriculum, enabled=True, keep=band)
    return dataclasses.replace(config, curriculum=by_rates)


def measure_pass_rates(
    config: RLConfig,
    path: pathlib.Path,
    *,
    samples: int,
    show: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Samples every training prompt that `path` has no row of; returns all rows by id.

    A row is {"id", "passes", "n", "mean_reward", "settings"}: n are the samples that could be
    judged, `settings` names model, sampler, task, rewards and samples.

    Args:
        config: `curriculum.pass_part` and `curriculum.pass_at` say what passes.
        samples: completions of each prompt.
        show: gets a line of progress now and then.

    Raises:
        ConfigError: fewer than one sample.
        DataError: `path` is damaged, or was made with other settings.
        RunDirectoryError: it can't be written.
    """
    if samples < 1:
        raise ConfigError("--samples is too small", got=samples, expected="≥ 1")
    settings = settings_name(config, samples)
    rows = rows_so_far(path, settings)
    check_writable(path)
    train, _ = config.task.load()
    missing = [index for index in range(len(train)) if train[index]["id"] not in rows]
    if missing:
        model = load(config.model.path, jnp.dtype(config.model.dtype))
        prompts = [
            (index, make_prompt(train[index], lambda text: encode_prompt(text, model.tokenizer)))
            for index in missing
        ]
        scorer = Scorer(config.rewards, model.tokenizer.decode, scoring_workers(config))
        try:
            measured = _measure(config, model, prompts, samples, scorer)
            for row in _shown(measured, len(rows), len(train), show):
                rows[row["id"]] = row | {"settings": settings}
                append_row(path, rows[row["id"]])
        finally:
            scorer.close()
    return {record["id"]: rows[record["id"]] for record in train}


def settings_name(config: RLConfig, samples: int) -> str:
    """A short name of all settings on which a pass rate depends."""
    sampler, curriculum = config.sampler, config.curriculum
    rewards = {
        name: (getattr(fn, "__module__", ""), getattr(fn, "__qualname__", repr(fn)), weight)
        for name, row in config.rewards.items()
        for fn, weight in [row if isinstance(row, tuple) else (row, 1.0)]
    }
    parts = (
        config.model.path,
        config.model.dtype,
        repr(config.task),
        rewards,
        (sampler.temperature, sampler.max_new_tokens, sampler.stop),
        (samples, config.train.seed, curriculum.pass_part, curriculum.pass_at),
    )
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(parts))  # addresses differ in every process
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def rows_so_far(path: pathlib.Path, settings: str) -> dict[str, dict[str, Any]]:
    """The rows of an earlier, stopped measurement; none if there is no file."""
    if not path.exists():
        return {}
    try:
        drop_half_line(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    rows = read_pass_rates(path)
    if any(row.get("settings") != settings for row in rows.values()):
        raise DataError(
            f"{path} was measured with other settings: model, sampler, task, rewards or samples",
            hint="another file, or the old settings",
        )
    return rows


def append_row(path: pathlib.Path, row: Mapping[str, Any]) -> None:
    """One row more; a kill loses none that was written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def check_writable(path: pathlib.Path) -> None:
    """That rows can be added, before anything is sampled.

    Raises:
        RunDirectoryError: they can't.
    """
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: pathlib.Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"can't write {path}",
        got=error.strerror or error,
        hint="free some space, or another place for the table",
    )


def _measure(
    config: RLConfig,
    model: Pretrained,
    prompts: Sequence[tuple[int, Prompt]],
    samples: int,
    scorer: Scorer,
) -> Iterator[dict[str, Any]]:
    """Rows of prompts, which come with their places among all: draws depend on the place alone."""
    sampler, curriculum = config.sampler, config.curriculum
    check_lengths(
        (prompt for _, prompt in prompts),
        sampler.max_prompt_tokens,
        sampler.max_new_tokens,
        model.config.max_position_embeddings,
    )
    params = SamplingParams(
        max_tokens=sampler.max_new_tokens,
        temperature=sampler.temperature,
        stop_ids=stop_ids(sampler.stop, model.tokenizer),
        seed=config.train.seed or 0,
    )
    engine = Engine(
        model.config,
        jax.device_put(model.params, jax.devices()[0]),
        engine_config(dataclasses.replace(sampler, group_size=samples)),
    )
    size = max(1, _ROUNDS * sampler.slots // samples)
    for start in range(0, len(prompts), size):
        part = prompts[start : start + size]
        requests = [
            Request(prompt=prompt, n=samples, params=params, uid=place) for place, prompt in part
        ]
        # Judged while others are still sampled, as in a run; in an order that no stop changes.
        done = [scorer.submit(rollout) for rollout in engine.generate(requests)]
        rollouts = scorer.finish(done, lambda r: (r.prompt.id, r.sample))
        counts = count_passes(rollouts, part=curriculum.pass_part, pass_at=curriculum.pass_at)
        for _, prompt in part:
            passes, judged = counts[prompt.id]
            values = [r.reward.value for r in rollouts if r.reward and r.prompt.id == prompt.id]
            mean = float(np.mean(values)) if values else None
            yield {"id": prompt.id, "passes": passes, "n": judged, "mean_reward": mean}


def _shown(
    rows: Iterable[dict[str, Any]], before: int, total: int, show: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """The same rows, with a line of progress at every tenth of them or every half minute."""
    begin = told = time.monotonic()
    passes = judged = 0
    if before:
        show(f"{before} of {total} prompts were measured earlier")
    for count, row in enumerate(rows, 1):
        yield row
        passes, judged = passes + row["passes"], judged + row["n"]
        now, left = time.monotonic(), total - before - count
        if left == 0 or now - told > 30 or count % max(1, total // 10) == 0:
            told, pace = now, (now - begin) / count
            mean = f"{passes / judged:.1%}" if judged else "not judged"
            show(f"{before + count}/{total} prompts · passed {mean} · {duration(pace * left)} left")
