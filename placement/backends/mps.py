"""NVIDIA's Multi-Process Service: processes run side by side on one GPU, each with a share of it. [unverified on GPU]

One daemon per GPU, since a fatal fault of one client reaches every other client of its server. Shares are static SM
partitions where driver and GPU have them (Ampere, CUDA 13.1), else caps: a client's thread percentage is a limit, not
a reservation. Device memory is capped in both (GMI-DRL §2.2, §3.3).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from placement.backends.base import Availability, SliceHealth, SliceLimits, validate_sizes
from placement.backends.mps_availability import mps_availability
from placement.backends.mps_control import DaemonTimeoutError, MpsDaemon
from placement.backends.mps_sizes import FIRST_STATIC, MIB, chunk_for, memory_of, sms_of
from placement.backends.partitioned import PartitionedBackend
from placement.backends.processes import wait_until
from placement.errors import PartitionError, SliceError
from placement.inventory.nvml import mps_clients
from placement.ledger import Ledger, LedgerEntry, Owner, UndoValue, all_ledgers, exclusive_lock
from placement.types import BackendName, Gpu, Node, Share, Slice

FOLDERS = Path("/tmp")
"""Where pipe directories are: a socket's path may have 107 bytes, and $TMPDIR is often longer."""

LEAVE_LIMIT_S = 10.0
"""For clients to leave by themselves before the daemon ends them."""

SM_ROUNDING = 8
"""SMs by which the driver may round a percentage up: it hands out whole groups of SMs."""


class MpsBackend(PartitionedBackend):
    """Shares of a GPU through a daemon that is ours, started by ``partition`` and ended by ``restore``."""

    name: BackendName = "mps"

    def availability(self, node: Node, gpu: Gpu | None) -> Availability:
        """From Volta on, where no other MPS has the GPU."""
        return mps_availability(node, gpu)

    def predict_limits(self, node: Node, gpu: Gpu, sizes: Sequence[float]) -> tuple[SliceLimits, ...]:
        """Whole chunks where the driver has static partitions, else caps."""
        chunk = chunk_for(gpu, sizes) if (node.cuda_version or (0, 0)) >= FIRST_STATIC else None
        return tuple(
            SliceLimits(sm_count=sms_of(gpu, size, chunk), memory_bytes=memory_of(gpu, size))
            for size in sizes
        )

    def partition(self, gpu: Gpu, sizes: Sequence[float], ledger: Ledger) -> tuple[Share, ...]:
        """Start a daemon for the GPU, with a static partition per share where the GPU has them.

        Raises:
            PartitionError: there is no daemon to start, it does not come up, or another run has the GPU.
        """
        checked = validate_sizes(gpu, sizes)
        chunk = chunk_for(gpu, checked)
        if chunk is not None:
            try:
                return self._with_rollback(gpu, ledger, lambda: _partition(gpu, checked, ledger, chunk))
            except DaemonTimeoutError:
                raise
            except PartitionError:
                pass  # a driver before CUDA 13.1 does not know static partitions
        return self._with_rollback(gpu, ledger, lambda: _partition(gpu, checked, ledger, None))

    def restore(self, gpu_uuid: str, ledger: Ledger) -> None:
        """Wait until the clients have left, end the daemon, remove its folder."""
        failures: dict[UndoValue, PartitionError] = {}
        for step in ledger.steps(gpu_uuid, "mps"):
            folder = step.undo["folder"]
            if folder in failures:
                continue  # the folder of a daemon that still lives
            try:
                _undo(step)
            except PartitionError as error:
                failures[folder] = error
            else:
                ledger.erase(step)
        if failures:
            raise next(iter(failures.values()))

    def share_environment(self, share: Share) -> dict[str, str]:
        """The daemon and the share. The GPU is named by its UUID, as to the daemon."""
        variables = {
            "CUDA_VISIBLE_DEVICES": share.gpu_uuid,
            "CUDA_MPS_PIPE_DIRECTORY": share.pipe_directory or "",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={(share.memory_bytes or 0) // MIB}M",
        }
        if share.sm_partition is not None:
            return variables | {"CUDA_MPS_SM_PARTITION": share.sm_partition}
        return variables | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share.thread_percentage:g}"}

    def enter(self, gmi_slice: Slice) -> None:
        """As every carved slice, without what another MPS set in the shell in which Ray was started."""
        super().enter(gmi_slice)
        for name in os.environ.keys() - self.environment(gmi_slice).keys():
            if name.startswith("CUDA_MPS_"):
                del os.environ[name]

    def verify(self, gmi_slice: Slice) -> None:
        """The daemon lists this process as a client, NVML knows of some, and CUDA shows no more SMs than the share has."""
        import torch

        pid, share = os.getpid(), gmi_slice.share
        assert share is not None  # entered
        clients, by_nvml = (
            MpsDaemon.from_pipe_directory(share.pipe_directory or "").clients(),
            mps_clients(share.gpu_uuid),
        )
        # NVML may know processes by other numbers, as from inside a container: only that there are some counts.
        if pid not in clients or by_nvml == 0:
            raise SliceError(
                f"process {pid} attached to the MPS daemon at {share.pipe_directory}",
                f"clients {sorted(clients) or 'none'} by the daemon, {by_nvml} by NVML",
                "Something called CUDA before the slice was entered, or the process is in another PID namespace",
            )
        seen = torch.cuda.get_device_properties(0).multi_processor_count
        if share.sm_count is not None and seen >= share.sm_count + SM_ROUNDING:
            raise SliceError(
                f"at most {share.sm_count} SMs in process {pid}",
                f"{seen} by what CUDA says",
                "The driver does not honour the share: use backend='direct' or 'mig'",
            )

    def health(self, gmi_slice: Slice) -> SliceHealth:
        """Asks the daemon."""
        if gmi_slice.share is None:
            return SliceHealth(state="ok", text="not carved yet")
        try:
            daemon = MpsDaemon.from_pipe_directory(gmi_slice.share.pipe_directory or "")
            states = {server: daemon.server_status(server) for server in daemon.servers()}
        except PartitionError as error:
            return SliceHealth(state="lost", text=str(error))
        if not states:
            text = f"the MPS server on {gmi_slice.gpu_uuid} has ended, and its clients with it"
            return SliceHealth(state="lost", text=text)
        for server, status in states.items():
            if status == "FAULT":
                text = (
                    f"MPS server {server} on {gmi_slice.gpu_uuid} is in FAULT: a client made a fatal error, "
                    "which ends all"
                )
                return SliceHealth(
                    state="lost", text=f"{text} clients; it takes new ones once they have left"
                )
        if "INITIALIZING" in states.values():
            return SliceHealth(
                state="degraded", text=f"the MPS server on {gmi_slice.gpu_uuid} is still starting"
            )
        return SliceHealth(state="ok", text=f"the MPS daemon on {gmi_slice.gpu_uuid} answers")

    def evict(self, gmi_slice: Slice, pid: int) -> None:
        """Let the server end the client's work."""
        if gmi_slice.share is not None:
            MpsDaemon.from_pipe_directory(gmi_slice.share.pipe_directory or "").terminate_client(pid)

    def _with_rollback(
        self, gpu: Gpu, ledger: Ledger, partition: Callable[[], tuple[Share, ...]]
    ) -> tuple[Share, ...]:
        try:
            return partition()
        except BaseException:
            # What cannot be undone now stays in the ledger; what went wrong first is what to tell.
            with suppress(PartitionError):
                self.restore(gpu.uuid, ledger)
            raise


