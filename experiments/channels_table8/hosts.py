"""Between hosts: a relay behind Ray's object store against Arrow Flight, one transfer at a time and several under way.

    python -m experiments.channels_table8.hosts

Two Ray nodes on this host stand for two hosts, so that bytes go from one object store to another as they would; Flight goes
through loopback. Prints a line of JSON per case. The network, which is not here, would take from both alike.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from experiments.channels_table8.shapes import TASKS, Size

SIZES = {"AY 16 x 64": Size(TASKS["AY"], 16, 64), "AY 32 x 256": Size(TASKS["AY"], 32, 256)}
TRANSFERS, REPEATS, UNDER_WAY = 40, 5, 3


class Sink:
    """The other host's end: copies what comes into memory of its own, as a relay does."""

    def __init__(self, size: int) -> None:
        self._memory = np.zeros(size, dtype=np.uint8)

    def take(self, message: Any) -> int:
        """Bytes that came."""
        self._memory[: len(message)] = np.frombuffer(message, dtype=np.uint8)
        return len(message)


def through_ray(message: np.ndarray, node: str) -> Callable[[], float]:
    """Seconds for ``TRANSFERS``, ``UNDER_WAY`` of them at a time."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    sink = ray.remote(Sink).options(num_cpus=0, scheduling_strategy=there).remote(len(message))

    def run() -> float:
        begin, under_way = time.perf_counter(), []
        for _ in range(TRANSFERS):
            if len(under_way) == UNDER_WAY:
                ray.get(under_way.pop(0))
            under_way.append(sink.take.remote(message))
        ray.get(under_way)
        return time.perf_counter() - begin

    return run


def serve_flight(size: int, connection: Any) -> None:
    """A Flight server that takes batches of bytes and answers each."""
    import pyarrow.flight as flight

    sink = Sink(size)

    class Server(flight.FlightServerBase):
        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            for chunk in reader:
                sink.take(chunk.data.column(0).buffers()[1])
                writer.write(b"taken")

    server = Server("grpc://127.0.0.1:0")
    connection.send(server.port)
    server.serve()


def through_flight(message: np.ndarray, port: int) -> Callable[[], float]:
    """The same through one open stream."""
    import pyarrow.flight as flight

    client = flight.FlightClient(f"grpc://127.0.0.1:{port}")
    batch = pa.record_batch([pa.array(message)], names=["message"])
    writer, answers = client.do_put(flight.FlightDescriptor.for_path("x"), batch.schema)

    def run() -> float:
        begin, under_way = time.perf_counter(), 0
        for _ in range(TRANSFERS):
            if under_way == UNDER_WAY:
                answers.read()
                under_way -= 1
            writer.write_batch(batch)
            under_way += 1
        for _ in range(under_way):
            answers.read()
        return time.perf_counter() - begin

    return run


def main() -> None:
    """Each way in turn, several times."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1).node_id
    ray.init(address=cluster.address, log_to_driver=False)
    context, servers = multiprocessing.get_context("spawn"), []
    try:
        for name, size in SIZES.items():
            message = np.random.default_rng(0).integers(0, 255, size.bytes, dtype=np.uint8)
            ours, theirs = context.Pipe()
            server = context.Process(target=serve_flight, args=(size.bytes, theirs), daemon=True)
            server.start()
            servers.append(server)
            ways = {"Ray": through_ray(message, node), "Flight": through_flight(message, ours.recv())}
            rates: dict[str, list[float]] = {way: [] for way in ways}
            for run in ways.values():
                run()  # everyone is here
            for _ in range(REPEATS):
                for way, run in ways.items():
                    rates[way].append(TRANSFERS * size.bytes / run() / 1e6)
            for way, found in rates.items():
                case = {"size": name, "bytes": size.bytes, "way": way, "load": os.getloadavg()[0]}
                spread = {"median": statistics.median(found), "lowest": min(found), "highest": max(found)}
                print(
                    json.dumps({**case, **{f"{key}_mb_per_s": round(value) for key, value in spread.items()}})
                )
    finally:
        for server in servers:
            server.kill()
            server.join()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
