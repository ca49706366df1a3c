# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts as rows: what is trained on, what is padding, and the few shapes that rows have."""

import functools

import jax
import numpy as np
import pytest
from tiny_model import tiny_model

from jaxrl_llm.models.transformer import forward
from jaxrl_llm.trainers.batching import count_targets, pad_rollouts, plan_rows, round_length
from jaxrl_llm.types import Prompt, Reward, Rollout

EOS = 2  # also the padding token of SmolLM2


def rollout(prompt, completion, reason="stop", judged=True):
    count = len(completion)
    return Rollout(
        prompt=Prompt("p", tuple(prompt), ""),
        sample=0,
        tokens=np.array(completion, np.int32),
        logp_sampler=-np.arange(1, count + 1, dtype=np.float32),
        mask=np.ones(count, bool),
        weights_version=np.zeros(count, np.int32),
        finish_reason=reason,
        reward=Reward(1.0) if judged else None,
    )


def test_the_chosen_eos_is_trained_on_once_and_padding_never_though_pad_is_eos():
    rows = [
        rollout([5, EOS, 6], [7, 8, EOS]),
        rollout([5], [9, EOS]),
        rollout([5, 6], [9], "length"),
    ]
    batch = pad_rollouts(rows, longest=40)
    for row, source in enumerate(rows):
        trained = batch.tokens[row][batch.mask[row]].tolist()
        assert trained == source.tokens.tolist()
        assert trained.count(EOS) == (source.finish_reason == "stop")
        size = len(source.prompt.tokens) + len(source.tokens)
        assert not batch.mask[row, size:].any() and not batch.segment_ids[row, size:].any()
        assert batch.segment_ids[row, :size].all()
    np.testing.assert_array_equal(batch.logp_sampler[0, 3:6], [-1, -2, -3])


def test_a_rollout_without_a_verdict_keeps_its_row_and_trains_nothing():
    batch = pad_rollouts([rollout([5], [9, 3]), rollout([5], [9, 3], judged=False)], longest=8)
    assert batch.mask.sum(axis=1).tolist() == [2, 0]


def test_cut_off_completions_are_left_out_only_when_asked():
    rows = [rollout([5], [9, 3], "length"), rollout([5], [9, EOS])]
    assert pad_rollouts(rows, longest=8).mask.sum(axis=1).tolist() == [2, 2]
    assert pad_rollouts(rows, longest=8, mask_truncated=True).mask.sum(axis=1).tolist() == [0, 2]


def test_row_lengths_are_few_and_never_beyond_the_longest():
    shapes = {round_length(length, 1000) for length in range(1, 1001)}
    coarse, fine = {32, 48, 64, 96, 128, 192, 256}, set(range(256, 512, 32))
    assert shapes == coarse | fine | set(range(512, 1000, 64)) | {1000}
    assert all(round_length(n, 1000) >= n for n in range(1, 1001))
    assert {round_length(length, 25) for length in range(1, 26)} == {25}


@pytest.mark.parametrize(("most", "width", "bound"), [(1, 4, 4), (3, 80, 16), (17, 80, 24)])
def test_the_bound_on_trained_tokens_is_static(most, width, bound):
    mask = np.zeros((2, width), bool)
    mask[1, width - most :] = True
    assert count_targets(mask) == bound


def ragged(rng, prompts=6, group=4, longest=40):
    made = []
    for _ in range(prompts):
        prompt = rng.integers(0, 99, int(rng.integers(1, 9))).tolist()
        for _ in range(group):
            count = int(rng.integers(1, 20))
            made.append(
                rollout(prompt, rng.integers(0, 99, count).tolist(), judged=rng.random() > 0.1)
            )
    return pad_rollouts(made, longest=longest)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
