"""Equal slices: cores divided evenly between GMIs, or GPUs partitioned into equal shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor

from placement.backend_choice import UnusedGpu, unused_gpu
from placement.backends import get_backend
from placement.errors import PlanError, counted
from placement.types import FRACTION_STEP, BackendName, Machine, Slice
from placement.unequal_slices import gpu_slices_of_node

MAX_DEFAULT_GMIS = 8
"""Default number of CPU GMIs with a simulator. With more, the all-reduce costs more than another process gains."""


def equal_core_slices(
    machine: Machine,
    num_gmis: int | None,
    gmis_per_gpu: int | None,
    threads: int | None,
    *,
    called: str = "GMI",
) -> tuple[list[Slice], str]:
    """One slice per GMI, each with its own cores, and the reason as a clause.

    Args:
        machine: inventory of the nodes
        num_gmis: number over all nodes; None: one per core, at most 8
        gmis_per_gpu: rejected unless None, since this partitions cores
        threads: cores of each; None: its node's cores divided evenly
        called: name of the worker type, for the reason

    Raises:
        PlanError: there are too few cores.
    """
    if gmis_per_gpu is not None:
        raise PlanError(
            f"gmis_per_gpu={gmis_per_gpu}",
            f"the cpu backend partitions cores, and there {_are(machine.num_gpus, 'GPU')}",
            "Use num_gmis instead",
        )
    cores = [len(node.usable_cores) for node in machine.nodes]
    fits = max_gmis_on_cores(machine, threads)
    if fits == 0 or (num_gmis is not None and num_gmis > fits):
        raise _too_many_for_cores(machine, num_gmis or 1, threads, fits)
    count = num_gmis if num_gmis is not None else min(fits, MAX_DEFAULT_GMIS)
    per_node = spread_over_nodes(cores, count, threads or 1)
    slices: list[Slice] = []
    for node, share in zip(machine.nodes, per_node, strict=True):
        if share:
            width = threads or len(node.usable_cores) // share
            cores_here = node.usable_cores if node.pinnable else ()
            slices += [
                Slice(
                    node=node.name,
                    backend="cpu",
                    cores=cores_here[i * width : (i + 1) * width],
                    num_threads=width,
                )
                for i in range(share)
            ]
    return slices, _explain_cores(machine, slices, called, asked=num_gmis is not None)


def gpu_fractions(
    machine: Machine, name: BackendName, shares: int, count: int | None, num_gmis: int | None
) -> tuple[dict[str, tuple[float, ...]], tuple[UnusedGpu, ...]]:
    """UUID of each GPU -> the fractions of it for its GMIs; and the GPUs that cannot be partitioned so.

    Equal shares if any GPU can be partitioned into them. Else what is there already, such as idle MIG instances.

    Args:
        machine: inventory of the nodes, with at least one GPU
        name: the backend
        shares: number of equal shares
        count: GMIs on each GPU; None: as many as there are shares already
        num_gmis: GMIs in total, for which GPUs are filled in order; None: all shares

    Raises:
        PlanError: no GPU can be partitioned, and none has idle shares, with the first GPU's reason; or more shares than Ray
            has fractions.
    """
    backend = get_backend(name)
    # Whole steps of Ray's fractions: 3 x 0.3333.
    fraction = round(floor(1 / shares / FRACTION_STEP + 1e-9) * FRACTION_STEP, 4)
    if not fraction:
        raise PlanError(
            f"{counted(shares, 'GMI')} per GPU",
            f"Ray's smallest fraction of a GPU is {FRACTION_STEP:g}",
            f"Use {round(1 / FRACTION_STEP)} per GPU or fewer",
        )
    equal = (fraction,) * shares
    gpus = [(node, gpu) for node in machine.nodes for gpu in node.usable_gpus]
    refusals: dict[str, PlanError] = {}
    left = shares * len(gpus) if num_gmis is None else num_gmis
    for node, gpu in gpus:
        try:
            if left > 0:
                backend.predict_limits(node, gpu, equal[:left])
            left -= shares
        except PlanError as error:
            refusals[gpu.uuid] = error
    fractions = {gpu.uuid: equal for _, gpu in gpus if gpu.uuid not in refusals}
    if not fractions:
        idle = {gpu.uuid: backend.idle_shares(gpu)[:count] for _, gpu in gpus}
        fractions = {uuid: found for uuid, found in idle.items() if len(found) >= (count or 1)}
    if not fractions:
        raise next(iter(refusals.values()))
    unused = (
        unused_gpu(node, gpu, refusals[gpu.uuid].problem, refusals[gpu.uuid].hint)
        for node, gpu in gpus
        if gpu.uuid not in fractions
    )
    return fractions, tuple(unused)


def equal_gpu_slices(
    machine: Machine,
    name: BackendName,
    fractions: Mapping[str, Sequence[float]],
    count: int,
    shares: int,
    threads: int | None,
) -> tuple[list[Slice], str]:
    """``count`` slices on GPUs, filled in order; and the reason as a clause.

    Args:
        machine: inventory of the nodes
        name: the backend
        fractions: UUID of each GPU -> fractions of it for its GMIs
        count: number of GMIs
        shares: GMIs per GPU as asked, for the reason
        threads: cores of each; None: its node's cores divided evenly

    Raises:
        PlanError: there are too few GPUs, or too few CPU cores for the GMIs on them.
    """
    fits = sum(map(len, fractions.values()))
    if count > fits:
        needed = -(-count // machine.num_gpus)
        raise PlanError(
            f"num_gmis={count}",
            f"{counted(machine.num_gpus, 'GPU')} with gmis_per_gpu={shares} gives {counted(fits, 'GMI')}",
            f"Set num_gmis={fits} or gmis_per_gpu={needed}",
        )
    slices: list[Slice] = []
    for node in machine.nodes:
        placed = [(node, gpu, share) for gpu in node.usable_gpus for share in fractions[gpu.uuid]]
        slices += gpu_slices_of_node(placed[: count - len(slices)], name, threads)
    used = len({gmi_slice.gpu_uuid for gmi_slice in slices})
    reason = f"{counted(shares, 'GMI')} per GPU on {used} of {counted(machine.num_gpus, 'GPU')}"
    sizes = [gmi_slice.gpu_fraction for gmi_slice in slices]
    if fits != shares * machine.num_gpus or len(set(sizes)) > 1:
        reason = "on idle MIG instances"
    if len(set(sizes)) > 1:
        listed = ", ".join(f"{size:g}" for size in sizes)
        reason += f"; gmi.slices = [{listed}] would share the environments in proportion to them"
    return slices, reason


def max_gmis_on_cores(machine: Machine, threads: int | None) -> int:
    """The number of GMIs with ``threads`` cores (None: 1) that fit without sharing cores."""
    return sum(len(node.usable_cores) // (threads or 1) for node in machine.nodes)


def spread_over_nodes(cores: list[int], count: int, width: int) -> list[int]:
    """Distribute ``count`` GMIs of at least ``width`` cores over nodes so that the smallest GMI is as large as possible.

    Greedy: each GMI goes to the node where it gets the most cores; the earlier node on a tie. Synchronous GMIs wait for
    the slowest. ``count`` must fit. Returns the GMIs per node.
    """
    shares = [0] * len(cores)
    for _ in range(count):
        open_nodes = [i for i, have in enumerate(cores) if have >= width * (shares[i] + 1)]
        best = max(open_nodes, key=lambda i: (cores[i] / (shares[i] + 1), -i))
        shares[best] += 1
    return shares


def _explain_cores(machine: Machine, slices: list[Slice], called: str, *, asked: bool) -> str:
    used = sum(gmi_slice.num_threads for gmi_slice in slices)
    why = f"as many {called}s as asked" if asked else f"one {called} per core, at most {MAX_DEFAULT_GMIS}"
    rest = machine.num_cores - used
    left = f", {counted(rest, 'core')} left for Ray and the driver" if rest else ""
    return f"{why}, {counted(used, 'core')} shared evenly{left}"


def _too_many_for_cores(machine: Machine, num_gmis: int, threads: int | None, fits: int) -> PlanError:
    each = f" with threads_per_gmi={threads}" if threads is not None else ""
    asked = f"num_gmis={num_gmis}{each}"
    where = counted(len(machine.nodes), "node")
    limit = f"there {_are(machine.num_cores, 'core')} on {where}, enough for {counted(fits, 'GMI')}{each}"
    logical = sum(node.ray_cpus or 0 for node in machine.nodes)
    if logical > machine.num_cores:
        limit += f" (Ray was started with {logical:g} CPUs, more than the cores that exist)"
    if fits:
        return PlanError(
            asked, limit, f"Set num_gmis to {fits} or less" + (" or threads_per_gmi lower" if each else "")
        )
    most = max((len(node.usable_cores) for node in machine.nodes), default=0)
    return PlanError(
        asked, limit, f"Set threads_per_gmi to {most} or less" if most else "Give Ray at least one CPU"
    )


def _are(number: int, noun: str) -> str:
    return f"{'is' if number == 1 else 'are'} {counted(number, noun)}"
