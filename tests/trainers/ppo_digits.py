# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""ppo.py for a random model, which never adds up but writes a digit now and then."""

import dataclasses

from jaxrl_llm.config import find_config, load_config


def digits(rollouts):
    return [float(sum(char in "0123456789" for char in r.completion)) for r in rollouts]


def get_config():
    config = load_config(find_config("ppo.py"))[1]
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path="tiny-random"),
        task=dataclasses.replace(config.task, heldout=4),
        rewards={"digits": digits},
    )
