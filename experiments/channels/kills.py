"""Producers killed at random points: is every row that they committed read, once each?

    python -m experiments.channels.kills --rounds 66

In each round two producers send to one or two consumers, and are killed (SIGKILL) and replaced three times. Even rounds send
through a ``ProducerRing``, odd ones transfers of two channels through a ``Dispenser``. In every third round one of two
consumers is killed, too. What was committed is read from the producers' own counters in shared memory after the kill.
Prints a JSON line per round, and the sums.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from collectives.experience import file_layout
from collectives.experience.batcher import Batcher
from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.dispenser import Dispenser
from collectives.experience.errors import ChannelTimeoutError
from collectives.experience.file_layout import SharedFile
from collectives.experience.packer import ChannelPlan
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field

PRODUCERS = 2
GENERATIONS = 3
"""Processes that each producer number has, one after the other."""
ROWS = 8
LIMIT_S = 60.0
PLAN = ChannelPlan(
    (
        ExperienceSchema("numbers", (Field(name="number", dtype=torch.int64),)),
        ExperienceSchema(
            "squares", (Field(name="square", dtype=torch.int64), Field(name="pad", shape=(64,)))
        ),
    )
)
RING_SCHEMA = ExperienceSchema("ring", PLAN.groups[0].fields + PLAN.groups[1].fields)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["experiments.channels.kills"])


@dataclass(frozen=True)
class Sending:
    """Parameters of one producer process."""

    producer: int
    first: int
    """Number of its first batch; its rows are this number and those after it, ``ROWS`` to a batch."""
    slots: int
    credit: int
    endpoints: tuple[tuple[str, ...], ...]
    """Of each consumer."""


def fill(rows: dict[str, torch.Tensor], first: int) -> None:
    """Write the numbers from ``first``, and their squares."""
    numbers = torch.arange(first, first + ROWS)
    rows["number"].copy_(numbers)
    rows["square"].copy_(numbers**2)


def send_by_ring(sending: Sending, pipe: Connection) -> None:
    """Send until killed."""
    ring = ProducerRing(
        RING_SCHEMA, rows=ROWS, slots=sending.slots, credit=sending.credit, producer=sending.producer
    )
    for endpoints in sending.endpoints:
        ring.attach(endpoints[0])
    pipe.send(ring.endpoint)
    pipe.recv()
    first = sending.first
    while True:
        slot = ring.reserve(timeout_s=LIMIT_S)
        fill(slot.tensors, first)
        slot.commit(version=0)
        first += ROWS


def send_by_dispenser(sending: Sending, pipe: Connection) -> None:
    """Send until killed."""
    dispenser = Dispenser(
        PLAN, rows=ROWS, producer=sending.producer, slots=sending.slots, credit=sending.credit
    )
    for index, endpoints in enumerate(sending.endpoints):
        dispenser.attach(index, endpoints)
    pipe.send(dispenser.rings[0].endpoint)
    pipe.recv()
    first = sending.first
    while True:
        fill(dispenser.open(LIMIT_S), first)
        dispenser.send(version=0)
        first += ROWS


def receive_from_ring(pace: random.Random, pipe: Connection) -> None:
    """Report the numbers of each batch before its release, until told that all producers are dead."""
    consumer = ConsumerEndpoint(RING_SCHEMA)
    pipe.send((consumer.endpoint,))
    is_last = False
    while not is_last or consumer.producers:
        is_last = is_last or pipe.poll(0)
        with suppress(ChannelTimeoutError):
            batch = consumer.take(timeout_s=0.05)
            if batch is None:
                continue
            with batch:
                report(pipe, batch.tensors)
                time.sleep(pace.random() * 2e-3)
    pipe.send(None)


def receive_by_batcher(pace: random.Random, pipe: Connection) -> None:
    """Report the numbers of each batch before its release, until told that all producers are dead."""
    batcher = Batcher(PLAN, rows=ROWS)
    pipe.send(batcher.endpoints)
    is_last = False
    while not is_last or batcher.producers or batcher.waiting:
        is_last = is_last or pipe.poll(0)
        with suppress(ChannelTimeoutError):
            experience = batcher.next(timeout_s=0.05)
            if experience is None:
                continue
            with experience:
                report(pipe, experience.tensors)
                time.sleep(pace.random() * 2e-3)
    pipe.send(None)


def report(pipe: Connection, rows: dict[str, torch.Tensor]) -> None:
    """Send a batch's numbers to the parent; -1 for rows that are not whole."""
    numbers, squares = rows["number"].clone(), rows["square"].clone()
    pipe.send(
        [
            number if number**2 == square else -1
            for number, square in zip(numbers.tolist(), squares.tolist(), strict=True)
        ]
    )


