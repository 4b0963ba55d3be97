"""Shared parts of both ends of a step exchange: attaching to partners, waiting for one, and detecting its loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from actors.errors import IterationMismatchError, PartnerLostError
from collectives.experience.consumer_endpoint import Batch, ConsumerEndpoint
from collectives.experience.directory import Directory
from collectives.experience.errors import ChannelError, ChannelTimeoutError
from collectives.experience.schema import ExperienceSchema
from collectives.limits import WaitedTime
from collectives.rendezvous import host_identity, poll

_LOOK_S = 0.5
"""Interval at which a waiting GMI checks whether its partners are still attached."""


class Closeable(Protocol):
    """An end that can disconnect from its partners."""

    def close(self) -> None:
        """Disconnect from the partners."""


@contextmanager
def close_on_error(end: Closeable) -> Iterator[None]:
    """Disconnect from the partners when the block raises, so that they fail at once instead of at their time limit."""
    try:
        yield
    except BaseException:
        end.close()
        raise


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


class PartnerInbox:
    """A consumer endpoint whose producers are named GMIs, all attached before the first take. Detects their loss."""

    def __init__(self, schema: ExperienceSchema, names: Sequence[str]) -> None:
        self._consumer_endpoint, self.names = ConsumerEndpoint(schema), tuple(names)

    @property
    def endpoint(self) -> str:
        """Where producers attach."""
        return self._consumer_endpoint.endpoint

    def close(self) -> None:
        """Disconnect from the producers."""
        self._consumer_endpoint.close()

    def take(self, awaited: Collection[int], asked: str, limit_s: float) -> Batch:
        """The next batch of any producer; fails if a producer in ``awaited`` is lost.

        Raises:
            PartnerLostError: a producer in ``awaited`` is lost.
            ChannelTimeoutError: no batch arrived within the time limit.
        """
        waited = WaitedTime()
        while True:
            try:
                batch = self._consumer_endpoint.take(min(_LOOK_S, limit_s))
            except ChannelTimeoutError:
                batch = None
            if batch is not None:
                return batch
            there = self._consumer_endpoint.producers
            for place in awaited:
                if place not in there:
                    raise PartnerLostError(
                        self._consumer_endpoint.schema.name,
                        self.names[place],
                        asked,
                        place in self._consumer_endpoint.lost,
                    )
            waited_s = waited.look()
            if waited_s >= limit_s:
                names = " and ".join(self.names[place] for place in awaited)
                raise ChannelTimeoutError(
                    self._consumer_endpoint.schema.name, f"{asked} did not come from {names}", waited_s
                )


def step_name(what: str, step: int, iteration: int) -> str:
    """Name of an awaited message for errors, which count from 1; ``step`` and ``iteration`` count from 0."""
    return f"{what} of step {step + 1} of iteration {iteration + 1}"


def check_iteration(batch: Batch, whose: str, iteration: int) -> None:
    """Raise if a partner's batch is of another iteration.

    Raises:
        IterationMismatchError: with both iterations.
    """
    if batch.version != iteration:
        raise IterationMismatchError(whose, batch.version + 1, iteration + 1)
