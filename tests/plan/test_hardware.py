# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.plan.hardware import CHIPS, parse_topology


@pytest.mark.parametrize(
    ("text", "chips", "devices", "hosts"),
    [
        ("v5p:4x4x4", 64, 64, 16),
        ("v5p:8x8x8", 512, 512, 128),
        ("v5e:4x4", 16, 16, 4),
        ("v5e:2x4", 8, 8, 1),
        ("v5e:2x2", 4, 4, 1),
        ("v4:2x2x1", 4, 4, 1),
        ("v6e:16x16", 256, 256, 64),
        ("tpu7x:2x2x1", 4, 8, 1),
        ("h100:8", 8, 8, 1),
        ("h100:64", 64, 64, 8),
        ("A100:8", 8, 8, 1),
        ("cpu:8", 8, 8, 1),
    ],
)
def test_a_topology_has_chips_devices_and_hosts(text, chips, devices, hosts):
    topology = parse_topology(text)
    assert (topology.chips, topology.devices, topology.hosts) == (chips, devices, hosts)
    assert parse_topology(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v5q:4x4x4", "Did you mean v5p?"),
        ("h10:8", "Did you mean h100?"),
        ("v5p:4x4", "try: v5p:2x2x4"),
        ("v5p:3x4x4", "try: v5p:4x4x4"),
        ("v5p:8x4x4", "ascending"),
        ("v5e:4x5", "try: v5e:4x4"),
        ("v5e:64", "try: v5e:8x8"),
        ("v5e", "expected v5e:4x4"),
        ("h100:", "expected h100:8"),
        ("h100:0", "at least 1"),
        ("h100:2x4", "try: h100:8"),
        ("h100:12", "try: h100:8"),
        ("h100:" + "9" * 5000, "expected h100:8"),
        ("h100:99999", "at most 16384"),
        ("cpu:100000", "at most 1024"),
        ("h100:²", "expected h100:8"),
        ("", "one of v4"),
        ("v5p:16x24x24", "try: v5p:16x16x24"),
        ("v4:16x16x24", "at most 4096 chips"),
    ],
)
def test_a_wrong_topology_is_one_line_with_what_would_do(text, says):
    with pytest.raises(ConfigError) as error:
        parse_topology(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_every_figure_has_a_source():
    for chip in CHIPS.values():
        assert chip.source and chip.price_source, chip.name
        assert chip.flops > 0 and chip.memory > 0 and chip.memory_bandwidth > 0
        if chip.price is not None and chip.kind != "cpu":
            assert "https://" in chip.price_source and "2026" in chip.price_source
