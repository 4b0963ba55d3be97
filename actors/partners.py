"""Shared parts of both ends of a step exchange: waiting for a partner, and detecting its loss."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from actors.errors import IterationMismatchError, PartnerLostError
from collectives.experience.consumer_endpoint import Batch, ConsumerEndpoint
from collectives.experience.errors import ChannelTimeoutError
from collectives.experience.schema import ExperienceSchema

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


class PartnerInbox:
    """A consumer endpoint whose producers are named GMIs, all attached before the first take. Detects their loss."""

    def __init__(self, schema: ExperienceSchema, names: Sequence[str]) -> None:
        self.consumer_endpoint, self.names = ConsumerEndpoint(schema), tuple(names)

    def take(self, awaited: Collection[int], asked: str, limit_s: float) -> Batch:
        """The next batch of any producer; fails if a producer in ``awaited`` is lost.

        Raises:
            PartnerLostError: a producer in ``awaited`` is lost.
            ChannelTimeoutError: no batch arrived within the time limit.
        """
        begin = time.monotonic()
        while True:
            try:
                batch = self.consumer_endpoint.take(min(_LOOK_S, limit_s))
            except ChannelTimeoutError:
                batch = None
            if batch is not None:
                return batch
            there = self.consumer_endpoint.producers
            for place in awaited:
                if place not in there:
                    raise PartnerLostError(
                        self.consumer_endpoint.schema.name,
                        self.names[place],
                        asked,
                        place in self.consumer_endpoint.lost,
                    )
            waited_s = time.monotonic() - begin
            if waited_s >= limit_s:
                names = " and ".join(self.names[place] for place in awaited)
                raise ChannelTimeoutError(
                    self.consumer_endpoint.schema.name, f"{asked} did not come from {names}", waited_s
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
