"""The workloads, each as our store and as a plain loop over NumPy arrays that do the same copies.

Every maker returns a function of a seed (one consumer or writer each), which returns a function that does one batch.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from actors.replay import (
    Column,
    Gatherer,
    Prioritized,
    ReplaySchema,
    ReplayStore,
    Subscription,
    SubSequences,
    Uniform,
    select,
)
from actors.replay.kernel import PRIORITIES, TreeStruct, address, library
from experiments.replay import peers

ANT = {"obs": 105, "act": 8, "rew": 1, "done": 1}
TRANSITION = {**ANT, "next_obs": 105}
LONG = {"obs": 110, "act": 8, "rew": 1, "done": 1}
SLICE = 64

Step = Callable[[], object]
Consumer = Callable[[int], Step]


@dataclass(frozen=True)
class Case:
    """One workload: what is done, by whom, and how many bytes a row of it has."""

    name: str
    batch: int
    row_bytes: int
    variants: dict[str, Consumer]
    beside: Consumer | None = None
    """Runs at the same time, in a process of its own."""


def random_rows(widths: dict[str, int], rows: int, steps: int) -> dict[str, np.ndarray]:
    """(rows, steps, width) float32 of each column, incompressible."""
    rng = np.random.default_rng(0)
    return {name: rng.random((rows, steps, width), dtype=np.float32) for name, width in widths.items()}


def filled(plain: dict[str, np.ndarray], selectors: tuple[object, ...]) -> ReplayStore:
    """A full store with these rows."""
    rows, steps = next(iter(plain.values())).shape[:2]
    columns = tuple(Column(name=name, dtype="float32", shape=data.shape[2:]) for name, data in plain.items())
    store = ReplayStore.create(ReplaySchema(columns, steps), rows, selectors=selectors)
    for begin in range(0, rows, 1000):
        store.insert({name: data[begin : begin + 1000] for name, data in plain.items()})
    return store


def in_trajectories(rows: int) -> ReplayStore:
    """A full store of trajectories of 1000 steps of the Ant task."""
    columns = tuple(
        Column(name=name, dtype="float32", shape=(width,), extra=name == "obs") for name, width in ANT.items()
    )
    store = ReplayStore.create(ReplaySchema(columns, 1000), rows, selectors=(SubSequences(1),))
    data = random_rows(ANT, 1, 1001)
    for _ in range(rows):
        store.insert({name: values if name == "obs" else values[:, :-1] for name, values in data.items()})
    return store


def in_shared_memory(plain: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copies that several processes can write."""
    shared = {}
    for name, data in plain.items():
        shared[name] = np.frombuffer(mmap.mmap(-1, data.nbytes), np.float32).reshape(data.shape)
        shared[name][:] = data
    return shared


def ours(
    store: ReplayStore,
    selector: object,
    batch: int,
    length: int | None,
    *,
    update: bool = False,
    next_obs: bool = False,
) -> Consumer:
    """Select, gather into the same batch, and set priorities if asked."""

    def consumer(seed: int) -> Step:
        own = ReplayStore.attach(store.endpoint)  # a forked mapping would fault at every page
        wanted = [Subscription(column=column.name, length=length) for column in own.schema.columns]
        if next_obs:
            wanted.append(Subscription(column="obs", offset=1, name="next_obs"))
        gatherer, numbers = Gatherer(own, wanted, batch), iter(range(10**12))
        priorities = np.random.default_rng(seed).random(batch)

        def step() -> None:
            chosen = select(own, selector, batch, seed=seed, draw=next(numbers))  # type: ignore[arg-type]
            gatherer(chosen)
            if update:
                own.update_priorities(chosen.keys, priorities)

        return step

    return consumer


def take(plain: dict[str, np.ndarray], batch: int) -> Consumer:
    """numpy.take of every column into kept arrays."""

    def consumer(seed: int) -> Step:
        rng, rows = np.random.default_rng(seed), len(next(iter(plain.values())))
        out = {name: np.empty((batch, *data.shape[1:]), np.float32) for name, data in plain.items()}

        def step() -> None:
            chosen = rng.integers(0, rows, batch)
            for name, data in plain.items():
                np.take(data, chosen, 0, out[name], mode="clip")

        return step

    return consumer


def slices(plain: dict[str, np.ndarray], batch: int) -> Consumer:
    """A loop of slice copies."""

    def consumer(seed: int) -> Step:
        rng = np.random.default_rng(seed)
        rows, steps = next(iter(plain.values())).shape[:2]
        out = {name: np.empty((batch, SLICE, *data.shape[2:]), np.float32) for name, data in plain.items()}

        def step() -> None:
            chosen = rng.integers(0, rows, batch).tolist()
            starts = rng.integers(0, steps - SLICE + 1, batch).tolist()
            for name, data in plain.items():
                to = out[name]
                for position, (row, start) in enumerate(zip(chosen, starts, strict=True)):
                    to[position] = data[row, start : start + SLICE]

        return step

    return consumer


