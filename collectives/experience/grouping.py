"""Grouping of experience types into channels: maximises GMI-DRL's proxy TOP_mov exactly (eq. 5-8)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from collectives.errors import counted

MAX_TYPES = 10
"""Types per connected component: Bell(10) = 115,975 partitions. The paper's limit."""


@dataclass(frozen=True, slots=True)
class Package:
    """A type of experience: the papers' package."""

    name: str
    size: float
    """Bytes of one package: P in eq. 6. Only ratios matter."""


Group = tuple[Package, ...]
MayShare = Callable[[Package, Package], bool]
"""Alignment (eq. 8): whether two types may be in one group; symmetric."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """A partition of the types, with its value of eq. 6 and those of the baselines."""

    groups: tuple[Group, ...]
    value: float
    """TOP_mov, in bytes per unit of the proxy's cost."""
    per_type: float
    """TOP_mov of one channel per type."""
    uni_channel: float
    """TOP_mov of one channel through which every package is sent by itself."""

    def __str__(self) -> str:
        lines = [f"TOP_mov {self.value:.6g} with {len(self.groups)} channel{'s' * (len(self.groups) != 1)}:"]
        for group in self.groups:
            names = ", ".join(package.name for package in group)
            lines.append(f"  {names}: mean {_mean(group):.6g} B")
        lines.append(f"one channel per type: {self.per_type:.6g}; uni-channel: {self.uni_channel:.6g}")
        return "\n".join(lines)


def top_mov(groups: Iterable[Group]) -> float:
    """Eq. 6 for a given grouping: the least mean package size of a group, divided by the number of groups."""
    all_groups = tuple(groups)
    # min_i { sum_j P_ij / (g_i grp) }    (eq. 6; P: bytes of a package, g_i: packages of group i, grp: number of groups)
    return min(map(_mean, all_groups)) / len(all_groups)


def group_packages(packages: Sequence[Package], may_share: MayShare = lambda one, other: True) -> Grouping:
    """The grouping with the greatest TOP_mov (eq. 6) of all feasible ones (eq. 7, 8); fewer groups where two are equal.

    Types that ``may_share`` does not connect are never in one group. So each connected component is enumerated by
    itself, and the components' best partitions by number of groups are then combined.

    The baselines' values are by eq. 6 too. The preprint's uni-channel sends each package by itself (no concatenation,
    g = 1) through one channel (grp = 1): the smallest package decides. One channel per type has g = 1, grp = nt.

    Raises:
        ValueError: no type, two of one name, a size that is not positive, or too many types.
    """
    names = [package.name for package in packages]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"types {names}: at least one is needed, each with a name of its own")
    for package in packages:
        if not package.size > 0:
            raise ValueError(f"{package.name} has size {package.size}: it must be positive")
    # Eq. 8 splits the problem: solve each connected component, one best partition per number of groups.
    fronts = [_best_partitions(component, may_share) for component in _components(packages, may_share)]
    # The max of eq. 6 over all combinations of these: only the least mean and the number of groups of each matter.
    candidates = (tuple(itertools.chain.from_iterable(choice)) for choice in itertools.product(*fronts))
    best = max(candidates, key=lambda groups: (top_mov(groups), -len(groups)))
    order = {name: place for place, name in enumerate(names)}
    groups = tuple(tuple(sorted(group, key=lambda package: order[package.name])) for group in best)
    # Baselines: g = 1, so the smallest package is the least mean.
    smallest = min(package.size for package in packages)
    return Grouping(
        groups=tuple(sorted(groups, key=lambda group: order[group[0].name])),
        value=top_mov(best),
        per_type=smallest / len(packages),
        uni_channel=smallest,
    )


def _mean(group: Group) -> float:
    return sum(package.size for package in group) / len(group)


def _components(packages: Sequence[Package], may_share: MayShare) -> Iterator[Group]:
    left = list(packages)
    while left:
        component = [left.pop(0)]
        for member in component:
            neighbours = [package for package in left if may_share(member, package)]
            component.extend(neighbours)
            left = [package for package in left if package not in neighbours]
        yield tuple(component)


def _best_partitions(component: Group, may_share: MayShare) -> list[tuple[Group, ...]]:
    """Pareto front of a component's partitions: fewest groups first, each with a greater least mean.

    Branch and bound over restricted growth strings, in descending order of size. A type that joins a group then never
    raises the group's mean. So a partial partition's least mean is an upper bound for all its completions, which have
    at least as many groups.
    """
    if len(component) > MAX_TYPES:
        raise ValueError(
            f"{counted(len(component), 'type')} may share channels with "
            f"one another ({', '.join(p.name for p in component)}): "
            f"at most {MAX_TYPES} can be grouped exactly; merge small fields into one, or let fewer share"
        )
    types = sorted(component, key=lambda package: -package.size)
    best: dict[int, tuple[float, tuple[Group, ...]]] = {}

    # Dominated: a known partition has no more groups and no smaller least mean (both terms of eq. 6).
    def is_dominated(num_groups: int, least_mean: float) -> bool:
        return any(count <= num_groups and mean >= least_mean for count, (mean, _) in best.items())

    def place(index: int, groups: tuple[Group, ...]) -> None:
        least_mean = min(map(_mean, groups), default=float("inf"))
        if is_dominated(len(groups), least_mean):  # prune by the upper bound
            return
        if index == len(types):
            best[len(groups)] = (least_mean, groups)
            return
        package = types[index]
        # Branch: the next type joins a group all of whose members it may share with (eq. 8), or opens a new one.
        for at, group in enumerate(groups):
            if all(may_share(package, member) for member in group):
                place(index + 1, (*groups[:at], (*group, package), *groups[at + 1 :]))
        place(index + 1, (*groups, (package,)))

    place(0, ())
    # Keep a partition with more groups only if its least mean is greater.
    front: list[tuple[Group, ...]] = []
    reached = 0.0
    for count in sorted(best):
        mean, groups = best[count]
        if mean > reached:
            front.append(groups)
            reached = mean
    return front
