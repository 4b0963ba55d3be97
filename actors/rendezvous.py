"""Clients of the rendezvous actor: start it, and call it across restarts."""

from __future__ import annotations

import threading
from typing import Any

import ray
import ray.exceptions

from actors.rendezvous_actor import RendezvousActor
from collectives.closing import ClosesOnExit
from collectives.errors import RendezvousError
from collectives.experience.errors import ChannelError
from collectives.rendezvous import Member, Rendezvous, RendezvousStatus

_CALL_TIMEOUT_S = 30.0
"""For one small call, including a restart of the actor."""
_REPEAT_S = 0.5


def start_rendezvous_actor(world_size: int) -> Any:
    """Start a rendezvous actor, which Ray restarts when it dies; returns its handle."""
    # All its calls are idempotent, so Ray may retry those in progress.
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(RendezvousActor).options(**options).remote(world_size)


class _RendezvousActorClient(ClosesOnExit):
    """Calls a rendezvous actor. Repeats registrations and endpoints twice a second, for an actor that has restarted."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle = handle
        self._remembered: dict[tuple[str, str], tuple[int, tuple[Any, ...]]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop repeating. Safe to call twice."""
        self._closed.set()
        self._thread.join()

    def _call(self, method: str, *arguments: Any) -> Any:
        """The actor's answer.

        Raises:
            ray.exceptions.RayActorError: it has died and cannot be restarted.
            ray.exceptions.GetTimeoutError: it did not answer.
        """
        try:
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=_CALL_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def _remember(self, generation: int, method: str, key: str, *arguments: Any) -> None:
        """Repeat this call from now on, until a call of a later generation is remembered."""
        with self._lock:
            self._remembered = {
                call: repeated for call, repeated in self._remembered.items() if repeated[0] >= generation
            }
            self._remembered[method, key] = (generation, arguments)

    def _repeat(self) -> None:
        while not self._closed.wait(_REPEAT_S):
            with self._lock:
                remembered = list(self._remembered.items())
            for (method, _), (_, arguments) in remembered:
                getattr(self._handle, method).remote(*arguments)  # the answer is not needed


class RemoteDirectory(_RendezvousActorClient):
    """Directory (``collectives.experience``) on a rendezvous actor's handle, for the lifetime of a GMI."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle, "directory")

    def announce(self, key: str, value: str) -> None:
        """Publish ``value`` under ``key``; replaces the value of an earlier process of this GMI.

        Raises:
            ChannelError: the rendezvous actor does not answer.
        """
        incarnation = self._ask("announce", key, value)
        self._remember(0, "announce", key, key, value, incarnation)

    def announced(self, prefix: str) -> dict[str, str]:
        """The latest values by key, for keys with this prefix. After a restart of the actor they take a second to return.

        Raises:
            ChannelError: the rendezvous actor does not answer.
        """
        announced: dict[str, str] = self._ask("announced", prefix)
        return announced

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return self._call(method, *arguments)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise ChannelError("directory", f"the rendezvous actor does not answer: {error}") from error


class RemoteRendezvous(_RendezvousActorClient, Rendezvous):
    """``Rendezvous`` on a rendezvous actor's handle, for ``collectives.connect``.

    Needed to connect; a connected group needs no actor.
    """

    def __init__(self, handle: Any) -> None:
        super().__init__(handle, "rendezvous")

    def register(self, generation: int, member: Member) -> RendezvousStatus:
        """Register a member; returns the current status."""
        status: RendezvousStatus = self._ask(generation, "register", generation, member)
        self._remember(generation, "register", "", generation, member)
        return status

    def report(self, generation: int, lost: tuple[Member, ...]) -> None:
        """Report lost members."""
        self._ask(generation, "report", generation, lost)

    def publish(self, generation: int, key: str, endpoint: str) -> None:
        """Publish the endpoint of a transport."""
        self._ask(generation, "publish", generation, key, endpoint)
        self._remember(generation, "publish", key, generation, key, endpoint)

    def endpoint(self, generation: int, key: str) -> str | None:
        """What was published under ``key``; None until then."""
        endpoint: str | None = self._ask(generation, "endpoint", generation, key)
        return endpoint

    def _ask(self, generation: int, method: str, *arguments: Any) -> Any:
        try:
            return self._call(method, *arguments)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise RendezvousError(generation, f"the rendezvous actor does not answer: {error}") from error
