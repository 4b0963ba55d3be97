"""Throughput model: predicts the environment steps per second of a layout from unit costs (GMI-DRL §3.1.1, Tables 1-3).

The papers' throughput is R_all / R x 1 / (T_s + T_a + T_t + COM / BW) (eq. 2 and 3), with R a share of the device averaged
over time. This model keeps the phases and COM, and replaces the rest:

- a phase takes the time of its own batch on its own slice, so that GMIs gain by occupancy, and never by idle devices;
- COM / BW has a cost per message, besides the bytes;
- phases add up or overlap by template (``predict``).

Formulas, validation and limits: docs/explanation/throughput.md. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from placement.plan import PlacementPlan
from placement.role_layout import OVERLAPPED_TEMPLATES, Roles, served_simulators

DeviceKind = Literal["cores", "gpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleCost:
    """Time of a role for a batch of environments.

    - on cores: fixed_s + n per_env_s, measured on one core and on ``wide_cores``. Between and beyond, both follow 1 / cores,
      as by Amdahl's law;
    - on a GPU: max(fixed_s, n per_env_s / share). Until the batch fills the slice, time does not depend on it: kernels and
      their launches take ``fixed_s``. Beyond, the slice is saturated.
    """

    device: DeviceKind
    fixed_s: float
    per_env_s: float
    """Per environment, on one core or on the whole GPU."""
    wide_fixed_s: float = 0.0
    """``fixed_s`` on ``wide_cores``: threads cost time to start and join."""
    wide_per_env_s: float = 0.0
    wide_cores: float = 1.0
    """1: measured on one core only, which takes the same time on more."""

    def seconds(self, num_envs: float, worker: Worker) -> float:
        """Time for ``num_envs`` environments on a GMI's slice."""
        if self.device == "gpu":
            return max(self.fixed_s, num_envs * self.per_env_s / worker.gpu_share)
        narrow_s = self.fixed_s + num_envs * self.per_env_s
        if self.wide_cores <= 1:
            return narrow_s
        wide_s = self.wide_fixed_s + num_envs * self.wide_per_env_s
        # a + b / w through both: b = (narrow - wide) / (1 - 1 / W)
        return narrow_s - (narrow_s - wide_s) * (1 - 1 / worker.cores) / (1 - 1 / self.wide_cores)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCosts:
    """Costs of one task, measured by ``rayagi.coordinator.unit_costs``; the parameters of Table 1, by batch size."""

    rollout: RoleCost
    """One step of a simulator and an agent in the GMI of their trainer, T_s + T_a: often part of one call per rollout."""
    simulate: RoleCost
    """One step of a simulator alone: T_s."""
    act: RoleCost
    """One step of an agent alone: T_a."""
    update: RoleCost
    """One update on a rollout, without reductions: T_t."""
    complete: RoleCost
    """What a collector adds to a rollout for a trainer in another GMI: log probabilities and returns."""
    message_s: float
    """One message between two GMIs of a host, without its bytes."""
    bandwidth: float
    """BW: bytes per second between two GMIs of a host."""
    reduce_s: float
    """One gradient reduction between two GMIs of a host."""
    step_spread: float
    """Standard deviation of a simulation step, relative to its mean: the slowest of several simulators is waited for."""
    rollout_spread: float
    """The same of rollouts that several GMIs make at the same time. It is larger than independent steps would have it: cores
    differ, and a neighbour of a virtual machine slows one of them for seconds."""
    state_bytes: float
    """S: one environment's observation."""
    action_bytes: float
    """A: one environment's action."""
    reward_bytes: float
    """W: one environment's reward, terminated and truncated flags."""
    model_bytes: float
    """M_p: the policy model, as the trainers exchange it."""
    gmi_bytes: float
    """Memory of a GMI with every role, on the device of its networks, without environments."""
    env_bytes: float
    """Further memory per environment."""
    num_steps: int
    """m: simulation steps per iteration."""
    num_updates: int
    """Gradient reductions per iteration: epochs times minibatches."""
    num_envs: tuple[int, int]
    """Environments of the two measured sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One GMI of a layout."""

    roles: Roles
    cores: float
    num_envs: int = 0
    gpu_share: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelledPlan:
    """What the model reads of a plan."""

    template: str
    workers: tuple[Worker, ...]
    """Those with simulators first."""
    cores: int
    """Cores of all nodes; GMIs of overlapped templates may share them."""
    serving: bool = False
    reduce_s: float | None = None
    """One reduction between all trainers; None: by ``UnitCosts.reduce_s``, on one host."""

    def hosting(self, role: str) -> tuple[Worker, ...]:
        """The GMIs with a role."""
        return tuple(worker for worker in self.workers if role in worker.roles)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanThroughput:
    """The throughput of one plan, predicted."""

    layout: ModelledPlan
    steps_per_s: float
    parts_s: Mapping[str, float]
    """Seconds per iteration (serving: per step) of each phase. The phases of overlapped templates take place at once."""

    @property
    def bound_by(self) -> str:
        """The longest phase."""
        return max(self.parts_s, key=lambda name: self.parts_s[name])


