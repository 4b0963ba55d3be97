"""A short version of the chaos experiment; ``experiments.allreduce.chaos`` runs the long one."""

import pytest

from experiments.allreduce.chaos import POINTS, run, table


@pytest.mark.parametrize(
    ("num_rounds", "hosts"),
    [(6, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((6, 1), (40, 1), (40, 2)))],
)
def test_members_killed_at_random_are_noticed_and_leave_nothing_and_the_next_generation_reduces(
    hosts, num_rounds
):
    # On a machine that other work fills a loss takes longer to be noticed; the members' own time limit is 600 s.
    rounds = run(num_rounds, world_size=4, hosts=hosts, transport="auto", seed=27, limit_s=30.0)
    assert [problem for one in rounds for problem in one.problems] == []
    assert {one.point for one in rounds} == set(POINTS)  # the seed was chosen so
    assert {one.replaced for one in rounds} == {True, False}
    assert all(point in table(rounds) for point in POINTS)
