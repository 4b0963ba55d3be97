"""Role assignment: which agent acts for which simulators, and the step channels between their GMIs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from actors.gmi import GmiContext, GmiIdentity
from actors.partners import exchange_endpoints
from actors.protocols import EnvFactory, EnvInfo
from actors.roles import StepSource
from actors.stepping import CHANNEL, RemoteSimulators, StepServer
from placement.role_layout import Roles, envs_per_gmi, gmis_hosting, served_simulators
from rayagi.config.spec import GmiSpec


@dataclass(frozen=True, slots=True)
class RoleAssignment:
    """Roles and environment count of each GMI of a run."""

    worker_types: tuple[Roles, ...]
    """Roles of each GMI."""
    envs: tuple[int, ...]
    """Environments of each GMI; 0 without a simulator."""

    @classmethod
    def for_gmi(cls, identity: GmiIdentity, gmi: GmiSpec) -> Self:
        """The role assignment of the run of this GMI."""
        return cls(identity.worker_types, envs_per_gmi(identity.worker_types, gmi.envs, gmi.sizes))

    @property
    def simulators(self) -> tuple[int, ...]:
        """GMIs with a simulator."""
        return gmis_hosting("simulator", self.worker_types)

    @property
    def agents(self) -> tuple[int, ...]:
        """GMIs with an agent."""
        return gmis_hosting("agent", self.worker_types)

    def simulators_of(self, agent: int) -> tuple[int, ...]:
        """GMIs whose simulators the agent of GMI ``agent`` acts for: a contiguous, evenly sized range."""
        served = served_simulators(self.agents.index(agent), len(self.agents), len(self.simulators))
        return tuple(self.simulators[place] for place in served)

    def envs_per_gmi(self, agent: int) -> int:
        """Environments that the agent of GMI ``agent`` acts for."""
        return sum(self.envs[simulator] for simulator in self.simulators_of(agent))

    def agent_of(self, simulator: int) -> int:
        """The GMI whose agent acts for the simulator of GMI ``simulator``."""
        return next(agent for agent in self.agents if simulator in self.simulators_of(agent))

    def first_env_index(self, simulator: int) -> int:
        """Global index of the first environment of a GMI with a simulator."""
        return sum(self.envs[:simulator])

    def first_env_index_of(self, agent: int) -> int:
        """Global index of the first environment that the agent of GMI ``agent`` acts for."""
        return self.first_env_index(self.simulators_of(agent)[0])

    def names(self, gmis: Sequence[int]) -> dict[int, str]:
        """Names of GMIs for error messages, by index."""
        return {gmi: f"GMI {gmi} ({'+'.join(self.worker_types[gmi])})" for gmi in gmis}


def connect_step_server(
    simulator: StepSource,
    info: EnvInfo,
    context: GmiContext,
    assignment: RoleAssignment,
    limit_s: float,
    *,
    log_probs: bool = False,
) -> StepServer:
    """Make this GMI's step server and connect it to its agent. Both ends call it at the same time.

    Raises:
        ChannelError: the agent does not attach in time, or is on another host.
    """
    index = context.identity.index
    agent = assignment.agent_of(index)
    names = assignment.names([agent])
    server = StepServer(
        simulator,
        info,
        assignment.envs[index],
        place=assignment.simulators_of(agent).index(index),
        agent=names[agent],
        limit_s=limit_s,
        log_probs=log_probs,
    )
    exchange_endpoints(
        context.directory,
        CHANNEL,
        index=index,
        endpoint=server.endpoint,
        partners=names,
        attach=lambda endpoints: server.attach(*endpoints),
        limit_s=limit_s,
    )
    return server


def connect_simulators(
    make_env: EnvFactory,
    context: GmiContext,
    assignment: RoleAssignment,
    limit_s: float,
    *,
    log_probs: bool = False,
) -> RemoteSimulators:
    """Connect this GMI's agent to its simulators. All ends call it at the same time.

    One sample environment is made here, and closed again, for its EnvInfo.

    Raises:
        ChannelError: a simulator does not attach in time, or is on another host.
    """
    index = context.identity.index
    served = assignment.simulators_of(index)
    names = assignment.names(served)
    sample = make_env(num_envs=1, first_env_index=0, seed=0, num_threads=1)
    sample.close()
    simulators = RemoteSimulators(
        sample.info,
        [assignment.envs[gmi] for gmi in served],
        simulators=tuple(names.values()),
        limit_s=limit_s,
        resumes_episodes=sample.resumes_episodes,
        log_probs=log_probs,
    )
    exchange_endpoints(
        context.directory,
        CHANNEL,
        index=index,
        endpoint=simulators.endpoint,
        partners=names,
        attach=simulators.attach,
        limit_s=limit_s,
    )
    return simulators
