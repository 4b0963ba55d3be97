"""Parameter publishing: a learner writes versions of its parameters to a store; collectors subscribe to it."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import torch
from torch import Tensor

from actors.protocols import StateDict
from collectives.experience.directory import Directory
from collectives.experience.errors import ChannelError, ChannelTimeoutError
from collectives.experience.migrator import RemoteTransport
from collectives.experience.parameters import ParameterStore, ReadableParameterStore
from collectives.rendezvous import host_identity, poll
from rayagi.algorithms.gradient_updater import on_host
from rayagi.algorithms.normalisers import moments_state
from rayagi.models.policy import NetworkPolicy

_MODEL, _STATISTICS = "model.", "obs_normaliser."


def parameter_store_key(learner: int) -> str:
    """Directory key of a learner's parameter store; learners count from 0."""
    return f"parameters/{learner}"


def published_tensors(policy: NetworkPolicy) -> dict[str, Tensor]:
    """All tensors needed for acting: the model, and its observation statistics."""
    tensors = {f"{_MODEL}{name}": tensor for name, tensor in policy.model.state_dict().items()}
    if policy.normaliser is not None:
        state = moments_state(policy.normaliser.moments)
        tensors |= {f"{_STATISTICS}{name}": tensor for name, tensor in state.items()}
    return tensors


class ParameterPublisher:
    """Learner's end: a parameter store in the host's shared memory, announced to collectors."""

    def __init__(self, policy: NetworkPolicy, directory: Directory, learner: int, *, node: str = "") -> None:
        """Nothing is published yet. ``node``: id of this node, by which collectors on other hosts address it.

        Raises:
            ChannelError: no shared memory, or not supported on this host.
        """
        self._policy, self._directory, self._key = policy, directory, parameter_store_key(learner)
        self._node = node
        self._parameter_store: ParameterStore | None = None

    @property
    def version(self) -> int:
        """Version published last; -1 before the first."""
        return -1 if self._parameter_store is None else self._parameter_store.version

    def publish(self, version: int) -> None:
        """Publish the policy's current tensors. A version that is not newer, as after a restore, opens a new store."""
        if self._parameter_store is not None and version <= self._parameter_store.version:
            self._parameter_store.close()
            self._parameter_store = None
        # Written before it is announced: a subscriber never finds an empty store.
        tensors = published_tensors(self._policy)
        announced = self._parameter_store is not None
        if self._parameter_store is None:
            self._parameter_store = ParameterStore.host(tensors)
        self._parameter_store.publish(tensors, version)
        if not announced:
            place = (host_identity(), self._node, self._parameter_store.endpoint)
            self._directory.announce(self._key, json.dumps(place))

    def close(self) -> None:
        """Mark the store as finished: no version follows."""
        if self._parameter_store is not None:
            self._parameter_store.close()


class ParameterSubscriber:
    """Collector's end: keeps a policy at the newest version that its learner published."""

    def __init__(
        self,
        policy: NetworkPolicy,
        directory: Directory,
        learner: int,
        *,
        remote_transport: RemoteTransport | None = None,
    ) -> None:
        """Nothing is read yet. ``remote_transport``: for a learner on another host; None: not supported."""
        self._policy, self._directory, self._key = policy, directory, parameter_store_key(learner)
        self._remote_transport = remote_transport
        self._parameter_store: ReadableParameterStore | None = None
        self._announcement = ""
        """Directory entry of the store that is attached."""
        self._own = {name: tensor.clone() for name, tensor in published_tensors(policy).items()}
        self.version = -1
        """Version of the policy; -1 before the first read."""

    def read(self, timeout_s: float) -> int:
        """Update the policy to the newest published version; returns that version.

        If the learner's process has ended, the policy keeps its last version until a successor announces a store.

        Raises:
            ChannelTimeoutError: no learner announced a store within the time limit.
            ChannelError: the learner is on another host without a transport to it.
        """
        if self._has_successor():
            self._find_store(timeout_s)
        self._read_newest()
        if self._has_successor():  # a remote store reports that it is finished only on a read
            self._find_store(timeout_s)
            self._read_newest()
        return self.version

    def _has_successor(self) -> bool:
        """Whether to attach another store: none is attached, or the attached one is finished and replaced."""
        return self._parameter_store is None or (
            self._parameter_store.is_finished and self._announced_endpoint() != self._announcement
        )

    def _read_newest(self) -> None:
        """Copy the store's tensors into the policy if their version differs."""
        assert self._parameter_store is not None
        version = self._parameter_store.read_newer(self._own, self.version)
        if version != self.version:
            self.version = version
            self._apply()

    def _find_store(self, timeout_s: float) -> None:
        begin = time.monotonic()
        parameter_store = poll(self._open_announced, timeout_s)
        if parameter_store is not None:
            if self._parameter_store is not None:
                self._parameter_store.close()
            self._parameter_store, self.version = parameter_store, -1
        elif self._parameter_store is None:
            waited_s = time.monotonic() - begin
            raise ChannelTimeoutError("parameters", f"learner {self._key!r} has not published any", waited_s)

    def forget(self) -> None:
        """Detach the store; the next read resolves it again, since the learner may have opened another."""
        if self._parameter_store is not None:
            self._parameter_store.close()
        self._parameter_store, self._announcement = None, ""

    def state_dict(self) -> StateDict:
        """The collector's view of the run's shared state: newest model and statistics, and the number of updates."""
        with suppress(ChannelTimeoutError):
            self.read(0.0)
        state: StateDict = {
            "iteration": max(0, self.version),
            "learner": {"model": on_host(self._policy.model.state_dict())},
        }
        if self._policy.normaliser is not None:
            state["obs_normaliser"] = self._policy.normaliser.state_dict()
        return state

    def close(self) -> None:
        """Detach the store."""
        self.forget()

    def _announced_endpoint(self) -> str:
        return self._directory.announced(self._key).get(self._key, "")

    def _open_announced(self) -> ReadableParameterStore | None:
        announcement = self._announced_endpoint()
        if not announcement:
            return None
        host, node, endpoint = json.loads(announcement)
        if host != host_identity() and node and self._remote_transport is not None:
            self._announcement = announcement
            return self._remote_transport.parameter_store(node, endpoint)
        if host != host_identity():
            raise ChannelError(
                "parameters",
                "the learner is on another host, and no remote transport is available: place one learner on every host "
                "(gmi.num_learners), or use fewer GMIs",
            )
        try:
            parameter_store = ParameterStore.attach(endpoint)
        except ChannelError:  # its learner has ended; a successor will announce its own store
            return None
        self._announcement = announcement
        return parameter_store

    @torch.no_grad()
    def _apply(self) -> None:
        for name, tensor in self._policy.model.state_dict().items():
            tensor.copy_(self._own[f"{_MODEL}{name}"])
        if self._policy.normaliser is not None:
            names = moments_state(self._policy.normaliser.moments)
            state = {name: self._own[f"{_STATISTICS}{name}"].clone() for name in names}
            self._policy.normaliser.load_state_dict(state)
