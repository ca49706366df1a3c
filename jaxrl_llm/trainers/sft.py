# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""One step of supervised fine-tuning.

    packed rows ─► log-probabilities of the learnt tokens ─► −mean ─► update

`build_supervised.py` makes the pieces, `learner.py` adds gradients up, `loop.py` repeats the step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data.encode import Unit
from jaxrl_llm.data.packing import PackedRows, in_batches, pack_step, target_bound
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import sequence_logprobs
from jaxrl_llm.trainers.learner import Bounds, Learner, Loss, micro_rows
from jaxrl_llm.trainers.metrics import Sums


def sft_loss(model_config: ModelConfig, *, kind: Literal["nll", "dft"], remat: bool) -> Loss:
    """The mean over learnt tokens of ``−log p``, or of ``−sg(p)·log p`` for "dft".

    Source of the latter: Dynamic Fine-Tuning, https://arxiv.org/abs/2508.05629, Eq. 9. `counts`
    holds "tokens".
    """

    def loss(params, rows: PackedRows, counts, coefs, bounds: Bounds):
        del coefs
        logp, entropy = sequence_logprobs(
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
        nll = -jnp.where(rows.mask, logp, 0.0)
        weighted = nll * jax.lax.stop_gradient(jnp.exp(logp)) if kind == "dft" else nll
        tokens = jnp.sum(rows.mask).astype(nll.dtype)
        metrics = {
            "nll": (jnp.sum(nll), tokens),
            "entropy": (jnp.sum(jnp.where(rows.mask, entropy, 0.0)), tokens),
        }
        return jnp.sum(weighted) / counts["tokens"].astype(nll.dtype), metrics

    return loss


def sft_counts(rows: PackedRows) -> dict[str, Any]:
    """What the loss is divided by, over the whole optimiser batch."""
    return {"tokens": np.maximum(np.float32(rows.mask.sum()), np.float32(1))}


@dataclasses.dataclass
class SFTTrainer:
    """The pieces of a run and what changes while it runs.

    Attributes:
        next_rows: the rows of the next step.
        updater: learns from rows; holds parameters and optimiser state.
        heldout: held-out examples.
        row_tokens: longest row of the evaluation.
        eval_rows: rows that are evaluated at once.
        step: steps done.
        num_tokens: tokens seen since the run began, without padding.
    """

    next_rows: Callable[[], PackedRows]
    updater: Learner
    heldout: Sequence[Unit]
    row_tokens: int
    eval_rows: int
    step: int = 0
    num_tokens: int = 0

    def train_step(self) -> tuple[dict[str, float], list[Any]]:
        """Learn from one batch of rows; returns the step's metrics."""
        start = time.perf_counter()
        rows = self.next_rows()
        bounds = Bounds(target_bound(rows.mask), 1)
        metrics = self.updater.update(rows, sft_counts(rows), {}, bounds, self.step)
        self.step += 1
        used = int((rows.segment_ids > 0).sum())
        self.num_tokens += used
        metrics["padding"] = 1.0 - used / rows.tokens.size
        metrics["num_tokens"] = float(self.num_tokens)
        metrics["step_time"] = time.perf_counter() - start
        return metrics, []

    def evaluate(self) -> tuple[dict[str, float], list[Any]]:
        """Held-out loss and perplexity, over all held-out tokens."""
        if not self.heldout:
            return {}, []
        sums = Sums()
        for units in in_batches(self.heldout, 256):
            rows, _ = pack_step(
                units, row_tokens=self.row_tokens, packed=True, multiple=self.eval_rows
            )
            bounds = Bounds(target_bound(rows.mask), 1)
            for micro in micro_rows(rows, self.eval_rows):
                _, metrics = self.updater.measure(micro, sft_counts(rows), {}, bounds)
                sums.add(metrics)
        means = sums.means()
        nll = means["nll"]
        return {
            "eval/loss": nll,
            "eval/perplexity": float(np.exp(min(nll, 700.0))),
            "eval/entropy": means["entropy"],
        }, []

    def host_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the arrays of `updater.state`, as JSON values."""
        return {"step": self.step, "num_tokens": self.num_tokens}

    def set_host_state(self, state: dict[str, Any]) -> None:
        self.step, self.num_tokens = state["step"], state["num_tokens"]
