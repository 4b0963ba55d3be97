"""Which fields share a channel, and how many groups are sent at a time."""

import pytest
import torch

from collectives.experience.errors import SchemaError
from collectives.experience.packer import ChannelPlan, pack
from collectives.experience.schema import ExperienceSchema, Field

STEPS = 16
TRAJECTORY = ExperienceSchema(
    "trajectory",
    (
        Field(name="raw_obs", shape=(STEPS, 48)),
        Field(name="actions", shape=(STEPS, 12)),
        Field(name="log_probs", shape=(STEPS,)),
        Field(name="rewards", shape=(STEPS,)),
        Field(name="terminated", dtype=torch.bool, shape=(STEPS,)),
        Field(name="truncated", dtype=torch.bool, shape=(STEPS,)),
        Field(name="running_returns", shape=(STEPS,)),
        Field(name="last_obs", shape=(48,)),
    ),
)
FINALS = ExperienceSchema(
    "finals",
    (
        Field(name="env", dtype=torch.int64),
        Field(name="step", dtype=torch.int64),
        Field(name="obs", shape=(48,)),
    ),
)


def test_fields_of_one_row_axis_share_a_channel_and_ragged_ones_have_their_own():
    plan = pack(TRAJECTORY, FINALS, ragged={"finals"})
    assert plan.groups == (TRAJECTORY, FINALS)
    assert plan.full == (TRAJECTORY,)
    assert plan.ragged == {"finals"}
    # A row: obs 3072, actions 768, three of 64, two of 16, last 192 = 4256 in 8 types: mean 532; finals: 208 in 3.
    assert plan.value == pytest.approx(208 / 3 / 2)
    assert "TOP_mov 34.6667 with 2 channels" in plan.reason


def test_fields_that_may_not_share_get_channels_with_numbers():
    plan = pack(TRAJECTORY, aligned=lambda one, other: len(one.shape) == len(other.shape))
    assert [group.name for group in plan.groups] == ["trajectory.0", "trajectory.1"]
    assert {field.name for field in plan.groups[0].fields} == {"raw_obs", "actions"}
    assert sum(len(group.fields) for group in plan.groups) == 8


def test_fields_of_two_groups_need_names_of_their_own():
    other = ExperienceSchema("other", (Field(name="rewards"),))
    with pytest.raises(SchemaError, match="'rewards' is in two groups"):
        pack(TRAJECTORY, other)


def test_a_ragged_group_needs_the_row_that_each_row_belongs_to():
    with pytest.raises(SchemaError, match="needs a field env"):
        pack(TRAJECTORY, ExperienceSchema("finals", (Field(name="obs"),)), ragged={"finals"})


def test_the_first_group_must_be_full():
    with pytest.raises(ValueError, match="the first must be full"):
        ChannelPlan((FINALS, TRAJECTORY), ragged=frozenset({"finals"}))
