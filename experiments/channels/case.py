"""One way for batches from two producers to one consumer, measured; prints a JSON line.

    python -m experiments.channels.case channel-put --seconds 2

The consumer is this process. Throughput: batches that it has read within the time, after a first dozen. Latency: a small
batch every 2 ms, so that its reader sleeps when it comes; from just before it is sent until the reader has it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema
from experiments.channels.batches import TASKS, age_s, make, nbytes, read, small, stamp
from experiments.cores import process_cpu_s

PRODUCERS = 2
SLOTS = 4
"""Batches of each producer that can be under way; a queue has as many places in all as both producers have slots here."""
WARM_UP = 12
SMALL_EVERY_S = 0.002
LATENCIES = 500
LIMIT_S = 60.0

Rows = dict[str, Tensor]
Take = Callable[[Callable[[Rows], None]], None]
"""Waits for one batch, and gives it to a function while it is valid."""


@contextmanager
def processes(target: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Producers, ended at the end."""
    context = multiprocessing.get_context("spawn")
    started = [
        context.Process(target=target, args=(number, *arguments), daemon=True) for number in range(PRODUCERS)
    ]
    for process in started:
        process.start()
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


# This channel.


def channel_producer(number: int, endpoint: str, rows: Rows, in_place: bool, pause_s: float) -> None:
    """Sends until it is ended."""
    torch.set_num_threads(1)
    ring = ProducerRing(
        ExperienceSchema.from_tensors("experiment", rows), rows=len(rows["obs"]), slots=SLOTS, producer=number
    )
    ring.attach(endpoint)
    while True:
        if pause_s:
            time.sleep(pause_s)
            stamp(rows)
        if in_place:
            reservation = ring.reserve(timeout_s=LIMIT_S)
            for tensor in reservation.tensors.values():
                tensor.fill_(1)
            reservation.commit(version=0)
        else:
            ring.put(rows, version=0, timeout_s=LIMIT_S)


@contextmanager
def channel(rows: Rows, in_place: bool, pause_s: float) -> Iterator[Take]:
    """Batches in shared memory, copied there or written there; the reader has them in place."""
    consumer_endpoint = ConsumerEndpoint(ExperienceSchema.from_tensors("experiment", rows))

    def take(use: Callable[[Rows], None]) -> None:
        with consumer_endpoint.take(LIMIT_S) as batch:
            use(batch.tensors)

    with consumer_endpoint, processes(channel_producer, consumer_endpoint.endpoint, rows, in_place, pause_s):
        yield take


# torch.multiprocessing's queue: a message per batch, tensors through files in shared memory, one per tensor.


def queue_producer(number: int, queue: Any, rows: Rows, pause_s: float) -> None:
    """Sends until it is ended. A tensor that was sent is shared, so each batch needs tensors of its own."""
    torch.set_num_threads(1)
    while True:
        if pause_s:
            time.sleep(pause_s)
            stamp(rows)
        queue.put({name: tensor.clone() for name, tensor in rows.items()})


@contextmanager
def queue(rows: Rows, pause_s: float) -> Iterator[Take]:
    """torch.multiprocessing.Queue."""
    made = torch.multiprocessing.get_context("spawn").Queue(SLOTS * PRODUCERS)
    with processes(queue_producer, made, rows, pause_s):
        yield lambda use: use(made.get(timeout=LIMIT_S))


# Ray's object store: an actor per producer, whose results are fetched as they come.


class RayProducer:
    """Gives a batch per call."""

    def __init__(self, rows: Rows, pause_s: float) -> None:
        torch.set_num_threads(1)
        self._rows, self._pause_s = rows, pause_s

    def get(self) -> Rows:
        """A batch, as a simulator would have filled it."""
        if self._pause_s:
            time.sleep(self._pause_s)
            stamp(self._rows)
        return {name: tensor.clone() for name, tensor in self._rows.items()}


