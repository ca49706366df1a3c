# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which curves a report shows: the rows of `metrics.jsonl` as charts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.monitor.charts import Chart, Series
from jaxrl_llm.monitor.samples import visible

Rows = Sequence[Mapping[str, Any]]

_HELDOUT, _HELDOUT_REWARD = "Held-out accuracy", "Held-out reward"
_PARTS, _TIME = "Reward parts", "Seconds a step"
_MOST_PARTS = 5
_GAP = "sampling/sampling_logp_difference"


@dataclasses.dataclass(frozen=True)
class Row:
    """One chart: texts, the metrics of its curves by name, and how to draw it (see `Chart`)."""

    title: str
    caption: str
    y_label: str
    metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dull_at_zero: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# In the order of the page. Charts without values are left out.
CURVES = (
    Row(
        "Reward",
        "Mean over the step’s completions.",
        "reward",
        {"reward": "reward"},
        options={"smooth": True},
    ),
    Row(
        _HELDOUT,
        "Greedy answers to prompts that are never trained on.",
        "share of prompts",
        {"accuracy": "eval/accuracy", "well-formed": "eval/well_formed"},
        options={"percent": True},
    ),
    Row(_HELDOUT_REWARD, "On prompts that are never trained on.", "reward"),
    Row(_PARTS, "Mean of each reward function.", "reward", options={"smooth": True}),
    Row(
        "Entropy",
        "How undecided the policy is at each token; near 0 it no longer explores.",
        "nats per token",
        {"entropy": "entropy"},
        options={"smooth": True},
    ),
    Row(
        "KL from the reference",
        "How far the policy has moved from the model it started as.",
        "nats per token",
        {"kl": "kl"},
        dull_at_zero=True,
        options={"smooth": True},
    ),
    Row(
        "Completion length",
        "Mean, and the range from the shortest to the longest.",
        "tokens",
        {
            "mean": "completions/mean_length",
            "shortest": "completions/min_length",
            "longest": "completions/max_length",
        },
        options={"smooth": True, "band": ("shortest", "longest")},
    ),
    Row(
        "Without signal",
        "Completions cut off at the length limit; groups whose rewards are all equal.",
        "share",
        {"cut off": "completions/clipped_ratio", "equal groups": "frac_reward_zero_std"},
        options={"percent": True},
    ),
    Row(
        "Ratio clipping",
        "Tokens whose probability ratio left the trust region.",
        "share of tokens",
        {"below": "clip_ratio/low_mean", "above": "clip_ratio/high_mean"},
        dull_at_zero=True,
    ),
    Row(
        "Gradient norm",
        "Of the whole step, before clipping.",
        "norm",
        {"norm": "grad_norm"},
        options={"smooth": True},
    ),
    Row(
        "Critic",
        "How much of the returns its values explain: 1 is all, 0 is no more than their mean.",
        "explained variance",
        {"explained": "value/explained_variance"},
    ),
    Row(
        "Values",
        "What the critic expected, and what came.",
        "reward",
        {"expected": "value/mean", "returns": "value/returns"},
    ),
    Row(
        "Value loss",
        "Of the critic.",
        "loss",
        {"loss": "value/loss"},
        options={"smooth": True},
    ),
    Row(
        "Dropped groups",
        "Groups without differing rewards, whose places were filled again.",
        "groups",
        {"dropped": "sampling/groups_dropped"},
        dull_at_zero=True,
    ),
    Row(
        "Experts",
        "The busiest expert's share of its fair share: 1 is even.",
        "times the fair share",
        {"busiest": "router/max_load/max"},
    ),
    Row(
        "Learning rate",
        "As the optimiser used it.",
        "learning rate",
        {"rate": "learning_rate"},
    ),
    Row(
        "Memory",
        "The largest amount that a step used.",
        "GiB",
        {"peak": "memory/peak_gib"},
    ),
    Row(_TIME, "Where the time of a step goes.", "seconds", options={"kind": "stack"}),
    Row(
        "Sampler against trainer",
        "Difference of their log-probabilities of the same token; float32 rounding is near 1e-6.",
        "nats per token",
        {"mean": f"{_GAP}/mean", "largest": f"{_GAP}/max"},
        options={"log": True, "smooth": True},
    ),
)


