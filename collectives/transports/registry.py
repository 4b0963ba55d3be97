"""Registry of the transports. To add one, write its module and list its definition here."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from collectives.errors import CommunicatorError
from collectives.schedule import Primitive

if TYPE_CHECKING:  # it imports torch
    from collectives.transports.base import Transport, TransportGroup


@dataclass(frozen=True, slots=True)
class TransportDefinition:
    """A transport in the registry, imported on first use."""

    name: str
    primitives: tuple[Primitive, ...]
    """Primitives that it serves."""
    module: str
    """Module with the function ``connect``."""
    device: str | None = None
    """Type of the tensors' device, if it serves only one."""

    def connect(self, group: TransportGroup) -> Transport | str:
        """Connect the members; or close what was opened and return why it cannot be done, alike on all members.

        Raises:
            CommunicatorError: a member is lost or did not come, or no other transport may take its place.
        """
        connected: Transport | str = import_module(self.module).connect(group)
        return connected


TRANSPORTS: tuple[TransportDefinition, ...] = (
    TransportDefinition("device", ("device",), "collectives.transports.device", device="cuda"),
    TransportDefinition("nccl", ("rp",), "collectives.transports.nccl", device="cuda"),
    TransportDefinition("shm", ("ip", "device"), "collectives.transports.shm.transport"),
    TransportDefinition("tcp", ("ip", "rp", "device", "net"), "collectives.transports.tcp"),
    TransportDefinition("gloo", ("ip", "rp", "device", "net"), "collectives.transports.gloo"),
)
"""Definitions in order of preference."""


def transport_names() -> tuple[str, ...]:
    """Values of ``gmi.transport``: ``auto``, and those that can reduce among all members of a host by themselves."""
    return ("auto", *(each.name for each in TRANSPORTS if "ip" in each.primitives))


def candidates(primitive: Primitive, named: str, device: str) -> list[TransportDefinition]:
    """Transports to try on a type of device, in this order: only the named one if it serves the primitive."""
    serving = [each for each in TRANSPORTS if primitive in each.primitives and each.device in (None, device)]
    return [each for each in serving if each.name == named] or serving


def unusable(named: str, rank: int, reason: str) -> CommunicatorError:
    """The error if a transport cannot be used; it names the others."""
    others = [repr(name) for name in (*transport_names()[1:], "auto") if name != named]
    detail = f"{reason}; use transport={' or '.join(others)}"
    return CommunicatorError("connect", rank, "nobody", 0.0, detail)
