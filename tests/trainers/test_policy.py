# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What tells of trainer and sampler by hand-worked numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.trainers.metrics import Sums
from jaxrl_llm.trainers.policy import effective_share, sampler_gap
from jaxrl_llm.types import Batch


def gap_batch(ratios, mask):
    shape = np.shape(ratios)
    zeros, ones = np.zeros(shape, np.float32), np.ones(shape, np.int32)
    batch = Batch(ones, ones, ones, np.array(mask, bool), zeros, zeros - 2)
    batch = jax.tree.map(jnp.asarray, batch)
    return jnp.log(jnp.asarray(ratios, jnp.float32)) - 2, batch


def test_mismatch_over_micro_batches_is_that_of_the_whole_batch():
    sums = Sums()
    sums.add(sampler_gap(*gap_batch([[2.0, 1.0, 9.0]], [[1, 1, 0]])))
    sums.add(sampler_gap(*gap_batch([[0.5, 7.0, 8.0]], [[1, 0, 0]])))
    found = effective_share(sums.means())
    logs = np.log([2.0, 1.0, 0.5])
    expected = {
        "sampling/sampling_logp_difference/mean": np.abs(logs).mean(),
        "sampling/sampling_logp_difference/max": np.log(2.0),
        "sampling/mismatch_k1": 0.0,
        "sampling/mismatch_k3": (3.5 - 3.0) / 3,  # the logarithms add up to 0
        "sampling/importance_sampling_ratio/mean": 3.5 / 3,
        "sampling/importance_sampling_ratio/max": 2.0,
        "sampling/effective_sample_size": 3.5**2 / (3 * (4 + 1 + 0.25)),
    }
    assert found == pytest.approx(expected, abs=1e-6)


def test_of_equal_policies_every_token_counts():
    found = effective_share(
        {
            name: float(a / b)
            for name, (a, b) in sampler_gap(*gap_batch([[1.0] * 4], [[1] * 4])).items()
        }
    )
    assert found["sampling/effective_sample_size"] == pytest.approx(1.0)
    assert found["sampling/mismatch_k3"] == 0.0
