"""Parameters on their way from a learner to its collectors: what is published, and who follows it."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import torch
from torch import Tensor

from actors.protocols import StateDict
from collectives.experience.directory import Directory
from collectives.experience.errors import ChannelError, ChannelTimeoutError
from collectives.experience.parameters import ParameterStore, ReadableParameterStore
from collectives.experience.remote_transport import RemoteTransport
from collectives.rendezvous import host_identity, poll
from rayagi.algorithms.normalisers import moments_state
from rayagi.models.policy import NetworkPolicy

_MODEL, _STATISTICS = "model.", "obs_normaliser."


def parameter_store_key(learner: int) -> str:
    """Under which a learner's board is announced; learners count from 0."""
    return f"parameters/{learner}"


def published_tensors(policy: NetworkPolicy) -> dict[str, Tensor]:
    """All that one acts with: the model, and the observation statistics that belong to it."""
    tensors = {f"{_MODEL}{name}": tensor for name, tensor in policy.model.state_dict().items()}
    if policy.normaliser is not None:
        state = moments_state(policy.normaliser.moments)
        tensors |= {f"{_STATISTICS}{name}": tensor for name, tensor in state.items()}
    return tensors


class ParameterPublisher:
    """A learner's side: a board on its host, announced to collectors."""

    def __init__(self, policy: NetworkPolicy, directory: Directory, learner: int, *, node: str = "") -> None:
        """Nothing is published yet. ``node``: by which collectors on other hosts name this one.

        Raises:
            ChannelError: there is no memory for it, or this host cannot.
        """
        self._policy, self._directory, self._key = policy, directory, parameter_store_key(learner)
        self._node = node
        self._parameter_store: ParameterStore | None = None

    @property
    def version(self) -> int:
        """Of what was published last; -1 before the first time."""
        return -1 if self._parameter_store is None else self._parameter_store.version

    def publish(self, version: int) -> None:
        """Show the policy as it is. A version that is not newer than the last, as of a restored run, begins a new board."""
        if self._parameter_store is not None and version <= self._parameter_store.version:
            self._parameter_store.close()
            self._parameter_store = None
        tensors = published_tensors(self._policy)
        announced = self._parameter_store is not None
        if self._parameter_store is None:
            self._parameter_store = ParameterStore.host(tensors)
        self._parameter_store.publish(tensors, version)
        if not announced:
            place = (host_identity(), self._node, self._parameter_store.endpoint)
            self._directory.announce(self._key, json.dumps(place))

    def close(self) -> None:
        """Tell collectors that no more will come."""
        if self._parameter_store is not None:
            self._parameter_store.close()


class ParameterSubscriber:
    """A collector's side: keeps a policy as its learner published it last."""

    def __init__(
        self,
        policy: NetworkPolicy,
        directory: Directory,
        learner: int,
        *,
        remote_transport: RemoteTransport | None = None,
    ) -> None:
        """Nothing is read yet. ``remote_transport``: how a learner on another host is followed; None: it cannot be."""
        self._policy, self._directory, self._key = policy, directory, parameter_store_key(learner)
        self._remote_transport = remote_transport
        self._parameter_store: ReadableParameterStore | None = None
        self._announcement = ""
        """What was announced of the board."""
        self._own = {name: tensor.clone() for name, tensor in published_tensors(policy).items()}
        self.version = -1
        """Of the policy; -1 before the first reading."""

    def read(self, timeout_s: float) -> int:
        """Make the policy the one that is published now; returns its version.

        Where the learner's process has ended, the policy stays as it published it last, until another has announced a board.

        Raises:
            ChannelTimeoutError: no learner has announced a board within the time limit.
            ChannelError: the learner is on another host, and there is no way to it.
        """
        if self._has_successor():
            self._find_store(timeout_s)
        self._read_newest()
        if self._has_successor():  # a board on another host says only when it is read that it is over
            self._find_store(timeout_s)
            self._read_newest()
        return self.version

    def _has_successor(self) -> bool:
        """Whether another board is to be looked for than the one that is read."""
        return self._parameter_store is None or (
            self._parameter_store.is_finished and self._announced_endpoint() != self._announcement
        )

    def _read_newest(self) -> None:
        """Make what the board shows the policy, if it is another version."""
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
        """Look for the board anew before the next reading: the learner may have begun another."""
        if self._parameter_store is not None:
            self._parameter_store.close()
        self._parameter_store, self._announcement = None, ""

    def state_dict(self) -> StateDict:
        """What of a run's shared state is known here: the newest model and statistics, and the number of updates."""
        with suppress(ChannelTimeoutError):
            self.read(0.0)
        state: StateDict = {
            "iteration": max(0, self.version),
            "learner": {"model": _clones(self._policy.model.state_dict())},
        }
        if self._policy.normaliser is not None:
            state["obs_normaliser"] = self._policy.normaliser.state_dict()
        return state

    def close(self) -> None:
        """Let go of the board."""
        self.forget()

    def _announced_endpoint(self) -> str:
        return self._directory.announced(self._key).get(self._key, "")

    def _open_announced(self) -> ReadableParameterStore | None:
        said = self._announced_endpoint()
        if not said:
            return None
        host, node, endpoint = json.loads(said)
        if host != host_identity() and node and self._remote_transport is not None:
            self._announcement = said
            return self._remote_transport.parameter_store(node, endpoint)
        if host != host_identity():
            raise ChannelError(
                "parameters",
                "the learner is on another host, and nothing was given to bring parameters from there: give every host a "
                "learner of its own (gmi.num_learners), or use fewer GMIs",
            )
        try:
            parameter_store = ParameterStore.attach(endpoint)
        except ChannelError:  # of a learner that has ended; another will announce its own
            return None
        self._announcement = said
        return parameter_store

    @torch.no_grad()
    def _apply(self) -> None:
        for name, tensor in self._policy.model.state_dict().items():
            tensor.copy_(self._own[f"{_MODEL}{name}"])
        if self._policy.normaliser is not None:
            names = moments_state(self._policy.normaliser.moments)
            state = {name: self._own[f"{_STATISTICS}{name}"].clone() for name in names}
            self._policy.normaliser.load_state_dict(state)


def _clones(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
