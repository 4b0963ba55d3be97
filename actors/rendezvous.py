"""The collective actor from the members' side: start it, and talk to it although it may die and come back."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

import ray
import ray.exceptions

from actors.collective import Collective
from collectives.errors import RendezvousError
from collectives.rendezvous import Attendance, Candidacy, Member, Rendezvous, Roster

_CALL_TIMEOUT_S = 30.0
"""For one small call, with a restart of the actor in it."""
_REPEAT_S = 0.5


def start_collective(world_size: int) -> Any:
    """The handle of a new collective actor, which Ray starts anew wherever it can when it dies."""
    # All its calls may be repeated, so Ray may repeat those that were under way.
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(Collective).options(**options).remote(world_size)


class RemoteRendezvous(Rendezvous):
    """A collective actor's handle as the object that ``collectives.connect`` and ``membership`` call.

    As long as it is open, it says again twice a second what it said: an actor that came back knows it again. Open it to
    form a generation and to connect; a connected group needs no actor.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._said: dict[tuple[str, str], tuple[int, tuple[Any, ...]]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="rendezvous", daemon=True)
        self._thread.start()

    def register(self, generation: int, member: Member) -> Attendance:
        """Say that a member is here, and see who else is."""
        attendance: Attendance = self._ask(generation, "register", generation, member)
        self._remember(generation, "register", "", generation, member)
        return attendance

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

    def enlist(self, candidacy: Candidacy) -> Roster | Attendance:
        """Want to belong to the next generation."""
        generation = 0 if candidacy.previous is None else candidacy.previous.generation + 1
        answer: Roster | Attendance = self._ask(generation, "enlist", candidacy)
        if isinstance(answer, Roster):
            self._remember(answer.generation, "learn", "", answer)
        return answer

    def withdraw(self, member: Member) -> None:
        """No longer want to."""
        self._ask(0, "withdraw", member)

    def close(self) -> None:
        """Stop repeating. Safe to call twice."""
        self._closed.set()
        self._thread.join()

    def _ask(self, generation: int, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=_CALL_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise RendezvousError(generation, f"the collective actor does not answer: {error}") from error

    def _remember(self, generation: int, method: str, key: str, *arguments: Any) -> None:
        """To be said again, until something of a later generation is said."""
        with self._lock:
            self._said = {which: what for which, what in self._said.items() if what[0] >= generation}
            self._said[method, key] = (generation, arguments)

    def _repeat(self) -> None:
        while not self._closed.wait(_REPEAT_S):
            with self._lock:
                said = list(self._said.items())
            for (method, _), (_, arguments) in said:
                getattr(self._handle, method).remote(
                    *arguments
                )  # whoever needs it asks; no answer is awaited

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
