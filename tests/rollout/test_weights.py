# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler's products: equal to the last bit for any number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout.weights import HEAD_ROWS, MAX_COLUMNS, Left


@pytest.mark.parametrize("most_rows", [HEAD_ROWS, 64])
@pytest.mark.parametrize(("out", "columns"), [(100, 64), (192, 64), (261, 64), (64, 1536)])
def test_a_row_s_product_does_not_depend_on_its_company(out, columns, most_rows):
    matrix = jax.random.normal(jax.random.key(0), (out, columns), jnp.float32)
    rows = jax.random.normal(jax.random.key(1), (256, columns), jnp.float32)
    parts = tuple(jnp.array_split(matrix, -(-columns // MAX_COLUMNS), axis=1))
    product = jax.jit(Left(parts, most_rows).product)
    whole = product(rows)
    np.testing.assert_allclose(whole, rows @ matrix.T, rtol=1e-4, atol=1e-4)
    for count in (16, 48, 64):
        np.testing.assert_array_equal(product(rows[64 : 64 + count]), whole[64 : 64 + count])
