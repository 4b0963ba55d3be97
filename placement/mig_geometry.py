"""MIG geometry of each GPU model: profiles, their legal placements, and all layouts that these allow.

A GPU's memory is an axis of slices. An instance of a profile occupies ``size`` of them, beginning at one of ``starts``. Any
set of instances that do not overlap is a legal layout (NVIDIA's MIG user guide, supported profiles).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from placement.types import Gpu

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class MigProfile:
    """A GPU instance profile of one GPU model."""

    name: str
    """As `nvidia-smi mig -lgip` prints it: ``2g.10gb``."""
    profile_id: int
    """Profile id of `nvidia-smi mig -cgi`, for commands in messages. The driver's own id comes from NVML."""
    nvml_profile: int
    """NVML_GPU_INSTANCE_PROFILE_*: the constant with which NVML looks up the id."""
    compute_slices: int
    size: int
    """Memory slices."""
    starts: tuple[int, ...]
    """Memory slices at which an instance may begin."""
    sm_count: int | None
    """None if no source was certain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """MIG geometry of one GPU model."""

    model: str
    compute_slices: int
    memory_slices: int
    profiles: tuple[MigProfile, ...]
    """From the smallest to the whole GPU."""

    def profile(self, name: str) -> MigProfile | None:
        """The profile of that name; None if the model has none."""
        return next((profile for profile in self.profiles if profile.name == name), None)


@dataclass(frozen=True, order=True, slots=True)
class Placement:
    """Memory slices [start, start + size) of a GPU."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first slice after it."""
        return self.start + self.size

    def overlaps(self, other: Placement) -> bool:
        """Whether they share a slice."""
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True, slots=True)
class PlacedProfile:
    """A profile at a start slice."""

    profile: MigProfile
    start: int

    @property
    def placement(self) -> Placement:
        """The memory slices that it occupies."""
        return Placement(self.start, self.profile.size)


Layout = tuple[PlacedProfile, ...]
"""Instances that do not overlap, sorted by start."""


def geometry_of(gpu: Gpu) -> Geometry | None:
    """The geometry of a GPU by its name and memory; None if it has no MIG or is not in the table."""
    if " MIG " in gpu.name:  # a MIG instance that the process sees as a GPU
        return None
    for pattern, smallest_gib, geometry in _MODELS:
        if re.search(pattern, gpu.name) and gpu.memory_total_bytes >= smallest_gib * GIB:
            return geometry
    return None


def nominal_memory_bytes(name: str) -> int | None:
    """Memory of a GPU of this name, which may state it; None if it is not in the table."""
    whole = next(
        (geometry.profiles[-1].name for pattern, _, geometry in _MODELS if re.search(pattern, name)), None
    )
    stated = re.search(r"(\d+) ?GB\b", name) or re.search(r"(\d+)gb", whole or "")
    return None if whole is None or stated is None else int(stated.group(1)) * GIB


@cache
def layouts(geometry: Geometry, taken: frozenset[Placement] = frozenset()) -> tuple[Layout, ...]:
    """Every legal layout next to the ``taken`` placements, including the empty one. A few hundred at most."""
    return tuple(_layouts(geometry, 0, taken))


def _layouts(geometry: Geometry, first: int, taken: Iterable[Placement]) -> Iterator[Layout]:
    """Layouts whose instances begin at slice ``first`` or later, by recursion over the slices."""
    if first >= geometry.memory_slices:
        yield ()
        return
    # Leave slice ``first`` empty, or place each profile that may begin there.
    yield from _layouts(geometry, first + 1, taken)
    for profile in geometry.profiles:
        here = PlacedProfile(profile, first)
        if first in profile.starts and not any(here.placement.overlaps(other) for other in taken):
            for rest in _layouts(geometry, here.placement.end, taken):
                yield (here, *rest)


def _eight_slices(model: str, gigabytes: tuple[int, ...], sms: tuple[int | None, ...]) -> Geometry:
    """A model of seven compute and eight memory slices: the profiles 1g, 1g with double memory, 2g, 3g, 4g, 7g."""
    shapes = (
        # compute slices, profile id, NVML constant, memory slices, starts
        (1, 19, 0, 1, (0, 1, 2, 3, 4, 5, 6)),
        (1, 15, 9, 2, (0, 2, 4, 6)),
        (2, 14, 1, 2, (0, 2, 4)),
        (3, 9, 2, 4, (0, 4)),
        (4, 5, 3, 4, (0,)),
        (7, 0, 4, 8, (0,)),
    )
    profiles = tuple(
        MigProfile(
            name=f"{compute}g.{gigabyte}gb",
            profile_id=profile_id,
            nvml_profile=constant,
            compute_slices=compute,
            size=size,
            starts=starts,
            sm_count=sm_count,
        )
        for (compute, profile_id, constant, size, starts), gigabyte, sm_count in zip(
            shapes, gigabytes, sms, strict=True
        )
    )
    return Geometry(model=model, compute_slices=7, memory_slices=8, profiles=profiles)


A30 = Geometry(
    model="A30",
    compute_slices=4,
    memory_slices=4,
    profiles=tuple(
        MigProfile(
            name=name,
            profile_id=profile_id,
            nvml_profile=constant,
            compute_slices=slices,
            size=slices,
            starts=starts,
            sm_count=14 * slices,
        )
        for name, profile_id, constant, slices, starts in (
            ("1g.6gb", 14, 0, 1, (0, 1, 2, 3)),
            ("2g.12gb", 5, 1, 2, (0, 2)),
            ("4g.24gb", 0, 3, 4, (0,)),
        )
    ),
)
A100_40 = _eight_slices("A100-40GB", (5, 10, 10, 20, 20, 40), (14, 14, 28, 42, 56, 98))
A100_80 = _eight_slices("A100-80GB", (10, 20, 20, 40, 40, 80), (14, 14, 28, 42, 56, 98))
H100_SXM = _eight_slices("H100-80GB SXM", (10, 20, 20, 40, 40, 80), (16, 26, 32, 60, 64, 132))
H100_PCIE = _eight_slices("H100-80GB PCIe", (10, 20, 20, 40, 40, 80), (None, 14, 30, 46, 62, 114))
H200 = _eight_slices("H200-141GB", (18, 35, 35, 71, 71, 141), (16, None, 32, None, None, 132))
B200 = _eight_slices("B200", (23, 45, 45, 90, 90, 180), (None,) * 6)

_MODELS = (
    (r"\bA30\b", 20, A30),
    (r"\bA100\b", 70, A100_80),
    (r"\bA100\b", 35, A100_40),
    (r"\bH100 PCIe\b", 70, H100_PCIE),
    (r"\bH100\b.*(HBM3|SXM)", 70, H100_SXM),
    (r"\bH200\b", 130, H200),
    (r"\bB200\b", 160, B200),
)
"""(pattern of the name, minimum memory in GiB, geometry); the first match counts. Other memory sizes are not supported."""

GEOMETRIES = tuple(geometry for _, _, geometry in _MODELS)
