"""Which fields share a channel, and how many groups are sent at a time."""

import pytest
import torch

from collectives.experience.errors import SchemaError
from collectives.experience.packer import ChannelPlan, measure_bandwidth, pack, smallest_good, with_batch
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


def test_the_smallest_batch_within_five_percent_of_the_best_is_taken():
    assert smallest_good({1: 50.0, 2: 94.0, 4: 96.0, 8: 100.0, 16: 80.0}) == 4


def test_the_batch_is_measured_and_its_reason_is_given():
    tiny = pack(ExperienceSchema("scalars", (Field(name="rewards"), Field(name="dones", dtype=torch.bool))))
    plan = with_batch(tiny, rows=16, most=64)
    assert plan.batch > 1  # 80 bytes: all of its time is what a transfer costs whatever its size
    assert plan.groups == tiny.groups
    assert f"{plan.batch} group(s) of 16 rows per transfer" in plan.reason
    assert with_batch(tiny, rows=16, most=1).batch == 1


def test_bandwidth_is_that_of_a_real_channel():
    assert measure_bandwidth((TRAJECTORY,), rows=64, limit_s=0.01) > 1e6