@pytest.mark.parametrize("seed", range(20))
def test_rows_hold_every_trained_token_once_after_its_own_prompt(layout, seed):
    rng = np.random.default_rng(seed)
    samples = ragged(rng)
    samples = samples.replace(logp_sampler=rng.normal(size=samples.mask.shape))
    plan = plan_rows(
        samples,
        layout=layout,
        row_tokens=int(rng.choice([16, 32, 64, 256])),
        micro_tokens=int(rng.choice([1, 64, 128])),
        longest=40,
        multiple=int(rng.choice([1, 2])),
    )
    rows = plan.pack(samples)
    np.testing.assert_array_equal(
        plan.unpack(rows.logp_sampler, samples.mask),
        np.where(samples.mask, samples.logp_sampler, 0.0),
    )
    assert rows.mask.sum() == samples.mask.sum()
    parts = list(plan.micro_batches(rows))
    assert {part.tokens.shape for part in parts} == {(plan.micro, rows.tokens.shape[1])}
    assert sum(part.mask.sum() for part in parts) == samples.mask.sum()
    prefix_ids = rows.prefix_ids if layout == "shared_prefix" else np.zeros_like(rows.segment_ids)
    seen = set()
    for row, column in zip(*np.nonzero(rows.mask), strict=True):
        sample, at = plan.sample[row, column], plan.column[row, column]
        assert (sample, at) not in seen
        seen.add((sample, at))
        # What the token may see, in the order of positions, is its own sample up to itself …
        visible = (rows.segment_ids[row] == rows.segment_ids[row, column]) | (
            (rows.segment_ids[row] == prefix_ids[row, column]) & (prefix_ids[row, column] > 0)
        )
        visible &= rows.positions[row] <= rows.positions[row, column]
        order = np.flatnonzero(visible)[np.argsort(rows.positions[row][visible])]
        np.testing.assert_array_equal(rows.tokens[row, order], samples.tokens[sample, : at + 1])
        np.testing.assert_array_equal(rows.positions[row, order], np.arange(at + 1))
        # … and the token before it, from whose state it is predicted, is the last of them.
        assert rows.sources[row, column] == order[-2]


def test_a_prompt_stands_once_before_all_its_completions():
    samples = pad_rollouts(
        [rollout(range(20), [7, 8, n]) for n in range(8)]
        + [rollout(range(30, 40), [5]) for _ in range(8)],
        longest=40,
    )
    shared = plan_rows(samples, layout="shared_prefix", row_tokens=64, micro_tokens=512, longest=40)
    assert (shared.sample >= 0).sum() == 20 + 8 * 3 + 10 + 8
    # A row too short for all of them repeats the prompt, once for each part of the group.
    short = plan_rows(samples, layout="shared_prefix", row_tokens=32, micro_tokens=512, longest=24)
    assert (short.sample >= 0).sum() == 2 * 20 + 8 * 3 + 10 + 8
    packed = plan_rows(samples, layout="packed", row_tokens=64, micro_tokens=512, longest=40)
    assert (packed.sample >= 0).sum() == 8 * 23 + 8 * 11
    assert packed.sample.shape[0] < 16


@pytest.mark.parametrize("layout", ["packed", "shared_prefix"])
def test_attention_over_what_rows_can_reach_is_attention_over_all(layout):
    rng = np.random.default_rng(0)
    made = []
    for size in (9, 30, 17):
        prompt = rng.integers(0, 99, size).tolist()
        counts = rng.integers(20, 50, 8)
        made += [rollout(prompt, rng.integers(0, 99, n).tolist()) for n in counts]
    samples = pad_rollouts(made, longest=96)
    plan = plan_rows(samples, layout=layout, row_tokens=448, micro_tokens=448, longest=96)
    if layout == "packed":  # rows are no longer than the longest sample
        assert plan.reach is None
        return
    rows = plan.pack(samples)
    for row in range(rows.tokens.shape[0]):
        sizes = np.bincount(rows.segment_ids[row])[1:]
        shared = [sizes[i - 1] for i in np.unique(rows.prefix_ids[row]) if i]
        assert max(sizes) <= rows.reach.segment and max(shared) <= rows.reach.prefix
    config, params = tiny_model()

    @functools.partial(jax.jit, static_argnums=0)
    def hidden(reach, batch):
        return forward(
            params,
            config,
            batch.tokens,
            batch.positions,
            batch.segment_ids,
            batch.prefix_ids,
            reach=reach,
        )

    np.testing.assert_allclose(hidden(rows.reach, rows), hidden(None, rows), atol=2e-5)


def test_a_batch_in_which_nothing_is_trained_still_makes_rows():
    samples = pad_rollouts([rollout([5], [9, 3], judged=False)] * 4, longest=8)
    plan = plan_rows(samples, layout="shared_prefix", row_tokens=64, micro_tokens=64, longest=8)
    assert not plan.pack(samples).mask.any() and plan.sample.shape[0] >= 1


def test_a_run_has_few_shapes_of_rows():
    shapes = set()
    for seed in range(300):
        samples = ragged(np.random.default_rng(seed))
        plan = plan_rows(
            samples, layout="shared_prefix", row_tokens=128, micro_tokens=512, longest=40
        )
        shapes.add((plan.micro, plan.sample.shape[1]))
    assert {width for _, width in shapes} <= {32, 48, 64, 96, 128}
    assert all(micro in (1, 2, 3, 4, 6, 8, 12, 512 // width) for micro, width in shapes)
    assert len(shapes) <= 12, shapes
