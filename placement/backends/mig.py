"""MIG backend: NVIDIA's Multi-Instance GPU gives instances their own SMs and memory. [unverified on GPU]

Sizes are coarse, but faults and memory traffic stay within an instance (GMI-DRL §2.2, §3.3). With the permission, this
backend creates instances and destroys them afterwards. Without it, it uses idle existing instances and leaves them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from placement.backends.base import Availability, SliceHealth, SliceLimits, refused, validate_sizes
from placement.backends.mig_nvml import MigGpu, mig_gpu
from placement.backends.mig_steps import claim_idle_instances, create_instances, undo_step
from placement.backends.partitioned import PartitionedBackend
from placement.errors import PartitionError, PlanError, SliceError
from placement.ledger import Ledger, exclusive_lock
from placement.mig_geometry import geometry_of
from placement.mig_planner import choose_existing, has_room, idle_shares, plan_instances, required_geometry
from placement.types import BackendName, Gpu, MigInstance, Node, Share, Slice

MEMORY_TOLERANCE = 1.05
"""Of CUDA's figure for an instance's memory: NVML's is in whole MB. The next larger instance has twice as much."""


class MigBackend(PartitionedBackend):
    """Shares of a GPU as MIG instances.

    It never changes the MIG mode: that needs an idle GPU, before Hopper also a reset, and affects all users of the GPU.
    Errors name the commands that an administrator can run.
    """

    name: BackendName = "mig"

    def availability(self, node: Node, gpu: Gpu | None) -> Availability:
        """Usable if MIG mode is on, and this user may create instances or some are idle."""
        if gpu is None:
            return refused("there is no GPU", "Use backend='cpu' and num_gmis")
        if geometry_of(gpu) is None:
            return refused(f"{gpu.name} has no MIG, or its geometry is not known", _without_geometry(gpu))
        problem = mode_problem(gpu.mig_enabled, gpu.mig_pending)
        if problem is not None:
            return refused(problem, f"Run {mode_commands(gpu, gpu.mig_enabled, gpu.mig_pending)}")
        idle = [one.profile for one in gpu.mig_instances if not one.in_use]
        if node.may_configure_mig and has_room(gpu):
            return Availability(usable=True, reason=f"instances can be created on {gpu.uuid}")
        if idle:
            return Availability(usable=True, reason=f"idle instances exist: {', '.join(idle)}")
        if node.may_configure_mig:
            return refused(
                f"the MIG instances on {gpu.uuid} are in use, and leave no room for another",
                "Wait until one is idle, or have its owner destroy it",
            )
        return refused(
            "this user may not create MIG instances, and no idle one exists",
            f"Run as root, or have an administrator create some; two halves: {_command_for(gpu, (0.5, 0.5))}",
        )

    def predict_limits(self, node: Node, gpu: Gpu, sizes: Sequence[float]) -> tuple[SliceLimits, ...]:
        """Limits of the instances that would be created; without the permission, of the idle ones that would be used."""
        geometry = required_geometry(gpu)
        if not node.may_configure_mig:
            try:
                return _limits_of(choose_existing(gpu, sizes))
            except PlanError as error:
                hint = f"{error.hint} with {_command_for(gpu, tuple(sizes))}"
                raise PlanError(error.what, error.problem, hint) from error
        try:
            placed = plan_instances(gpu, sizes)
        except PlanError:
            with suppress(PlanError):  # if no idle one fits either, report why no new one fits
                return _limits_of(choose_existing(gpu, sizes))
            raise
        slice_bytes = gpu.memory_total_bytes // geometry.memory_slices
        return tuple(
            SliceLimits(sm_count=one.profile.sm_count, memory_bytes=one.profile.size * slice_bytes)
            for one in placed
        )

    def idle_shares(self, gpu: Gpu) -> tuple[float, ...]:
        """The idle instances."""
        return idle_shares(gpu)

    def partition(self, gpu: Gpu, sizes: Sequence[float], ledger: Ledger) -> tuple[Share, ...]:
        """Create an instance per size, as close to it as MIG's profiles allow.

        Raises:
            PartitionError: MIG mode is off, the sizes do not fit next to existing instances, or the driver fails.
        """
        checked = validate_sizes(gpu, sizes)
        with exclusive_lock(ledger.path.parent), mig_gpu(gpu.uuid) as device:
            try:
                return self._partition(device, gpu, checked, ledger)
            except BaseException as error:
                # Steps that cannot be undone stay in the ledger. Report the first error.
                try:
                    self.restore(gpu.uuid, ledger)
                except PartitionError as left:
                    error.add_note(f"Left behind, for `rayagi cleanup` on this host: {left}")
                raise

    def restore(self, gpu_uuid: str, ledger: Ledger) -> None:
        """Destroy the instances that were created, and release the existing ones that were used."""
        steps = ledger.steps(gpu_uuid, "mig")
        if not steps:
            return
        failures: list[PartitionError] = []
        with mig_gpu(gpu_uuid) as device:
            for step in steps:
                try:
                    undo_step(step, device)
                except PartitionError as error:
                    failures.append(error)
                else:
                    ledger.erase(step)
        if failures:
            raise failures[0]

    def share_environment(self, share: Share) -> dict[str, str]:
        """The instance as the only visible device."""
        assert share.mig_uuid is not None  # set by partition()
        return {"CUDA_VISIBLE_DEVICES": share.mig_uuid}

    def verify(self, gmi_slice: Slice) -> None:
        """Check that CUDA reports no more SMs and memory than the instance has."""
        import torch  # the slice's environment has to be in place before this import

        assert gmi_slice.share is not None  # entered
        device = torch.cuda.get_device_properties(0)
        limits = self.limits(gmi_slice)
        most_bytes = MEMORY_TOLERANCE * (limits.memory_bytes or 0)
        if device.multi_processor_count > (limits.sm_count or 0) or device.total_memory > most_bytes:
            raise SliceError(
                f"MIG instance {gmi_slice.share.mig_uuid} with {limits.sm_count} SMs and {limits.memory_bytes} bytes",
                f"{device.multi_processor_count} SMs and {device.total_memory} bytes as CUDA reports",
                "Something called CUDA before the slice was entered",
            )

    def health(self, gmi_slice: Slice) -> SliceHealth:
        """Whether the instance still exists."""
        if gmi_slice.share is None or gmi_slice.share.mig_uuid is None:
            return SliceHealth(state="ok", text="not partitioned yet")
        uuid = gmi_slice.share.mig_uuid
        try:
            with mig_gpu(gmi_slice.share.gpu_uuid) as device:
                there = any(one.uuid == uuid for one in device.devices(None))
        except PartitionError as error:
            return SliceHealth(state="lost", text=str(error))
        if there:
            return SliceHealth(state="ok", text=f"MIG instance {uuid} exists")
        return SliceHealth(state="lost", text=f"MIG instance {uuid} is gone from {gmi_slice.share.gpu_uuid}")

    def _partition(
        self, device: MigGpu, gpu: Gpu, sizes: tuple[float, ...], ledger: Ledger
    ) -> tuple[Share, ...]:
        _require_mode(device, gpu)
        instances = device.permitted_instances()
        if instances is None:
            try:
                return claim_idle_instances(device, gpu, sizes, ledger)
            except PlanError as error:
                raise PartitionError(
                    f"MIG on {gpu.uuid}",
                    f"this user may not create instances, and the existing ones do not fit: {str(error).rstrip('.')}",
                    f"Run as root, or have an administrator run {_command_for(gpu, sizes)}",
                ) from error
        try:
            placed = plan_instances(gpu, sizes, [one.placement for one in instances])
        except PlanError as error:
            with suppress(PlanError):  # if no idle one fits either, report why no new one fits
                return claim_idle_instances(device, gpu, sizes, ledger)
            raise PartitionError(error.what, error.problem, error.hint) from error
        return create_instances(device, gpu, sizes, placed, ledger)


