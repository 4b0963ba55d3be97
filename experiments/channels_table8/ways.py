"""Four ways from agents to trainers, all on the same outboxes and inboxes: what differs is what a transfer is.

uni, per step       One channel. Every package of every step is a transfer by itself, as it is collected: the preprint's
                    uni-channel (its §4.2 and Table 8), which "would incur lots of fine-grained data communication".
                    The trainer's side puts them together.
uni, per rollout    One channel. Every package of a whole rollout is a transfer by itself: a kinder uni-channel. Written
                    and read in place.
per type            A channel for each type, a rollout's package per transfer. Written and read in place.
multi               The channels that eq. 5-8 give, a rollout's group per transfer. Written and read in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from collectives.experience.batcher import Batcher, Experience
from collectives.experience.consumer_endpoint import Batch, ConsumerEndpoint
from collectives.experience.dispenser import Dispenser
from collectives.experience.packer import ChannelPlan, pack
from collectives.experience.producer_ring import ProducerRing, ReservedSlot
from collectives.experience.schema import ExperienceSchema, Field
from experiments.channels_table8.shapes import Size

WAYS = ("uni, per step", "uni, per rollout", "per type", "multi")
LIMIT_S = 60.0
SLOTS = 3
"""Rollouts that an agent can have under way, in every way but the first."""
STEP_SLOTS = 128
"""Packages that it can have under way in the first; from 64 to 512 made no difference beyond the spread."""
LAST = "last_obs"
"""The one package that a rollout has once, not once a step."""


class Sender(Protocol):
    """An agent's end."""

    def begin(self) -> None:
        """Wait until there is room for a rollout's first package."""

    def step(self, index: int, packages: Mapping[str, Tensor]) -> None:
        """One step's packages, (envs, ...)."""

    def end(self, last_obs: Tensor) -> None:
        """The rollout is over."""


class Receiver(Protocol):
    """A trainer's end."""

    def next(self) -> dict[str, Tensor]:
        """A rollout, (envs, steps, ...), valid until released."""

    def release(self) -> None:
        """Done with it."""


def grouped(size: Size) -> ChannelPlan:
    """What the packer makes of it."""
    return pack(size.schema())


def one_per_type(size: Size) -> ChannelPlan:
    """A channel for each package."""
    fields = size.schema().fields
    return ChannelPlan(tuple(ExperienceSchema(field.name, (field,)) for field in fields))


class ChannelSender(Sender):
    """Through a dispenser."""

    def __init__(self, plan: ChannelPlan, size: Size, producer: int, endpoints: tuple[str, ...]) -> None:
        self._dispenser = Dispenser(plan, rows=size.envs, producer=producer, slots=SLOTS)
        self._dispenser.attach(0, endpoints)
        self._last = torch.empty(0)
        self._steps: dict[str, tuple[Tensor, ...]] = {}

    def begin(self) -> None:
        """Claim slots for all groups."""
        rollout = self._dispenser.open(LIMIT_S)
        self._last = rollout.pop(LAST)
        self._steps = {name: tensor.unbind(1) for name, tensor in rollout.items()}

    def step(self, index: int, packages: Mapping[str, Tensor]) -> None:
        """Write in place."""
        for name, tensor in packages.items():
            self._steps[name][index].copy_(tensor)

    def end(self, last_obs: Tensor) -> None:
        """Commit all groups."""
        self._last.copy_(last_obs)
        self._steps = {}
        self._dispenser.send(version=0)


class ChannelReceiver(Receiver):
    """Through a batcher."""

    def __init__(self, plan: ChannelPlan, size: Size) -> None:
        self._batcher = Batcher(plan, rows=size.envs)
        self.endpoints = self._batcher.endpoints
        self._experience: Experience | None = None

    def next(self) -> dict[str, Tensor]:
        """In place."""
        self._experience = self._batcher.next(LIMIT_S)
        assert self._experience is not None
        return self._experience.tensors

    def release(self) -> None:
        """All groups."""
        assert self._experience is not None
        self._experience.release()


def package_schema(field_bytes: int) -> ExperienceSchema:
    """Of a channel that carries anything."""
    return ExperienceSchema(
        "packages",
        (
            Field(name="payload", dtype=torch.uint8, shape=(field_bytes,)),
            Field(name="kind", dtype=torch.int64),
            Field(name="step", dtype=torch.int64),
        ),
    )


