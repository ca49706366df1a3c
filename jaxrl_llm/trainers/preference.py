# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""One step of preference optimisation: the DPO family on pairs, KTO on single replies.

    examples ─► rows ─► log-probabilities of replies, policy and reference ─► loss ─► update

A pair lies in one row, its chosen reply in an even slot and its rejected one in the next, so every
micro-batch of rows is whole pairs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.kl import KL_ESTIMATORS
from jaxrl_llm.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    Pairs,
    kto_kl,
    kto_loss,
    slot_sums,
)
from jaxrl_llm.data.encode import Part, Unit
from jaxrl_llm.data.packing import PackedRows, pack_step, target_bound
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import sequence_logprobs
from jaxrl_llm.trainers.learner import Bounds, Learner, Loss, map_rows, micro_rows
from jaxrl_llm.trainers.metrics import Sums
from jaxrl_llm.trainers.supervised_settings import PreferenceSettings

_ROUNDING = 1e-6  # of the log-probabilities of the replies: closer than that, two numbers are equal


def reply_logprobs(model_config: ModelConfig, *, remat: bool) -> Callable:
    """(params, rows, bounds) → (token log-probabilities [N, T], 0 outside replies; entropies)."""

    def logprobs(params, rows: PackedRows, bounds: Bounds):
        return sequence_logprobs(
            params,
            model_config,
            rows.tokens,
            rows.positions,
            rows.segment_ids,
            rows.mask,
            num_targets=bounds.targets,
            reach=rows.reach,
            remat=remat,
        )

    return logprobs


def preference_loss(
    model_config: ModelConfig, settings: PreferenceSettings, *, remat: bool
) -> Loss:
    """The loss of `settings` on rows of pairs, or of single replies for kto.

    `counts` holds "units" (pairs, or replies), "chosen_tokens" and "tokens"; `coefs` holds "kl" for
    kto.
    """
    logprobs = reply_logprobs(model_config, remat=remat)

    def loss(params, rows: PackedRows, counts, coefs, bounds: Bounds):
        logp, entropy = logprobs(params, rows, bounds)
        if settings.loss == "kto":
            value, metrics = _kto_terms(logp, rows, counts, coefs, bounds, settings)
        else:
            value, metrics = _pair_terms(logp, rows, counts, bounds, settings)
        tokens = jnp.sum(rows.mask).astype(logp.dtype)
        metrics["entropy"] = (jnp.sum(jnp.where(rows.mask, entropy, 0.0)), tokens)
        return value, metrics

    return loss


def _pair_terms(logp, rows: PackedRows, counts, bounds: Bounds, settings: PreferenceSettings):
    pairs, valid = pairs_of(logp, rows, bounds.slots)
    value = jnp.zeros((), logp.dtype)
    for name, weight in settings.mixture:
        row = PREFERENCE_LOSSES[name]
        wanted = {setting: getattr(settings, setting) for setting in row.settings}
        terms = row.function(pairs, beta=settings.beta, **wanted)
        total = jnp.sum(jnp.where(valid, terms, 0.0))
        value = value + weight * total / counts["units"].astype(logp.dtype)
    count = jnp.sum(valid).astype(logp.dtype)
    chosen, rejected = jax.lax.stop_gradient(implicit_rewards(pairs, settings))

    def mean(x):
        return jnp.sum(jnp.where(valid, x.astype(logp.dtype), 0.0)), count

    metrics = {
        "rewards/chosen": mean(chosen),
        "rewards/rejected": mean(rejected),
        "rewards/margins": mean(chosen - rejected),
        "rewards/accuracies": mean(told_right(pairs, settings)),
        "logps/chosen": mean(jax.lax.stop_gradient(pairs.chosen)),
        "logps/rejected": mean(jax.lax.stop_gradient(pairs.rejected)),
    }
    if settings.nll_weight:
        # Even slots, which are odd segments, hold the chosen replies.
        of_chosen = rows.mask & (rows.segment_ids % 2 == 1)
        nll = -jnp.sum(jnp.where(of_chosen, logp, 0.0))
        value = value + settings.nll_weight * nll / counts["chosen_tokens"].astype(logp.dtype)
        tokens = jnp.sum(of_chosen).astype(logp.dtype)
        metrics["nll_loss"] = (jax.lax.stop_gradient(nll), tokens)
    if settings.kl_coef:
        ref = jnp.where(rows.mask, rows.ref_tokens.astype(logp.dtype), 0.0)
        distance = KL_ESTIMATORS[settings.kl_estimator](jnp.where(rows.mask, logp, 0.0), ref)
        total = jnp.sum(jnp.where(rows.mask, distance, 0.0))
        value = value + settings.kl_coef * total / counts["tokens"].astype(logp.dtype)
        tokens = jnp.sum(rows.mask).astype(logp.dtype)
        metrics[f"kl_on_data/{settings.kl_estimator}"] = (jax.lax.stop_gradient(total), tokens)
    return value, metrics


