"""Producers and consumers in processes of their own, which report what they do.

Each reports an action before and after it, through a pipe that outlives it. A killed process leaves at most one action that
was announced and may have happened.
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
    """When a process kills itself: the n-th time that it reaches a place, at the n-th executed line of the channels' own
    code, or after a time."""

    place: str = ""
    number: int = 0
    after_s: float = 0.0


@dataclass(frozen=True)
class Work:
    """Parameters of a producer or a consumer."""

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
    """Batches that a consumer holds before it releases one."""


class Peer:
    """A producer or a consumer in another process."""

    def __init__(self, role: Any, work: Work, consumer_endpoints: Sequence[str] = ()) -> None:
        self.work, self.reports = work, []
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=role, args=(work, consumer_endpoints, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.over = False

    @property
    def pipe(self) -> Connection:
        return self._pipe

    def receive(self, limit_s: float = 0.0) -> None:
        """Read new reports; ``over`` once the process has ended."""
        while not self.over and self._pipe.poll(limit_s):
            try:
                self.reports.append(pickle.loads(self._pipe.recv_bytes()))
            except (EOFError, ConnectionResetError):
                self.over = True
                self.process.join(LIMIT_S)
            limit_s = 0.0

    def wait_for(self, what: str) -> Any:
        """Value of the first report of this name; None if the process ends before."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            for name, value in self.reports:
                if name == what:
                    return value
            if self.over:
                return None
            assert time.monotonic() < deadline, f"no report {what!r} in time: {self.reports[-3:]}"
            self.receive(0.1)

    def send(self, *words: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send_bytes(pickle.dumps(words))

    def all_of(self, what: str) -> list[Any]:
        return [value for name, value in self.reports if name == what]

    def end(self) -> None:
        self.process.kill()
        self.process.join(LIMIT_S)
        self._pipe.close()


class Reporter:
    """The process's side of the pipe: reports actions, receives commands, and kills the process at the given place."""

    def __init__(self, pipe: Connection, kill: Kill | None) -> None:
        self._pipe, self._kill, self._times = pipe, kill, 0
        if kill is not None and kill.after_s:
            # The default action ends the process at any instruction, as SIGKILL does.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, kill.after_s)
        if kill is not None and kill.place == "line":
            sys.settrace(self._trace)

    def report(self, name: str, value: Any = None) -> None:
        self._pipe.send_bytes(pickle.dumps((name, value)))

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(CHANNELS):
            return None
        if event == "line":
            self.reach("line")
        return self._trace

    def reach(self, place: str) -> None:
        if self._kill is not None and self._kill.place == place:
            self._times += 1
            if self._times == self._kill.number:
                os.kill(os.getpid(), signal.SIGKILL)

    def wait_for(self, word: str) -> None:
        if self._pipe.poll(LIMIT_S):
            assert pickle.loads(self._pipe.recv_bytes()) == (word,)

    def received(self) -> list[tuple[Any, ...]]:
        commands = []
        while self._pipe.poll(0):
            commands.append(pickle.loads(self._pipe.recv_bytes()))
        return commands


def produce(work: Work, consumer_endpoints: Sequence[str], pipe: Connection) -> None:
    """Send batches with reproducible rows, attach to consumers on command, and close once all are released."""
    torch.set_num_threads(1)
    reporter = Reporter(pipe, work.kill)
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
    reporter.report("endpoint", ring.endpoint)
    reporter.wait_for("go")
    for number in range(1, work.batches + 1):
        attach_received(reporter, ring)
        rows = random_rows(work.schema, pace.randint(0, work.rows), seed=work.origin * 10_000 + number)
        order = [field.name for field in work.schema.fields]
        count = len(rows[order[0]])
        reservation = reserve_and_attach(reporter, ring, count)
        reporter.reach("reserved")
        for name in order[: len(order) // 2]:
            reservation[name].copy_(rows[name])
        reporter.reach("half written")
        for name in order[len(order) // 2 :]:
            reservation[name].copy_(rows[name])
        reporter.report("commits", (number, count, digest(rows, order)))
        reservation.commit(version=number)
        reporter.reach("committed")
        reporter.report("committed", number)
        time.sleep(pace.random() * work.pause_s)
    while ring.drain(0.02):
        attach_received(reporter, ring)
    reporter.report("drained")
    ring.close()


def attach_received(reporter: Reporter, ring: ProducerRing) -> None:
    for word, *values in reporter.received():
        if word == "attach":
            attach(ring, values[0])


def attach(ring: ProducerRing, endpoint: str) -> None:
    with contextlib.suppress(ChannelError):  # it may have ended meanwhile
        ring.attach(endpoint)


def reserve_and_attach(reporter: Reporter, ring: ProducerRing, rows: int) -> Any:
    """Reserve a slot; attach to new consumers meanwhile."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ChannelTimeoutError):
            return ring.reserve(rows, timeout_s=0.02)
        attach_received(reporter, ring)
    raise TimeoutError("no slot came free")


def consume(work: Work, _: Sequence[str], pipe: Connection) -> None:
    """Take batches, report their contents, and release them in random order, until the command that no producer follows."""
    torch.set_num_threads(1)
    reporter = Reporter(pipe, work.kill)
    pace = random.Random(work.seed)
    consumer_endpoint = ConsumerEndpoint(work.schema)
    reporter.report("endpoint", consumer_endpoint.endpoint)
    order = [field.name for field in work.schema.fields]
    held, last = [], False
    while True:
        last = last or any(word == "last" for word, *_ in reporter.received())
        try:
            batch = consumer_endpoint.take(timeout_s=0.02)
        except ChannelTimeoutError:
            batch = None
        if batch is not None:
            reporter.reach("taken")
            held.append(batch)
        elif last and not held and not consumer_endpoint.producers:
            break
        if held and (batch is None or len(held) > work.keep):
            time.sleep(pace.random() * work.pause_s)
            release(reporter, held.pop(pace.randrange(len(held))), order)
    reporter.report("left", (consumer_endpoint.lost, consumer_endpoint.leaks))
    consumer_endpoint.close()


def release(reporter: Reporter, batch: Any, order: list[str]) -> None:
    number = (batch.origin, batch.sequence)
    reporter.report("releases", (number, batch.num_rows, digest(batch, order)))
    reporter.reach("read")
    batch.release()
    reporter.reach("released")
    reporter.report("released", number)
