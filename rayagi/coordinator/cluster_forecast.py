"""Cluster forecast: throughput and bottleneck of a cluster that is not available, from unit costs measured here.

    iteration = simulation on the node's cores + inference and update + gradient reduction
    reduction = updates per iteration x (har(g, t) in a node + ring between nodes)        (preprint, Table 2)

Simulation runs on cores, so a node's cores limit its steps, however its GPUs are partitioned. Inference and update scale by
the number of SMs if unit costs were measured on a GPU. If they were measured on cores, the forecast is a range: networks as
slow as on the cores (low), or without cost (high). Figures of GPUs, links and hosts are nominal and printed with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from collectives.costs import all_reduce_s, har_s
from placement.errors import PlanError
from placement.templates import UnitCosts
from placement.text import aligned

MAX_GPUS = 1024
MAX_GMIS_PER_GPU = 10
NETWORK_LATENCY_S = 10e-6
"""Assumed latency per hop of a ring between nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
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
    model.name: model
    for model in (
        GpuModel(
            name="V100", sm_count=80, memory_bytes=32 * GIB, link_bytes_per_s=150e9, cores_per_gpu=5,
            network_bytes_per_s=12.5e9,
        ),
        GpuModel(
            name="A100-40", sm_count=108, memory_bytes=40 * GIB, link_bytes_per_s=300e9, cores_per_gpu=16,
            network_bytes_per_s=25e9,
        ),
        GpuModel(
            name="A100-80", sm_count=108, memory_bytes=80 * GIB, link_bytes_per_s=300e9, cores_per_gpu=16,
            network_bytes_per_s=25e9,
        ),
        GpuModel(
            name="H100", sm_count=132, memory_bytes=80 * GIB, link_bytes_per_s=450e9, cores_per_gpu=14,
            network_bytes_per_s=50e9,
        ),
        GpuModel(
            name="H200", sm_count=132, memory_bytes=141 * GIB, link_bytes_per_s=450e9, cores_per_gpu=14,
            network_bytes_per_s=50e9,
        ),
    )
}  # fmt: skip
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
    """Forecast for one cluster and one number of GMIs per GPU. Times are seconds per iteration."""

    cluster: Cluster
    gmis_per_gpu: int
    simulate_s: float
    networks_s: float
    """Inference and update, as measured or scaled to the GPU."""
    reduce_s: dict[str, float]
    """By link: ``host`` between GMIs of a GPU, ``links`` between GPUs of a node, ``network`` between nodes."""
    low_steps_per_s: float
    high_steps_per_s: float
    """With networks without cost if no GPU was measured; else equal to low."""

    @property
    def binding(self) -> str:
        """The longest part of an iteration; if no GPU was measured, inference and update are left out."""
        parts = {"simulation on the cores": self.simulate_s}
        if self.low_steps_per_s == self.high_steps_per_s:
            parts["inference and update"] = self.networks_s
        names = {"host": "reduction through the host", "links": "GPU links", "network": "network"}
        parts |= {names[link]: seconds for link, seconds in self.reduce_s.items()}
        return max(parts, key=lambda name: parts[name])


def cluster_of(nodes: int, gpus_per_node: int, gpu: str, cores_per_node: int | None = None) -> Cluster:
    """Build a cluster from command-line values.

    Raises:
        PlanError: an unknown GPU, or more than ``MAX_GPUS`` GPUs.
    """
    if gpu not in GPUS:
        raise PlanError(f"--gpu {gpu}", f"the GPUs known here are {', '.join(GPUS)}", "Use one of them")
    if nodes * gpus_per_node > MAX_GPUS:
        raise PlanError(
            f"{nodes} nodes of {gpus_per_node} GPUs",
            f"at most {MAX_GPUS} GPUs are forecast",
            "Use fewer nodes",
        )
    cores = cores_per_node or GPUS[gpu].cores_per_gpu * gpus_per_node
    return Cluster(nodes=nodes, gpus_per_node=gpus_per_node, gpu=GPUS[gpu], cores_per_node=cores)


