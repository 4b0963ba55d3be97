"""Finds the primitives that work among these members: by exchanged capabilities first, then by a test reduction.

GMI-DRL (§3.2.1) assumes what the platform allows ("NCCL prohibits synchronization among GMIs on the same GPU"). Here it is
probed, because it depends on NCCL's version, MIG, containers and permissions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from collectives.limits import call_with_timeout
from collectives.objects import all_gather_objects
from collectives.rendezvous import host_identity
from collectives.schedule import Primitive
from collectives.shared_words import unsupported_reason
from collectives.transports.base import Transport, shares
from collectives.transports.nccl import MIG_SINCE, Version, nccl_version

_PROBE_ELEMENTS = 1001
"""Odd, and several shares for each of some members."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessCapabilities:
    """Capabilities of one process and its host."""

    host_id: str
    shared_memory: bool
    """Whether the shared-memory transport works on this host."""
    device: str
    """UUID of the GPU (``GPU-...``) or MIG instance (``MIG-...``) that it computes on, or ``cpu``."""
    nccl: Version | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrimitiveProbe:
    """A primitive to probe, from one member's view."""

    members: tuple[int, ...]
    """Ranks of its group including this member, for example those of one GPU for ``device``."""
    open: Callable[[], Transport]
    """Connects the group; called by all its members at the same time. The probe closes the transport."""


def local_capabilities(device: torch.device) -> ProcessCapabilities:
    """Capabilities of the calling process. [unverified on GPU] the UUID of a GPU or MIG instance."""
    return ProcessCapabilities(
        host_id=host_identity(),
        shared_memory=not unsupported_reason(),
        device=_device_id(device),
        nccl=nccl_version(),
    )


def probe_primitives(
    control: Transport,
    capabilities: ProcessCapabilities,
    candidates: Mapping[Primitive, PrimitiveProbe],
    limit_s: float,
) -> dict[Primitive, str]:
    """Why each candidate does not work; empty if it does. All members of ``control`` call it with the same primitives.

    A member in no group of a primitive leaves its candidate's ``members`` empty. A primitive is supported only if it works
    for every member of ``control`` in its group. Members wait for each other in ``control``, whose time limit must exceed
    ``limit_s``.

    Raises:
        CommunicatorError: a member is lost.
    """
    everyone: list[ProcessCapabilities] = all_gather_objects(capabilities, control)
    objections: dict[Primitive, str] = {}
    for primitive in sorted(candidates):
        candidate = candidates[primitive]
        objection = ""
        if len(candidate.members) > 1:
            group = [everyone[rank] for rank in candidate.members]
            objection = primitive_unsupported_reason(primitive, group) or probe(candidate.open, limit_s)
        objections[primitive] = _combine_objections(all_gather_objects(objection, control))
    return objections


def primitive_unsupported_reason(primitive: Primitive, group: Sequence[ProcessCapabilities]) -> str:
    """Why the primitive cannot work among these members; empty if it may. Equal on all, so that all or none probe it."""
    if primitive == "net":
        return ""
    if primitive == "ip":
        works = all(capabilities.shared_memory for capabilities in group)
        return _no_shared_host(group) or ("" if works else "a member cannot share memory")
    on_cpu = [capabilities.device == "cpu" for capabilities in group]
    if all(on_cpu):
        return "" if primitive == "rp" else "no CUDA: these members compute on a CPU"
    if any(on_cpu):
        return "some members compute on a CPU and some on a GPU"
    if primitive == "device":
        return _no_shared_host(group) or _not_one_device(group)
    return _nccl_unfit(group) or _not_a_device_each(group)


def probe(open_transport: Callable[[], Transport], limit_s: float) -> str:
    """Reduce numbers whose sum is known; returns the reason of a failure, or an empty text, within ``limit_s``.

    A call that hangs stays in its own thread.
    """
    try:
        return call_with_timeout(limit_s, lambda: _wrong_result(open_transport))
    except TimeoutError:
        return f"its probe did not end within {limit_s:.1f} s"
    except Exception as error:  # any exception of a library means that the primitive does not work here
        return f"its probe failed: {error}"


def _wrong_result(open_transport: Callable[[], Transport]) -> str:
    transport = open_transport()
    try:
        n = transport.world_size
        numbers = transport.buffer(_PROBE_ELEMENTS, torch.float32)
        # Element i of rank r is (r + 1)(i + 1), so the sum is (i + 1) n (n + 1) / 2, exact in float32.
        ramp = torch.arange(1, _PROBE_ELEMENTS + 1, dtype=torch.float32, device=numbers.device)
        for name, reduce in (
            ("all_reduce", transport.all_reduce),
            ("reduce_scatter", transport.reduce_scatter),
        ):
            numbers.copy_(ramp * (transport.rank + 1))
            reduce(numbers)
            begin, end = (
                (0, _PROBE_ELEMENTS) if name == "all_reduce" else shares(_PROBE_ELEMENTS, n)[transport.rank]
            )
            if not torch.equal(numbers[begin:end], ramp[begin:end] * (n * (n + 1) // 2)):
                return f"its {name} of known numbers gave a wrong sum"
        transport.barrier()
        return ""
    finally:
        transport.close()


def _combine_objections(objections: Sequence[str]) -> str:
    """Empty only if no member objects; equal objections are merged."""
    ranks: dict[str, list[int]] = {}
    for rank, objection in enumerate(objections):
        if objection:
            ranks.setdefault(objection, []).append(rank)
    return "; ".join(f"ranks {', '.join(map(str, who))}: {what}" for what, who in ranks.items())


def _no_shared_host(group: Sequence[ProcessCapabilities]) -> str:
    hosts = len({capabilities.host_id for capabilities in group})
    return "" if hosts == 1 else f"its members are on {hosts} hosts, or containers that share no memory"


def _not_one_device(group: Sequence[ProcessCapabilities]) -> str:
    devices = {capabilities.device for capabilities in group}
    if len(devices) == 1:
        return ""
    if any(device.startswith("MIG-") for device in devices):
        return f"MIG: CUDA IPC does not reach from one instance to another, and these are {len(devices)}"
    return f"its members are on {len(devices)} different GPUs"


def _not_a_device_each(group: Sequence[ProcessCapabilities]) -> str:
    devices = [capabilities.device for capabilities in group]
    if len(set(devices)) < len(devices):
        return "NCCL takes one rank per GPU, and several of its members share one"
    if any(device.startswith("MIG-") for device in devices) and not _since(group, MIG_SINCE):
        return f"NCCL takes MIG instances from {_text(MIG_SINCE)} on, and this is {_text(group[0].nccl)}"
    return ""


def _nccl_unfit(group: Sequence[ProcessCapabilities]) -> str:
    versions = {capabilities.nccl for capabilities in group}
    if None in versions:
        return "torch was built without NCCL"
    if len(versions) > 1:
        return f"its members have different versions of NCCL: {', '.join(sorted(map(_text, versions)))}"
    return ""


def _since(group: Sequence[ProcessCapabilities], version: Version) -> bool:
    return all(capabilities.nccl is not None and capabilities.nccl >= version for capabilities in group)


def _text(version: Version | None) -> str:
    return "none" if version is None else ".".join(map(str, version))


def _device_id(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible.startswith("MIG-"):  # CUDA uses only the first visible MIG instance
        return visible.split(",")[0]
    return "GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
