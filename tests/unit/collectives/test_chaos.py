"""A short version of the chaos experiment; ``experiments.collectives.chaos`` runs the long one."""

import pytest

from experiments.collectives.chaos import POINTS, run, table


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "seed"), [(1, 0), (2, 0)], ids=["one host", "two hosts"])
def test_members_killed_at_random_are_noticed_and_leave_nothing_and_the_next_generation_reduces(hosts, seed):
    rounds = run(10, world_size=4, hosts=hosts, transport="auto", seed=seed)
    assert [problem for one in rounds for problem in one.problems] == []
    assert {one.point for one in rounds} == set(POINTS)  # the seed was chosen so
    assert {one.replaced for one in rounds} == {True, False}
    assert all(point in table(rounds) for point in ("before", "inside", "after"))
