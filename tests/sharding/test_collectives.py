# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What the compiled step sends: activations from stage to stage, no weights between stages."""

import re

import jax
import numpy as np
import pytest
from mesh_problems import LENGTH, RICH, TELLING, draw_params, draw_rows, on_mesh, parse

from jaxrl_llm.models.heads import sequence_logprobs
from jaxrl_llm.models.placement import Placement
from jaxrl_llm.models.shapes import layer_shapes

pytestmark = pytest.mark.full
MATRICES = [shape for shape in layer_shapes(TELLING).values() if len(shape) == 2]
WEIGHTS = {(o // a, i // b) for o, i in MATRICES for a, b in ((1, 1), (2, 1), (1, 2))}


def sent(text, kind):
    """The trailing two dimensions of everything that a kind of collective makes."""
    found = set()
    for line in text.splitlines():
        made = re.search(rf"= (.*?) {kind}(-start)?\(", line)
        for shape in re.findall(r"\[([\d,]+)\]", made.group(1)) if made else ():
            found.add(tuple(int(n) for n in shape.split(","))[-2:])
    return found


@pytest.mark.parametrize(
    "mesh",
    [
        "pipeline=2,data=2,tensor=2",
        "pipeline=2,data=2,tensor=2,rounds=2,microbatches=2",
        "pipeline=4,tensor=2",
        "pipeline=4,data=2",
    ],
)
def test_stages_send_activations_and_no_weights(mesh):
    text = on_mesh("rl_telling", "float32", parse(mesh))[3]().compile().as_text()
    assert (LENGTH, TELLING.hidden_size) in sent(text, "collective-permute")
    for kind in ("all-gather", "all-to-all", "collective-permute"):
        assert not sent(text, kind) & WEIGHTS, (kind, sent(text, kind) & WEIGHTS)


def test_fsdp_gathers_weights():
    """What the test above looks for is there where it should be."""
    text = on_mesh("rl_telling", "float32", parse("data=4,fsdp=2"))[3]().compile().as_text()
    assert sent(text, "all-gather") & WEIGHTS
    assert "collective-permute" not in text or not sent(text, "collective-permute") & WEIGHTS


@pytest.mark.parametrize("mesh", ["pipeline=2,fsdp=2,tensor=2,rounds=2", "pipeline=4,data=2"])
def test_log_probabilities_without_gradients(mesh):
    rows, params = draw_rows(RICH), draw_params(RICH, "float32")
    place = Placement.make(parse(mesh), RICH)

    def logprobs(params, rows, model):
        return sequence_logprobs(params, model, **rows, num_targets=LENGTH)

    expected = jax.jit(lambda p, r: logprobs(p, r, RICH))(params, rows)
    compute = place.jit(lambda p, r: logprobs(p, r, place.model))
    found = compute(place.put(params), place.put_rows(rows))
    for one, other in zip(jax.device_get(expected), jax.device_get(found), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5 * np.abs(one).max())
