"""Mapping templates, and the resource-performance model that compares them (GMI-DRL §3.1.1, Tables 1-3, eq. 1-3).

A template states which roles share a GMI. An *instance* is one simulator with its agent and its trainer. The model computes
the resources that an instance holds and the bytes that it moves between GMIs, and from these the throughput of all devices:

    throughput = R_all / R * 1 / (T_s + T_a + T_t + COM / BW)                       (eq. 2 and 3)

Units: seconds, bytes, and shares of one device in (0, 1] for resources, so that R_all is the number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from placement.text import aligned

Role = Literal["simulator", "agent", "trainer"]
Mode = Literal["serving", "synchronous", "asynchronous"]
Resource = Literal["compute", "memory"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """Mapping of roles to GMIs for one mode."""

    name: str
    mode: Mode
    gmis: tuple[tuple[Role, ...], ...]
    """The roles of each worker type; roles in one tuple share a GMI."""
    shares_agent: bool = False
    """Whether several simulators share an agent; each instance is then charged ``alpha`` of an agent."""
    shares_trainer: bool = False
    """Whether several simulators share a trainer; each instance is then charged ``beta`` of a trainer."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """Every role of an instance, in pipeline order."""
        return tuple(role for gmi in self.gmis for role in gmi)

    def colocates(self, one: Role, other: Role) -> bool:
        """Whether two roles share a GMI, so that data between them leaves no GMI."""
        return any(one in gmi and other in gmi for gmi in self.gmis)


SERVING: tuple[Template, ...] = (
    Template(name="dp_mp", mode="serving", gmis=(("simulator",), ("agent",))),
    Template(name="mp_dp", mode="serving", gmis=(("simulator",), ("agent",)), shares_agent=True),
    Template(name="dp_only", mode="serving", gmis=(("simulator", "agent"),)),
)
"""Figure 5. dp_mp: each simulator has its own agent in another GMI. mp_dp: simulators share agents."""

SYNCHRONOUS: tuple[Template, ...] = (
    Template(name="dp_only", mode="synchronous", gmis=(("simulator", "agent", "trainer"),)),
    Template(
        name="dp_mp",
        mode="synchronous",
        gmis=(("simulator",), ("agent",), ("trainer",)),
        shares_agent=True,
        shares_trainer=True,
    ),
    Template(
        name="e_at",
        mode="synchronous",
        gmis=(("simulator",), ("agent", "trainer")),
        shares_agent=True,
        shares_trainer=True,
    ),
    Template(
        name="ea_t",
        mode="synchronous",
        gmis=(("simulator", "agent"), ("trainer",)),
        shares_agent=True,
        shares_trainer=True,
    ),
)
"""Figure 6. ``ea_t`` is charged alpha, as in Table 3's row "DP-MP (EA-T)"."""

ASYNCHRONOUS: tuple[Template, ...] = (
    Template(
        name="decoupled",
        mode="asynchronous",
        gmis=(("simulator", "agent"), ("trainer",)),
        shares_trainer=True,
    ),
)
"""Figure 6d, with serving and training at the same time."""