@contextmanager
def ray_store(rows: Rows, pause_s: float) -> Iterator[Take]:
    """Results of actors, each with two calls under way."""
    import ray  # of this case only: the others measure without it

    if not ray.is_initialized():
        ray.init(
            num_cpus=PRODUCERS + 1, object_store_memory=10**9, include_dashboard=False, log_to_driver=False
        )
    actors = [ray.remote(num_cpus=1)(RayProducer).remote(rows, pause_s) for _ in range(PRODUCERS)]
    under_way = {actor.get.remote(): actor for actor in actors for _ in range(2)}

    def take(use: Callable[[Rows], None]) -> None:
        (ready,), _ = ray.wait(list(under_way), num_returns=1, timeout=LIMIT_S)
        actor = under_way.pop(ready)
        use(ray.get(ready))
        under_way[actor.get.remote()] = actor

    try:
        yield take
    finally:
        for actor in actors:
            ray.kill(actor)


WAYS: dict[str, Callable[[Rows, float], Any]] = {
    "channel-put": lambda rows, pause_s: channel(rows, False, pause_s),
    "channel-in-place": lambda rows, pause_s: channel(rows, True, pause_s),
    "torch-queue": queue,
    "ray": ray_store,
}

COPIES = {"memcpy": 1, "memcpy-slots": SLOTS * PRODUCERS, "memcpy-fresh": None}
"""Without another process: into one place that is warm; into as many places as there are slots, in turn; and as the
project's first figures were taken, 30 copies into memory that was never touched before."""
FRESH_COPIES = 30


def throughput(way: str, task: str, seconds: float) -> dict[str, float]:
    """Bytes and batches per second that the reader has read; for memcpy, copied within this process."""
    rows = make(TASKS[task])
    if way in COPIES:
        places = COPIES[way]
        return _rate(_copies(nbytes(rows), places or 1), rows, seconds, most=None if places else FRESH_COPIES)
    sent = torch.ones_like(rows["obs"]) if way == "channel-in-place" else rows["obs"]
    expected = float(sent.sum())
    with WAYS[way](rows, 0.0) as take:
        return _rate(lambda: take(lambda found: read(found, expected)), rows, seconds)


def _copies(size: int, places: int) -> Callable[[], object]:
    """Copies one source into so many destinations in turn."""
    source = torch.ones(size, dtype=torch.uint8)
    into = itertools.cycle([torch.empty_like(source) for _ in range(places)])
    return lambda: next(into).copy_(source)


def _rate(
    step: Callable[[], object], rows: Rows, seconds: float, most: int | None = None
) -> dict[str, float]:
    for _ in range(0 if most else WARM_UP):
        step()
    count, cpu_s, begin = 0, _cpu_s(), time.perf_counter()
    while (elapsed_s := time.perf_counter() - begin) < seconds and count != most:
        step()
        count += 1
    mb = count * nbytes(rows) / 1e6
    used_s = max(_cpu_s() - cpu_s, 1e-9)
    return {"mb_per_s": mb / elapsed_s, "batches_per_s": count / elapsed_s, "mb_per_cpu_s": mb / used_s}


def _cpu_s() -> float:
    """CPU seconds so far of this process and those that it started, ended ones included. Ray's are not among them."""
    running_s = sum(
        process_cpu_s(child.pid) or 0.0 for child in multiprocessing.active_children() if child.pid
    )
    ended = resource.getrusage(
        resource.RUSAGE_CHILDREN
    )  # active_children() has waited for those that ended before
    return time.process_time() + running_s + ended.ru_utime + ended.ru_stime


def latency(way: str) -> dict[str, float]:
    """Microseconds from sending a small batch until its reader has it, while nothing else is under way."""
    ages: list[float] = []
    with WAYS[way](small(), SMALL_EVERY_S) as take:
        for _ in range(LATENCIES + WARM_UP):
            take(lambda found: ages.append(age_s(found)))
    centiles = statistics.quantiles(ages[WARM_UP:], n=100)
    return {"p50_us": 1e6 * centiles[49], "p99_us": 1e6 * centiles[98]}


def main() -> None:
    """Measure one way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=[*COPIES, *WAYS])
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {task: throughput(arguments.way, task, arguments.seconds) for task in TASKS}
    if arguments.way not in (*COPIES, "channel-in-place"):
        found["latency"] = latency(arguments.way)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