def inserting(store: ReplayStore, rows: int) -> Consumer:
    """Insert the same rows again and again."""

    def consumer(seed: int) -> Step:
        data = {name: values[:, 0] for name, values in random_rows(TRANSITION, rows, 1).items()}
        own = ReplayStore.attach(store.endpoint)
        return lambda: own.insert(data)

    return consumer


def copying(plain: dict[str, np.ndarray], rows: int, writers: int) -> Consumer:
    """Slice copies into a ring without any synchronisation, each writer in its own part."""

    def consumer(seed: int) -> Step:
        data, size = random_rows(TRANSITION, rows, 1), len(plain["obs"]) // writers
        begin, at = (seed % writers) * size, [0]

        def step() -> None:
            place = begin + at[0]
            for name, values in plain.items():
                values[place : place + rows] = data[name]
            at[0] = (at[0] + rows) % (size - rows)

        return step

    return consumer


def cases(scale: float, wanted: Callable[[str], bool]) -> Iterator[Case]:
    """The workloads of the experiment, one store after the other."""
    if any(map(wanted, ("W1", "W1p", "W1t", "W6"))):
        yield from _transitions(scale, wanted)
    if wanted("W2"):
        plain = random_rows(ANT, int(2e4 * scale), 64)
        store = filled(plain, ())
        for batch in (32, 256):
            others = {"loop": take(plain, batch), **peers.uniform(plain, batch)}
            yield Case("W2", batch, 29_440, {**others, "replay": ours(store, Uniform(), batch, 64)})
        del plain, store
    if any(map(wanted, ("W3", "W4"))):
        yield from _trajectories(scale, wanted)


def _transitions(scale: float, wanted: Callable[[str], bool]) -> Iterator[Case]:
    """W1, W1p, W6, W1t."""
    prioritized = Prioritized(0.6, 0.4)
    plain = random_rows(TRANSITION, int(1e6 * scale), 1)
    store = filled(plain, (prioritized,))
    for batch in (256, 4096):
        if wanted("W1"):
            others = {"loop": take(plain, batch), **peers.uniform(plain, batch)}
            yield Case("W1", batch, 880, {**others, "replay": ours(store, Uniform(), batch, None)})
        if wanted("W1p"):
            replay = ours(store, prioritized, batch, None, update=True)
            yield Case("W1p", batch, 880, {**peers.prioritized(plain, batch), "replay": replay})
    if wanted("W6"):
        yield from _insertions(plain, store)
    del store
    if wanted("W1t"):  # the same transitions in trajectories: no copy of next_obs is stored
        store = in_trajectories(max(1, int(1e3 * scale)))
        for batch in (256, 4096):
            replay = ours(store, SubSequences(1), batch, None, next_obs=True)
            yield Case("W1t", batch, 880, {"loop": take(plain, batch), "replay": replay})


def _insertions(plain: dict[str, np.ndarray], store: ReplayStore) -> Iterator[Case]:
    """W6: by one writer and by two, beside a sampler."""
    shared = in_shared_memory(plain)
    for rows in (1, 64):
        others = peers.inserting(plain, rows)
        for writers in (1, 2):
            loop = {"loop": copying(shared, rows, writers)}
            variants = {**loop, **others, "replay": inserting(store, rows)}
            yield Case(f"W6 x{writers}", rows, 880, variants, ours(store, Uniform(), 256, None))


def _trajectories(scale: float, wanted: Callable[[str], bool]) -> Iterator[Case]:
    """W3, W4."""
    plain = random_rows(LONG, int(4e3 * scale), 1000)
    store = filled(plain, (SubSequences(SLICE),))
    if wanted("W3"):
        others = {"loop": take(plain, 32), **peers.uniform(plain, 32)}
        yield Case("W3", 32, 480_000, {**others, "replay": ours(store, Uniform(), 32, 1000)})
    if wanted("W4"):
        others = {"loop": slices(plain, 256), **peers.slices(plain, 256)}
        yield Case("W4", 256, 30_720, {**others, "replay": ours(store, SubSequences(SLICE), 256, SLICE)})


class WeightTree:
    """A store's tree alone, over given weights."""

    def __init__(self, weights: np.ndarray) -> None:
        self.struct, size = TreeStruct(kind=PRIORITIES), len(weights)
        at, shape = ctypes.addressof(self.struct), (0, size, size)
        self.memory = np.zeros(math.ceil(library().replay_tree_layout(at, None, *shape) / 8))
        library().replay_tree_layout(at, address(self.memory), *shape)
        self.at = at
        self.memory[:size] = weights
        library().replay_tree_build(at)
        self.total = float(
            self.memory[(self.struct.level[self.struct.levels - 1] - address(self.memory)) // 8]
        )

    def draw(self, u: np.ndarray) -> np.ndarray:
        """Indices with probability in proportion to the weights, for uniform numbers (n,)."""
        targets, found = u * self.total, np.empty(len(u), np.int64)
        library().replay_tree_draw(self.at, len(u), address(targets), address(found))
        return found

    def update(self, indices: np.ndarray, weights: np.ndarray) -> None:
        """Set weights."""
        scratch = np.empty_like(indices)
        library().replay_tree_set(self.at, len(indices), address(indices), address(weights), address(scratch))
