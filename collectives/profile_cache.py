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
from collectives.layout import Layout
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

    All members call it and get the same profile.

    Args:
        control: transport among all members
        device: of this member
        layout: of the members
        usable: primitives that work here
        measure: makes a profile; called by all members
    """
    path = profiles_directory() / f"{_key(control, device, layout, usable)}.json"
    kept = _broadcast(control, _read(path, layout, usable) if control.rank == 0 else "")
    if kept:
        return CostProfile.from_json(kept, str(path))
    profile = measure()
    if control.rank == 0:
        _write(path, profile)
    return profile


def profiles_directory() -> Path:
    """Folder of the cache: ``$XDG_CACHE_HOME/rayagi/profiles``, usually below ``~/.cache``. It may be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "rayagi" / "profiles"


def _key(control: Transport, device: torch.device, layout: Layout, usable: Collection[Primitive]) -> str:
    """Digest of everything that costs depend on: all members' machines, the layout, the usable primitives."""
    own = [machine(), str(os.cpu_count()), torch.__version__, str(PROTOCOL)]
    if device.type == "cuda":
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
        own += [torch.cuda.get_device_name(device), str(torch.version.cuda), share]
    digest = hashlib.sha256("\0".join(own).encode()).digest()
    everyone = control.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.int64))
    parts = [everyone.numpy().tobytes(), repr(layout.mpl).encode(), repr(layout.nodes).encode()]
    return hashlib.sha256(b"\0".join([*parts, *sorted(name.encode() for name in usable)])).hexdigest()[:32]


def _broadcast(control: Transport, text: str) -> str:
    """Rank 0's text, on every member."""
    content = text.encode()
    length = torch.tensor([len(content)], dtype=torch.int64)
    control.broadcast(length)
    if length.item() == 0:
        return ""
    # Padded to int64, which every transport supports.
    padded = torch.zeros(-(-int(length.item()) // 8), dtype=torch.int64)
    if content:
        padded.numpy().view("uint8")[: len(content)] = bytearray(content)
    control.broadcast(padded)
    return bytes(padded.numpy().view("uint8")[: int(length.item())]).decode()


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
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(beside)
        beside.replace(path)  # atomically
    except OSError as error:
        _logger.warning("the profile of this machine cannot be saved: %s; the next run measures again", error)