class UniChannel:
    """One channel of packages: how they lie in it."""

    def __init__(self, size: Size, *, per_step: bool) -> None:
        self.fields = size.schema().fields
        self.names = [field.name for field in self.fields]
        self.per_step = per_step
        self.shapes = [
            (size.envs, *(field.shape[1:] if per_step and field.name != LAST else field.shape))
            for field in self.fields
        ]
        largest = max(
            torch.Size(shape).numel() * field.dtype.itemsize
            for shape, field in zip(self.shapes, self.fields, strict=True)
        )
        self.schema = package_schema(largest)
        self.packages = len(self.fields) if not per_step else (len(self.fields) - 1) * size.steps + 1
        """Of a rollout."""

    def typed(self, payload: Tensor, kind: int) -> Tensor:
        """A package in the bytes that carry it."""
        shape, dtype = self.shapes[kind], self.fields[kind].dtype
        return payload[0, : torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


class UniSender(Sender):
    """Every package by itself."""

    def __init__(self, channel: UniChannel, producer: int, endpoint: str) -> None:
        self._channel = channel
        slots = STEP_SLOTS if channel.per_step else SLOTS * channel.packages
        self._ring = ProducerRing(channel.schema, rows=1, slots=slots, producer=producer)
        self._ring.attach(endpoint)
        self._reservations: dict[str, ReservedSlot] = {}
        self._typed: dict[tuple[int, int], Tensor] = {}

    def begin(self) -> None:
        """Claim slots for all packages of a rollout, where each has one."""
        if not self._channel.per_step:
            self._reservations = {name: self._ring.reserve(timeout_s=LIMIT_S) for name in self._channel.names}

    def step(self, index: int, packages: Mapping[str, Tensor]) -> None:
        """Send each package, or write it in place."""
        for name, tensor in packages.items():
            if self._channel.per_step:
                reservation = self._ring.reserve(timeout_s=LIMIT_S)
                self._package(reservation, name).copy_(tensor)
                self._commit(reservation, name, index)
            else:
                self._package(self._reservations[name], name)[:, index].copy_(tensor)

    def end(self, last_obs: Tensor) -> None:
        """Send what is left."""
        reservation = (
            self._ring.reserve(timeout_s=LIMIT_S) if self._channel.per_step else self._reservations[LAST]
        )
        self._package(reservation, LAST).copy_(last_obs)
        self._reservations[LAST] = reservation
        for name, reservation in self._reservations.items():
            self._commit(reservation, name, 0)
        self._reservations = {}

    def _package(self, reservation: ReservedSlot, name: str) -> Tensor:
        place = (reservation.slot, self._channel.names.index(name))
        if place not in self._typed:
            self._typed[place] = self._channel.typed(reservation["payload"], place[1])
        return self._typed[place]

    def _commit(self, reservation: ReservedSlot, name: str, index: int) -> None:
        reservation["kind"].fill_(self._channel.names.index(name))
        reservation["step"].fill_(index)
        reservation.commit(version=0)


class UniReceiver(Receiver):
    """Puts rollouts together: by copying steps, or of packages in place."""

    def __init__(self, channel: UniChannel, size: Size) -> None:
        self._channel, self._size = channel, size
        self._consumer_endpoint = ConsumerEndpoint(channel.schema)
        self.endpoints = (self._consumer_endpoint.endpoint,)
        self._rollouts: dict[int, dict[str, Tensor]] = {}
        self._came: dict[int, list[Batch]] = {}
        self._count: dict[int, int] = {}
        self._given: list[Batch] = []

    def next(self) -> dict[str, Tensor]:
        """Take packages until one producer's rollout is complete."""
        while True:
            batch = self._consumer_endpoint.take(LIMIT_S)
            assert batch is not None
            producer = batch.producer
            self._store(batch, int(batch["kind"]), int(batch["step"]))
            self._count[producer] = self._count.get(producer, 0) + 1
            if self._count[producer] == self._channel.packages:
                self._count[producer] = 0
                self._given = self._came.pop(producer, [])
                return self._rollouts[producer] if self._channel.per_step else self._rollouts.pop(producer)

    def release(self) -> None:
        """What was given in place."""
        while self._given:
            self._given.pop().release()

    def _store(self, batch: Batch, kind: int, step: int) -> None:
        name = self._channel.names[kind]
        package = self._channel.typed(batch["payload"], kind)
        rollout = self._rollouts.setdefault(batch.producer, {})
        if not self._channel.per_step:
            rollout[name] = package
            self._came.setdefault(batch.producer, []).append(batch)
            return
        if name not in rollout:
            field = self._channel.fields[kind]
            rollout[name] = torch.empty((self._size.envs, *field.shape), dtype=field.dtype)
        (rollout[name] if name == LAST else rollout[name][:, step]).copy_(package)
        del package
        batch.release()


def make_receiver(way: str, size: Size) -> ChannelReceiver | UniReceiver:
    """A trainer's end of a way."""
    if way.startswith("uni"):
        return UniReceiver(UniChannel(size, per_step=way == "uni, per step"), size)
    return ChannelReceiver(grouped(size) if way == "multi" else one_per_type(size), size)


def make_sender(way: str, size: Size, producer: int, endpoints: tuple[str, ...]) -> Sender:
    """An agent's end of a way."""
    if way.startswith("uni"):
        return UniSender(UniChannel(size, per_step=way == "uni, per step"), producer, endpoints[0])
    return ChannelSender(grouped(size) if way == "multi" else one_per_type(size), size, producer, endpoints)