def _kto_terms(logp, rows: PackedRows, counts, coefs, bounds: Bounds, settings: PreferenceSettings):
    total = slot_sums(jnp.where(rows.mask, logp, 0.0), rows.segment_ids, bounds.slots)
    ratio = (total - rows.ref.astype(logp.dtype)).reshape(-1)
    wanted = rows.values.reshape(-1) > 0
    lengths = slot_sums(rows.mask.astype(logp.dtype), rows.segment_ids, bounds.slots)
    valid = lengths.reshape(-1) > 0
    terms = kto_loss(
        jnp.where(valid, ratio, 0.0),
        wanted,
        coefs["kl"],
        beta=settings.beta,
        desirable_weight=settings.desirable_weight,
        undesirable_weight=settings.undesirable_weight,
    )
    value = jnp.sum(jnp.where(valid, terms, 0.0)) / counts["units"].astype(logp.dtype)
    reward = settings.beta * jax.lax.stop_gradient(ratio)
    metrics = {}
    for name, kind in (("chosen", wanted), ("rejected", ~wanted)):
        those = valid & kind
        count = jnp.sum(those).astype(logp.dtype)
        metrics[f"rewards/{name}"] = (jnp.sum(jnp.where(those, reward, 0.0)), count)
    # A reply is told right when its reward, past the KL, has the sign of its label.
    past = jax.lax.stop_gradient(ratio) - coefs["kl"].astype(logp.dtype)
    size = jnp.abs(total) + jnp.abs(rows.ref.astype(logp.dtype))
    right = _share_right(jnp.where(wanted, past, -past), size.reshape(-1))
    hits = jnp.sum(jnp.where(valid, right, 0.0))
    metrics["rewards/accuracies"] = (hits, jnp.sum(valid).astype(logp.dtype))
    return value, metrics


def pairs_of(logp: Any, rows: PackedRows, slots: int) -> tuple[Pairs, Any]:
    """The pairs of some rows and which of them are there; the others hold harmless numbers."""
    total = slot_sums(jnp.where(rows.mask, logp, 0.0), rows.segment_ids, slots)
    length = slot_sums(rows.mask.astype(total.dtype), rows.segment_ids, slots)
    valid = (length[:, 0::2] > 0).reshape(-1)

    def side(values, first, harmless):
        picked = values.astype(total.dtype)[:, first::2].reshape(-1)
        return jnp.where(valid, picked, harmless)

    has_ref = rows.ref is not None
    return Pairs(
        chosen=side(total, 0, -1.0),
        rejected=side(total, 1, -1.0),
        chosen_length=side(length, 0, 1.0),
        rejected_length=side(length, 1, 1.0),
        ref_chosen=side(rows.ref, 0, -1.0) if has_ref else None,
        ref_rejected=side(rows.ref, 1, -1.0) if has_ref else None,
    ), valid


def implicit_rewards(pairs: Pairs, settings: PreferenceSettings) -> tuple[Any, Any]:
    """β times the log-ratio to the reference, or the log-probability where there is none; a mean
    over tokens for losses that normalise by length."""
    row = PREFERENCE_LOSSES[settings.loss]
    chosen, rejected = pairs.chosen, pairs.rejected
    if row.reference:
        chosen, rejected = chosen - pairs.ref_chosen, rejected - pairs.ref_rejected
    if row.per_token:
        chosen, rejected = chosen / pairs.chosen_length, rejected / pairs.rejected_length
    return settings.beta * chosen, settings.beta * rejected


def told_right(pairs: Pairs, settings: PreferenceSettings) -> Any:
    """1 for each pair whose chosen reply has the larger implicit reward, ½ for a tie, else 0.

    A margin below the rounding of the log-probabilities that it is a difference of is a tie: where
    the policy is still the reference, the mean is ½.
    """
    chosen, rejected = implicit_rewards(pairs, settings)
    absolute = pairs.replace(chosen=jnp.abs(pairs.chosen), rejected=jnp.abs(pairs.rejected))
    if pairs.ref_chosen is not None:
        absolute = absolute.replace(
            ref_chosen=-jnp.abs(pairs.ref_chosen), ref_rejected=-jnp.abs(pairs.ref_rejected)
        )
    return jax.lax.stop_gradient(
        _share_right(chosen - rejected, sum(implicit_rewards(absolute, settings)))
    )