def forecast(
    costs: UnitCosts, cluster: Cluster, gmis_per_gpu: int, *, updates: int, measured_sms: int | None
) -> Forecast:
    """Forecast a dp_only run.

    Args:
        costs: unit costs, measured with one simulating core, or with one GPU and its share of the cores
        cluster: the cluster to forecast
        gmis_per_gpu: number of GMIs on each GPU
        updates: gradient reductions per iteration: epochs times minibatches
        measured_sms: SMs of the GPU on which ``costs`` were measured; None: measured on cores
    """
    gmis_per_node = gmis_per_gpu * cluster.gpus_per_node
    cores_each = cluster.cores_per_node / gmis_per_node
    # T_s was measured on one core and scales with the cores of a GMI.
    simulate_s = costs.simulate_s / cores_each
    networks_s = costs.act_s + costs.train_s
    if measured_sms is None:
        low_s, high_s = networks_s / min(1.0, cores_each), 0.0
    else:
        low_s = high_s = networks_s * measured_sms * gmis_per_gpu / cluster.gpu.sm_count
    reduce_s = _reduction(costs, cluster, gmis_per_gpu, updates)
    steps = cluster.nodes * gmis_per_node * costs.num_steps * costs.num_envs
    fixed_s = simulate_s + sum(reduce_s.values())
    return Forecast(
        cluster=cluster,
        gmis_per_gpu=gmis_per_gpu,
        simulate_s=simulate_s,
        networks_s=low_s,
        reduce_s=reduce_s,
        low_steps_per_s=steps / (fixed_s + low_s),
        high_steps_per_s=steps / (fixed_s + high_s),
    )


def best_forecast(costs: UnitCosts, cluster: Cluster, *, updates: int, measured_sms: int | None) -> Forecast:
    """The number of GMIs per GPU with the highest low estimate; fewer GMIs on a tie."""
    cuts = range(1, MAX_GMIS_PER_GPU + 1)
    found = [forecast(costs, cluster, cut, updates=updates, measured_sms=measured_sms) for cut in cuts]
    return max(found, key=lambda each: (each.low_steps_per_s, -each.gmis_per_gpu))


def sizes_up_to(cluster: Cluster) -> list[Cluster]:
    """Clusters of 1, 2, 4, ... nodes, and the cluster itself."""
    counts = [2**power for power in range(cluster.nodes.bit_length()) if 2**power < cluster.nodes]
    return [replace(cluster, nodes=nodes) for nodes in (*counts, cluster.nodes)]


def table(forecasts: Sequence[Forecast]) -> str:
    """Format a line per cluster size."""
    head = (
        "nodes",
        "GPUs",
        "GMIs per GPU",
        "steps/s",
        "of linear",
        "simulate",
        "networks",
        "reduce",
        "bound by",
    )
    first = forecasts[0]
    return "\n".join(aligned([head, *(_row(each, first) for each in forecasts)]))


def _reduction(costs: UnitCosts, cluster: Cluster, gmis_per_gpu: int, updates: int) -> dict[str, float]:
    """Seconds of the gradient reductions of an iteration, by link (preprint, Table 2)."""
    size, gpus, nodes = costs.model_bytes, cluster.gpus_per_node, cluster.nodes
    # Between the GMIs of a GPU, then between the GPUs of a node, then a ring of 2 (nodes - 1) hops between nodes.
    in_host = har_s(1, gmis_per_gpu, size, costs.bandwidth, cluster.gpu.link_bytes_per_s)
    in_node = har_s(gpus, gmis_per_gpu, size, costs.bandwidth, cluster.gpu.link_bytes_per_s) - in_host
    hops_s = 2 * (nodes - 1) * NETWORK_LATENCY_S
    between = all_reduce_s(nodes, size, cluster.gpu.network_bytes_per_s) + hops_s
    return {"host": updates * in_host, "links": updates * in_node, "network": updates * between}


def _row(each: Forecast, first: Forecast) -> tuple[str, ...]:
    low, high = each.low_steps_per_s, each.high_steps_per_s
    speed = f"{low:,.0f}" if low == high else f"{low:,.0f} - {high:,.0f}"
    linear = low / first.low_steps_per_s * first.cluster.nodes / each.cluster.nodes
    return (
        str(each.cluster.nodes),
        str(each.cluster.num_gpus),
        str(each.gmis_per_gpu),
        speed,
        f"{100 * linear:.0f} %",
        f"{1e3 * each.simulate_s:.0f} ms",
        f"{1e3 * each.networks_s:.0f} ms",
        f"{1e3 * sum(each.reduce_s.values()):.1f} ms",
        each.binding,
    )
