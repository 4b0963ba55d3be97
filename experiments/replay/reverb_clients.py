"""Throughput of several Reverb clients of one server. Runs in an environment of its own, with dm-reverb 0.14.0.

Each client iterates over a TrajectoryDataset with two workers and twice the batch in flight. Prints {"bytes_per_s": ...} of
all clients together.
"""

import argparse
import json
import multiprocessing
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
TABLE = "rows"


def serve(given: argparse.Namespace, pipe) -> None:
    """A table that is full, until the process is killed."""
    import numpy as np
    import reverb
    import tensorflow as tf

    server = reverb.Server(
        [
            reverb.Table(
                TABLE,
                sampler=reverb.selectors.Uniform(),
                remover=reverb.selectors.Fifo(),
                max_size=given.rows,
                rate_limiter=reverb.rate_limiters.MinSize(1),
                signature={"data": tf.TensorSpec((given.steps, given.width), tf.float32)},
            )
        ]
    )
    client, rng = reverb.Client(f"localhost:{server.port}"), np.random.default_rng(0)
    some = rng.random((16, given.steps, given.width), dtype=np.float32)
    for row in range(given.rows):
        with client.writer(max_sequence_length=given.steps, chunk_length=given.steps) as writer:
            writer.append_sequence({"data": some[row % 16]})
            writer.create_item(TABLE, given.steps, 1.0)
    pipe.send(server.port)
    server.wait()


def consume(given: argparse.Namespace, port: int, barrier, pipe) -> None:
    """Take batches for some seconds; report how many."""
    import reverb

    rows = reverb.TrajectoryDataset.from_table_signature(
        f"localhost:{port}",
        TABLE,
        max_in_flight_samples_per_worker=2 * given.batch,
        num_workers_per_iterator=2,
    ).batch(given.batch)
    batches = rows.as_numpy_iterator()
    next(batches)
    barrier.wait()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < given.seconds:
        next(batches)
        count += 1
    pipe.send(count / (time.perf_counter() - begin))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("clients", 1), ("rows", 1000), ("steps", 64), ("width", 115), ("batch", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")  # neither gRPC nor TensorFlow survives a fork
    own, theirs = context.Pipe()
    server = context.Process(target=serve, args=(given, theirs), daemon=True)
    server.start()
    port, barrier, pipes = own.recv(), context.Barrier(given.clients), []
    for _ in range(given.clients):
        end, theirs = context.Pipe()
        context.Process(target=consume, args=(given, port, barrier, theirs), daemon=True).start()
        pipes.append(end)
    batches_per_s = sum(pipe.recv() for pipe in pipes)
    print(json.dumps({"bytes_per_s": batches_per_s * given.batch * given.steps * given.width * 4}))
    server.kill()


if __name__ == "__main__":
    main()
