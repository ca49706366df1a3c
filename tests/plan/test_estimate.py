# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Figures that circulate, with their right values; all worked by hand from public sizes."""

from __future__ import annotations

import pytest
from golden_files import read_golden

from jaxrl_llm.models.hf_config import config_from_hf
from jaxrl_llm.plan.estimate import (
    BEST_MFU,
    Bill,
    accelerator_hours,
    compute_phase,
    cost,
    days,
    hours_a_day,
    mfu_range,
    sampler_phase,
)
from jaxrl_llm.plan.flops import (
    METHODS,
    Pass,
    active_params,
    method_flops_per_token,
    plain_flops,
    training_flops,
)
from jaxrl_llm.plan.hardware import CHIPS

H100 = CHIPS["h100"].flops
A100 = CHIPS["a100-80"].flops


def public(name: str):
    return config_from_hf(read_golden("model_configs.json")["models"][name]["config"])


def test_deepseek_v3_counts_its_active_parameters():
    tokens = 14.8e12
    wrong = accelerator_hours(training_flops(671e9, tokens), H100, 0.45)
    right = accelerator_hours(training_flops(37e9, tokens), H100, 0.346)
    assert round(wrong / 1e6, 1) == 37.2  # millions of hours: with all 671 B parameters
    assert round(right / 1e6, 2) == 2.67  # its report says 2.664 M for this part of its training


def test_a_grpo_of_7b_is_ten_times_n():
    tokens = 2.4576e9
    claimed = 3.5 * training_flops(7e9, tokens)
    assert claimed == pytest.approx(3.61e20, rel=1e-3)
    assert round(accelerator_hours(claimed, A100, 0.35)) == 919  # not 3,300
    ours = method_flops_per_token("grpo", 7e9) * tokens
    assert ours == 10 * 7e9 * tokens
    assert round(accelerator_hours(ours, A100, 0.35)) == 438


def test_passes_of_the_methods():
    assert method_flops_per_token("sft", 1.0) == 6.0  # not 2: the gradients are four of the six
    assert method_flops_per_token("preference", 1.0) == 8.0
    assert method_flops_per_token("grpo", 1.0) == 10.0
    assert method_flops_per_token("ppo", 1.0) == 2 * 5 + 6 * 2
    assert {kind for row in METHODS.values() for _, kind in row} == {"decode", "forward", "update"}


def test_eight_gpus_at_seventy_percent_are_134_hours_a_day():
    assert round(hours_a_day(8, 0.7)) == 134  # not 250: there are only 192
    assert hours_a_day(8, 1.0) == 192


def test_days_and_money():
    assert days(438.0, 8) == pytest.approx(2.28, abs=0.01)
    assert cost(100.0, 2.0, retry=0.2) == 240.0
    assert cost(100.0, 2.0, retry=0.0) == 200.0


def test_active_parameters_are_those_that_a_token_meets():
    dense, experts = public("meta-llama/Llama-3.1-8B"), public("mistralai/Mixtral-8x7B-v0.1")
    embedding = dense.vocab_size * dense.hidden_size
    norms = (2 * dense.num_layers + 1) * dense.hidden_size
    assert active_params(dense) == dense.num_params - embedding - norms
    assert experts.num_params == 46_702_792_704
    assert 12.5e9 < active_params(experts) < 12.9e9  # two of eight experts
    sparse = public("Qwen/Qwen3-30B-A3B")
    assert 2.9e9 < active_params(sparse) < 3.4e9


def test_an_update_with_remat_computes_the_layers_once_more_but_their_last_product():
    config = public("Qwen/Qwen2.5-0.5B")
    sizes = dict(model=config, tokens=100.0, context=32.0, places=128.0, width=64.0)
    update = Pass("update", "update", **sizes)
    again = Pass("update", "update", **sizes, remat=True)
    head = 2.0 * config.vocab_size * config.hidden_size
    layers = plain_flops(config, 64.0) - head
    scores = (plain_flops(config, 64.0) - plain_flops(config, 0.0)) / 2
    head *= 19 * 8192 / 151936  # chunks, the last of which overlaps
    down = 2.0 * 24 * 4864 * 896
    assert update.model_flops == 3 * 100 * config.flops_per_token(32.0)
    assert update.computed_flops() == pytest.approx(128 * (3 * layers + scores + 4 * head))
    again, update = again.computed_flops(), update.computed_flops()
    assert again - update == pytest.approx(128 * (layers - scores - down))


def test_utilisation_falls_with_few_tokens_a_device():
    chip = CHIPS["v5p"]
    enough = 459e12 / 600e9  # tokens whose products take as long as their weights' transfer
    assert mfu_range(2 * enough, chip) == BEST_MFU
    low, high = mfu_range(enough / 2, chip)
    assert (low, high) == pytest.approx((BEST_MFU[0] / 2, BEST_MFU[1] / 2))


def test_float32_runs_at_half_the_rate_of_a_gpu_and_moves_twice_the_bytes():
    chip = CHIPS["h100"]
    assert (chip.rate("float32"), CHIPS["v5p"].rate("float32")) == (989e12 / 2, 459e12)
    assert "TF32" in chip.rate_words("float32") and "bfloat16 p" in CHIPS["v5p"].rate_words(
        "float32"
    )
    both = [
        compute_phase(
            "update", computed=1e18, needed=1e18, devices=8, chip=chip, mfu=BEST_MFU, dtype=dtype
        ).seconds[0]
        for dtype in ("float32", "bfloat16")
    ]
    assert both[0] == 2 * both[1]
    assert mfu_range(100, chip, dtype="float32") == mfu_range(100, chip)  # half, times two
    v5p = mfu_range(100, CHIPS["v5p"], dtype="float32")
    assert v5p == pytest.approx([x / 2 for x in mfu_range(100, CHIPS["v5p"])])


def test_decoding_is_bound_by_what_is_slower():
    chip = CHIPS["h100"]
    few = sampler_phase(
        "decode", steps=10, step_bytes=16e9, step_flops=16e9, needed=1e12, chip=chip
    )
    many = sampler_phase(
        "decode", steps=10, step_bytes=16e9, step_flops=16e12, needed=1e12, chip=chip
    )
    assert few.bound == "bandwidth"
    assert few.seconds == pytest.approx((10 * 16e9 / 3.35e12 / 0.8, 10 * 16e9 / 3.35e12 / 0.5))
    assert many.bound == "FLOPs"
    assert many.seconds[0] == pytest.approx(10 * 16e12 / 989e12 / BEST_MFU[1])


def test_a_bill_adds_up():
    chip = CHIPS["v5p"]
    phase = compute_phase(
        "update", computed=2e18, needed=1e18, devices=64, chip=chip, mfu=(0.25, 0.5)
    )
    bill = Bill((phase, phase), 100, 1e6, 64, chip, price=4.2, retry=0.2)
    seconds = 2 * 2e18 / (64 * 459e12) / 0.5
    assert bill.step_seconds == pytest.approx((seconds, 2 * seconds))
    assert bill.mfu == pytest.approx((0.125, 0.25))  # half of what is computed is needed
    assert bill.tokens_per_second == pytest.approx((1e6 / (2 * seconds), 1e6 / seconds))
    assert bill.hours[0] == pytest.approx(100 * seconds / 3600)
    assert bill.money[1] == pytest.approx(bill.hours[1] * 64 * 4.2 * 1.2)
    assert Bill((phase,), 1, 1.0, 4, CHIPS["tpu7x"], price=None).money is None
