"""The MIG planner against brute force and against figures of NVIDIA's user guide."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.errors import PlanError
from placement.mig_geometry import (
    A30,
    A100_40,
    A100_80,
    B200,
    GEOMETRIES,
    H100_PCIE,
    H100_SXM,
    H200,
    Geometry,
    PlacedProfile,
    Placement,
    geometry_of,
    layouts,
)
from placement.mig_planner import MIN_GRANTED, choose_existing, plan_instances
from placement.types import Gpu, MigInstance

GIB = 2**30
MODELS = {
    "NVIDIA A30": (24, A30),
    "NVIDIA A100-SXM4-40GB": (40, A100_40),
    "NVIDIA A100-PCIE-40GB": (40, A100_40),
    "NVIDIA A100-SXM4-80GB": (80, A100_80),
    "NVIDIA A100 80GB PCIe": (80, A100_80),
    "NVIDIA H100 80GB HBM3": (80, H100_SXM),
    "NVIDIA H100 PCIe": (80, H100_PCIE),
    "NVIDIA H200": (141, H200),
    "NVIDIA B200": (180, B200),
    "Tesla V100-SXM2-16GB": (16, None),
    "NVIDIA GeForce RTX 4090": (24, None),
    "NVIDIA A10": (24, None),
    "NVIDIA H100 NVL": (94, None),
    "NVIDIA GB200": (186, None),
    "NVIDIA A100-SXM4-40GB MIG 7g.40gb": (40, None),
}
BY_MODEL = {geometry.model: name for name, (_, geometry) in MODELS.items() if geometry is not None}


def gpu(name: str = "NVIDIA A100-SXM4-40GB", **changes) -> Gpu:
    memory = MODELS[name][0] * GIB * 99 // 100  # drivers keep a little
    return Gpu(**({"index": 0, "uuid": "GPU-0", "name": name, "memory_total_bytes": memory} | changes))


def of(geometry: Geometry) -> Gpu:
    return gpu(BY_MODEL[geometry.model])


def cut(placed: tuple[PlacedProfile, ...]) -> list[str]:
    return [f"{one.profile.name}@{one.start}" for one in placed]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_known_by_name_and_memory(name):
    assert geometry_of(gpu(name)) is MODELS[name][1]


@pytest.mark.parametrize(
    ("geometry", "most"),
    [(one, (4, 2, 1) if one is A30 else (7, 4, 3, 2, 1, 1)) for one in GEOMETRIES],
    ids=[one.model for one in GEOMETRIES],
)
def test_as_many_instances_of_one_profile_fit_as_nvidia_says(geometry, most):
    possible = layouts(geometry)
    assert [
        max(sum(one.profile is profile for one in layout) for layout in possible)
        for profile in geometry.profiles
    ] == list(most)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda one: one.model)
def test_layouts_are_all_legal_sets_and_never_exceed_the_gpu(geometry):
    pieces = [PlacedProfile(profile, start) for profile in geometry.profiles for start in profile.starts]
    # Brute force of its own: grow every set of pieces that do not share a slice. A bit for each memory slice.
    legal = {frozenset(): 0}
    for piece in pieces:
        slots = ((1 << piece.profile.size) - 1) << piece.start
        legal |= {chosen | {piece}: taken | slots for chosen, taken in legal.items() if not taken & slots}
    possible = layouts(geometry)
    assert {frozenset(layout) for layout in possible} == legal.keys()
    whole = geometry.profiles[-1]
    for layout in possible:
        assert sum(one.profile.size for one in layout) <= geometry.memory_slices
        assert sum(one.profile.compute_slices for one in layout) <= geometry.compute_slices
        if all(one.profile.sm_count is not None for one in layout) and whole.sm_count is not None:
            assert sum(one.profile.sm_count for one in layout) <= whole.sm_count


def test_four_beside_three_is_legal_one_way_round():
    assert cut(plan_instances(gpu(), [3 / 7, 4 / 7])) == ["3g.20gb@4", "4g.20gb@0"]
    on_the_left = [Placement(0, 4)]
    assert cut(plan_instances(gpu(), [3 / 7], on_the_left)) == ["3g.20gb@4"]
    with pytest.raises(PlanError, match=r"no legal placement .* with memory slices 4-7 taken"):
        plan_instances(gpu(), [0.9, 0.1], [Placement(4, 4)])


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, "7g.40gb"),
        (2, "3g.20gb"),
        (3, "2g.10gb"),
        (4, "1g.10gb"),  # two memory slices each
        (5, "1g.5gb"),
        (6, "1g.5gb"),
        (7, "1g.5gb"),
    ],
)
def test_even_shares_get_even_instances(count, expected):
    placed = plan_instances(gpu(), [1 / count] * count)
    assert [one.profile.name for one in placed] == [expected] * count


def test_counts_alone_would_not_do():
    # Three slices are free, 1 + 2 are wanted; but they are 1, 3 and 6, and 2g begins at 0, 2 or 4.
    taken = [Placement(0, 1), Placement(2, 1), Placement(4, 2), Placement(7, 1)]
    with pytest.raises(PlanError, match=r"alone would fit any of 1g.5gb. 1 x 0.14 would fit as 1 x 1g.5gb"):
        plan_instances(gpu(), [0.14, 0.28], taken)


def test_what_is_too_far_from_what_was_asked_is_refused():
    # Beside half of the GPU, nine tenths would be 3g: 3/7 / 0.9 < 1/2
    with pytest.raises(PlanError, match=r"1 x 0.9 on GPU 0"):
        plan_instances(gpu(), [0.9], [Placement(0, 4)])


def test_many_requests_are_refused_as_soon_as_few():
    with pytest.raises(
        PlanError, match=r"it holds at most 7 MIG instances. 7 x 0.125 would fit as 7 x 1g.5gb"
    ):
        plan_instances(gpu(), [0.125] * 8)
    # C(40, 7) subsets of seven would fit at most: the first seven do.
    several = [round(1 / 40 + index / 10_000, 4) for index in range(40)]
    with pytest.raises(
        PlanError, match=r"it holds at most 7 MIG instances. 1 x 0.025 \+ .* would fit as 7 x 1g.5gb"
    ):
        plan_instances(gpu(), several)
    # Of 40 large ones two fit, in two halves; so does a small one before them.
    with pytest.raises(PlanError, match=r"at most 7 .*\. 2 x 0.8 would fit as 2 x 3g.20gb"):
        plan_instances(gpu(), [0.8] * 40)
    with pytest.raises(
        PlanError, match=r"at most 7 .*\. 1 x 0.1 \+ 1 x 0.8 would fit as 1 x 1g.5gb \+ 1 x 4g.20gb"
    ):
        plan_instances(gpu(), [0.1, *[0.8] * 39])


def first_of_the_largest_subsets(geometry: Geometry, taken: list[Placement], requests: list) -> str:
    """The hint by its definition: every subset, the largest first, in lexicographic order."""
    for count in range(len(requests) - 1, 0, -1):
        for part in combinations(requests, count):
            try:
                placed = plan_instances(of(geometry), part, taken)
            except PlanError:
                continue
            return f"{texts(part)} would fit as {texts([one.profile.name for one in placed])}"
    return "Use another GPU, have its instances destroyed by their owner, or use backend='mps'"


def hint_of(geometry: Geometry, requests: list, taken: list[Placement]) -> str | None:
    """The hint of the refusal; None if the requests fit."""
    try:
        plan_instances(of(geometry), requests, taken)
    except PlanError as error:
        return error.hint
    return None


def texts(requests) -> str:
    counts = Counter(one if isinstance(one, str) else f"{one:.3g}" for one in requests)
    return " + ".join(f"{count} x {name}" for name, count in counts.items())


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([A30, A100_40, H100_SXM]), st.data())
def test_the_hint_is_the_first_of_the_largest_subsets_that_fit(geometry, data):
    sizes = [0.1, 0.125, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0]
    requests = data.draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=6))
    exists = data.draw(st.sampled_from(layouts(geometry)))
    taken = [one.placement for one in exists[:2]]
    hint = hint_of(geometry, requests, taken)
    assert hint is None or hint == first_of_the_largest_subsets(geometry, taken, requests)


def test_a_gpu_without_mig_is_refused():
    with pytest.raises(PlanError, match="its MIG geometry is not known, or it has no MIG"):
        plan_instances(gpu("NVIDIA GeForce RTX 4090"), [0.5])


# Against brute force.

GEOMETRY = st.sampled_from([A30, A100_40, H100_SXM])


@settings(max_examples=60, deadline=None)
@given(
    GEOMETRY,
    st.lists(st.sampled_from([0.1, 0.125, 0.2, 0.25, 0.3, 0.5, 0.7, 1.0]), min_size=1, max_size=3),
    st.data(),
)
def test_no_layout_gives_the_poorest_fraction_more(geometry, fractions, data):
    exists = data.draw(st.sampled_from(layouts(geometry)))
    taken = [one.placement for one in exists[:2]]

    def poorest(assigned) -> float:
        return min(
            min(
                1.0,
                profile.compute_slices / geometry.compute_slices / fraction,
                profile.size / geometry.memory_slices / fraction,
            )
            for profile, fraction in zip(assigned, fractions, strict=True)
        )

    best = max(
        (
            poorest([one.profile for one in order])
            for layout in layouts(geometry, frozenset(taken))
            if len(layout) == len(fractions)
            for order in permutations(layout)
        ),
        default=0.0,
    )
    try:
        placed = plan_instances(of(geometry), fractions, taken)
    except PlanError:
        assert best < MIN_GRANTED
        return
    assert poorest([one.profile for one in placed]) == pytest.approx(best)
    assert all(one.start in one.profile.starts for one in placed)
    everything = [*taken, *(one.placement for one in placed)]
    assert not any(one.overlaps(other) for one, other in combinations(everything, 2))
    assert max(one.end for one in everything) <= geometry.memory_slices
    assert placed == plan_instances(
        of(geometry), fractions, list(reversed(taken))
    )  # a function of its inputs


# Instances that exist.


def instance(number: int, profile: str, gib: float, *, in_use: bool = False) -> MigInstance:
    return MigInstance(
        uuid=f"MIG-{number}", profile=profile, memory_bytes=int(gib * GIB), sm_count=14, in_use=in_use
    )


def test_the_smallest_that_do_are_chosen_among_those_that_exist():
    there = (
        instance(0, "3g.20gb", 19.6),
        instance(1, "2g.10gb", 9.75),
        instance(2, "1g.5gb", 4.75),
        instance(3, "1g.5gb", 4.75, in_use=True),
    )
    cut_gpu = gpu(mig_enabled=True, mig_instances=there)
    assert [one.uuid for one in choose_existing(cut_gpu, [0.1])] == ["MIG-2"]
    assert [one.uuid for one in choose_existing(cut_gpu, [0.1, 0.4])] == ["MIG-2", "MIG-0"]
    assert [one.uuid for one in choose_existing(cut_gpu, [0.24])] == ["MIG-1"]
    with pytest.raises(PlanError, match=r"of its 4 MIG instances, free are 1 x 3g.20gb"):
        choose_existing(cut_gpu, [0.1] * 4)


def test_a_part_of_a_gpu_instance_counts_by_its_own_sms():
    # 14 of 98 SMs are 1/7, whatever the memory: half of a GPU is not in it
    cut_gpu = gpu(mig_enabled=True, mig_instances=(instance(0, "1c.3g.20gb", 19.6),))
    assert [one.uuid for one in choose_existing(cut_gpu, [0.14])] == ["MIG-0"]
    with pytest.raises(PlanError):
        choose_existing(cut_gpu, [0.5])