def _share_right(margin: Any, size: Any) -> Any:
    """By the sign of a difference of numbers whose sizes add up to `size`."""
    tie = jnp.abs(margin) <= _ROUNDING * size
    return jnp.where(tie, 0.5, (margin > 0).astype(margin.dtype)).astype(margin.dtype)


def preference_counts(rows: PackedRows, units: int) -> dict[str, Any]:
    """What the terms of the loss are divided by, over the whole optimiser batch."""
    of_chosen = rows.mask & (rows.segment_ids % 2 == 1)
    counts = {"units": units, "chosen_tokens": of_chosen.sum(), "tokens": rows.mask.sum()}
    return {name: np.maximum(np.float32(count), np.float32(1)) for name, count in counts.items()}


def mismatched(units: Sequence[Unit], most: int) -> list[Unit]:
    """Each prompt with the reply of another row: the next one whose prompt differs, or else the
    next one whose reply differs. A row that is like all others is left out.

    Args:
        most: tokens of a sequence; longer ones lose their end.
    """
    halves = []
    for unit in units:
        (part,) = unit.parts
        start = int(np.flatnonzero(part.mask)[0])
        halves.append((part.tokens[:start], part.tokens[start:]))
    keys = [(prompt.tobytes(), reply.tobytes()) for prompt, reply in halves]
    result = []
    for place, (prompt, _) in enumerate(halves):
        other = _other_row(keys, place, 0)
        other = _other_row(keys, place, 1) if other is None else other
        if other is not None:
            tokens = np.concatenate([prompt, halves[other][1]])[: max(most, len(prompt) + 1)]
            result.append(Unit((Part(tokens, np.arange(len(tokens)) >= len(prompt)),)))
    return result


def _other_row(keys: Sequence[tuple[bytes, bytes]], place: int, half: int) -> int | None:
    """The next row, round and round, whose `half` is not that of the row at `place`."""
    following = (
        (place + step) % len(keys)
        for step in range(1, len(keys))
        if keys[(place + step) % len(keys)][half] != keys[place][half]
    )
    return next(following, None)


