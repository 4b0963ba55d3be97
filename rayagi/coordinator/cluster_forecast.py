"""Cluster forecast: throughput and bottleneck of a cluster that is not available, from unit costs measured here.

It is the throughput model (``throughput_model``) of ``dp_only``, with the reductions of a cluster:

    reduction = in a GPU, as measured + ring between GPUs + ring between nodes                 (preprint, Table 2)

An engine on cores uses the node's cores, however its GPUs are partitioned. Costs measured on a GPU scale by its SMs. Costs
measured on cores give a range: networks as slow as on the cores (low), or without cost (high). Figures of GPUs, links and
hosts are nominal and printed with it. No GPU has validated the model, so nothing here is ranked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from collectives.costs import all_reduce_s
from placement.errors import PlanError, counted
from placement.text import aligned
from rayagi.coordinator.throughput_model import (
    ModelledPlan,
    RoleCost,
    UnitCosts,
    Worker,
    predict,
)
from rayagi.run.quantities import bytes_text

MAX_GPUS = 1024
MAX_GMIS_PER_GPU = 10
HOP_LATENCY_S = 10e-6
"""Assumed latency per hop of a ring between GPUs or nodes."""
GPU_ENGINES = ("mujoco_warp", "isaacgym", "isaaclab")
"""Engines that simulate on the GPU where there is one."""
CONTEXT_BYTES = 512 * 2**20
"""Assumed memory of a CUDA context with torch's kernels; every GMI has one."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """Nominal figures of a GPU model and its vendor's reference host."""

    name: str
    sm_count: int
    memory_bytes: int
    link_bytes_per_s: float
    """Bandwidth to the other GPUs of its host, per direction: NVLink, or PCIe without NVLink."""
    cores_per_gpu: int
    """Physical cores of the host per GPU."""
    network_bytes_per_s: float
    """Bandwidth of one network port of the host."""


GIB = 2**30
GPUS: dict[str, GpuModel] = {
    name: GpuModel(name, sm_count, gib * GIB, link, cores, network)
    for name, sm_count, gib, link, cores, network in (
        ("V100", 80, 32, 150e9, 5, 12.5e9),
        ("A100-40", 108, 40, 300e9, 16, 25e9),
        ("A100-80", 108, 80, 300e9, 16, 25e9),
        ("H100", 132, 80, 450e9, 14, 50e9),
        ("H200", 132, 141, 450e9, 14, 50e9),
    )
}
"""Nominal figures of DGX-1V, DGX A100, DGX H100 and DGX H200; not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A cluster of equal nodes."""

    nodes: int
    gpus_per_node: int
    gpu: GpuModel
    cores_per_node: int

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Forecast for one cluster and one number of GMIs per GPU."""

    cluster: Cluster
    gmis_per_gpu: int
    parts_s: Mapping[str, float]
    """Seconds per iteration of each phase, with the networks of ``low_steps_per_s``."""
    low_steps_per_s: float
    high_steps_per_s: float
    """With networks without cost if no GPU was measured; else equal to low."""

    @property
    def bound_by(self) -> str:
        """The longest part of an iteration; if no GPU was measured, the update is left out."""
        names = dict(self.parts_s)
        if self.low_steps_per_s != self.high_steps_per_s:
            del names["update"]
        return max(names, key=lambda name: names[name])


def cluster_of(nodes: int, gpus_per_node: int, gpu: str, cores_per_node: int | None = None) -> Cluster:
    """Build a cluster from command-line values.

    Raises:
        PlanError: an unknown GPU, or more than ``MAX_GPUS`` GPUs.
    """
    if gpu not in GPUS:
        raise PlanError(f"--gpu {gpu}", f"the GPUs known here are {', '.join(GPUS)}", "Use one of them")
    if nodes * gpus_per_node > MAX_GPUS:
        raise PlanError(
            f"{counted(nodes, 'node')} of {counted(gpus_per_node, 'GPU')}",
            f"at most {MAX_GPUS} GPUs are forecast",
            "Use fewer nodes",
        )
    cores = cores_per_node or GPUS[gpu].cores_per_gpu * gpus_per_node
    return Cluster(nodes=nodes, gpus_per_node=gpus_per_node, gpu=GPUS[gpu], cores_per_node=cores)


def refuse_gpu_engine(env_id: str, engine: str) -> None:
    """Refuse to forecast simulation on GPUs from costs measured on cores.

    Raises:
        PlanError: the engine simulates on a GPU.
    """
    if engine in GPU_ENGINES:
        raise PlanError(
            f"a forecast of {env_id} with engine {engine}",
            "it simulates on the GPU, and without one here its speed there is not known",
            "Run this command on a machine with a GPU, or forecast another engine",
        )


def forecast(
    costs: UnitCosts, cluster: Cluster, gmis_per_gpu: int, num_envs: int, *, measured_sms: int | None
) -> Forecast:
    """Forecast a dp_only run.

    Args:
        costs: unit costs, measured on cores or on a GPU
        cluster: the cluster to forecast
        gmis_per_gpu: number of GMIs on each GPU
        num_envs: environments of one GMI
        measured_sms: SMs of the GPU on which ``costs`` were measured; None: measured on cores
    """
    num_gmis = gmis_per_gpu * cluster.num_gpus
    worker = Worker(
        roles=("simulator", "agent", "trainer"),
        cores=cluster.cores_per_node / (gmis_per_gpu * cluster.gpus_per_node),
        num_envs=num_envs,
        gpu_share=1 / gmis_per_gpu,
    )
    reduce_s = _reduction(costs, cluster, gmis_per_gpu)
    layout = ModelledPlan(
        template="dp_only",
        workers=(worker,) * num_gmis,
        cores=cluster.cores_per_node * cluster.nodes,
        reduce_s=sum(reduce_s.values()),
    )
    if measured_sms is None:
        none = RoleCost(device="gpu", fixed_s=0.0, per_env_s=0.0)
        slow, fast = costs, replace(costs, rollout=costs.simulate, update=none)
    else:
        slow = fast = _scaled(costs, measured_sms / cluster.gpu.sm_count)
    low, high = predict(slow, layout), predict(fast, layout)
    parts = {name: seconds for name, seconds in low.parts_s.items() if name != "reduce"}
    links = {link: costs.num_updates * seconds for link, seconds in reduce_s.items()}
    return Forecast(
        cluster=cluster,
        gmis_per_gpu=gmis_per_gpu,
        parts_s=parts | links,
        low_steps_per_s=low.steps_per_s,
        high_steps_per_s=max(low.steps_per_s, high.steps_per_s),
    )


