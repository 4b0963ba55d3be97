"""The collective actor from the members' side: start it, and talk to it although it may die and come back."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self

import ray
import ray.exceptions

from actors.rendezvous_actor import RendezvousActor
from collectives.errors import RendezvousError
from collectives.experience.errors import ChannelError
from collectives.rendezvous import JoinRequest, Member, MembershipView, Rendezvous, RendezvousStatus

_CALL_TIMEOUT_S = 30.0
"""For one small call, with a restart of the actor in it."""
_REPEAT_S = 0.5


def start_rendezvous_actor(world_size: int) -> Any:
    """The handle of a new collective actor, which Ray starts anew wherever it can when it dies."""
    # All its calls may be repeated, so Ray may repeat those that were under way.
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(RendezvousActor).options(**options).remote(world_size)


class _RendezvousActorClient:
    """Calls a collective actor, and says again twice a second what it is to remember: an actor that came back knows it."""

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
            ray.exceptions.RayActorError: it is gone for good.
            ray.exceptions.GetTimeoutError: it did not answer.
        """
        try:
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=_CALL_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def _remember(self, generation: int, method: str, key: str, *arguments: Any) -> None:
        """To be said again, until something of a later generation is said."""
        with self._lock:
            self._remembered = {
                which: what for which, what in self._remembered.items() if what[0] >= generation
            }
            self._remembered[method, key] = (generation, arguments)

    def _repeat(self) -> None:
        while not self._closed.wait(_REPEAT_S):
            with self._lock:
                said = list(self._remembered.items())
            for (method, _), (_, arguments) in said:
                getattr(self._handle, method).remote(
                    *arguments
                )  # whoever needs it asks; no answer is awaited


class RemoteDirectory(_RendezvousActorClient):
    """A collective actor's handle as a directory (``collectives.experience``), for as long as a GMI lives."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle, "directory")

    def announce(self, key: str, value: str) -> None:
        """Say ``value`` under ``key``: instead of what another process of this GMI said before it was replaced.

        Raises:
            ChannelError: the collective actor does not answer.
        """
        incarnation = time.time_ns()
        self._ask("announce", key, value, incarnation)
        self._remember(0, "announce", key, key, value, incarnation)

    def announced(self, prefix: str) -> dict[str, str]:
        """What was said last under each key that begins with ``prefix``; an actor that came back needs a second for it.

        Raises:
            ChannelError: the collective actor does not answer.
        """
        said: dict[str, str] = self._ask("announced", prefix)
        return said

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return self._call(method, *arguments)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise ChannelError("directory", f"the collective actor does not answer: {error}") from error


class RemoteRendezvous(_RendezvousActorClient, Rendezvous):
    """A collective actor's handle as the object that ``collectives.connect`` and ``membership`` call.

    Open it to form a generation and to connect; a connected group needs no actor.
    """

    def __init__(self, handle: Any) -> None:
        super().__init__(handle, "rendezvous")

    def register(self, generation: int, member: Member) -> RendezvousStatus:
        """Say that a member is here, and see who else is."""
        status: RendezvousStatus = self._ask(generation, "register", generation, member)
        self._remember(generation, "register", "", generation, member)
        return status

    def report(self, generation: int, lost: tuple[Member, ...]) -> None:
        """Say that members of a meeting are gone."""
        self._ask(generation, "report", generation, lost)

    def publish(self, generation: int, key: str, endpoint: str) -> None:
        """Say where a data path begins."""
        self._ask(generation, "publish", generation, key, endpoint)
        self._remember(generation, "publish", key, generation, key, endpoint)

    def endpoint(self, generation: int, key: str) -> str | None:
        """What was published under ``key``; None until then."""
        endpoint: str | None = self._ask(generation, "endpoint", generation, key)
        return endpoint

    def request_join(self, join_request: JoinRequest) -> MembershipView | RendezvousStatus:
        """Want to belong to the next generation."""
        generation = 0 if join_request.previous is None else join_request.previous.generation + 1
        answer: MembershipView | RendezvousStatus = self._ask(generation, "request_join", join_request)
        if isinstance(answer, MembershipView):
            self._remember(answer.generation, "adopt_membership", "", answer)
        return answer

    def cancel_join(self, member: Member) -> None:
        """No longer want to."""
        self._ask(0, "cancel_join", member)

    def _ask(self, generation: int, method: str, *arguments: Any) -> Any:
        try:
            return self._call(method, *arguments)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise RendezvousError(generation, f"the collective actor does not answer: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
