"""NVIDIA's Multi-Instance GPU: the driver cuts a GPU into instances with SMs and memory of their own. [unverified on GPU]

Sizes are coarse, but neither faults nor memory traffic of one instance reach another (GMI-DRL §2.2, §3.3). Instances
are created where this process may, and given back; else those that exist and are idle are used and left as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from placement.backends.base import Availability, Health, SliceLimits, checked_sizes
from placement.backends.carved import Carved
from placement.backends.mig_commands import create_command, mode_commands, mode_problem
from placement.backends.mig_nvml import MigGpu, mig_gpu
from placement.backends.mig_steps import borrow, create, undo
from placement.errors import CarvingError, PlanError, SliceError
from placement.ledger import Ledger, exclusive
from placement.mig_geometry import geometry_of
from placement.mig_planner import choose_existing, plan_instances, required_geometry
from placement.types import BackendName, Gpu, MigInstance, Node, Share, Slice


class MigBackend(Carved):
    """Shares of a GPU as MIG instances.

    MIG mode stays as it is: a switch needs a GPU that nobody uses, before Hopper also a reset, and it changes what everybody
    else sees of the GPU. Errors say what a human would run.
    """

    name: BackendName = "mig"

    def availability(self, node: Node, gpu: Gpu | None) -> Availability:
        """Where MIG mode is on, and either instances may be made or some are idle."""
        if gpu is None:
            return Availability(
                usable=False, reason="there is no GPU", way_out="Use backend='cpu' and num_gmis"
            )
        if geometry_of(gpu) is None:
            return Availability(
                usable=False,
                reason=f"{gpu.name} has no MIG, or its geometry is not known",
                way_out="Use backend='mps' or 'direct'",
            )
        problem = mode_problem(gpu.mig_enabled, gpu.mig_pending)
        if problem is not None:
            return Availability(
                usable=False,
                reason=problem,
                way_out=f"Run {mode_commands(gpu, gpu.mig_enabled, gpu.mig_pending)}",
            )
        if node.may_configure_mig:
            return Availability(usable=True, reason=f"instances can be made on {gpu.uuid}")
        idle = [one.profile for one in gpu.mig_instances if not one.in_use]
        if idle:
            return Availability(usable=True, reason=f"idle instances exist: {', '.join(idle)}")
        return Availability(
            usable=False,
            reason="this user may not create MIG instances, and no idle one exists",
            way_out=f"Run as root, or have an administrator make some, as two halves by {_command_for(gpu, (0.5, 0.5))}",
        )

    def foresee(self, node: Node, gpu: Gpu, sizes: Sequence[float]) -> tuple[SliceLimits, ...]:
        """Instances that would be made, as far as this user may make some; else the idle ones that would be used."""
        geometry = required_geometry(gpu)
        if not node.may_configure_mig:
            try:
                return _limits_of(choose_existing(gpu, sizes))
            except PlanError as error:
                way_out = f"{error.way_out}, by {_command_for(gpu, tuple(sizes))}"
                raise PlanError(error.asked, error.limit, way_out) from error
        try:
            placed = plan_instances(gpu, sizes)
        except PlanError:
            with suppress(PlanError):  # then the reason why no new one fits is what to tell
                return _limits_of(choose_existing(gpu, sizes))
            raise
        slice_bytes = gpu.memory_total_bytes // geometry.memory_slices
        return tuple(
            SliceLimits(sm_count=one.profile.sm_count, memory_bytes=one.profile.size * slice_bytes)
            for one in placed
        )

    def carve(self, gpu: Gpu, sizes: Sequence[float], ledger: Ledger) -> tuple[Share, ...]:
        """Make an instance per size, as near to it as MIG's sizes allow.

        Raises:
            CarvingError: MIG is off, the sizes do not fit beside what is there, or the driver refuses.
        """
        checked = checked_sizes(gpu, sizes)
        with exclusive(ledger.path.parent), mig_gpu(gpu.uuid) as device:
            try:
                return self._carve(device, gpu, checked, ledger)
            except BaseException as error:
                # What cannot be undone now stays in the ledger; what went wrong first is what to tell.
                try:
                    self.restore(gpu.uuid, ledger)
                except CarvingError as left:
                    error.add_note(f"Left behind, for `rayagi cleanup` on this host: {left}")
                raise

    def restore(self, gpu_uuid: str, ledger: Ledger) -> None:
        """Destroy the instances that are ours, and forget those that were borrowed."""
        steps = ledger.steps(gpu_uuid, "mig")
        if not steps:
            return
        failures: list[CarvingError] = []
        with mig_gpu(gpu_uuid) as device:
            for step in steps:
                try:
                    undo(step, device)
                except CarvingError as error:
                    failures.append(error)
                else:
                    ledger.erase(step)
        if failures:
            raise failures[0]

    def share_environment(self, share: Share) -> dict[str, str]:
        """The instance as the only visible device."""
        assert share.mig_uuid is not None  # as carve made it
        return {"CUDA_VISIBLE_DEVICES": share.mig_uuid}

    def verify(self, piece: Slice) -> None:
        """CUDA shows no more SMs and memory than the instance has."""
        import torch

        assert piece.share is not None  # entered
        seen = torch.cuda.get_device_properties(0)
        limits = self.limits(piece)
        if seen.multi_processor_count > (limits.sm_count or 0) or seen.total_memory > (
            limits.memory_bytes or 0
        ):
            raise SliceError(
                f"MIG instance {piece.share.mig_uuid} with {limits.sm_count} SMs and {limits.memory_bytes} bytes",
                f"{seen.multi_processor_count} SMs and {seen.total_memory} bytes by what CUDA says",
                "Something called CUDA before the slice was entered",
            )

    def health(self, piece: Slice) -> Health:
        """Whether the instance still exists."""
        if piece.share is None or piece.share.mig_uuid is None:
            return Health(state="ok", text="not carved yet")
        uuid = piece.share.mig_uuid
        try:
            with mig_gpu(piece.share.gpu_uuid) as device:
                there = any(one.uuid == uuid for one in device.devices(None))
        except CarvingError as error:
            return Health(state="lost", text=str(error))
        if there:
            return Health(state="ok", text=f"MIG instance {uuid} is there")
        return Health(state="lost", text=f"MIG instance {uuid} is gone from {piece.share.gpu_uuid}")

    def _carve(self, device: MigGpu, gpu: Gpu, sizes: tuple[float, ...], ledger: Ledger) -> tuple[Share, ...]:
        _require_mode(device, gpu)
        instances = device.permitted_instances()
        if instances is None:
            try:
                return borrow(device, gpu, sizes, ledger)
            except PlanError as error:
                raise CarvingError(
                    f"MIG on {gpu.uuid}",
                    f"this user may not create instances, and those that exist do not do: {str(error).rstrip('.')}",
                    f"Run as root, or have an administrator run {_command_for(gpu, sizes)}",
                ) from error
        try:
            placed = plan_instances(gpu, sizes, [one.placement for one in instances])
        except PlanError as error:
            with suppress(PlanError):  # then the reason why no new one fits is what to tell
                return borrow(device, gpu, sizes, ledger)
            raise CarvingError(error.asked, error.limit, error.way_out) from error
        return create(device, gpu, sizes, placed, ledger)


def _require_mode(device: MigGpu, gpu: Gpu) -> None:
    mode = device.mode()
    if mode is None:
        raise CarvingError(f"MIG on {gpu.uuid}", f"{gpu.name} has no MIG", "Use backend='mps'")
    problem = mode_problem(*mode)
    if problem is not None:
        raise CarvingError(f"MIG on {gpu.uuid}", problem, f"Run {mode_commands(gpu, *mode)}")


def _limits_of(instances: Sequence[MigInstance]) -> tuple[SliceLimits, ...]:
    return tuple(SliceLimits(sm_count=one.sm_count, memory_bytes=one.memory_bytes) for one in instances)


def _command_for(gpu: Gpu, sizes: tuple[float, ...]) -> str:
    """What an administrator would run, on a GPU whose instances nobody here knows the places of."""
    try:
        return create_command(gpu, plan_instances(gpu, sizes))
    except PlanError:
        return f"`sudo nvidia-smi mig -i {gpu.uuid} -lgi` to see who has what"
