"""GMIs as Ray actors: start them in a placement group, call all of them at once, stop them."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import ray.exceptions
import ray.util

from actors.errors import GmiLostError, GmiSilentError, ObjectStoreError, PartnerLostError
from actors.gmi import Gmi, GmiIdentity, WorkerInfo
from actors.ping import PING_INTERVAL_S, PingMonitor, PingServer
from actors.raylet_watch import end_with_raylet
from actors.relay import Relays
from actors.rendezvous import RemoteDirectory, RemoteRendezvous, start_rendezvous_actor
from collectives.errors import CommunicatorError, MemberLostError
from collectives.experience.errors import ChannelError
from collectives.limits import WaitedTime
from collectives.transport_factory import TransportName
from placement.plan import PlacementPlan, bundle_of
from placement.ray_groups import Reservation, scheduling

WATCH_S = PING_INTERVAL_S
"""Interval at which ``watch`` is called, and silent GMIs are looked for, while no answer arrives."""
LONG_WAIT_S = 300.0
"""After so long a wait a warning says what the awaited program is doing."""
MAX_POSITIONS = 8
"""Most GMIs of which an error says where their programs are."""
ROOT_CAUSE_GRACE_S = 2.0
"""After one GMI failed, how long to wait for the errors of the others, which may contain the root cause."""
_STORE_FULL = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)
_logger = logging.getLogger(__name__)


class GmiActor(Gmi):
    """A GMI as a Ray actor: it knows its node, and joins its group through the rendezvous actor."""

    def __init__(self, identity: GmiIdentity, backend_name: str, collective: Any | None) -> None:
        end_with_raylet()
        given = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
        self._gpu_ids = tuple(str(gpu) for gpu in given)
        if self._gpu_ids and identity.slice.gpu_uuid is not None:
            # Ray reads the actor's repr once: it must name the GPU that Ray allocated, not the planned one.
            identity = replace(identity, slice=replace(identity.slice, gpu_uuid=self._gpu_ids[0]))
        super().__init__(identity, backend_name)
        self._collective = collective
        if collective is not None:
            self.directory = RemoteDirectory(collective)
        self.node, self.remote_transport = ray.get_runtime_context().get_node_id(), Relays()
        self._ping_server = PingServer(ray.util.get_node_ip_address())

    def worker_info(self) -> WorkerInfo:
        """Report this process's placement, with Ray's node and GPU ids, and where it answers pings."""
        return replace(
            super().worker_info(),
            node_id=self.node,
            gpu_ids=self._gpu_ids,
            ping_address=self._ping_server.address,
        )

    def join_through(
        self, *, timeout_s: float, transport: TransportName, composition: str, generation: int = 0
    ) -> str:
        """Join the group through the rendezvous actor. Returns the communicator's description, as ``join``."""
        with RemoteRendezvous(self._collective) as rendezvous:
            return self.join(
                rendezvous,
                timeout_s=timeout_s,
                transport=transport,
                composition=composition,
                address=ray.util.get_node_ip_address(),
                generation=generation,
            )

    def close(self) -> None:
        """Release the program, leave the group, and close the transports and the directory."""
        super().close()
        if self.remote_transport is not None:
            self.remote_transport.close()
        if isinstance(self.directory, RemoteDirectory):
            self.directory.close()