def _without_geometry(gpu: Gpu) -> str:
    """What to do with a GPU whose geometry is not known."""
    if not gpu.mig_enabled:
        return "Use backend='mps' or 'direct'"
    idle = next((one.uuid for one in gpu.mig_instances if not one.in_use), "MIG-...")
    return f"Set CUDA_VISIBLE_DEVICES={idle}: one of its instances is used as a GPU of its own"


def _require_mode(device: MigGpu, gpu: Gpu) -> None:
    mode = device.mode()
    if mode is None:
        raise PartitionError(f"MIG on {gpu.uuid}", f"{gpu.name} has no MIG", "Use backend='mps'")
    problem = mode_problem(*mode)
    if problem is not None:
        raise PartitionError(f"MIG on {gpu.uuid}", problem, f"Run {mode_commands(gpu, *mode)}")


def _limits_of(instances: Sequence[MigInstance]) -> tuple[SliceLimits, ...]:
    return tuple(SliceLimits(sm_count=one.sm_count, memory_bytes=one.memory_bytes) for one in instances)


def _command_for(gpu: Gpu, sizes: tuple[float, ...]) -> str:
    """The command to create these instances with their compute instances; if none fits, one that lists the existing ones."""
    try:
        placed = plan_instances(gpu, sizes)
    except PlanError:
        return f"`sudo nvidia-smi mig -i {gpu.uuid} -lgi` to list the instances"
    by_size = sorted(placed, key=lambda one: (-one.profile.size, one.start))
    specifiers = ",".join(f"{one.profile.profile_id}:{one.start}" for one in by_size)
    return f"`sudo nvidia-smi mig -i {gpu.uuid} -cgi {specifiers} -C`"


FIRST_WITHOUT_RESET = (9, 0)
"""From Hopper on, a change of MIG mode needs no reset of the GPU."""


def mode_problem(enabled: bool | None, pending: bool | None) -> str | None:
    """Why no instance can be created in this state of MIG mode; None if it is on."""
    if enabled and pending is not False:
        return None
    if enabled:
        return "MIG mode is on, but will be off after the pending reset"
    if pending:
        return "MIG mode will be on after the pending reset of the GPU"
    return "MIG mode is off" if enabled is False else "the MIG mode is unknown"


def mode_commands(gpu: Gpu, enabled: bool | None, pending: bool | None) -> str:
    """Commands that enable MIG mode on an idle GPU.

    Args:
        gpu: its compute capability decides whether a reset is needed
        enabled: whether the mode is on now; None: unknown
        pending: whether it will be on after the next reset
    """
    reset = f"`sudo nvidia-smi --gpu-reset -i {gpu.uuid}`"
    if pending and not enabled:
        return f"{reset} while the GPU is idle"
    switch = f"`sudo nvidia-smi -i {gpu.uuid} -mig 1`"
    if enabled:
        return f"{switch}, which cancels the pending change"
    if gpu.compute_capability is not None and gpu.compute_capability >= FIRST_WITHOUT_RESET:
        return f"{switch} while the GPU is idle"
    return f"{switch}, then {reset}, while the GPU is idle"