def _partition(gpu: Gpu, sizes: tuple[float, ...], ledger: Ledger, chunk: int | None) -> tuple[Share, ...]:
    daemon = MpsDaemon(FOLDERS / f"rayagi-mps-{secrets.token_hex(4)}")
    where = {"folder": str(daemon.folder)}
    with exclusive_lock(ledger.path.parent):
        _reject_gpu_of_other_run(gpu, ledger)
        ledger.record("mps", gpu.uuid, "folder", where)
    daemon.make_folder()
    ledger.record("mps", gpu.uuid, "daemon", where)
    daemon.start(gpu.uuid, static=chunk is not None)
    daemon.start_server()
    if chunk is None:
        return tuple(_capped_share(gpu, size, daemon) for size in sizes)
    return tuple(_static_partition_share(gpu, size, daemon, chunk) for size in sizes)


def _capped_share(gpu: Gpu, size: float, daemon: MpsDaemon) -> Share:
    return Share(
        kind="mps",
        gpu_uuid=gpu.uuid,
        fraction=size,
        sm_count=sms_of(gpu, size, None),
        memory_bytes=memory_of(gpu, size),
        pipe_directory=str(daemon.pipe),
        thread_percentage=round(100 * size, 2),
    )


def _static_partition_share(gpu: Gpu, size: float, daemon: MpsDaemon, chunk: int) -> Share:
    sms = sms_of(gpu, size, chunk) or 0
    # Partitions live in the daemon: they end with it, and need no step of their own in the ledger.
    return Share(
        kind="mps",
        gpu_uuid=gpu.uuid,
        fraction=size,
        sm_count=sms,
        memory_bytes=memory_of(gpu, size),
        pipe_directory=str(daemon.pipe),
        sm_partition=daemon.add_partition(gpu.uuid, sms // chunk),
    )


def _undo(step: LedgerEntry) -> None:
    daemon = MpsDaemon(Path(str(step.undo["folder"])))
    if step.made == "folder":
        daemon.remove_folder()
        return
    if not daemon.processes():
        return
    with suppress(PartitionError):  # a daemon that does not answer has to be ended by signals
        if not wait_until(lambda: not daemon.clients(), LEAVE_LIMIT_S):
            for client in daemon.clients():
                daemon.terminate_client(client)
    daemon.end()


def _reject_gpu_of_other_run(gpu: Gpu, ledger: Ledger) -> None:
    """Two daemons on one GPU take turns instead of sharing it."""
    for other in all_ledgers(ledger.path.parent)[0]:
        if other.path == ledger.path or not other.steps(gpu.uuid):
            continue
        state = other.owner.state()
        if state != "elsewhere":
            left = state == "dead"
            raise PartitionError(
                f"{gpu.uuid} on {Owner.local_capabilities().host}",
                f"it is cut by run {other.run} (process {other.owner.pid}{', which has ended' if left else ''})",
                "Run `rayagi cleanup`"
                if left
                else "Wait for that run, leave this GPU out, or use backend='direct'",
            )