@dataclass(frozen=True, slots=True)
class GmiGroup:
    """Running GMIs, by index, and their rendezvous actor."""

    identities: list[GmiIdentity]
    handles: list[Any]
    """Actor handles; a restarted actor replaces the previous handle."""
    collective: Any | None
    """Handle of the rendezvous actor; None for a single GMI."""
    pings: PingMonitor
    inherited: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that Ray's workers have from their start."""

    def ask(self, question: Callable[[int, Any], Any], of: Sequence[int] | None = None) -> list[Any]:
        """Call every GMI, or those in ``of``: ``question(index, handle)`` returns the object ref. Does not wait."""
        return [
            question(index, self.handles[index]) for index in (range(len(self.handles)) if of is None else of)
        ]

    def answers(
        self,
        refs: Sequence[Any],
        asked: str,
        timeout_s: float,
        of: Sequence[int] | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Wait for the results of calls, in the order of ``refs``.

        ``of``: the GMIs that were called, in this order, None: all; ``asked``: name of the call, for errors. ``watch``
        is called every ``WATCH_S`` seconds without a result; an exception from it ends the wait.

        The time for which this process itself was stopped, as by Ctrl-Z, does not count.

        Raises:
            GmiLostError: a process or node ended, or a process is stopped or stuck.
            GmiSilentError: a result did not arrive within ``timeout_s``.
            Exception: the original exception of a GMI. Of several, the root cause.
        """
        begin = time.monotonic()
        waiting = list(refs)
        waited, waited_s, has_warned = WaitedTime(WATCH_S), 0.0, False
        asked_of = dict(zip(refs, range(len(refs)) if of is None else of, strict=True))
        while waiting:
            left_s = max(0.0, timeout_s - waited_s)
            try:
                ready, waiting = ray.wait(waiting, timeout=min(left_s, WATCH_S))
            except KeyboardInterrupt as error:
                if time.monotonic() - begin > WATCH_S:  # the user may have waited in vain
                    self.note_positions(error, [asked_of[ref] for ref in waiting])
                raise
            waited_s = waited.look()
            if not ready and left_s > WATCH_S:
                watch()
                self._raise_if_silent([asked_of[ref] for ref in waiting], asked)
                if waited_s > LONG_WAIT_S and not has_warned:
                    has_warned = True
                    self._warn_of_long_wait(asked_of[waiting[0]], asked, timeout_s)
                continue
            if not ready:
                raise self._too_late([asked_of[ref] for ref in waiting], asked, timeout_s)
            failure = self.failure(asked_of[ready[0]], ready[0], asked)
            if failure is not None:
                raise self._root_cause(failure, asked_of, waiting, asked)
        return list(ray.get(list(refs)))

    def _too_late(self, indices: Sequence[int], asked: str, timeout_s: float) -> GmiSilentError:
        """The error for GMIs that did not answer in time; of each it says where its program is."""
        first, *others = indices
        position = self.pings.code_position(first)
        error = GmiSilentError(str(self.identities[first]), asked, timeout_s, position)
        self.note_positions(error, others)
        return error

    def silence(self, index: int, asked: str, also_known: str = "") -> GmiLostError:
        """The error for a GMI whose process answers no pings."""
        known = self.pings.reason(index) + also_known
        return GmiLostError(index, str(self.identities[index]), asked, known)

    def _raise_if_silent(self, indices: Sequence[int], asked: str) -> None:
        silent = self.pings.silent(indices)
        if silent:
            raise self.silence(silent[0], asked)

    def _root_cause(
        self, first: Exception, asked_of: Mapping[Any, int], waiting: list[Any], asked: str
    ) -> Exception:
        """The root cause of a failure. A lost peer makes others raise communication errors, which may arrive first."""
        if not isinstance(first, CommunicatorError | ChannelError | GmiLostError) or not waiting:
            return first
        ready, late = ray.wait(waiting, num_returns=len(waiting), timeout=ROOT_CAUSE_GRACE_S)
        failures = [self.failure(asked_of[ref], ref, asked) for ref in ready]
        known = [first, *(failure for failure in failures if failure is not None)]
        consequences = (CommunicatorError, ChannelError)
        cause = next((failure for failure in known if not isinstance(failure, consequences)), first)
        noticed = next((failure for failure in known if _names_the_lost(failure)), None)
        if isinstance(cause, GmiLostError) and noticed is not None:
            return GmiLostError(cause.index, cause.gmi, cause.asked, f"{cause.known}; {noticed}")
        if not isinstance(cause, consequences):
            return cause
        # The others have waited for one that is stopped, and may not know which.
        busy = [asked_of[ref] for ref in late]
        if stopped := self.pings.stopped(busy):
            return self.silence(stopped[0], asked, f"; {cause}")
        # Or for one whose program takes long, or for ever.
        self.note_positions(cause, busy)
        return cause

    def _warn_of_long_wait(self, index: int, asked: str, timeout_s: float) -> None:
        """Say once where a program is that takes long: limits are generous, and an environment's step() may never return."""
        at = self.pings.code_position(index) or "an unknown line of code"
        _logger.warning(
            "%s has not answered for %.0f min; the call was: %s; its program is at %s; the limit is %.0f min",
            self.identities[index],
            LONG_WAIT_S / 60,
            asked,
            at,
            timeout_s / 60,
        )

    def note_positions(self, error: BaseException, indices: Sequence[int]) -> None:
        """Add to an error where the programs of these GMIs are, or of the first ones."""
        for index in indices[:MAX_POSITIONS]:
            if position := self.pings.code_position(index):
                error.add_note(f"{self.identities[index]} is still at {position}.")

    def failure(self, index: int, ref: Any, asked: str) -> Exception | None:
        """The exception of a finished call, as one of rayagi's classes; None if it succeeded."""
        try:
            ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, _STORE_FULL):
                cause = ObjectStoreError(str(self.identities[index]), asked)
            cause.__cause__ = error  # carries the traceback of the GMI's process
            return cause if isinstance(cause, Exception) else error
        except _STORE_FULL:  # here, where the answer arrives
            return ObjectStoreError(str(self.identities[index]), asked)
        except ray.exceptions.RayError as error:  # actor died, node died, out of memory
            return GmiLostError(index, str(self.identities[index]), asked, _brief(error))
        return None