TEMPLATES: dict[Mode, tuple[Template, ...]] = {
    "serving": SERVING,
    "synchronous": SYNCHRONOUS,
    "asynchronous": ASYNCHRONOUS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCosts:
    """Parameters of Table 1, measured by ``rayagi.coordinator.unit_costs``. An iteration is m steps of N environments."""

    simulate_s: float
    """T_s: seconds of an iteration in the simulator."""
    act_s: float
    """T_a: seconds of an iteration in the agent."""
    train_s: float
    """T_t: seconds of an iteration in the trainer, without waiting for other GMIs."""
    simulator_share: float
    """R_s: the simulator's share of one device's dominant resource, in (0, 1]."""
    agent_share: float
    """R_a: the agent's share."""
    trainer_share: float
    """R_t: the trainer's share."""
    resource: Resource
    """The dominant resource of eq. 1; R_s, R_a and R_t are shares of it."""
    state_bytes: float
    """S: one environment's observation."""
    action_bytes: float
    """A: one environment's action."""
    reward_bytes: float
    """W: one environment's reward, terminated and truncated flags."""
    model_bytes: float
    """M_p: the policy model, as the trainers exchange it."""
    bandwidth: float
    """BW: bytes per second between two GMIs."""
    alpha: float
    """Cost of a shared agent per simulator, relative to an agent of its own."""
    beta: float
    """Cost of a shared trainer per simulator, relative to a trainer of its own."""
    num_steps: int
    """m: simulation steps per iteration."""
    num_envs: int
    """N: environments of one simulator during the measurement."""

    def time_s(self, role: Role) -> float:
        """T of a role."""
        return {"simulator": self.simulate_s, "agent": self.act_s, "trainer": self.train_s}[role]

    def share(self, role: Role) -> float:
        """R of a role."""
        return {"simulator": self.simulator_share, "agent": self.agent_share, "trainer": self.trainer_share}[
            role
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The model's prediction for one template."""

    template: Template
    resource: float
    """R of one instance, in devices."""
    compute_s: float
    """Time of an iteration without communication."""
    communication_bytes: float
    """COM of an iteration of one instance."""
    communication_s: float
    """COM / BW."""
    steps_per_s: float
    """Environment steps per second on all devices."""
    limit: Literal["compute", "communication"]
    """The larger part of an iteration."""


def dominant_resource(*, compute_share: float, memory_share: float) -> Resource:
    """Eq. 1: the resource of which one process alone uses the larger share; compute on a tie."""
    return "compute" if compute_share >= memory_share else "memory"


def instance_resource(template: Template, costs: UnitCosts) -> float:
    """R of Tables 2 and 3: the device share that one instance holds, averaged over an iteration.

    - dp_only: max(R_s, R_a, R_t). One GMI with every role is as large as its largest role for the whole iteration.
    - dp_mp, mp_dp, ea_t, e_at: (T_s R_s + T_a alpha R_a + T_t beta R_t) / (T_s + T_a + T_t). Each role is charged for its
      own time; alpha and beta are 1 for roles that are not shared. The paper prints no row for e_at; its text gives it the
      same sharing as ea_t.
    - decoupled: max(R_s, R_a) + beta R_t, since both GMIs work all the time (ours: the paper prints no formula).
    """
    total_s = sum(costs.time_s(role) for role in template.roles)
    if len(template.gmis) == 1:  # dp_only: (T_s + T_a + T_t) max{R_s, R_a, R_t} / (T_s + T_a + T_t)
        return max(costs.share(role) for role in template.roles)
    shrink: dict[Role, float] = {
        "simulator": 1.0,
        "agent": costs.alpha if template.shares_agent else 1.0,
        "trainer": costs.beta if template.shares_trainer else 1.0,
    }
    held = {role: shrink[role] * costs.share(role) for role in template.roles}
    if template.mode == "asynchronous":  # max(R_s, R_a) + beta R_t
        return sum(max(held[role] for role in gmi) for gmi in template.gmis)
    # (T_s R_s + T_a alpha R_a + T_t beta R_t) / (T_s + T_a + T_t), Tables 2 and 3
    return sum(costs.time_s(role) * held[role] for role in template.roles) / total_s


def communication_bytes(template: Template, costs: UnitCosts, num_gmis: int) -> float:
    """COM of Tables 2 and 3: bytes that leave a GMI per instance and iteration.

    - simulator and agent in different GMIs: 2 S + A + W per step (Table 2);
    - agent and trainer in different GMIs: S + A + W per step as experience, and M_p back (Table 3);
    - all-reduce between trainers: 2 (n - 1) M_p / n (Table 3).

    e_at follows the paper's text: agent and trainer share memory, so only the first and third term apply. dp_mp in training
    has all three ("additional agent-trainer interaction").

    Args:
        template: which roles share a GMI
        costs: sizes in bytes
        num_gmis: n, the number of GMIs with a trainer
    """
    a_step = costs.num_envs * costs.num_steps
    state, action, reward = costs.state_bytes, costs.action_bytes, costs.reward_bytes
    total = 0.0
    if not template.colocates("simulator", "agent"):
        total += a_step * (2 * state + action + reward)  # m N (2 S + A + W)
    if "trainer" in template.roles:
        if not template.colocates("agent", "trainer"):
            total += a_step * (state + action + reward) + costs.model_bytes  # m N (S + A + W) + M_p
        total += 2 * (num_gmis - 1) * costs.model_bytes / num_gmis  # ring all-reduce: 2 (n - 1) M_p / n
    return total


def estimate(
    template: Template, costs: UnitCosts, *, num_devices: float = 1.0, num_gmis: int = 1
) -> Estimate:
    """Predict a template's throughput (eq. 2 for serving, eq. 3 for training).

    ``decoupled`` overlaps its phases: the period is max(T_s + T_a, T_t, COM / BW) (ours). As in the paper, the number of
    instances R_all / R is not rounded.

    Raises:
        ValueError: ``num_gmis`` or ``num_devices`` is not positive.
    """
    if num_gmis < 1 or num_devices <= 0:
        raise ValueError(f"num_gmis={num_gmis}, num_devices={num_devices}: both must be positive")
    held = instance_resource(template, costs)  # R
    moved = communication_bytes(template, costs, num_gmis)  # COM
    moving_s = moved / costs.bandwidth  # COM / BW
    times = [sum(costs.time_s(role) for role in gmi) for gmi in template.gmis]
    overlapped = template.mode == "asynchronous"
    compute_s = max(times) if overlapped else sum(times)
    # Synchronous: T_s + T_a + T_t + COM / BW, the denominator of eq. 2 and 3.
    period_s = max(compute_s, moving_s) if overlapped else compute_s + moving_s
    return Estimate(
        template=template,
        resource=held,
        compute_s=compute_s,
        communication_bytes=moved,
        communication_s=moving_s,
        # (R_all / R) instances, each m N environment steps per period.
        steps_per_s=num_devices / held * costs.num_steps * costs.num_envs / period_s,
        limit="communication" if moving_s > compute_s else "compute",
    )


def choose(
    costs: UnitCosts, mode: Mode = "synchronous", *, num_devices: float = 1.0, num_gmis: int = 1
) -> tuple[Estimate, ...]:
    """Predictions for every template of a mode, fastest first; by name on a tie."""
    found = [estimate(item, costs, num_devices=num_devices, num_gmis=num_gmis) for item in TEMPLATES[mode]]
    return tuple(sorted(found, key=lambda each: (-each.steps_per_s, each.template.name)))


def explain(estimates: Sequence[Estimate], costs: UnitCosts) -> str:
    """Format the predictions: a line per template, fastest first, then the factors of each gain."""
    best = estimates[0]
    head = ("template", "GMIs", "R", "compute ms", "COM KiB", "COM/BW ms", "steps/s", "bound by")
    lines = aligned([head, *(_row(each) for each in estimates)])
    lines.append(
        f"R in shares of a device's {costs.resource}: simulator {costs.simulator_share:.3g}, agent "
        f"{costs.agent_share:.3g}, trainer {costs.trainer_share:.3g}; alpha {costs.alpha:.2f}, beta {costs.beta:.2f}."
    )
    for other in estimates[1:]:
        gain = best.steps_per_s / other.steps_per_s
        lines.append(
            f"{best.template.name} over {other.template.name}: {gain:.2f}x = {other.resource / best.resource:.2f} "
            f"(instances that fit) x {gain * best.resource / other.resource:.2f} (time of an iteration)."
        )
    return "\n".join(lines)


def unit_costs_from_dict(data: Mapping[str, object]) -> UnitCosts:
    """Rebuild unit costs from the output of ``dataclasses.asdict``.

    Raises:
        ValueError: a field is missing, unknown, or not a positive finite number.
    """
    names = {field.name for field in fields(UnitCosts)}
    if set(data) != names:
        raise ValueError(f"unit costs: missing or unknown fields: {', '.join(sorted(names ^ set(data)))}")
    for name, value in data.items():
        if name == "resource":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"unit costs: {name} = {value!r} is not a positive number")
    return UnitCosts(**data)  # type: ignore[arg-type]  # checked above


def _row(each: Estimate) -> tuple[str, ...]:
    return (
        each.template.name,
        " | ".join("+".join(gmi) for gmi in each.template.gmis),
        f"{each.resource:.3g}",
        f"{1e3 * each.compute_s:.3g}",
        f"{each.communication_bytes / 1024:.4g}",
        f"{1e3 * each.communication_s:.3g}",
        f"{each.steps_per_s:,.0f}",
        each.limit,
    )