def device_bytes(costs: UnitCosts, num_envs: int, *, measured_sms: int | None) -> float:
    """Memory of one GMI on its GPU: a CUDA context, and what was measured there.

    Measured on cores, it is a lower bound: parameters, gradients and Adam's two moments, and the rollout's columns that
    networks read.
    """
    if measured_sms is not None:
        return CONTEXT_BYTES + costs.gmi_bytes + num_envs * costs.env_bytes
    row = costs.state_bytes + 2 * costs.action_bytes
    return CONTEXT_BYTES + 4 * costs.model_bytes + num_envs * costs.num_steps * row


def most_gmis_per_gpu(costs: UnitCosts, cluster: Cluster, num_envs: int, *, measured_sms: int | None) -> int:
    """The largest number of GMIs per GPU that its memory holds, and that has a core each; at most 10.

    Raises:
        PlanError: not even one fits.
    """
    need = device_bytes(costs, num_envs, measured_sms=measured_sms)
    fits = int(cluster.gpu.memory_bytes // need)
    if fits < 1:
        raise PlanError(
            f"{counted(num_envs, 'environment')} on a {cluster.gpu.name}",
            f"they need {bytes_text(need)}, and it has {bytes_text(cluster.gpu.memory_bytes)}",
            "Use fewer environments",
        )
    return max(1, min(fits, MAX_GMIS_PER_GPU, cluster.cores_per_node // cluster.gpus_per_node))


def forecasts(
    costs: UnitCosts, cluster: Cluster, num_envs: int, *, measured_sms: int | None
) -> list[Forecast]:
    """Clusters of 1, 2, 4, ... nodes with one GMI per GPU, and then the cluster itself with each number that fits.

    Raises:
        PlanError: the environments do not fit on a GPU.
    """
    most = most_gmis_per_gpu(costs, cluster, num_envs, measured_sms=measured_sms)
    cases = [(each, 1) for each in sizes_up_to(cluster)] + [(cluster, cut) for cut in range(2, most + 1)]
    return [forecast(costs, each, cut, num_envs, measured_sms=measured_sms) for each, cut in cases]


def sizes_up_to(cluster: Cluster) -> list[Cluster]:
    """Clusters of 1, 2, 4, ... nodes, and the cluster itself."""
    counts = [2**power for power in range(cluster.nodes.bit_length()) if 2**power < cluster.nodes]
    return [replace(cluster, nodes=nodes) for nodes in (*counts, cluster.nodes)]


def table(forecasts: Sequence[Forecast]) -> str:
    """Format a line per forecast."""
    head = (
        "nodes",
        "GPUs",
        "GMIs per GPU",
        "steps/s",
        "of linear",
        "simulate",
        "update",
        "reduce",
        "bound by",
    )
    first = forecasts[0]
    return "\n".join(aligned([head, *(_row(each, first) for each in forecasts)]))


def _scaled(costs: UnitCosts, factor: float) -> UnitCosts:
    """Costs on a GPU with other SMs: saturated work scales, and the time of small kernels does not."""

    def scaled(role: RoleCost) -> RoleCost:
        return replace(role, per_env_s=factor * role.per_env_s) if role.device == "gpu" else role

    return replace(
        costs,
        rollout=scaled(costs.rollout),
        simulate=scaled(costs.simulate),
        act=scaled(costs.act),
        update=scaled(costs.update),
    )


def _reduction(costs: UnitCosts, cluster: Cluster, gmis_per_gpu: int) -> dict[str, float]:
    """Seconds of one gradient reduction, by link (preprint, Table 2, with a latency per hop)."""

    def ring(members: int, bandwidth: float) -> float:
        return all_reduce_s(members, costs.model_bytes, bandwidth) + 2 * (members - 1) * HOP_LATENCY_S

    return {
        "reduction in the host": costs.reduce_s * all_reduce_s(gmis_per_gpu, 1, 1),
        "GPU links": ring(cluster.gpus_per_node, cluster.gpu.link_bytes_per_s),
        "network": ring(cluster.nodes, cluster.gpu.network_bytes_per_s),
    }


def _row(each: Forecast, first: Forecast) -> tuple[str, ...]:
    low, high = each.low_steps_per_s, each.high_steps_per_s
    linear = low / first.low_steps_per_s * first.cluster.nodes / each.cluster.nodes
    parts = dict(each.parts_s)
    simulate_s, update_s = parts.pop("simulate"), parts.pop("update")
    return (
        str(each.cluster.nodes),
        str(each.cluster.num_gpus),
        str(each.gmis_per_gpu),
        f"{low:,.0f}" if low == high else f"{low:,.0f} - {high:,.0f}",
        f"{100 * linear:.0f} %",
        f"{1e3 * simulate_s:.0f} ms",
        f"{1e3 * update_s:.0f} ms",
        f"{1e3 * sum(parts.values()):.1f} ms",
        each.bound_by,
    )
