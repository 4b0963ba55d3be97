"""Steps between GMIs: simulators in some, the agent that they share in another (GMI-DRL §3.1.1, Figures 5a, 5b, 6a and 6c).

One small batch each way per step. A simulator tells what it sees, and steps as often as it is told actions; the agent waits
for all its simulators, and acts on them in one forward pass::

    simulator   first observations | actions -> step | actions -> step | ...   T times, then the next iteration
    agent       first observations -> act | step -> act | ...

One forward pass for all, though the first to come wait for the last: it costs least (the papers' alpha), and what is
computed depends on no timing. To the agent's loop they are one simulator: ``actors.collecting`` sees no difference.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.collecting import StepSource
from actors.partners import PartnerInbox, check_iteration, step_name
from actors.protocols import EnvInfo, StateDict, StepResult
from collectives.experience.consumer_endpoint import Batch
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field

CHANNEL = "steps"
"""Under which GMIs that exchange steps find each other."""
BETWEEN_ITERATIONS_S = 3600.0
"""For the first message of an iteration: the partner may still learn or evaluate. One that has ended is noticed at once."""
_SLOTS = 2
"""A step, and the first observations of the next iteration, which may be told before the step is read."""
_CLOSE_S = 0.2


def step_schema(info: EnvInfo) -> ExperienceSchema:
    """What a simulator tells; a row is one environment's step.

    Rows of ``final_obs`` hold something only where an episode ended. The ragged part of a step needs no channel of its own
    here: in shared memory, rows that nobody writes cost nothing, and a step stays one batch.
    """
    obs = (info.obs_dim,)
    return ExperienceSchema(
        CHANNEL,
        (
            Field(name="obs", shape=obs),
            Field(name="rewards"),
            Field(name="terminated", dtype=torch.bool),
            Field(name="truncated", dtype=torch.bool),
            Field(name="final_obs", shape=obs),
        ),
    )


def action_schema(info: EnvInfo) -> ExperienceSchema:
    """What an agent tells; a row is one environment's action."""
    dtype = torch.int64 if info.action.is_discrete else torch.float32
    return ExperienceSchema("actions", (Field(name="actions", dtype=dtype, shape=info.action.shape),))


class StepServer:
    """A simulator's end: tells its observations to the agent, and steps when it gets actions.

    ``begin`` an iteration, then ``step`` as often as the agent does.
    """

    def __init__(
        self, simulator: StepSource, info: EnvInfo, num_envs: int, *, place: int, agent: str, limit_s: float
    ) -> None:
        """Open it; ``attach`` it before use.

        Args:
            simulator: what is stepped
            info: of its environments
            num_envs: how many there are
            place: which of the agent's simulators this is, from 0
            agent: its name, for errors
            limit_s: for the agent to answer a step
        """
        self.simulator, self.num_envs = simulator, num_envs
        self._limit_s = limit_s
        self._partner_inbox = PartnerInbox(action_schema(info), [agent])
        self._ring = ProducerRing(step_schema(info), rows=num_envs, slots=_SLOTS, producer=place)
        (field,) = self._partner_inbox.consumer_endpoint.schema.fields
        self._actions = torch.zeros((num_envs, *field.shape), dtype=field.dtype)
        self._iteration = self._steps = 0

    @property
    def endpoint(self) -> str:
        """Where the agent sends actions to."""
        return self._partner_inbox.consumer_endpoint.endpoint

    def attach(self, endpoint: str) -> None:
        """Connect to the agent. Both ends attach before either is used.

        Raises:
            ChannelError: it is not there.
            SchemaError: it has another environment in mind.
        """
        self._ring.attach(endpoint)

    def begin(self, iteration: int) -> None:
        """Tell the agent what an iteration begins with."""
        self._iteration, self._steps = iteration, 0
        reservation = self._ring.reserve(timeout_s=self._limit_s)
        reservation["obs"].copy_(self.simulator.obs)
        reservation.commit(version=iteration)

    def step(self) -> tuple[float, float]:
        """One step with the agent's actions. Returns seconds in exchanging, waiting included, and in the simulator.

        Raises:
            PartnerLostError: the agent is gone.
            ChannelTimeoutError: it does not answer.
            IterationMismatchError: it is in another iteration.
        """
        asked = time.perf_counter()
        limit_s = self._limit_s if self._steps else BETWEEN_ITERATIONS_S
        awaited = step_name("the actions", self._steps, self._iteration)
        with self._partner_inbox.take((0,), awaited, limit_s) as batch:
            check_iteration(batch, self._partner_inbox.names[0], self._iteration)
            self._actions.copy_(batch["actions"])
        begun = time.perf_counter()
        result = self.simulator.step(self._actions)
        ended = time.perf_counter()
        self._send_result(result)
        self._steps += 1
        return time.perf_counter() - ended + begun - asked, ended - begun

    def _send_result(self, result: StepResult) -> None:
        reservation = self._ring.reserve(timeout_s=self._limit_s)
        for name in ("obs", "rewards", "terminated", "truncated"):
            reservation[name].copy_(getattr(result, name))
        if len(result.final_ids):
            reservation["final_obs"][result.final_ids] = result.final_obs
        reservation.commit(version=self._iteration)

    def close(self) -> None:
        """Say goodbye to the agent. Safe to call twice."""
        self._ring.close(_CLOSE_S)
        self._partner_inbox.consumer_endpoint.close()


