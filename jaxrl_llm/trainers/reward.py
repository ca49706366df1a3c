# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""One step of a reward model, from pairs of replies, or of a process reward model, from steps.

pairs ─► rows ─► score at each reply's last token ─► −log σ(r_c − r_r − m) ─► update
steps ─► rows ─► two logits at each step's mark   ─► cross-entropy         ─► update
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.preference_losses import slot_sums
from jaxrl_llm.algorithms.reward_losses import bradley_terry_loss, calibration_error, step_loss
from jaxrl_llm.data.encode import Unit
from jaxrl_llm.data.packing import PackedRows, pack_step
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.score_heads import token_scores
from jaxrl_llm.sharding.reshard import fetch
from jaxrl_llm.trainers.learner import Bounds, Learner, Loss, micro_rows
from jaxrl_llm.trainers.metrics import Sums


def row_scores(
    params: Any, model_config: ModelConfig, rows: PackedRows, *, remat: bool
) -> Float[Array, "N T C"]:
    """Scores at every token of rows."""
    places = rows.tokens, rows.positions, rows.segment_ids
    return token_scores(params, model_config, *places, reach=rows.reach, remat=remat)


def sequence_scores(
    params: Any, model_config: ModelConfig, rows: PackedRows, slots: int, *, remat: bool = False
) -> Float[Array, "N slots"]:
    """The score of every sequence of every row, read at its one masked token."""
    scores = row_scores(params, model_config, rows, remat=remat)
    return slot_sums(jnp.where(rows.mask, scores[:, :, 0], 0.0), rows.segment_ids, slots)


def pair_reward_loss(
    model_config: ModelConfig, *, use_margin: bool, center_coef: float, remat: bool
) -> Loss:
    """Mean Bradley–Terry loss over the pairs of a batch; `counts` holds "pairs"."""

    def loss(params, rows: PackedRows, counts, coefs, bounds: Bounds):
        del coefs
        scores = sequence_scores(params, model_config, rows, bounds.slots, remat=remat)
        chosen, rejected = scores[:, 0::2].reshape(-1), scores[:, 1::2].reshape(-1)
        valid = pair_places(rows, bounds.slots)
        margin = rows.values[:, 0::2].reshape(-1) if use_margin else None
        values = bradley_terry_loss(chosen, rejected, margin, center_coef=center_coef)
        total = jnp.sum(jnp.where(valid, values, 0.0))
        # Reported, not learnt from.
        chosen, rejected = jax.lax.stop_gradient((chosen, rejected))
        pairs = jnp.sum(valid).astype(values.dtype)

        def mean(x):
            return jnp.sum(jnp.where(valid, x.astype(values.dtype), 0.0)), pairs

        metrics = {
            "bt_loss": (jax.lax.stop_gradient(total), pairs),
            "accuracy": mean(chosen > rejected),
            "margin": mean(chosen - rejected),
            "mean_reward": mean((chosen + rejected) / 2.0),
        }
        return total / counts["pairs"].astype(values.dtype), metrics

    return loss


def pair_places(rows: PackedRows, slots: int) -> Any:
    """Which pairs of slots hold a pair, [N·S/2]: its chosen reply has a masked token."""
    marks = slot_sums(rows.mask.astype(jnp.float32), rows.segment_ids, slots)
    return marks[:, 0::2].reshape(-1) > 0


def step_reward_loss(model_config: ModelConfig, *, remat: bool) -> Loss:
    """Mean cross-entropy over the step marks of a batch; `counts` holds "steps"."""

    def loss(params, rows: PackedRows, counts, coefs, bounds: Bounds):
        del coefs, bounds
        logits = row_scores(params, model_config, rows, remat=remat)
        values = step_loss(logits, rows.labels, rows.mask)
        marks = jnp.sum(rows.mask).astype(values.dtype)
        said = (logits[:, :, 1] > logits[:, :, 0]).astype(rows.labels.dtype)
        right = jnp.where(rows.mask, (said == rows.labels).astype(values.dtype), 0.0)
        total = jnp.sum(values)
        metrics = {
            "step_loss": (jax.lax.stop_gradient(total), marks),
            "accuracy": (jnp.sum(right), marks),
        }
        return total / counts["steps"].astype(values.dtype), metrics

    return loss


@dataclasses.dataclass
class RewardTrainer:
    """The pieces of a run and what changes while it runs.

    Attributes:
        kind: "pairs" or "steps".
        next_units: the examples of the next step.
        updater: learns from rows; holds parameters and optimiser state.
        scores: the compiled `sequence_scores`, (trained, frozen, rows, slots).
        heldout: held-out examples.
        row_tokens, packed: how examples become rows.
        step, num_tokens: steps done, tokens seen.
    """

    kind: str
    next_units: Callable[[], list[Unit]]
    updater: Learner
    scores: Callable
    heldout: Sequence[Unit]
    row_tokens: int
    packed: bool
    step: int = 0
    num_tokens: int = 0

    def train_step(self) -> tuple[dict[str, float], list[Any]]:
        """Learn from one batch of examples; returns the step's metrics."""
        start = time.perf_counter()
        rows, counts, bounds = self.rows(self.next_units())
        metrics = self.updater.update(rows, counts, {}, bounds, self.step)
        self.step += 1
        self.num_tokens += int((rows.segment_ids > 0).sum())
        metrics["num_tokens"] = float(self.num_tokens)
        metrics["step_time"] = time.perf_counter() - start
        return metrics, []

    def rows(self, units: Sequence[Unit]) -> tuple[PackedRows, dict[str, Any], Bounds]:
        """The rows of some examples, what their loss is divided by, and static sizes."""
        rows, _ = pack_step(
            units, row_tokens=self.row_tokens, packed=self.packed, multiple=self.updater.micro_rows
        )
        if self.kind == "steps":
            counts = {"steps": np.maximum(np.float32(rows.mask.sum()), np.float32(1))}
        else:
            counts = {"pairs": np.float32(len(units))}
        return rows, counts, Bounds(1, rows.values.shape[1])

    def evaluate(self) -> tuple[dict[str, float], list[Any]]:
        """Held-out loss and accuracy; of pairs also calibration: "eval/calibration_error"."""
        if not self.heldout:
            return {}, []
        rows, counts, bounds = self.rows(self.heldout)
        sums, differences = Sums(), []
        for micro in micro_rows(rows, self.updater.micro_rows):
            _, metrics = self.updater.measure(micro, counts, {}, bounds)
            sums.add(metrics)
            if self.kind == "pairs":
                learner, put = self.updater, self.updater.put(micro)
                found = self.scores(learner.params, learner.frozen, put, bounds.slots)
                scores = fetch(found)
                here = jax.tree.map(jnp.asarray, micro)  # every process knows all rows
                valid = jax.device_get(pair_places(here, bounds.slots))
                differences.append((scores[:, 0::2] - scores[:, 1::2]).reshape(-1)[valid])
        means = sums.means()
        result = {f"eval/{name}": value for name, value in means.items()}
        name = "bt_loss" if self.kind == "pairs" else "step_loss"
        result["eval/loss"] = result.pop(f"eval/{name}")
        if differences:
            p = jax.nn.sigmoid(jnp.asarray(np.concatenate(differences)))
            error = calibration_error(p, jnp.ones(p.shape, bool))
            result["eval/calibration_error"] = float(error)
        return result, []

    def host_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the arrays of `updater.state`, as JSON values."""
        return {"step": self.step, "num_tokens": self.num_tokens}

    def set_host_state(self, state: dict[str, Any]) -> None:
        self.step, self.num_tokens = state["step"], state["num_tokens"]