def charts(rows: Rows, results: Mapping[str, Any]) -> tuple[list[Chart], list[Chart]]:
    """The charts of a run, and those of the metrics that none of the first shows.

    Args:
        rows: of `read_metrics`.
        results: of `result.json`, or {}.
    """
    names = dict.fromkeys(key for row in rows for key in row if key != "step")
    parts = [key for key in names if re.fullmatch(r"rewards/.*/mean", key)][:_MOST_PARTS]
    key = heldout_key(rows, results)
    special = {
        _HELDOUT: [heldout(rows, results, "accuracy"), heldout(rows, results, "well_formed")],
        _HELDOUT_REWARD: [heldout(rows, results, "reward")] if key == "reward" else [],
        # A single part is the reward itself.
        _PARTS: [_curve(rows, visible(key[8:-5]), key) for key in parts if len(parts) > 1],
        _TIME: _time_split(rows),
    }
    found = []
    for row in CURVES:
        series = special.get(row.title) or [_curve(rows, n, key) for n, key in row.metrics.items()]
        values = [value for one in series for value in one.values]
        if any(values) if row.dull_at_zero else values:
            found.append(Chart(row.title, row.caption, row.y_label, series, **row.options))
    used = {name for row in CURVES for name in row.metrics.values()}
    used |= {"step_time", f"eval/{key}", *parts}
    rest = [key for key in names if key not in used and not key.startswith("time/")]
    return found, [Chart(visible(key), "", "", [_curve(rows, "value", key)]) for key in rest]


def _curve(rows: Rows, name: str, metric: str) -> Series:
    known = [row for row in rows if isinstance(row.get(metric), int | float)]
    return Series(name, [row["step"] for row in known], [row[metric] for row in known])


def heldout_key(rows: Rows, results: Mapping[str, Any]) -> str:
    """What tells how good the model is: "accuracy" where it is measured, else "reward"."""
    return "accuracy" if heldout(rows, results, "accuracy").values else "reward"


def heldout(rows: Rows, results: Mapping[str, Any], key: str) -> Series:
    """A held-out result by step, with those before and after the run."""
    seen = _curve(rows, key, f"eval/{key}")
    values = dict(zip(seen.steps, seen.values, strict=True))
    before, after = result_value(results, "before", key), result_value(results, "after", key)
    if before is not None:
        values[0] = before
    if after is not None and rows:
        values[rows[-1]["step"]] = after
    steps = sorted(values)
    return Series(key.replace("_", "-"), steps, [values[step] for step in steps], points=True)


def result_value(results: Mapping[str, Any], when: str, key: str) -> int | float | None:
    """A number of `result.json`'s `heldout_before` or `heldout_after`."""
    values = results.get(f"heldout_{when}")
    if not isinstance(values, Mapping):
        return None
    value = values.get(key, values.get(f"eval/{key}"))
    return value if isinstance(value, int | float) else None


def _time_split(rows: Rows) -> list[Series]:
    timed = [row for row in rows if any(key.startswith("time/") for key in row)]
    labels = {"sampling": "sampling", "rewards": "rewards"}
    labels |= {"logprobs": "log-probabilities", "update": "update"}
    split = {label: [row.get(f"time/{key}", 0.0) for row in timed] for key, label in labels.items()}
    spent = [sum(column) for column in zip(*split.values(), strict=True)]
    whole = [row.get("step_time", 0.0) for row in timed]
    split["other"] = [max(0.0, w - s) for w, s in zip(whole, spent, strict=True)]
    steps = [row["step"] for row in timed]
    return [Series(name, steps, values) for name, values in split.items()] if timed else []
