"""Memory check of a plan: whether each GMI's share of memory is sufficient for its roles, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import floor

from actors.protocols import EnvInfo
from placement.errors import PlanError, counted
from placement.plan import PlacementPlan
from placement.search import TrialMeasurement
from rayagi.config.off_policy import OffPolicySpec
from rayagi.config.spec import NetworkSpec, RunSpec
from rayagi.coordinator.search_store import SearchStore
from rayagi.run.quantities import bytes_text

_REAL, _FLAG, _WHOLE, _COUNT = 4, 1, 8, 4
"""Bytes of float32, bool, int64 and int32."""
_STATUS = 64
"""Bytes of a row's status in a replay (actors.replay)."""

_CERTAIN_FRACTION = 0.75
"""Certain part of measured memory: a probe of partial iterations also holds a part, and measures up to a third too much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """Linear memory model of a GMI: ``fixed_bytes + num_envs * bytes_per_env``."""

    fixed_bytes: float
    bytes_per_env: float
    source: str
    """Origin of the model, as a clause."""
    certain_fraction: float = 1.0
    """Fraction of the prediction that is certainly needed."""

    def bytes_at(self, num_envs: int) -> float:
        """Predicted memory with ``num_envs`` environments."""
        return self.fixed_bytes + num_envs * self.bytes_per_env

    def max_envs(self, limit_bytes: float) -> int:
        """The largest number of environments that fits; 0 if none does."""
        return (
            max(0, floor((limit_bytes - self.fixed_bytes) / self.bytes_per_env))
            if self.bytes_per_env > 0
            else 0
        )


def reject_insufficient_memory(spec: RunSpec, plan: PlacementPlan) -> None:
    """Compare each GMI's networks, and each collecting GMI's predicted memory, with its share.

    The prediction is the larger of the rollouts' storage and, if a search has measured here, of eq. 4.

    Args:
        spec: spec of the run
        plan: plan of the run; a user's own program is not checked

    Raises:
        PlanError: a share is too small; the message says how many environments fit.
    """
    owners = sorted({*plan.hosting("agent"), *plan.hosting("trainer")})
    if not owners:
        return
    info = spec.env.info()
    for index in owners:
        _reject_large_networks(spec.network, info, plan, index, owners)
    _reject_large_replay(spec, info, plan)
    hosts = [index for index in plan.hosting("simulator") if "agent" in plan.roles_of(index)]
    if not hosts:
        return
    store = SearchStore(spec, plan.machine)
    per_device = len(hosts) // len(
        {(plan.slices[index].node, plan.slices[index].gpu_uuid) for index in hosts}
    )
    measured = store.trials(per_device)
    for index in hosts:
        num_envs, limit = plan.envs[index], _share_bytes(plan, index)
        on_gpu = plan.slices[index].gpu_uuid is not None
        needs = [
            rollout_memory(spec, info, on_gpu=on_gpu),
            *_measured_memory(measured, num_envs),
        ]
        need = max(needs, key=lambda each: each.bytes_at(num_envs))
        if need.certain_fraction * need.bytes_at(num_envs) > limit:
            raise _too_small(plan, index, need, limit)


def _reject_large_networks(
    network: NetworkSpec, info: EnvInfo, plan: PlacementPlan, index: int, owners: Sequence[int]
) -> None:
    """``owners``: the GMIs with networks, which share the memory of their host."""
    gmi_slice, trains = plan.slices[index], "trainer" in plan.roles_of(index)
    limit = plan.memory_bytes(index)
    if gmi_slice.gpu_uuid is None:
        beside = sum(plan.slices[other].node == gmi_slice.node for other in owners)
        limit = plan.machine.node(gmi_slice.node).memory_total_bytes // beside
    need = network_bytes(network, info, trains=trains)
    if need > limit:
        parts = "parameters and gradients" if trains else "parameters"
        raise PlanError(
            f"the networks in GMI {index} {gmi_slice.label()}",
            f"their {parts} alone need {bytes_text(need)}, and its share has {bytes_text(limit)}",
            "Give network.hidden and network.core_size smaller sizes, or use fewer GMIs",
        )


def _reject_large_replay(spec: RunSpec, info: EnvInfo, plan: PlacementPlan) -> None:
    """The trainers of a host share its memory; each has its part of the replay."""
    if not isinstance(spec.learning, OffPolicySpec):
        return
    if spec.data.path is not None:
        info = replace(info, frames=1)  # of a dataset's observations, each is stored whole
    trainers = plan.hosting("trainer")
    for node in plan.machine.nodes:
        here = sum(plan.slices[index].node == node.name for index in trainers)
        need = replay_bytes(spec.learning, info, spec.total_env_steps) * here // len(trainers)
        if need > node.memory_total_bytes:
            fitting = spec.learning.capacity * node.memory_total_bytes // need
            raise PlanError(
                f"the replay of {counted(spec.learning.capacity, 'transition')} on {node.name}",
                f"it needs {bytes_text(need)}, and the host has {bytes_text(node.memory_total_bytes)}",
                f"Set {spec.algorithm}.capacity to less than {fitting}",
            )


def replay_bytes(settings: OffPolicySpec, info: EnvInfo, total_env_steps: int | None) -> int:
    """Memory of all replays: rows of transitions (rayagi.algorithms.transitions), and 64 B of status each.

    A lower bound: trees and priorities are left out, and a dataset of short episodes may need more.

    ``total_env_steps``: of the run, which fills no more; None: without a limit.
    """
    action = (_WHOLE if info.action.is_discrete else _REAL) * info.action.dim
    steps, reach = settings.row_form(info.max_episode_steps)
    frames = info.frames if steps > 1 else 1
    later = _COUNT if frames > 1 else 0
    row = (
        (steps + reach + frames - 1) * info.obs_bytes // frames
        + steps * (2 * _REAL + action + later)
        + _STATUS
    )
    most = settings.capacity if total_env_steps is None else min(settings.capacity, total_env_steps)
    return -(-most // steps) * row


def network_bytes(network: NetworkSpec, info: EnvInfo, *, trains: bool) -> int:
    """Lower bound of the memory of policy and value network: the weights between layers of known size.

    Args:
        network: a user's own module counts as 0
        info: spaces of the environment
        trains: whether there is a gradient beside each parameter
    """
    if network.module is not None:
        return 0
    # What an encoder gives, or is hidden from the policy, is left out.
    seen = [] if info.obs_parts or network.critic_only else [info.obs_dim]
    weights = sum(fan_in * fan_out for fan_in, fan_out in pairwise([*seen, *network.hidden]))
    gates = {"none": 0, "gru": 3, "lstm": 4}[network.core]
    weights += gates * network.core_size * (network.hidden[-1] + network.core_size)
    return _REAL * weights * (1 if network.shared else 2) * (2 if trains else 1)


def rollout_memory(spec: RunSpec, info: EnvInfo, *, on_gpu: bool) -> MemoryModel:
    """Lower bound of a GMI's memory: the storage of its rollouts (actors.rollout).

    Args:
        spec: rollout and sequence lengths, and the network; the states of a user's module are not counted
        info: observation and action spaces of the environment
        on_gpu: whether the rollouts are on a GPU; it holds only what the networks read, and the host holds the rest
    """
    action = info.action
    # Bytes of one step of one environment: observation, policy outputs, action.
    row = info.obs_bytes + _REAL * action.output_dim + (_WHOLE if action.is_discrete else _REAL) * action.dim
    if not on_gpu:
        row += info.obs_bytes + _REAL + 2 * _FLAG
    last = 0 if on_gpu else info.obs_bytes
    rollout_length, states = spec.learning.rollout_length, spec.learning.sequences * spec.network.state_dim
    return MemoryModel(
        fixed_bytes=0.0,
        bytes_per_env=float(rollout_length * row + last + _REAL * states),
        source=f"its rollouts of {counted(rollout_length, 'step')} alone hold that",
    )


def _measured_memory(measured: Sequence[tuple[int, TrialMeasurement]], num_envs: int) -> list[MemoryModel]:
    """Eq. 4 through the two nearest measurements from below, or the lowest two; empty with fewer than two.

    slope = (m_2 - m_1) / (e_2 - e_1); memory(e) = m_2 + slope * (e - e_2)
    """
    if len(measured) < 2:
        return []
    below = [point for point in measured if point[0] <= num_envs]
    (envs_1, one), (envs_2, two) = below[-2:] if len(below) > 1 else measured[:2]
    slope = max(0.0, (two.memory_bytes - one.memory_bytes) / (envs_2 - envs_1))
    return [
        MemoryModel(
            fixed_bytes=two.memory_bytes - slope * envs_2,
            bytes_per_env=slope,
            certain_fraction=_CERTAIN_FRACTION,
            source=f"by eq. 4, from a search's measurements with {envs_1} and {envs_2} environments",
        )
    ]


def _share_bytes(plan: PlacementPlan, index: int) -> float:
    """Memory share of a GMI. On a GPU: its slice's limit or fraction. On a host: in proportion to its environments."""
    gmi_slice = plan.slices[index]
    if gmi_slice.gpu_uuid is not None:
        return plan.memory_bytes(index)
    node_envs = sum(
        plan.envs[other] for other in plan.hosting("simulator") if plan.slices[other].node == gmi_slice.node
    )
    return plan.machine.node(gmi_slice.node).memory_total_bytes * plan.envs[index] / node_envs


def _too_small(plan: PlacementPlan, index: int, need: MemoryModel, limit: float) -> PlanError:
    num_envs = plan.envs[index]
    # Environments of unequal GMIs stay in proportion to their sizes.
    most = need.max_envs(limit) * plan.num_envs // num_envs
    larger = "give it a larger share" if plan.sizes else "use fewer GMIs"
    return PlanError(
        f"{counted(num_envs, 'environment')} in GMI {index} {plan.slices[index].label()}",
        f"they need {bytes_text(need.bytes_at(num_envs))} ({need.source}), and its share has {bytes_text(limit)}",
        f"Set num_envs to {most} or less, or {larger}" if most else f"Not even one fits: {larger}",
    )