def start(
    plan: PlacementPlan,
    reservation: Reservation,
    task: str,
    silence_s: float,
    *,
    inherited: Mapping[str, str],
) -> GmiGroup:
    """Start one actor per GMI, and the rendezvous actor if there are several. Does not wait for them to be ready.

    A GMI counts as lost if its process answers no ping for ``silence_s``. ``inherited``: environment variables that Ray's
    workers have from their start.

    Environment variables of a slice are set before its process starts. Ray never restarts an actor (max_restarts = 0): it
    would silently continue with initial weights.
    """
    identities = [
        GmiIdentity(
            index=index,
            num_gmis=plan.num_gmis,
            slice=gmi_slice,
            roles=plan.roles_of(index),
            task=task,
            worker_types=plan.worker_types,
            group=plan.group,
        )
        for index, gmi_slice in enumerate(plan.slices)
    ]
    group = GmiGroup(identities, [], None, PingMonitor(silence_s), inherited)
    try:
        if plan.num_gmis > 1:
            group = replace(group, collective=start_rendezvous_actor(len(identities[0].members)))
        for identity in identities:
            group.handles.append(_start_one(identity, plan, reservation, group))
    except BaseException:
        stop(group, timeout_s=0.0, evict=lambda index: None)
        raise
    return group


def restart(group: GmiGroup, index: int, plan: PlacementPlan, reservation: Reservation) -> None:
    """Kill a GMI's actor and start a new one on its bundle. Does not wait for it to be ready."""
    group.pings.remove(index)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(group.handles[index], no_restart=True)
    group.handles[index] = _start_one(group.identities[index], plan, reservation, group)


def _start_one(identity: GmiIdentity, plan: PlacementPlan, reservation: Reservation, group: GmiGroup) -> Any:
    token = reservation.group.id.hex()[:8]
    bundle = bundle_of(identity.slice)
    environment = identity.slice.environment
    has_it = environment.items() <= group.inherited.items()
    actor = ray.remote(GmiActor).options(
        name=f"gmi-{identity.index}-{token}-{time.time_ns():x}",
        num_cpus=bundle["CPU"],
        num_gpus=bundle.get("GPU", 0.0),
        max_restarts=0,
        scheduling_strategy=scheduling(reservation, identity.index),
        runtime_env=None if has_it else {"env_vars": dict(environment)},
    )
    return actor.remote(identity, plan.backend, group.collective)


def stop(group: GmiGroup, timeout_s: float, evict: Callable[[int], None]) -> None:
    """Close every GMI, wait up to ``timeout_s``, then kill the processes. Safe to call twice.

    ``evict`` is called with the index of a GMI that did not close, before its process is killed.
    """
    if not ray.is_initialized():
        return
    with contextlib.suppress(ray.exceptions.RayError):
        if timeout_s > 0:
            refs = group.ask(lambda index, gmi: gmi.close.remote())
            _, late = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
            for ref in late:
                evict(refs.index(ref))
    for handle in (*group.handles, group.collective):
        if handle is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(handle, no_restart=True)


def _names_the_lost(failure: Exception) -> bool:
    """Whether a peer's error names the lost GMI, and so adds who detected the loss and in which call."""
    return isinstance(failure, MemberLostError) or (
        isinstance(failure, PartnerLostError) and failure.has_ended
    )


def _brief(error: ray.exceptions.RayError) -> str:
    """Ray's message on a dead actor as a clause; of an unusual one the informative lines, without its guesses at causes."""
    text = str(error)
    if "The process receives a SIGTERM." in text:
        return "its process was sent SIGTERM, as by a service manager, or a guard of the memory"
    if "running low on memory" in text:
        used = re.search(r"\bwas (\S+) used / (\S+) limit", text)
        return "Ray ended it, as its node was running low on memory" + (
            f" ({used[1]} of {used[2]} in use)" if used else ""
        )
    if "Worker unexpectedly exits with a connection error" in text:
        return (
            "its process was killed, as the kernel does where memory runs out, its native code crashed, or code of the "
            "environment ended it (os._exit)"
        )
    lines = [line.strip() for line in text.partition("Some common causes include")[0].splitlines()]
    kept = [
        line for line in lines if line and not line.startswith(("class_name:", "actor_id:", "namespace:"))
    ]
    return "; ".join(kept)[:600].rstrip(". ")
