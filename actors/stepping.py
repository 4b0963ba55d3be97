"""Step exchange between GMIs: simulators and their shared agent (GMI-DRL §3.1.1, Figures 5a, 5b, 6a and 6c).

Each step sends one batch each way. A simulator sends observations and steps with the received actions. The agent waits for
all its simulators and acts on their observations in one forward pass::

    simulator   first observations | actions -> step | actions -> step | ...   T times, then the next iteration
    agent       first observations -> act | step -> act | ...

One forward pass for all simulators costs least (the papers' alpha), and results do not depend on timing. The price is that
fast simulators wait for the slowest. To ``actors.roles`` they look like one simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.partners import PartnerInbox, check_iteration, step_name
from actors.protocols import EnvInfo, StateDict, StepResult
from actors.roles import UNTIMED, StepSource, Timing
from actors.rollout import obs_type
from collectives.experience.consumer_endpoint import Batch
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field

CHANNEL = "steps"
"""Name of the channel, and prefix of its directory keys."""
BETWEEN_ITERATIONS_S = 3600.0
"""Time limit for the first message of an iteration: the partner may still train or evaluate. A loss is detected at once."""
_SLOTS = 2
"""A step, and the first observations of the next iteration, which may be sent before the step is read."""
_CLOSE_S = 0.2


def step_schema(info: EnvInfo) -> ExperienceSchema:
    """Schema of a simulator's messages; a row is one environment's step.

    Rows of ``final_obs`` are valid only where an episode ended. They need no ragged channel: unwritten rows of shared
    memory cost nothing, and a step stays one batch.
    """
    return ExperienceSchema(
        CHANNEL,
        (
            Field(name="obs", dtype=obs_type(info), shape=(info.obs_dim,)),
            Field(name="rewards"),
            Field(name="terminated", dtype=torch.bool),
            Field(name="truncated", dtype=torch.bool),
            Field(name="final_obs", dtype=obs_type(info), shape=(info.obs_dim,)),
        ),
    )


def action_schema(info: EnvInfo, *, log_probs: bool = False) -> ExperienceSchema:
    """Schema of an agent's messages; a row is one environment's action, and its log probability with ``log_probs``."""
    dtype = torch.int64 if info.action.is_discrete else torch.float32
    actions = Field(name="actions", dtype=dtype, shape=info.action.shape)
    return ExperienceSchema("actions", (actions, *([Field(name="log_probs")] if log_probs else [])))


class StepServer:
    """A simulator's end: sends observations to the agent, and steps with the actions it receives.

    Call ``begin`` once per iteration, then ``step`` as often as the agent does.
    """

    def __init__(
        self,
        simulator: StepSource,
        info: EnvInfo,
        num_envs: int,
        *,
        place: int,
        agent: str,
        limit_s: float,
        log_probs: bool = False,
    ) -> None:
        """Open it; ``attach`` it before use.

        ``place``: number of this simulator among the agent's, from 0; ``agent``: its name, for errors; ``limit_s``: for
        its actions; ``log_probs``: whether it sends the log probabilities of its actions.
        """
        self.simulator, self.num_envs = simulator, num_envs
        self._limit_s = limit_s
        actions = action_schema(info, log_probs=log_probs)
        self._partner_inbox = PartnerInbox(actions, [agent])
        self._ring = ProducerRing(step_schema(info), rows=num_envs, slots=_SLOTS, producer=place)
        field, *_ = actions.fields
        self._actions = torch.zeros((num_envs, *field.shape), dtype=field.dtype)
        self.log_probs = torch.zeros(num_envs) if log_probs else None
        """Of the actions of the current step, (N,)."""
        self._iteration = self._steps = 0

    @property
    def endpoint(self) -> str:
        """Endpoint that the agent sends actions to."""
        return self._partner_inbox.endpoint

    def attach(self, endpoint: str) -> None:
        """Connect to the agent. Both ends attach before either is used.

        Raises:
            ChannelError: the agent's endpoint does not exist.
            SchemaError: the agent's schema differs: another environment.
        """
        self._ring.attach(endpoint)

    def begin(self, iteration: int) -> None:
        """Send the first observations of an iteration to the agent."""
        self._iteration, self._steps = iteration, 0
        reservation = self._ring.reserve(timeout_s=self._limit_s)
        reservation["obs"].copy_(self.simulator.obs)
        reservation.commit(version=iteration)

    def step(self, exchanging: Timing = UNTIMED, simulating: Timing = UNTIMED) -> None:
        """One step with the agent's actions.

        Args:
            exchanging: entered around the wait for actions, and around sending the result
            simulating: entered around the step of the simulator

        Raises:
            PartnerLostError: the agent is lost.
            ChannelTimeoutError: it does not answer.
            IterationMismatchError: it is in another iteration.
        """
        limit_s = self._limit_s if self._steps else BETWEEN_ITERATIONS_S
        awaited = step_name("the actions", self._steps, self._iteration)
        with exchanging, self._partner_inbox.take((0,), awaited, limit_s) as batch:
            check_iteration(batch, self._partner_inbox.names[0], self._iteration)
            self._actions.copy_(batch["actions"])
            if self.log_probs is not None:
                self.log_probs.copy_(batch["log_probs"])
        with simulating:
            result = self.simulator.step(self._actions)
        with exchanging:
            self._send_result(result)
        self._steps += 1

    def _send_result(self, result: StepResult) -> None:
        reservation = self._ring.reserve(timeout_s=self._limit_s)
        for name in ("obs", "rewards", "terminated", "truncated"):
            reservation[name].copy_(getattr(result, name))
        if len(result.final_ids):
            reservation["final_obs"][result.final_ids] = result.final_obs
        reservation.commit(version=self._iteration)

    def close(self) -> None:
        """Disconnect from the agent. Safe to call twice."""
        self._ring.close(_CLOSE_S)
        self._partner_inbox.close()


class RemoteSimulators:
    """An agent's end: all its remote simulators, with the interface of one ``actors.roles.LocalSimulator``.

    Environment states and episode returns stay in the simulators' GMIs. Environments are in the order of the simulators.
    The result of ``step`` is valid until the next step.
    """

    def __init__(
        self,
        info: EnvInfo,
        num_envs: Sequence[int],
        *,
        simulators: Sequence[str],
        limit_s: float,
        resumes_episodes: bool = True,
        log_probs: bool = False,
    ) -> None:
        """Open it; ``attach`` it before use.

        ``num_envs`` and names of ``simulators``: of each, in order; ``limit_s``: for a step of all;
        ``resumes_episodes``: whether restoring a saved state continues theirs; ``log_probs``: whether ``step`` sends
        the log probabilities of its actions.
        """
        self.info, self.num_envs, self.resumes_episodes = info, sum(num_envs), resumes_episodes
        self._limit_s = limit_s
        self._partner_inbox = PartnerInbox(step_schema(info), simulators)
        self._rings = [
            # One ring per simulator: a ring with several consumers would reroute a lost consumer's batches to another.
            ProducerRing(action_schema(info, log_probs=log_probs), rows=count, slots=_SLOTS)
            for count in num_envs
        ]
        total = self.num_envs
        self.obs = torch.zeros(total, info.obs_dim, dtype=obs_type(info))
        """Observations to act on next, (N, obs_dim)."""
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
        """Batches of simulators that began the next iteration before others ended this one, by simulator."""
        self._iteration = self._steps = 0

    @property
    def endpoint(self) -> str:
        """Endpoint that simulators send their steps to."""
        return self._partner_inbox.endpoint

    def attach(self, endpoints: Sequence[str]) -> None:
        """Connect to the simulators, in their order. Both ends attach before either is used.

        Raises:
            ChannelError: a simulator's endpoint does not exist.
            SchemaError: a simulator's schema differs: another environment.
        """
        for ring, endpoint in zip(self._rings, endpoints, strict=True):
            ring.attach(endpoint)

    def begin(self, iteration: int) -> None:
        """Wait for the first observations of an iteration. Raises as ``step``."""
        self._iteration, self._steps = iteration, 0
        asked = f"the first observations of iteration {iteration + 1}"
        for batch in self._one_batch_per_simulator(asked, BETWEEN_ITERATIONS_S):
            self._parts[batch.producer]["obs"].copy_(batch["obs"])

    def step(self, actions: Tensor, log_probs: Tensor | None = None) -> StepResult:
        """Step every environment; ``actions`` on the host, (N, dim) or (N,), and their ``log_probs`` (N,) if they are sent.

        Raises:
            PartnerLostError: a simulator is lost.
            ChannelTimeoutError: one does not answer.
            IterationMismatchError: one is in another iteration.
        """
        for ring, span in zip(self._rings, self._spans, strict=True):
            reservation = ring.reserve(timeout_s=self._limit_s)
            reservation["actions"].copy_(actions[span])
            if log_probs is not None:
                reservation["log_probs"].copy_(log_probs[span])
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
        ended = [finals[place] for place in sorted(finals)]
        return StepResult(
            **self._columns,
            final_ids=torch.cat([ids for ids, _ in ended]) if ended else torch.empty(0, dtype=torch.int64),
            final_obs=torch.cat([obs for _, obs in ended]) if ended else self.obs[:0],
        )

    def take_finished(self) -> tuple[list[float], list[int]]:
        """Empty: the simulators' GMIs report the episodes that ended."""
        return [], []

    def take_reward_terms(self) -> dict[str, list[float]]:
        """Empty, likewise."""
        return {}

    def take_sim_errors(self) -> dict[str, float]:
        """Empty, likewise."""
        return {}

    def state_dict(self) -> StateDict:
        """Empty: the simulators' GMIs save their environments."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """No-op: there is nothing to restore."""

    def close(self) -> None:
        """Disconnect from the simulators. Safe to call twice."""
        while self._early:
            self._early.popitem()[1].release()
        for ring in self._rings:
            ring.close(_CLOSE_S)
        self._partner_inbox.close()

    def _one_batch_per_simulator(self, asked: str, limit_s: float) -> Iterator[Batch]:
        """One batch of every simulator, in order of arrival; each is released when the next is requested."""
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