WAYS: tuple[tuple[Any, Any], ...] = (
    (send_by_ring, receive_from_ring),
    (send_by_dispenser, receive_by_batcher),
)


class Peer:
    """A process and its pipe."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_run, args=(target, *arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def reports(self) -> list[list[int]]:
        """Everything reported since the last call; waits for nothing."""
        found: list[list[int]] = []
        with suppress(EOFError, ConnectionResetError):
            while self.pipe.poll(0):
                numbers = self.pipe.recv()
                if numbers is None:
                    break
                found.append(numbers)
        return found


def _run(target: Any, *arguments: Any) -> None:
    torch.set_num_threads(1)
    with suppress(BrokenPipeError, EOFError):
        target(*arguments)


def run_round(number: int, seed: int) -> dict[str, int]:
    """One round. Returns rows committed, lost, read twice (by a killed consumer and its heir: allowed), repeated, torn."""
    pace = random.Random(seed)
    send, receive = WAYS[number % 2]
    kills_consumer = number % 3 == 2
    consumers = [
        Peer(receive, random.Random(pace.random()))
        for _ in range(2 if kills_consumer else pace.randint(1, 2))
    ]
    endpoints = tuple(consumer.pipe.recv() for consumer in consumers)
    committed: set[int] = set()
    read: list[list[list[int]]] = [[] for _ in consumers]
    dead: set[int] = set()
    for generation in range(GENERATIONS):
        producers = []
        for producer in range(PRODUCERS):
            first = (generation * PRODUCERS + producer + 1) * 10**6
            sending = Sending(producer, first, pace.randint(1, 4), pace.randint(1, 4), endpoints)
            peer = Peer(send, sending)
            counter = SharedFile.open("kills", peer.pipe.recv(), file_layout.RING_MAGIC)
            peer.pipe.send("go")
            producers.append((peer, counter, first))
        for peer, counter, first in producers:
            time.sleep(pace.random() * 0.06)
            peer.kill()
            count = counter.words[file_layout.COMMITTED]
            committed |= {*range(first, first + count * ROWS)}
        if kills_consumer and generation == 1:
            consumers[0].kill()
            dead.add(0)
            endpoints = endpoints[1:]
        for place, consumer in enumerate(consumers):
            read[place] += consumer.reports()
    for place, consumer in enumerate(consumers):
        if place not in dead:
            consumer.pipe.send("last")
    deadline = time.monotonic() + LIMIT_S
    for place, consumer in enumerate(consumers):
        while place not in dead and consumer.process.is_alive() and time.monotonic() < deadline:
            consumer.pipe.poll(0.01)
            read[place] += consumer.reports()
        consumer.process.kill()
        consumer.process.join()
        read[place] += consumer.reports()
    # A killed consumer may have reported its last batch and not released it: then it is read again.
    last = {number for place in dead for number in (read[place][-1] if read[place] else ())}
    times = Counter(number for batches in read for numbers in batches for number in numbers)
    return {
        "committed": len(committed),
        "lost": len(committed - times.keys()),
        "repeated": sum(count > 1 for number, count in times.items() if number not in last),
        "torn": times[-1],
        "unknown": len(times.keys() - committed - {-1}),
    }


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=66)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sums: Counter[str] = Counter()
    for number in range(arguments.rounds):
        found = run_round(number, arguments.seed + number)
        sums.update(found)
        print(json.dumps({"round": number, **found}), flush=True)
    print(json.dumps({"rounds": arguments.rounds, **{name: sums[name] for name in sorted(sums)}}))


if __name__ == "__main__":
    main()
