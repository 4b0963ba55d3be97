"""Producers and consumers that are processes of their own, and what they say that they did.

Each writes down what it is about to do and what it has done, in a pipe that outlives it. A process that is killed leaves at
most one thing that it was about to do and may have done.
"""

import contextlib
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from channel_cases import LIMIT_S, digest, random_rows

from collectives import experience
from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.errors import ChannelError, ChannelTimeoutError
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema
from tests.unit.forkserver import context

CHANNELS = os.path.dirname(experience.__file__)


@dataclass(frozen=True)
class Kill:
    """When a process kills itself: at the n-th time that it comes by a place, at the n-th line of the channels' own code
    that it runs, or so long after it began."""

    place: str = ""
    number: int = 0
    after_s: float = 0.0


@dataclass(frozen=True)
class Work:
    """What a producer or a consumer does."""

    schema: ExperienceSchema
    rows: int = 4
    slots: int = 2
    credit: int | None = None
    producer: int = 0
    origin: int = 0
    batches: int = 10
    pause_s: float = 0.0
    kill: Kill | None = None
    seed: int = 0
    keep: int = 1
    """Batches that a consumer has in hand before it releases the oldest."""


class End:
    """A producer or a consumer in another process."""

    def __init__(self, role: Any, work: Work, consumer_endpoints: Sequence[str] = ()) -> None:
        self.work, self.said = work, []
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=role, args=(work, consumer_endpoints, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.over = False

    @property
    def pipe(self) -> Connection:
        return self._pipe

    def hear(self, limit_s: float = 0.0) -> None:
        """Take in what it has said since; ``over`` once it has ended."""
        while not self.over and self._pipe.poll(limit_s):
            try:
                self.said.append(pickle.loads(self._pipe.recv_bytes()))
            except (EOFError, ConnectionResetError):
                self.over = True
                self.process.join(LIMIT_S)
            limit_s = 0.0

    def wait_for(self, what: str) -> Any:
        """The first thing of this name that it says; None if it ends before."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            for name, value in self.said:
                if name == what:
                    return value
            if self.over:
                return None
            assert time.monotonic() < deadline, f"it did not say {what!r} in time: {self.said[-3:]}"
            self.hear(0.1)

    def tell(self, *words: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send_bytes(pickle.dumps(words))

    def all_of(self, what: str) -> list[Any]:
        return [value for name, value in self.said if name == what]

    def end(self) -> None:
        self.process.kill()
        self.process.join(LIMIT_S)
        self._pipe.close()


class Teller:
    """The other side: says what is done, hears what to do, and kills its process where it is told to."""

    def __init__(self, pipe: Connection, kill: Kill | None) -> None:
        self._pipe, self._kill, self._came = pipe, kill, 0
        if kill is not None and kill.after_s:
            signal.signal(
                signal.SIGALRM, signal.SIG_DFL
            )  # ends the process at any instruction, as SIGKILL does
            signal.setitimer(signal.ITIMER_REAL, kill.after_s)
        if kill is not None and kill.place == "line":
            sys.settrace(self._trace)

    def say(self, name: str, value: Any = None) -> None:
        self._pipe.send_bytes(pickle.dumps((name, value)))

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(CHANNELS):
            return None
        if event == "line":
            self.passing("line")
        return self._trace

    def passing(self, place: str) -> None:
        if self._kill is not None and self._kill.place == place:
            self._came += 1
            if self._came == self._kill.number:
                os.kill(os.getpid(), signal.SIGKILL)

    def wait_for(self, word: str) -> None:
        if self._pipe.poll(LIMIT_S):
            assert pickle.loads(self._pipe.recv_bytes()) == (word,)

    def heard(self) -> list[tuple[Any, ...]]:
        found = []
        while self._pipe.poll(0):
            found.append(pickle.loads(self._pipe.recv_bytes()))
        return found


def produce(work: Work, consumer_endpoints: Sequence[str], pipe: Connection) -> None:
    """Put batches whose rows say whose they are, attach to whom it is told to, and leave once all are released."""
    torch.set_num_threads(1)
    teller = Teller(pipe, work.kill)
    pace = random.Random(work.seed)
    ring = ProducerRing(
        work.schema,
        rows=work.rows,
        slots=work.slots,
        credit=work.credit,
        producer=work.producer,
        origin=work.origin,
    )
    for endpoint in consumer_endpoints:
        attach(ring, endpoint)
    teller.say("endpoint", ring.endpoint)
    teller.wait_for("go")
    for number in range(1, work.batches + 1):
        attach_told(teller, ring)
        rows = random_rows(work.schema, pace.randint(0, work.rows), seed=work.origin * 10_000 + number)
        order = [field.name for field in work.schema.fields]
        count = len(rows[order[0]])
        reservation = claim_patiently(teller, ring, count)
        teller.passing("claimed")
        for name in order[: len(order) // 2]:
            reservation[name].copy_(rows[name])
        teller.passing("half written")
        for name in order[len(order) // 2 :]:
            reservation[name].copy_(rows[name])
        teller.say("commits", (number, count, digest(rows, order)))
        reservation.commit(version=number)
        teller.passing("committed")
        teller.say("committed", number)
        time.sleep(pace.random() * work.pause_s)
    while ring.drain(0.02):
        attach_told(teller, ring)
    teller.say("drained")
    ring.close()


def attach_told(teller: Teller, ring: ProducerRing) -> None:
    for word, *values in teller.heard():
        if word == "attach":
            attach(ring, values[0])


def attach(ring: ProducerRing, endpoint: str) -> None:
    with contextlib.suppress(ChannelError):  # it may have ended meanwhile
        ring.attach(endpoint)


def claim_patiently(teller: Teller, ring: ProducerRing, rows: int) -> Any:
    """Wait for a slot, and go on attaching to new consumers meanwhile."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ChannelTimeoutError):
            return ring.reserve(rows, timeout_s=0.02)
        attach_told(teller, ring)
    raise TimeoutError("no slot came free")


def consume(work: Work, _: Sequence[str], pipe: Connection) -> None:
    """Take batches, say what was in them, and release them in some order, until told that no producer comes any more."""
    torch.set_num_threads(1)
    teller = Teller(pipe, work.kill)
    pace = random.Random(work.seed)
    consumer_endpoint = ConsumerEndpoint(work.schema)
    teller.say("endpoint", consumer_endpoint.endpoint)
    order = [field.name for field in work.schema.fields]
    held, last = [], False
    while True:
        last = last or any(word == "last" for word, *_ in teller.heard())
        try:
            batch = consumer_endpoint.take(timeout_s=0.02)
        except ChannelTimeoutError:
            batch = None
        if batch is not None:
            teller.passing("taken")
            held.append(batch)
        elif last and not held and not consumer_endpoint.producers:
            break
        if held and (batch is None or len(held) > work.keep):
            time.sleep(pace.random() * work.pause_s)
            release_free_memory(teller, held.pop(pace.randrange(len(held))), order)
    teller.say("left", (consumer_endpoint.lost, consumer_endpoint.leaks))
    consumer_endpoint.close()


def release_free_memory(teller: Teller, batch: Any, order: list[str]) -> None:
    number = (batch.origin, batch.sequence)
    teller.say("releases", (number, batch.num_rows, digest(batch, order)))
    teller.passing("looked")
    batch.release()
    teller.passing("released")
    teller.say("released", number)