def layout_of(plan: PlacementPlan) -> ModelledPlan:
    """The layout of a placement plan."""
    workers = [
        Worker(roles=roles, cores=gmi_slice.num_threads, num_envs=num_envs, gpu_share=gmi_slice.gpu_fraction)
        for roles, gmi_slice, num_envs in zip(plan.worker_types, plan.slices, plan.envs, strict=True)
    ]
    workers.sort(key=lambda worker: "simulator" not in worker.roles)  # stable
    return ModelledPlan(
        template=plan.template,
        workers=tuple(workers),
        cores=plan.machine.num_cores,
        serving=not any("trainer" in roles for roles in plan.worker_types),
    )


def predict(costs: UnitCosts, layout: ModelledPlan) -> PlanThroughput:
    """Predict a layout's throughput.

    - serving: every group of simulators and their agent steps on its own;
    - synchronous training: T_rollout + T_update + COM, one after the other. GMIs with the same role work at the same time;
    - ``decoupled``: the larger of rollout and update, or of all work on the cores that both share.
    """
    if layout.serving:
        return _serving(costs, layout)
    if layout.template in OVERLAPPED_TEMPLATES:
        return _overlapped(costs, layout)
    return _synchronous(costs, layout)


def slowest(mean_s: float, spread: float, number: int) -> float:
    """Expected maximum of ``number`` normal times (Blom 1958): mean (1 + spread Phi^-1((k - 0.375) / (k + 0.25)))."""
    if number < 2:
        return mean_s
    return mean_s * (1 + spread * NormalDist().inv_cdf((number - 0.375) / (number + 0.25)))


def _step(costs: UnitCosts, agent: Worker, simulators: Sequence[Worker], *, apart: bool) -> dict[str, float]:
    """One step of an agent and its simulators, by phase; all of the simulators step at the same time."""
    envs = sum(worker.num_envs for worker in simulators)
    simulate = max(costs.simulate.seconds(worker.num_envs, worker) for worker in simulators)
    parts = {"simulate": simulate, "act": costs.act.seconds(envs, agent)}
    if apart:
        parts["simulate"] = slowest(simulate, costs.step_spread, len(simulators))
        # Actions go out one message at a time, and the last simulator's answer follows its step.
        # Table 2: 2 S + A + W
        moved = envs * (2 * costs.state_bytes + costs.action_bytes + costs.reward_bytes)
        parts["exchange"] = (1 + len(simulators)) * costs.message_s + moved / costs.bandwidth
    return parts


def _groups(layout: ModelledPlan) -> list[tuple[Worker, tuple[Worker, ...], bool]]:
    """Each agent with its simulators, and whether they are in different GMIs."""
    simulators, agents = layout.hosting("simulator"), layout.hosting("agent")
    if agents == simulators:
        return [(worker, (worker,), False) for worker in simulators]
    spans = (served_simulators(place, len(agents), len(simulators)) for place in range(len(agents)))
    return [
        (agent, tuple(simulators[i] for i in span), True) for agent, span in zip(agents, spans, strict=True)
    ]


def _serving(costs: UnitCosts, layout: ModelledPlan) -> PlanThroughput:
    total, parts = 0.0, dict[str, float]()
    for agent, simulators, apart in _groups(layout):
        parts = _step(costs, agent, simulators, apart=apart)
        total += sum(worker.num_envs for worker in simulators) / sum(parts.values())
    return PlanThroughput(layout=layout, steps_per_s=total, parts_s=parts)


