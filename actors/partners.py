"""What both ends of an exchange of steps have in common: waiting for a partner, and missing it."""

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
"""After which a GMI that waits looks whether those that it waits for are still there."""


class Closeable(Protocol):
    """What can say goodbye."""

    def close(self) -> None:
        """Say goodbye to the partners."""
        ...


@contextmanager
def close_on_error(end: Closeable) -> Iterator[None]:
    """Say goodbye to the partners when the block raises: they must not wait for what will not come."""
    try:
        yield
    except BaseException:
        end.close()
        raise


class PartnerInbox:
    """An inbox whose producers are GMIs with names, all attached before the first take; notices when one has gone."""

    def __init__(self, schema: ExperienceSchema, names: Sequence[str]) -> None:
        self.consumer_endpoint, self.names = ConsumerEndpoint(schema), tuple(names)

    def take(self, awaited: Collection[int], asked: str, limit_s: float) -> Batch:
        """The next batch, while waiting for those of ``awaited``.

        Raises:
            PartnerLostError: one of these is gone.
            ChannelTimeoutError: nothing came within the time limit.
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
    """What is awaited of a step, both counted from 0, as errors say it: from 1."""
    return f"{what} of step {step + 1} of iteration {iteration + 1}"


def check_iteration(batch: Batch, whose: str, iteration: int) -> None:
    """Raise where a partner is elsewhere in the run.

    Raises:
        IterationMismatchError: with both iterations.
    """
    if batch.version != iteration:
        raise IterationMismatchError(whose, batch.version + 1, iteration + 1)