class RemoteSimulators:
    """An agent's end: the simulators that it shares, as one.

    ``begin`` an iteration, then ``step``, as ``actors.simulator.Simulator`` does; what belongs to the environments (their
    state, their episodes' returns) stays with them. Environments are in the order of the simulators. What ``step`` returned
    is valid until the next.
    """

    def __init__(
        self,
        info: EnvInfo,
        num_envs: Sequence[int],
        *,
        simulators: Sequence[str],
        limit_s: float,
        resumes_episodes: bool = True,
    ) -> None:
        """Open it; ``attach`` it before use.

        Args:
            info: of the environments, alike in all simulators
            num_envs: of each simulator
            simulators: their names, for errors
            limit_s: for a step of all of them
            resumes_episodes: whether a saved state goes on within its episodes
        """
        self.info, self.num_envs, self.resumes_episodes = info, sum(num_envs), resumes_episodes
        self._limit_s = limit_s
        self._partner_inbox = PartnerInbox(step_schema(info), simulators)
        self._rings = [
            # One for each: an outbox with several consumers would post to another what one of them can take no more.
            ProducerRing(action_schema(info), rows=count, slots=_SLOTS)
            for count in num_envs
        ]
        total = self.num_envs
        self.obs = torch.zeros(total, info.obs_dim)
        """What to act on next, (N, obs_dim)."""
        self._columns = {
            "obs": self.obs,
            "rewards": torch.zeros(total),
            "terminated": torch.zeros(total, dtype=torch.bool),
            "truncated": torch.zeros(total, dtype=torch.bool),
        }
        self._begins = [sum(num_envs[:place]) for place in range(len(num_envs))]
        spans = [slice(begin, begin + count) for begin, count in zip(self._begins, num_envs, strict=True)]
        self._spans = spans
        self._parts = [{name: whole[span] for name, whole in self._columns.items()} for span in spans]
        self._early: dict[int, Batch] = {}
        """Of simulators that have begun the next iteration before others have ended this one."""
        self._iteration = self._steps = 0
        self.exchange_s = 0.0
        """Seconds in exchanging since the iteration began, waiting for simulators included."""

    @property
    def endpoint(self) -> str:
        """Where simulators tell their steps."""
        return self._partner_inbox.consumer_endpoint.endpoint

    def attach(self, endpoints: Sequence[str]) -> None:
        """Connect to the simulators, in their order. Both ends attach before either is used.

        Raises:
            ChannelError: one is not there.
            SchemaError: one has another environment in mind.
        """
        for ring, endpoint in zip(self._rings, endpoints, strict=True):
            ring.attach(endpoint)

    def begin(self, iteration: int) -> None:
        """Wait for the observations that an iteration begins with. Raises as ``step``."""
        started = time.perf_counter()
        self._iteration, self._steps = iteration, 0
        asked = f"the first observations of iteration {iteration + 1}"
        for batch in self._one_batch_per_simulator(asked, BETWEEN_ITERATIONS_S):
            self._parts[batch.producer]["obs"].copy_(batch["obs"])
        self.exchange_s = time.perf_counter() - started

    def step(self, actions: Tensor) -> StepResult:
        """Have every environment stepped; ``actions`` on the host, (N, dim) or (N,).

        Raises:
            PartnerLostError: a simulator is gone.
            ChannelTimeoutError: one does not answer.
            IterationMismatchError: one is in another iteration.
        """
        started = time.perf_counter()
        for ring, span in zip(self._rings, self._spans, strict=True):
            reservation = ring.reserve(timeout_s=self._limit_s)
            reservation["actions"].copy_(actions[span])
            reservation.commit(version=self._iteration)
        finals: dict[int, tuple[Tensor, Tensor]] = {}
        for batch in self._one_batch_per_simulator(
            step_name("the outcome", self._steps, self._iteration), self._limit_s
        ):
            part = self._parts[batch.producer]
            for name, own in part.items():
                own.copy_(batch[name])
            ids = (part["terminated"] | part["truncated"]).nonzero().flatten()
            if len(ids):
                finals[batch.producer] = (self._begins[batch.producer] + ids, batch["final_obs"][ids])
        self._steps += 1
        self.exchange_s += time.perf_counter() - started
        ended = [finals[place] for place in sorted(finals)]
        return StepResult(
            **self._columns,
            final_ids=torch.cat([ids for ids, _ in ended]) if ended else torch.empty(0, dtype=torch.int64),
            final_obs=torch.cat([obs for _, obs in ended]) if ended else torch.empty(0, self.info.obs_dim),
        )

    def take_finished(self) -> tuple[list[float], list[int]]:
        """Nothing: the simulators' GMIs report the episodes that ended."""
        return [], []

    def take_reward_terms(self) -> dict[str, list[float]]:
        """Nothing, likewise."""
        return {}

    def take_sim_errors(self) -> dict[str, float]:
        """Nothing, likewise."""
        return {}

    def state_dict(self) -> StateDict:
        """Nothing: the simulators' GMIs save their environments."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Say goodbye to the simulators. Safe to call twice."""
        while self._early:
            self._early.popitem()[1].release()
        for ring in self._rings:
            ring.close(_CLOSE_S)
        self._partner_inbox.consumer_endpoint.close()

    def _one_batch_per_simulator(self, asked: str, limit_s: float) -> Iterator[Batch]:
        """A batch of every simulator, as they come; each is released when the next is asked for."""
        missing = set(range(len(self._partner_inbox.names)))
        while missing:
            early = next((place for place in missing if place in self._early), None)
            batch = (
                self._partner_inbox.take(missing, asked, limit_s) if early is None else self._early.pop(early)
            )
            if batch.producer not in missing:
                self._early[batch.producer] = batch
                continue
            missing.remove(batch.producer)
            with batch:
                check_iteration(batch, self._partner_inbox.names[batch.producer], self._iteration)
                yield batch
