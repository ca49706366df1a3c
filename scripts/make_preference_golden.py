# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/preference_losses.json: what TRL 1.16's own loss code gives on a fixed batch.

Needs an environment of its own with trl==1.16.*, torch and transformers; run from the repository:

    python scripts/make_preference_golden.py

TRL's trainers run the model inside their losses. Here they get a stand-in that returns stored
log-probabilities, so that every number comes from TRL's lines and none from a network. Losses and
their gradients by the token log-probabilities are stored in float64.
"""

from __future__ import annotations

import collections
import json
import pathlib
import types

import numpy as np
import torch
import trl
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer

TARGET = pathlib.Path(__file__).parents[1] / "tests" / "golden" / "preference_losses.json"
LENGTHS = [[3, 5], [4, 1], [2, 2], [6, 3]]  # chosen and rejected reply of four pairs
WIDTH, PROMPT = 9, 2


class Accelerator:
    """One process: gathering gives back what it gets."""

    device = torch.device("cpu")

    def gather(self, values):
        return values

    gather_for_metrics = gather

    def unwrap_model(self, model):
        return model


def stored_model(logp):
    """A model whose token log-probabilities are `logp`, whatever it is asked."""

    def call(**kwargs):
        zeros = torch.zeros_like(logp)
        return types.SimpleNamespace(
            log_probs=logp, entropy=zeros, mean_logits=zeros, is_top1=zeros > 1
        )

    call.training, call.is_gradient_checkpointing = True, False
    return call


def bare(kind, **attributes):
    """A trainer that was not initialised, with just what its loss reads."""
    trainer = object.__new__(kind)
    trainer.accelerator = Accelerator()
    trainer._metrics = {"train": collections.defaultdict(list)}
    trainer._total_train_tokens, trainer._tp_size = 0, 1
    trainer.aux_loss_enabled = False
    trainer.args = types.SimpleNamespace(
        gradient_checkpointing=False, gradient_checkpointing_kwargs=None, discopop_tau=0.05,
        center_rewards_coefficient=None,
    )  # fmt: skip
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return trainer


def draw(seed):
    rng = np.random.default_rng(seed)
    lengths = np.array(LENGTHS).T.reshape(-1)  # chosen replies first, as TRL batches them
    mask = np.zeros((8, WIDTH), bool)
    for row, length in enumerate(lengths):
        mask[row, PROMPT : PROMPT + length] = True
    logp = np.where(mask, -np.exp(rng.normal(-0.5, 0.8, mask.shape)), 0.0)
    ref = np.where(mask, logp + rng.normal(0, 0.6, mask.shape), 0.0)
    ref = np.minimum(ref, np.where(mask, -1e-3, 0.0))
    return mask, logp, ref


def dpo(mask, logp, ref, loss, **settings):
    # The α-divergence refuses float64.
    dtype = torch.float32 if settings.get("f_divergence_type") == "alpha_divergence" else None
    tokens = torch.tensor(logp[:, 1:], requires_grad=True, dtype=dtype)
    names = [loss] if isinstance(loss, str) else loss
    values = {
        "beta": 0.3, "label_smoothing": 0.0, "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5, "loss_weights": [1.0] * len(names), "ld_alpha": None,
        "use_weighting": False, "precompute_ref_logps": False,
        "ref_model": stored_model(torch.tensor(ref[:, 1:], dtype=dtype)), **settings,
    }  # fmt: skip
    trainer = bare(DPOTrainer, loss_types=names, **values)
    trainer.model = stored_model(tokens)
    inputs = {
        "input_ids": torch.zeros(mask.shape, dtype=torch.long),
        "attention_mask": torch.ones(mask.shape, dtype=torch.long),
        "completion_mask": torch.tensor(mask.astype(int)),
    }
    value = trainer._compute_loss(trainer.model, inputs, False)
    value.backward()
    kept = {name: rows[-1] for name, rows in trainer._metrics["train"].items() if "/" in name}
    return {"loss": value.item(), "grad": tokens.grad.numpy().tolist(), "metrics": kept}


def kto(mask, logp, ref, loss, labels, **settings):
    tokens = torch.tensor(logp[:, 1:], requires_grad=True)
    # The policy and the reference on mismatched replies: the rows moved by one.
    moved = [torch.tensor(np.roll(x[:, 1:], 1, 0).sum(1)) for x in (logp, ref)]
    trainer = bare(
        KTOTrainer, beta=0.3, loss_type=loss, calculate_KL=loss == "kto",
        precompute_ref_logps=False, desirable_weight=settings.get("desirable", 1.0),
        undesirable_weight=settings.get("undesirable", 1.0),
        ref_model=stored_model(torch.tensor(ref[:, 1:])),
    )  # fmt: skip
    trainer.model = stored_model(tokens)
    trainer._compute_kl_logps = lambda model, batch: (
        (moved[0] if model is trainer.model else moved[1]) if loss == "kto" else None
    )
    inputs = {
        "input_ids": torch.zeros(mask.shape, dtype=torch.long),
        "attention_mask": torch.ones(mask.shape, dtype=torch.long),
        "completion_mask": torch.tensor(mask.astype(int)),
        "label": torch.tensor(labels),
    }
    value = trainer._compute_loss(trainer.model, inputs, False)
    value.backward()
    kl = trainer._metrics["train"]["kl"][-1]
    return {"loss": value.item(), "grad": tokens.grad.numpy().tolist(), "kl": kl}


def without_reference(mask, logp, kind, **settings):
    """The pairwise part of CPO, SimPO and ORPO, from sums or means as their trainers take them."""
    tokens = torch.tensor(logp[:, 1:], requires_grad=True)
    totals = tokens.sum(1)
    if settings.pop("mean"):
        totals = totals / torch.tensor(mask[:, 1:].sum(1))
    trainer = bare(CPOTrainer if kind == "cpo" else ORPOTrainer, beta=0.3, **settings)
    if kind == "cpo":
        trainer.alpha = 0.0
        value = trainer.cpo_loss(*totals.chunk(2))[0].mean()
    else:
        # The trainer casts to float32 here; kept in float64 to compare to more digits.
        torch.Tensor.float, cast = (lambda self: self), torch.Tensor.float
        value = -trainer.odds_ratio_loss(*totals.chunk(2))[0].mean()
        torch.Tensor.float = cast
    value.backward()
    return {"loss": value.item(), "grad": tokens.grad.numpy().tolist()}


def reward(scores, margin, center):
    logits = torch.tensor(scores, requires_grad=True, dtype=torch.float64)
    trainer = bare(RewardTrainer)
    trainer.args.center_rewards_coefficient = center
    inputs = {name: torch.ones(len(scores), 3) for name in ("input_ids", "attention_mask")}
    if margin is not None:
        inputs["margin"] = torch.tensor(margin, dtype=torch.float64)

    def model(**kwargs):
        return types.SimpleNamespace(logits=logits[:, None])

    model.training = True
    trainer.model = model
    value = trainer.compute_loss(model, inputs)
    value.backward()
    return {"loss": value.item(), "grad": logits.grad.numpy().tolist()}


def main() -> None:
    assert trl.__version__.startswith("1.16."), trl.__version__
    mask, logp, ref = draw(5)
    batch = (mask, logp, ref)
    golden = {"trl": trl.__version__, "beta": 0.3, "mask": mask.astype(int).tolist()}
    golden |= {"logp": logp.tolist(), "ref": ref.tolist(), "dpo": {}, "pairs": {}, "kto": {}}
    for name in ("sigmoid", "hinge", "ipo", "sigmoid_norm", "nca_pair", "sppo_hard", "apo_zero",
                 "apo_down"):  # fmt: skip
        golden["dpo"][name] = dpo(*batch, name)
    golden["dpo"]["robust"] = dpo(*batch, "robust", label_smoothing=0.2)
    golden["dpo"]["exo_pair"] = dpo(*batch, "exo_pair", label_smoothing=0.2)
    for divergence in ("forward_kl", "js_divergence", "alpha_divergence"):
        golden["dpo"][divergence] = dpo(*batch, "sigmoid", f_divergence_type=divergence)
    golden["dpo"]["mixture"] = dpo(
        *batch, ["sigmoid", "apo_zero", "sft"], loss_weights=[0.8, 0.2, 0.5]
    )
    smoothed = dpo(*batch, "sigmoid", label_smoothing=0.3)
    golden["label_smoothing_is_ignored_by_trl"] = smoothed == golden["dpo"]["sigmoid"]
    for name, kind, settings in (
        ("simpo", "cpo", {"loss_type": "simpo", "simpo_gamma": 0.4, "mean": True}),
        ("cpo", "cpo", {"loss_type": "sigmoid", "mean": False}),
        ("orpo", "orpo", {"mean": True}),
    ):
        if kind == "cpo":
            settings["label_smoothing"] = 0.1
        golden["pairs"][name] = without_reference(mask, logp, kind, **settings)
    labels = [True, True, False, True, False, False, True, False]
    golden["kto_labels"] = labels
    golden["kto"]["kto"] = kto(*batch, "kto", labels, desirable=1.2, undesirable=0.7)
    golden["kto"]["kto_one_class"] = kto(*batch, "kto", [True] * 8)
    scores, margin = [0.3, -1.2, 2.0, 0.1, 0.5, -0.9], [0.2, 0.0, 1.5]
    golden["reward"] = {"scores": scores, "margin": margin}
    golden["reward"]["plain"] = reward(scores, None, None)
    golden["reward"]["margin_centered"] = reward(scores, margin, 0.05)
    TARGET.write_text(json.dumps(golden, indent=0) + "\n")
    print(TARGET, TARGET.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
