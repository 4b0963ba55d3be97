"""Endpoint exchange: GMIs that exchange steps announce their endpoints in the directory, and attach to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from collectives.experience.directory import Directory
from collectives.experience.errors import ChannelError, ChannelTimeoutError
from collectives.rendezvous import host_identity, poll


def exchange_endpoints(
    directory: Directory,
    channel: str,
    *,
    index: int,
    endpoint: str,
    partners: Mapping[int, str],
    attach: Callable[[list[str]], object],
    limit_s: float,
) -> None:
    """Attach to all partners, and wait until they have attached to this GMI.

    ``endpoint``: where this GMI receives messages; ``partners``: their names, by index; ``attach`` is called with their
    endpoints, in this order.

    Raises:
        ChannelTimeoutError: a partner did not announce its endpoint, or attach, in time.
        ChannelError: a partner is on another host, with which this one shares no memory.
        SchemaError: a partner has environments with other shapes.
    """
    host, prefix = host_identity(), f"{channel}/"
    directory.announce(f"{prefix}{index}", f"{host} {endpoint}")
    keys = {f"{prefix}{partner}": name for partner, name in partners.items()}
    announced = _awaited(directory, channel, prefix, keys, "has not announced its endpoint", limit_s)
    hosts, _, endpoints = zip(*(announced[key].rpartition(" ") for key in keys), strict=True)
    for name, theirs in zip(partners.values(), hosts, strict=True):
        if theirs != host:
            raise ChannelError(
                channel,
                f"{name} is on another host than GMI {index}, and steps are exchanged in shared memory: give the "
                "template no more GMIs than one node holds, or take one whose simulator and agent are together",
            )
    attach(list(endpoints))
    attached = f"attached/{channel}/"
    directory.announce(f"{attached}{index}", "")
    keys = {f"{attached}{partner}": name for partner, name in partners.items()}
    _awaited(directory, channel, attached, keys, "has not attached", limit_s)


def _awaited(
    directory: Directory, channel: str, prefix: str, keys: Mapping[str, str], what: str, limit_s: float
) -> dict[str, str]:
    """All entries under a prefix, once all of these keys are announced."""
    announced: dict[str, str] = {}

    def complete() -> bool | None:
        announced.update(directory.announced(prefix))
        return True if keys.keys() <= announced.keys() else None

    if poll(complete, limit_s) is None:
        missing = " and ".join(name for key, name in keys.items() if key not in announced)
        raise ChannelTimeoutError(channel, f"{missing} {what}", limit_s)
    return announced
