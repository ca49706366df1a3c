# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: whole groups are dropped and their places filled, nothing kept is lost."""

import dataclasses

import numpy as np
import pytest

from jaxrl_llm.config import find_config, load_config
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.trainers.collect import GroupFilter, check_part, collect, informative
from jaxrl_llm.types import Prompt, Reward, Rollout

PROMPTS = GroupFilter(refill="prompts", max_rounds=4)


def group(prompt, values, parts=None):
    none = np.zeros(0, np.int32)
    rewards = [
        None if v is None else Reward(v, (parts or {}).get(i, {})) for i, v in enumerate(values)
    ]
    return [
        Rollout(prompt, i, none, none.astype(np.float32), none > 0, none, "stop", "", reward)
        for i, reward in enumerate(rewards)
    ]


class World:
    """Prompts 0, 1, 2 …; those in `dead` always give equal rewards, others never do."""

    def __init__(self, dead):
        self.dead, self.served, self.calls = dead, 0, []

    def next_prompts(self, count, unwanted=()):
        made = [Prompt(str(self.served + i), (1,), "") for i in range(count)]
        self.served += count
        assert not {prompt.id for prompt in made} & set(unwanted)
        return made

    def sample(self, prompts, round_):
        self.calls.append((round_, [prompt.id for prompt in prompts]))
        return [group(p, [1.0, 1.0] if int(p.id) in self.dead else [1.0, 0.0]) for p in prompts]


def ids(groups):
    return [group[0].prompt.id for group in groups]


def run(world, rule, count=4):
    return collect(world.next_prompts(count), world.sample, world.next_prompts, rule)


def test_off_takes_the_first_groups_as_they_are():
    world = World({0, 1, 2, 3})
    got = run(world, GroupFilter())
    assert [g[0].prompt.id for g in got.groups] == ["0", "1", "2", "3"]
    assert (got.rounds, got.dropped, got.metrics()) == (1, [], {})


def test_dropped_places_are_filled_exactly_and_every_prompt_is_trained_or_dropped_once():
    world = World({1, 2, 4, 6, 8})
    got = run(world, PROMPTS)
    # Round 0: 0 1 2 3, of which 1 and 2 are dropped; then 4 5; then 6; then 7.
    assert [ids for _, ids in world.calls] == [["0", "1", "2", "3"], ["4", "5"], ["6"], ["7"]]
    assert [g[0].prompt.id for g in got.groups] == ["0", "7", "5", "3"]
    assert ids(got.dropped) == ["1", "2", "4", "6"]
    assert sorted(ids(got.groups + got.dropped)) == [str(i) for i in range(world.served)]
    assert got.metrics() == {"sampling/rounds": 4.0, "sampling/groups_dropped": 4.0}


def test_the_last_round_is_kept_as_it_is_and_the_batch_has_its_size():
    world = World(set(range(1, 100)))
    got = run(world, PROMPTS)
    assert len(got.groups) == 4 and got.rounds == 4
    assert sorted(ids(got.groups + got.dropped), key=int) == [str(i) for i in range(world.served)]
    assert got.groups[0][0].prompt.id == "0"  # what was kept in the first round stays


def test_the_same_prompt_can_be_sampled_anew():
    world = World(set())
    first = world.sample
    world.sample = lambda prompts, round_: (
        [group(p, [0.0, 0.0]) for p in prompts] if round_ == 0 else first(prompts, round_)
    )
    got = run(world, GroupFilter(refill="samples", max_rounds=3))
    assert [g[0].prompt.id for g in got.groups] == ["0", "1", "2", "3"]
    assert ids(got.dropped) == ["0", "1", "2", "3"] and got.rounds == 2 and world.served == 4


def test_the_unshaped_reward_decides_and_unjudged_samples_do_not():
    prompt = Prompt("p", (1,), "")
    parts = {0: {"right": 1.0, "length": 0.3}, 1: {"right": 1.0, "length": 0.1}}
    shaped = group(prompt, [1.3, 1.1], parts)
    assert informative(shaped, None) and not informative(shaped, "right")
    assert informative(shaped, "length")
    assert not informative(group(prompt, [1.0, None]), None)
    assert not informative(group(prompt, [None, None]), None)
    assert informative(group(prompt, [1.0, None, 0.0]), None)


@pytest.mark.parametrize(
    "settings",
    [{"reward": "right"}, {"max_rounds": 3}, {"refill": "prompts", "max_rounds": 1}],
)
def test_settings_without_effect_or_sense_are_refused(settings):
    with pytest.raises(ConfigError):
        GroupFilter(**settings)


def test_a_part_that_no_reward_has_is_told_at_once():
    world = World(set())
    with pytest.raises(DataError, match=r"filter\.reward names · got right/typo · expected None"):
        run(world, GroupFilter(refill="prompts", reward="right/typo"))
    assert len(world.calls) == 1
    parts = {0: {"right": 1.0}, 1: {"right": 0.0}}
    mixed = [group(Prompt("p", (1,), ""), [1.0, 0.0], p) for p in ({}, parts)]
    check_part(mixed, "right")  # a part that only some rewards have decides among them
    check_part([group(Prompt("p", (1,), ""), [None, None])], "right")


def test_one_sample_never_differs_from_itself():
    config = load_config(find_config("ppo.py"))[1]
    alone = dataclasses.replace(config.sampler, group_size=1)
    dataclasses.replace(config, sampler=alone)
    for refill in ("prompts", "samples"):
        with pytest.raises(ConfigError, match="those of one sample never do"):
            dataclasses.replace(config, sampler=alone, filter=GroupFilter(refill=refill))
