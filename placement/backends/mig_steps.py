"""Steps of a MIG partition, and their undo, which another process can run too. [unverified on GPU]"""

from __future__ import annotations

from dataclasses import replace

from placement.backends.mig_nvml import ComputeInstance, GpuInstance, MigGpu
from placement.errors import PartitionError
from placement.ledger import Ledger, LedgerEntry, all_ledgers
from placement.mig_geometry import PlacedProfile, Placement, geometry_of
from placement.mig_planner import choose_existing
from placement.types import Gpu, MigInstance, Share


def create_instances(
    device: MigGpu, gpu: Gpu, sizes: tuple[float, ...], placed: tuple[PlacedProfile, ...], ledger: Ledger
) -> tuple[Share, ...]:
    """Create instances, each recorded in the ledger first; returns the shares in the order of the sizes.

    Raises:
        PartitionError: the driver fails to create one; earlier ones are in the ledger.
    """
    made: dict[int, Share] = {}
    # Largest first: if one does not fit, that shows before small instances occupy its place.
    for index in sorted(range(len(placed)), key=lambda i: (-placed[i].profile.size, placed[i].start)):
        place, profile_id = placed[index].placement, device.profile_id(placed[index])
        where = {"profile_id": profile_id, "start": place.start, "size": place.size}
        # 1. Record the intent. 2. Create the GPU instance. 3. Record its id. 4. Create its compute instance.
        step = ledger.record("mig", gpu.uuid, "gpu_instance", where)
        try:
            instance = device.create(profile_id, place)
        except PartitionError as error:
            # Nothing was created: an instance at this place belongs to someone else.
            if device.was_refused(error):
                ledger.erase(step)
            raise
        instance_id = device.id_of(instance)
        step = ledger.amend(step, instance_id=instance_id)
        device.create_compute_instance(instance_id)
        (part,) = device.compute_instances(instance_id)
        ledger.amend(step, uuid=part.uuid)  # claims it: no other run uses it as an idle instance
        made[index] = _share(gpu, part)
    return tuple(made[index] for index in range(len(sizes)))


def claim_idle_instances(
    device: MigGpu, gpu: Gpu, sizes: tuple[float, ...], ledger: Ledger
) -> tuple[Share, ...]:
    """Use idle instances that no other run has claimed; records the claim in the ledger.

    Raises:
        PlanError: they do not fit these sizes.
    """
    claimed = {
        step.undo.get("uuid")
        for other in all_ledgers(ledger.path.parent)[0]
        if other.owner_state() != "dead"
        for step in other.steps(gpu.uuid, "mig")
    }
    there: tuple[MigInstance, ...] = device.devices(geometry_of(gpu))
    unclaimed = tuple(one for one in there if one.uuid not in claimed)
    chosen = choose_existing(replace(gpu, mig_instances=unclaimed), sizes)
    for one in chosen:
        ledger.record("mig", gpu.uuid, "borrowed", {"uuid": one.uuid})
    return tuple(_share(gpu, one) for one in chosen)


def _share(gpu: Gpu, instance: ComputeInstance | MigInstance) -> Share:
    return Share(
        kind="mig",
        gpu_uuid=gpu.uuid,
        sm_count=instance.sm_count,
        memory_bytes=instance.memory_bytes,
        mig_uuid=instance.uuid,
    )


def undo_step(step: LedgerEntry, device: MigGpu) -> None:
    """Destroy the instance of a step, if it still exists.

    Raises:
        PartitionError: a process uses it, or the driver fails.
    """
    if step.made == "borrowed":
        return
    mode = device.mode()
    if mode is not None and not mode[0]:
        return  # disabling MIG mode or rebooting the host has destroyed the instances
    instance = _instance_of_step(step, device)
    if instance is None:
        return
    parts = device.compute_instances(instance.id)
    known = step.undo.get("uuid")
    if parts and known is not None and known not in {part.uuid for part in parts}:
        return  # ids are reused: it is another's
    pids = [pid for part in parts for pid in device.processes(part.uuid)]
    if pids:
        if "instance_id" not in step.undo:
            return  # our process died before the creation returned: the instance belongs to who uses it
        raise PartitionError(
            f"MIG instance {', '.join(part.uuid for part in parts)}",
            f"still used by process {', '.join(map(str, pids))}",
            "End that process, then run `rayagi cleanup` on this host",
        )
    for part in parts:
        device.destroy_compute_instance(instance.id, part.id)
    device.destroy(instance.id)


def _instance_of_step(step: LedgerEntry, device: MigGpu) -> GpuInstance | None:
    """The GPU instance that the step created; None if it is gone.

    Ids are reused, so placement and profile have to match too. If the process died before it recorded the id, placement and
    profile alone decide: the place was free before.
    """
    known = step.undo.get("instance_id")
    place = Placement(int(step.undo["start"] or 0), int(step.undo["size"] or 0))
    for one in device.instances():
        if (one.placement, one.profile_id) == (place, step.undo["profile_id"]) and known in (None, one.id):
            return one
    return None
