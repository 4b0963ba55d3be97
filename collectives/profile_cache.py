"""Profile cache: profiles kept between runs, one file per machine type and layout."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from collectives.alphabeta import AlphaBetaModel
from collectives.compiler import machine
from collectives.errors import ProfileError
from collectives.files import cache_folder, replacing
from collectives.layout import Layout
from collectives.objects import exchange
from collectives.profile import CostProfile, StepShape, steps_to_measure
from collectives.rendezvous import PROTOCOL
from collectives.schedule import Primitive
from collectives.transports.base import Transport

_logger = logging.getLogger(__name__)


def load_or_measure_profile(
    control: Transport,
    device: torch.device,
    layout: Layout,
    usable: Collection[Primitive],
    measure: Callable[[], CostProfile],
) -> CostProfile:
    """The profile in rank 0's cache for these machines and this layout; on a miss it is measured now and cached.

    All members of ``control`` call it, and ``measure``, and get the same profile.
    """
    path = cache_folder("profiles") / f"{_key(control, device, layout, usable)}.json"
    kept = exchange(control, _read(path, layout, usable).encode() if control.rank == 0 else b"")[0]
    if kept:
        return CostProfile.from_json(kept.decode(), str(path))
    profile = measure()
    if control.rank == 0:
        _write(path, profile)
    return profile


def _key(control: Transport, device: torch.device, layout: Layout, usable: Collection[Primitive]) -> str:
    """Digest of everything that costs depend on: all members' machines, the layout, the usable primitives."""
    own = [machine(), str(os.cpu_count()), torch.__version__, str(PROTOCOL)]
    if device.type == "cuda":
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
        own += [torch.cuda.get_device_name(device), str(torch.version.cuda), share]
    digest = hashlib.sha256("\0".join(own).encode()).digest()
    parts = [b"".join(exchange(control, digest)), repr(layout.mpl).encode(), repr(layout.nodes).encode()]
    return hashlib.sha256(b"\0".join([*parts, *sorted(name.encode() for name in usable)])).hexdigest()[:32]


def _read(path: Path, layout: Layout, usable: Collection[Primitive]) -> str:
    """The cached profile, if it has all that the planner needs; else empty."""
    if not path.exists():
        return ""
    try:
        profile = CostProfile.load(path)
        AlphaBetaModel.fit(profile)
        needed = {StepShape.from_step(step, layout) for step in steps_to_measure(layout, usable)}
        if not needed <= {point.shape for point in profile.points}:
            raise ProfileError(str(path), "it lacks steps that are needed here")
        return profile.to_json()
    except ProfileError as error:
        _logger.warning("%s: %s; the machine is measured again", path, error.reason)
        return ""


def _write(path: Path, profile: CostProfile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside:
            profile.save(beside)
    except OSError as error:
        _logger.warning("the profile of this machine cannot be saved: %s; the next run measures again", error)