def _rollouts(costs: UnitCosts, layout: ModelledPlan) -> dict[str, float]:
    """One rollout of every simulator, by phase: that of the slowest group."""
    # With physics on cores and networks on a GPU, dp_only alternates steps of both.
    if layout.template == "dp_only" and costs.simulate.device == costs.act.device:
        workers = layout.hosting("simulator")
        seconds = max(costs.rollout.seconds(worker.num_envs, worker) for worker in workers)
        return {"simulate": costs.num_steps * slowest(seconds, costs.rollout_spread, len(workers))}
    steps = (_step(costs, agent, simulators, apart=apart) for agent, simulators, apart in _groups(layout))
    worst = max(steps, key=lambda parts: sum(parts.values()))
    parts = {name: costs.num_steps * seconds for name, seconds in worst.items()}
    senders = [(agent, served) for agent, served, _ in _groups(layout) if "trainer" not in agent.roles]
    if senders:
        parts["act"] += max(
            costs.complete.seconds(sum(worker.num_envs for worker in served), agent)
            for agent, served in senders
        )
    return parts


def _update(costs: UnitCosts, layout: ModelledPlan) -> dict[str, float]:
    """One update of all trainers, by phase: that of the largest batch, and the reductions between the trainers."""
    trainers = layout.hosting("trainer")
    envs = sum(worker.num_envs for worker in layout.workers)
    alone = layout.template == "dp_only"
    seconds = max(
        costs.update.seconds(worker.num_envs if alone else envs / len(trainers), worker)
        for worker in trainers
    )
    reduce_s = costs.reduce_s * 2 * (len(trainers) - 1) / len(trainers)  # all-reduce: 2 (n - 1) / n of M_p
    reduce_s = reduce_s if layout.reduce_s is None else layout.reduce_s
    return {"update": seconds, "reduce": costs.num_updates * reduce_s}


def _experience(costs: UnitCosts, layout: ModelledPlan) -> float:
    """Seconds to move a rollout of every agent to the trainers, and the parameters back (Table 3: S + A + W, M_p)."""
    if any({"agent", "trainer"} <= set(worker.roles) for worker in layout.workers):
        return 0.0
    envs = sum(worker.num_envs for worker in layout.workers)
    row = costs.state_bytes + costs.action_bytes + costs.reward_bytes
    agents = len(layout.hosting("agent"))
    moved = costs.num_steps * envs * row + agents * costs.model_bytes
    return 2 * agents * costs.message_s + moved / costs.bandwidth


def _synchronous(costs: UnitCosts, layout: ModelledPlan) -> PlanThroughput:
    parts = _rollouts(costs, layout) | _update(costs, layout)
    moved_s = _experience(costs, layout)
    if moved_s:
        parts["exchange"] = parts.get("exchange", 0.0) + moved_s
    return PlanThroughput(
        layout=layout, steps_per_s=_steps(costs, layout) / sum(parts.values()), parts_s=parts
    )


def _overlapped(costs: UnitCosts, layout: ModelledPlan) -> PlanThroughput:
    """Collectors fill one rollout while the trainers train on another: the period is that of the slower side."""
    collect_s = sum(_rollouts(costs, layout).values()) + _experience(costs, layout)
    update_s = sum(_update(costs, layout).values())
    parts = {"collect": collect_s, "update": update_s}
    collectors, trainers = layout.hosting("simulator"), layout.hosting("trainer")
    if sum(worker.cores for worker in layout.workers) > layout.cores:
        # They share cores: all core seconds, over the cores.
        work = collect_s * sum(worker.cores for worker in collectors)
        work += update_s * sum(worker.cores for worker in trainers)
        parts["work on shared cores"] = work / layout.cores
    return PlanThroughput(
        layout=layout, steps_per_s=_steps(costs, layout) / max(parts.values()), parts_s=parts
    )


def _steps(costs: UnitCosts, layout: ModelledPlan) -> float:
    return float(costs.num_steps * sum(worker.num_envs for worker in layout.workers))


def unit_costs_from_dict(data: Mapping[str, Any]) -> UnitCosts:
    """Rebuild unit costs from the output of ``dataclasses.asdict``, whose tuples JSON makes lists."""
    values: dict[str, Any] = {
        name: RoleCost(**value) if isinstance(value, Mapping) else value for name, value in data.items()
    }
    return UnitCosts(**{**values, "num_envs": tuple(data["num_envs"])})
