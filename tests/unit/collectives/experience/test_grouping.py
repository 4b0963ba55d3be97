"""TOP_mov (GMI-DRL, eq. 5-8): by hand, against all partitions, and what must always hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.experience.grouping import Package, group_packages, top_mov


def packages(**sizes):
    return [Package(name, size) for name, size in sizes.items()]


def names(grouping):
    return [[package.name for package in group] for group in grouping.groups]


def forbid(*pairs):
    forbidden = {frozenset(pair) for pair in pairs}
    return lambda one, other: frozenset((one.name, other.name)) not in forbidden


def test_the_value_of_a_given_grouping_by_hand():
    state, action, reward, done = packages(state=192, action=48, reward=4, done=4)
    # means 120 and 4, two groups: min(120, 4) / 2
    assert top_mov([(state, action), (reward, done)]) == 2.0
    # means (192 + 4) / 2 = 98 and (48 + 4) / 2 = 26: 26 / 2
    assert top_mov([(state, reward), (action, done)]) == 13.0


def test_without_a_constraint_everything_shares_one_channel():
    grouping = group_packages(packages(state=192, action=48, reward=4, done=4))
    assert names(grouping) == [["state", "action", "reward", "done"]]
    assert grouping.value == 62.0  # 248 / 4 / 1
    assert grouping.per_type == 1.0  # 4 / 1 / 4
    assert grouping.uni_channel == 4.0  # 4 / 1 / 1


def test_a_small_type_goes_with_the_large_one_that_it_may_share_with():
    # finals may be with nobody, and reward not with state:
    # {state action} {reward} {finals}: min(120, 4, 100) / 3 = 1.33
    # {state} {action reward} {finals}: min(192, 26, 100) / 3 = 8.67
    grouping = group_packages(
        packages(state=192, action=48, reward=4, finals=100),
        forbid(("reward", "state"), ("finals", "state"), ("finals", "action"), ("finals", "reward")),
    )
    assert names(grouping) == [["state"], ["action", "reward"], ["finals"]]
    assert grouping.value == pytest.approx(26 / 3)


def test_two_row_axes_are_two_groups():
    apart = forbid(*[(one, other) for one in ("obs", "act") for other in ("env", "last")])
    grouping = group_packages(packages(obs=192, act=48, env=8, last=96), apart)
    assert names(grouping) == [["obs", "act"], ["env", "last"]]
    assert grouping.value == 26.0  # min(120, 52) / 2


def test_the_plan_is_printed_with_its_value_and_the_baselines():
    text = str(group_packages(packages(obs=192, act=48), forbid(("obs", "act"))))
    assert text == (
        "TOP_mov 24 with 2 channels:\n  obs: mean 192 B\n  act: mean 48 B\n"
        "one channel per type: 24; uni-channel: 48"
    )


def test_more_types_than_can_be_enumerated_are_refused():
    many = [Package(f"f{index}", 1.0) for index in range(11)]
    with pytest.raises(ValueError, match=r"11 types may share.*at most 10 can be grouped exactly"):
        group_packages(many)


def test_eleven_types_of_which_not_all_may_share_are_grouped():
    many = [Package(f"{'ab'[index % 2]}{index}", 1.0 + index) for index in range(11)]
    grouping = group_packages(many, lambda one, other: one.name[0] == other.name[0])
    assert sorted(map(len, grouping.groups)) == [5, 6]


@pytest.mark.parametrize(
    ("given_packages", "message"),
    [
        ([], "at least one"),
        (packages(a=0), "a has size 0"),
        ([Package("a", 1), Package("a", 2)], "name of its own"),
    ],
)
def test_invalid_packages_are_refused(given_packages, message):
    with pytest.raises(ValueError, match=message):
        group_packages(given_packages)


def partitions(types):
    """All, by putting the first type into each partition of the others."""
    if not types:
        yield []
        return
    first, *others = types
    for partition in partitions(others):
        yield [[first], *partition]
        for index, group in enumerate(partition):
            yield [*partition[:index], [first, *group], *partition[index + 1 :]]


cases = st.integers(1, 6).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(1, 10_000), min_size=count, max_size=count),
        st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))),
    )
)


@settings(max_examples=150, deadline=None)
@given(cases)
def test_it_is_the_best_of_all_allowed_partitions(case):
    sizes, pairs = case
    types = [Package(str(index), size) for index, size in enumerate(sizes)]
    may_share = forbid(*[(str(one), str(other)) for one, other in pairs if one != other])

    def is_allowed(partition):
        return all(
            may_share(one, other)
            for group in partition
            for one in group
            for other in group
            if one is not other
        )

    allowed = [partition for partition in partitions(types) if is_allowed(partition)]
    best = max(
        min(sum(package.size for package in group) / len(group) for group in partition) / len(partition)
        for partition in allowed
    )
    grouping = group_packages(types, may_share)
    assert grouping.value == pytest.approx(best)
    assert sorted(package.name for group in grouping.groups for package in group) == sorted(
        package.name for package in types
    )
    assert is_allowed(grouping.groups)
    assert grouping.value >= grouping.per_type