@dataclasses.dataclass
class PreferenceTrainer:
    """The pieces of a run and what changes while it runs.

    Attributes:
        settings: what is minimised.
        next_units: the examples of the next step.
        updater: learns from rows; its state also holds a reference that moves.
        fixed_ref: parameters of a reference that is in memory and stays as it is.
        logprobs: the compiled `reply_logprobs`, (trained, frozen, rows, bounds).
        move: compiled (reference, policy) → the reference after its move.
        table: reference log-probability of each part of each example, by its index, if precomputed.
        heldout: held-out examples.
        row_tokens, packed, max_length: how examples become rows.
        step, num_tokens: steps done, tokens seen.
    """

    settings: PreferenceSettings
    next_units: Callable[[], list[Unit]]
    updater: Learner
    fixed_ref: Any | None
    logprobs: Callable
    move: Callable
    table: np.ndarray | None
    heldout: Sequence[Unit]
    row_tokens: int
    packed: bool
    max_length: int
    step: int = 0
    num_tokens: int = 0

    def train_step(self) -> tuple[dict[str, float], list[Any]]:
        """Learn from one batch of examples; returns the step's metrics."""
        start = time.perf_counter()
        # ── 1 · rows, with the reference's log-probabilities ──────────────────────────────────────
        units = self.next_units()
        rows, bounds = self.rows(units)
        coefs = {"kl": self.measure_kl(units)} if self.settings.loss == "kto" else {}

        # ── 2 · update: counts first, then Σ over micro-batches ───────────────────────────────────
        counts = preference_counts(rows, len(units))
        metrics = self.updater.update(rows, counts, coefs, bounds, self.step)
        self.step += 1

        # ── 3 · the reference follows, where it does ──────────────────────────────────────────────
        every = self.settings.ref_update_every
        if every and self.step % every == 0:
            now = self.updater.current
            self.updater.current = now.replace(ref=self.move(now.ref, now.train.params))

        self.num_tokens += int((rows.segment_ids > 0).sum())
        metrics |= {"kl": float(coefs["kl"])} if coefs else {}
        metrics["num_tokens"] = float(self.num_tokens)
        metrics["step_time"] = time.perf_counter() - start
        return metrics, []

    def rows(self, units: Sequence[Unit]) -> tuple[PackedRows, Bounds]:
        """The rows of some examples with what the reference says of them, and static sizes."""
        rows, places = pack_step(
            units, row_tokens=self.row_tokens, packed=self.packed, multiple=self.updater.micro_rows
        )
        bounds = self.bounds(rows)
        if not self.settings.needs_reference:
            return rows, bounds
        if self.table is not None:
            ref = np.zeros(rows.values.shape, np.float32)
            for n, row in enumerate(places):
                known = [value for i in row for value in self.table[units[i].index]]
                ref[n, : len(known)] = known
            return rows.replace(ref=ref), bounds
        return self.with_reference(rows, bounds), bounds

    def bounds(self, rows: PackedRows) -> Bounds:
        """Static sizes of some rows."""
        return Bounds(target_bound(rows.mask), rows.values.shape[1])

    @property
    def reference(self) -> tuple[Any, Any]:
        """The reference that is in memory, as (trained, frozen): under an adapter, its base."""
        if self.updater.frozen is not None:
            return None, self.updater.frozen if self.fixed_ref is None else self.fixed_ref
        moving = self.updater.current.ref
        return (self.fixed_ref if moving is None else moving), None

    @property
    def policy(self) -> tuple[Any, Any]:
        """The policy as (trained, frozen)."""
        return self.updater.params, self.updater.frozen

    def with_reference(self, rows: PackedRows, bounds: Bounds) -> PackedRows:
        """The rows with the log-probabilities of the reference that is in memory."""
        tokens = self.token_logprobs(self.reference, rows, bounds)
        ref = host_slot_sums(tokens, rows, bounds.slots)
        return rows.replace(ref=ref, ref_tokens=tokens if self.settings.kl_coef else None)

    def token_logprobs(
        self, model: tuple[Any, Any], rows: PackedRows, bounds: Bounds
    ) -> np.ndarray:
        """Log-probabilities of the replies' tokens, without gradient."""
        return map_rows(
            lambda micro: self.logprobs(*model, micro, bounds)[0],
            rows,
            self.updater.micro_rows,
            self.updater.put,
        )

    def measure_kl(self, units: Sequence[Unit]) -> np.ndarray:
        """KTO's z from replies to other prompts, under policy and reference."""
        pairs = mismatched(units, self.max_length)
        if not pairs:
            return np.zeros((), np.float32)
        rows, _ = pack_step(
            pairs,
            row_tokens=self.row_tokens,
            packed=self.packed,
            multiple=self.updater.micro_rows,
        )
        bounds = self.bounds(rows)
        new, old = (
            self.token_logprobs(model, rows, bounds) for model in (self.policy, self.reference)
        )
        ratio = host_slot_sums(new - old, rows, bounds.slots)
        lengths = host_slot_sums(rows.mask.astype(new.dtype), rows, bounds.slots)
        return np.asarray(
            kto_kl(jnp.asarray(ratio).reshape(-1), jnp.asarray(lengths > 0).reshape(-1))
        )

    def evaluate(self) -> tuple[dict[str, float], list[Any]]:
        """Held-out metrics of the loss; "eval/accuracy" is the share of pairs (for kto: of replies)
        told right, a tie counted half: it begins at ½ with a loss that has a reference."""
        if not self.heldout:
            return {}, []
        rows, bounds = self.rows(self.heldout)
        coefs = {"kl": self.measure_kl(self.heldout)} if self.settings.loss == "kto" else {}
        counts, sums = preference_counts(rows, len(self.heldout)), Sums()
        for micro in micro_rows(rows, self.updater.micro_rows):
            value, metrics = self.updater.measure(micro, counts, coefs, bounds)
            sums.add({**metrics, "loss/sum": (value, 1.0)})
        result = {f"eval/{name}": value for name, value in sums.means().items()}
        result["eval/accuracy"] = result.pop("eval/rewards/accuracies")
        return result, []

    def host_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the arrays of `updater.state`, as JSON values."""
        return {"step": self.step, "num_tokens": self.num_tokens}

    def set_host_state(self, state: dict[str, Any]) -> None:
        self.step, self.num_tokens = state["step"], state["num_tokens"]


def host_slot_sums(values: np.ndarray, rows: PackedRows, slots: int) -> np.ndarray:
    """`slot_sums` of masked values in numpy, in the dtype of `values`."""
    kept = np.where(rows.mask, values, 0)
    ids = np.arange(1, slots + 1)
    return np.stack([np.where(rows.segment_ids == i, kept, 0).sum(1) for i in ids], 1).astype(
        values.dtype
    )
