"""How GMIs that exchange steps find each other: each says in the directory where it takes messages."""

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

    Args:
        directory: the one that they use too
        channel: name of what is exchanged
        index: of this GMI
        endpoint: where this GMI takes messages
        partners: names of the GMIs that it exchanges messages with, by index
        attach: gets their endpoints, in this order
        limit_s: for all of them to come

    Raises:
        ChannelTimeoutError: one did not come.
        ChannelError: one is on another host, with which this one shares no memory.
        SchemaError: one has other environments in mind.
    """
    host, prefix = host_identity(), f"{channel}/"
    directory.announce(f"{prefix}{index}", f"{host} {endpoint}")
    keys = {f"{prefix}{partner}": name for partner, name in partners.items()}
    said = _awaited(directory, channel, prefix, keys, "has not said where it takes messages", limit_s)
    hosts, _, endpoints = zip(*(said[key].rpartition(" ") for key in keys), strict=True)
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
    """All that was said under a prefix, once it has been said under all of these keys."""
    said: dict[str, str] = {}

    def complete() -> bool | None:
        said.update(directory.announced(prefix))
        return True if keys.keys() <= said.keys() else None

    if poll(complete, limit_s) is None:
        missing = " and ".join(name for key, name in keys.items() if key not in said)
        raise ChannelTimeoutError(channel, f"{missing} {what}", limit_s)
    return said
