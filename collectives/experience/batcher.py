"""Batcher (GMI-DRL §3.2.2): slices and stacks transfers to batches of the size that a trainer wants."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from collectives.closing import ClosesOnExit
from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.directory import ConsumerAnnouncement, Directory, consumer_key
from collectives.experience.errors import ChannelTimeoutError
from collectives.experience.packer import ROW_FIELD, ChannelPlan
from collectives.experience.reassembly import Reassembler, Transfer
from collectives.rendezvous import host_identity

_CPU = torch.device("cpu")

Accept = Callable[[int], bool]
"""Whether experience of a policy version is fresh enough."""


@dataclass(slots=True)
class Experience:
    """One batch for a trainer. Its tensors are valid until it is released.

    Attributes:
        tensors: fields of the full groups, (rows, *shape)
        ragged: by ragged group, its fields; ``env`` is a row index into ``tensors``
        versions: of the policy that collected each row, (rows,) int64
        producers: producer of each row, (rows,) int64
    """

    tensors: dict[str, Tensor]
    ragged: dict[str, dict[str, Tensor]]
    versions: Tensor
    producers: Tensor
    _transfers: list[Transfer] = field(repr=False)
    _give_back: Callable[[], None] | None = field(default=None, repr=False)

    @property
    def num_rows(self) -> int:
        """Rows of the full groups."""
        return len(self.versions)

    def __getitem__(self, name: str) -> Tensor:
        """A field of the full groups, (rows, *shape)."""
        return self.tensors[name]

    def release(self) -> None:
        """Mark the rows as consumed. Safe to call twice."""
        self.tensors, self.ragged = {}, {}
        while self._transfers:
            self._transfers.pop().remove_user()
        if self._give_back is not None:
            self._give_back()
            self._give_back = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class _Stack:
    """A batch that is being copied together from several transfers, into registered memory."""

    def __init__(self, memory: dict[str, Tensor], rows: int) -> None:
        self.memory, self.rows = memory, rows
        self.filled = 0
        self.ragged: dict[str, list[dict[str, Tensor]]] = {}
        self.versions = torch.empty(rows, dtype=torch.int64)
        self.producers = torch.empty(rows, dtype=torch.int64)
        self.transfers: list[Transfer] = []

    def release_oldest_of(self, producer: int) -> None:
        """Release the oldest transfer of a producer whose rows were all copied here."""
        for transfer in self.transfers:
            if transfer.producer == producer and not transfer.is_released and not transfer.rows_left:
                transfer.release()
                return


class Batcher(ClosesOnExit):
    """Experience of one trainer: a consumer endpoint per group. Not thread-safe.

    ::

        batcher = Batcher(plan, rows=128)
        batcher.announce(directory, "experience", index=0)      # for Migrators
        with batcher.next(timeout_s=60.0) as experience:
            learn(experience["obs"], experience.versions)
    """

    def __init__(
        self, plan: ChannelPlan, *, rows: int, consumers: int = 1, device: torch.device = _CPU
    ) -> None:
        """Create the consumer endpoints; ``next`` gives ``rows`` rows of the full groups.

        ``consumers``: how many share the producers' slots, and wait for each other. For a CUDA ``device`` all memory that
        experience is copied from is page-locked [unverified on GPU].

        Raises:
            ChannelError: there is not enough memory.
            ValueError: ``rows`` is below 1.
        """
        if rows < 1:
            raise ValueError(f"rows={rows}: at least 1")
        self.plan, self.rows, self._consumers = plan, rows, consumers
        self._identity = secrets.token_hex(8)
        self._page_locked = locked = device.type == "cuda"
        leader = ConsumerEndpoint(plan.groups[0], page_locked=locked)
        others = [ConsumerEndpoint(group, leader, locked) for group in plan.groups[1:]]
        self._consumer_endpoints = [leader, *others]
        self._reassembler = Reassembler(self._consumer_endpoints)
        self._full = [index for index, group in enumerate(plan.groups) if group.name not in plan.ragged]
        self._ragged = [index for index, group in enumerate(plan.groups) if group.name in plan.ragged]
        self._ready: deque[Transfer] = deque()
        self._open: list[Transfer] = []
        """Transfers that are not released: used by a trainer, ready, or in the stack."""
        self._stack: _Stack | None = None
        self._memory: dict[int, list[dict[str, Tensor]]] = {}
        """Free registered memory, by its number of rows."""
        self.stale_rows = 0
        """Rows that ``accept`` rejected, released unused."""
        self.left_rows = 0
        """Rows that were left over when all producers had closed: too few for a batch."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Addresses of its consumer endpoints, one per group, for ``Dispenser.attach``."""
        return tuple(consumer_endpoint.endpoint for consumer_endpoint in self._consumer_endpoints)

    @property
    def incomplete(self) -> int:
        """Transfers with lost parts, which were released unused."""
        return self._reassembler.incomplete

    @property
    def received(self) -> dict[int, tuple[int, int]]:
        """Rows received and rows released, by origin of the dispenser."""
        reassembler = self._reassembler
        return {origin: (rows, reassembler.released[origin]) for origin, rows in reassembler.received.items()}

    @property
    def repeated(self) -> int:
        """Duplicate parts, which were dropped."""
        return self._reassembler.repeated

    @property
    def producers(self) -> tuple[int, ...]:
        """Connected producers that are alive or have batches left."""
        return self._consumer_endpoints[0].producers

    @property
    def waiting(self) -> set[int]:
        """Producers of complete transfers that were not returned to the trainer."""
        return {transfer.producer for transfer in self._ready}

    @property
    def lost(self) -> list[int]:
        """Producers whose process ended without closing, in the order in which that was detected."""
        return self._consumer_endpoints[0].lost

    def announce(
        self, directory: Directory, name: str, index: int, *, node: str = "", host_id: str | None = None
    ) -> None:
        """Announce the addresses of this consumer.

        ``index``: its number in the channel set ``name``, from 0; a successor takes the number of the one that died.
        ``node``: where relays to its host are started (in Ray: the node id). ``host_id``: None: ``host_identity()``.
        """
        consumer = ConsumerAnnouncement(host_id or host_identity(), self.endpoints, self._identity, node)
        directory.announce(consumer_key(name, index), consumer.text())

    def next(self, timeout_s: float = 60.0, accept: Accept | None = None) -> Experience | None:
        """The next ``rows`` rows, in order of arrival. None once all producers have closed and too few rows are left.

        Rows of versions that ``accept`` rejects are released unused, and counted in ``stale_rows``.

        Raises:
            ChannelTimeoutError: too few rows came within the time limit. They are kept.
            SchemaError: a producer sends another schema.
        """
        begin = time.monotonic()
        while True:
            self._drop_stale(accept)
            # One transfer has enough rows: a view of it, no copy.
            if self._stack is None and self._ready and self._ready[0].rows_left >= self.rows:
                return self._view(self._use(self.rows))
            # Otherwise copy rows of several transfers into one batch.
            while self._ready:
                self._stack = self._stack or _Stack(self._register(self.rows), self.rows)
                self._add(self._stack, *self._use(self._stack.rows - self._stack.filled))
                if self._stack.filled == self.rows:
                    stack, self._stack = self._stack, None
                    return self._stacked(stack)
            if not self._receive(begin, timeout_s):
                self._leave()
                return None

    def round(
        self, producers: Iterable[int], timeout_s: float = 60.0, accept: Accept | None = None
    ) -> Experience:
        """The oldest transfer of each of these producers, stacked in their order: for synchronous learners.

        Raises:
            ChannelTimeoutError: some of them sent none within the time limit. The other transfers are kept.
            SchemaError: a producer sends another schema.
        """
        begin = time.monotonic()
        wanted = list(producers)
        while True:
            self._drop_stale(accept)
            first: dict[int, Transfer] = {}
            # Oldest by version first: sequence numbers of a producer's successor begin at 1 again.
            for transfer in self._ready:
                other = first.get(transfer.producer)
                if other is None or (transfer.version, transfer.sequence) < (other.version, other.sequence):
                    first[transfer.producer] = transfer
            missing = [producer for producer in wanted if producer not in first]
            if not missing:
                break
            try:
                received = self._receive(begin, timeout_s)
            except ChannelTimeoutError as error:
                raise self._silent(missing, begin) from error
            if not received:
                raise self._silent(missing, begin)
        chosen = [first[producer] for producer in wanted]
        for transfer in chosen:
            self._ready.remove(transfer)
        if len(chosen) == 1:
            return self._view(self._used(chosen[0], chosen[0].rows_left))
        rows = sum(transfer.rows_left for transfer in chosen)
        stack = _Stack(self._register(rows), rows)
        for transfer in chosen:
            self._add(stack, *self._used(transfer, transfer.rows_left))
        return self._stacked(stack)

    def close(self) -> None:
        """Close the endpoints, and release rows that were not returned to the trainer. Safe to call twice."""
        for consumer_endpoint in self._consumer_endpoints:
            consumer_endpoint.close()
        self.left_rows += self._reassembler.close()
        self._leave()

    def _receive(self, begin: float, timeout_s: float) -> bool:
        """Wait for one more transfer. False once all producers have closed and everything is taken."""
        self._open = [transfer for transfer in self._open if not transfer.is_released]
        # Avoid a deadlock: a producer whose slots are all held could send nothing more here: the others hold their share of
        # them until this consumer goes on. Its rows are copied already.
        for transfer in self._stack.transfers if self._stack else ():
            held = sum(other.producer == transfer.producer for other in self._open if not other.is_released)
            if held >= max(1, transfer.slots // self._consumers) and self._stack:
                self._stack.release_oldest_of(transfer.producer)
        received = self._reassembler.next(max(0.0, begin + timeout_s - time.monotonic()))
        if received is None:
            return False
        self._ready.append(received)
        self._open.append(received)
        return True

    def _silent(self, missing: Sequence[int], begin: float) -> ChannelTimeoutError:
        here = set(self.producers)
        names = ", ".join(
            f"{producer}{'' if producer in here else ' (not connected)'}" for producer in missing
        )
        waited_s = time.monotonic() - begin
        return ChannelTimeoutError(
            self.plan.groups[0].name, f"no batch came from producers {names}", waited_s
        )

    def _drop_stale(self, accept: Accept | None) -> None:
        for transfer in [one for one in self._ready if accept is not None and not accept(one.version)]:
            self._ready.remove(transfer)
            self.stale_rows += self._give_up(transfer)

    def _leave(self) -> None:
        for transfer in self._stack.transfers if self._stack else ():
            transfer.remove_user()
        self.left_rows += self._stack.filled if self._stack else 0
        self._stack = None
        while self._ready:
            self.left_rows += self._give_up(self._ready.popleft())

    def _give_up(self, transfer: Transfer) -> int:
        """Release its unused rows. Returns how many they are."""
        rows, transfer.used_rows = transfer.rows_left, transfer.num_rows
        transfer.release_if_done()
        return rows

    def _use(self, most: int) -> tuple[Transfer, slice]:
        """Take the next rows of the oldest ready transfer, at most ``most``."""
        used = self._used(self._ready[0], most)
        if not used[0].rows_left:
            self._ready.popleft()
        return used

    def _used(self, transfer: Transfer, most: int) -> tuple[Transfer, slice]:
        rows = slice(transfer.used_rows, min(transfer.num_rows, transfer.used_rows + most))
        transfer.used_rows = rows.stop
        transfer.users += 1
        return transfer, rows

    def _view(self, used: tuple[Transfer, slice]) -> Experience:
        """A batch that views the rows of one transfer."""
        transfer, rows = used
        count = rows.stop - rows.start
        return Experience(
            {name: tensor[rows] for group in self._full for name, tensor in transfer.tensors(group).items()},
            {
                self.plan.groups[group].name: self._ragged_rows(transfer, group, rows, 0)
                for group in self._ragged
            },
            torch.full((count,), transfer.version),
            torch.full((count,), transfer.producer),
            [transfer],
        )

    def _add(self, stack: _Stack, transfer: Transfer, rows: slice) -> None:
        """Copy rows of a transfer behind those that the stack has."""
        to = slice(stack.filled, stack.filled + rows.stop - rows.start)
        for group in self._full:
            for name, tensor in transfer.tensors(group).items():
                stack.memory[name][to].copy_(tensor[rows])
        for group in self._ragged:
            parts = stack.ragged.setdefault(self.plan.groups[group].name, [])
            parts.append(
                {
                    name: tensor.clone()
                    for name, tensor in self._ragged_rows(transfer, group, rows, to.start).items()
                }
            )
        stack.versions[to], stack.producers[to] = transfer.version, transfer.producer
        stack.transfers.append(transfer)
        stack.filled = to.stop

    def _ragged_rows(self, transfer: Transfer, group: int, rows: slice, first: int) -> dict[str, Tensor]:
        """Rows of a ragged group that belong to ``rows``; ``env`` is renumbered so that they begin at ``first``."""
        tensors = transfer.tensors(group)
        if rows == slice(0, transfer.num_rows) and first == 0:
            return dict(tensors)
        env = tensors[ROW_FIELD]
        mask = (env >= rows.start) & (env < rows.stop)
        selected = {name: tensor[mask] for name, tensor in tensors.items()}
        selected[ROW_FIELD] += first - rows.start
        return selected

    def _stacked(self, stack: _Stack) -> Experience:
        return Experience(
            stack.memory,
            {
                name: {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
                for name, parts in stack.ragged.items()
            },
            stack.versions,
            stack.producers,
            stack.transfers,
            lambda: self._memory.setdefault(stack.rows, []).append(stack.memory),
        )

    def _register(self, rows: int) -> dict[str, Tensor]:
        """Memory for a batch, reused if possible."""
        free = self._memory.get(rows)
        if free:
            return free.pop()
        return {
            field.name: torch.empty((rows, *field.shape), dtype=field.dtype, pin_memory=self._page_locked)
            for group in self._full
            for field in self.plan.groups[group].fields
        }
