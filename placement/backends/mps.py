"""MPS backend: NVIDIA's Multi-Process Service runs processes concurrently on one GPU.

One daemon per GPU, since a fatal fault of one client ends every client of the same server. Shares are static SM partitions
if driver and GPU support them (Ampere, CUDA 13.1) [unverified on GPU]. Otherwise they are active thread percentages:
a limit, not a reservation. Both limit device memory (GMI-DRL §2.2, §3.3).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import floor, fsum
from pathlib import Path

from placement.backends.base import Availability, SliceHealth, SliceLimits, refused, validate_sizes
from placement.backends.mps_control import (
    INSTALL,
    DaemonBusyError,
    DaemonTimeoutError,
    MpsDaemon,
    wait_until,
)
from placement.backends.partitioned import PartitionedBackend
from placement.errors import PartitionError, SliceError
from placement.ledger import Ledger, LedgerEntry, Owner, UndoValue, all_ledgers, exclusive_lock
from placement.types import FRACTION_STEP, BackendName, Gpu, Node, Share, Slice

FOLDERS = Path("/tmp")
"""Parent of the pipe directories: a socket's path may have 107 bytes, and $TMPDIR is often longer."""

LEAVE_LIMIT_S = 10.0
"""Time limit for clients to disconnect before the daemon terminates them."""

SM_ROUNDING = 8
"""SMs by which the driver may round a thread percentage up: it allocates whole groups of SMs."""


class MpsBackend(PartitionedBackend):
    """Shares of a GPU through a private MPS daemon: ``partition`` starts it, ``restore`` stops it."""

    name: BackendName = "mps"

    def availability(self, node: Node, gpu: Gpu | None) -> Availability:
        """Usable from Volta on, if MPS is installed and no one else uses the GPU exclusively."""
        if gpu is None:
            return refused("there is no GPU", "Use backend='cpu' and num_gmis")
        if gpu.compute_capability is not None and gpu.compute_capability < (7, 0):
            version = ".".join(map(str, gpu.compute_capability))
            reason = f"{gpu.name} has compute capability {version}, and MPS shares need 7.0"
            return refused(reason, "Use backend='direct'")
        if node.mps_control is False:
            return refused(f"node {node.name} has no nvidia-cuda-mps-control on PATH", INSTALL)
        if gpu.mig_enabled:
            hint = f"Use backend='mig', or run `nvidia-smi -i {gpu.uuid} -mig 0` as root"
            return refused(f"{gpu.uuid} is in MIG mode", hint)
        if gpu.mps_running:
            hint = (
                "Run `rayagi cleanup` if it was left by a run of yours; else its owner ends it with "
                "`echo quit | nvidia-cuda-mps-control`, or use backend='direct' inside of it"
            )
            return refused(f"an MPS daemon that this run did not start is there for {gpu.uuid}", hint)
        if gpu.compute_mode == "prohibited":
            hint = f"Run `nvidia-smi -i {gpu.uuid} -c DEFAULT` as root"
            return refused(f"{gpu.uuid} admits no process (compute mode prohibited)", hint)
        if gpu.compute_mode == "exclusive_process" and gpu.processes:
            pids = ", ".join(str(process.pid) for process in gpu.processes)
            reason = f"process {pids} uses {gpu.uuid} exclusively (compute mode exclusive_process)"
            return refused(reason, "Wait until it has ended")
        return Availability(usable=True, reason="no other MPS server uses the GPU")

    def predict_limits(self, node: Node, gpu: Gpu, sizes: Sequence[float]) -> tuple[SliceLimits, ...]:
        """SMs in whole chunks with static partitions, else by thread percentage."""
        chunk = chunk_for(gpu, sizes) if (node.cuda_version or (0, 0)) >= FIRST_STATIC else None
        return tuple(
            SliceLimits(sm_count=sms_of(gpu, size, chunk), memory_bytes=memory_of(gpu, size, sizes))
            for size in sizes
        )

    def partition(self, gpu: Gpu, sizes: Sequence[float], ledger: Ledger) -> tuple[Share, ...]:
        """Start a daemon for the GPU, with a static partition per share if supported.

        Raises:
            PartitionError: MPS is not installed, the daemon does not start, or another run uses the GPU.
        """
        checked = validate_sizes(gpu, sizes)
        chunk = chunk_for(gpu, checked)
        if chunk is not None:
            try:
                return self._with_rollback(gpu, ledger, lambda: _partition(gpu, checked, ledger, chunk))
            except DaemonTimeoutError:
                raise
            except PartitionError:
                pass  # a driver before CUDA 13.1 has no static partitions: fall back to thread percentages
        return self._with_rollback(gpu, ledger, lambda: _partition(gpu, checked, ledger, None))

    def restore(self, gpu_uuid: str, ledger: Ledger) -> None:
        """Wait for the clients to disconnect, stop the daemon, remove its folder."""
        failures: dict[UndoValue, PartitionError] = {}
        for step in ledger.steps(gpu_uuid, "mps"):
            folder = step.undo["folder"]
            if folder in failures:
                continue  # do not remove the folder of a daemon that is still running
            try:
                _undo(step)
            except PartitionError as error:
                failures[folder] = error
            else:
                ledger.erase(step)
        if failures:
            raise next(iter(failures.values()))

    def share_environment(self, share: Share) -> dict[str, str]:
        """Variables for the daemon's pipe directory, the SM share and the memory limit; the GPU by its UUID."""
        variables = {
            "CUDA_VISIBLE_DEVICES": share.gpu_uuid,
            "CUDA_MPS_PIPE_DIRECTORY": share.pipe_directory or "",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={(share.memory_bytes or 0) // MIB}M",
        }
        if share.sm_partition is not None:
            return variables | {"CUDA_MPS_SM_PARTITION": share.sm_partition}
        return variables | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share.thread_percentage:g}"}

    def enter(self, gmi_slice: Slice) -> None:
        """As in the base class; also removes CUDA_MPS_* variables inherited from the shell that started Ray."""
        super().enter(gmi_slice)
        for name in os.environ.keys() - self.environment(gmi_slice).keys():
            if name.startswith("CUDA_MPS_"):
                del os.environ[name]

    def verify(self, gmi_slice: Slice) -> None:
        """Check that the daemon lists this process as a client, and CUDA reports no excess SMs.

        NVML is not asked: it knows no PID namespaces, and may list no process at all inside of a container.
        """
        import torch  # the slice's environment has to be in place before this import

        pid, share = os.getpid(), gmi_slice.share
        assert share is not None  # entered
        clients = MpsDaemon.from_pipe_directory(share.pipe_directory or "").clients()
        if pid not in clients:
            raise SliceError(
                f"process {pid} attached to the MPS daemon at {share.pipe_directory}",
                f"clients {sorted(clients) or 'none'} of it",
                "Something called CUDA before the slice was entered, or the process is in another PID namespace",
            )
        visible_sms = torch.cuda.get_device_properties(0).multi_processor_count
        if share.sm_count is not None and visible_sms >= share.sm_count + SM_ROUNDING:
            raise SliceError(
                f"at most {share.sm_count} SMs in process {pid}",
                f"{visible_sms} as CUDA reports",
                "The driver does not enforce the share: use backend='direct' or 'mig'",
            )

    def health(self, gmi_slice: Slice) -> SliceHealth:
        """Health by the daemon's server states."""
        if gmi_slice.share is None:
            return SliceHealth(state="ok", text="not partitioned yet")
        try:
            daemon = MpsDaemon.from_pipe_directory(gmi_slice.share.pipe_directory or "")
            states = {server: daemon.server_status(server) for server in daemon.servers()}
        except DaemonBusyError as error:
            return SliceHealth(state="degraded", text=str(error))
        except PartitionError as error:
            return SliceHealth(state="lost", text=str(error))
        if not states:
            text = f"the MPS server on {gmi_slice.gpu_uuid} and its clients have ended"
            return SliceHealth(state="lost", text=text)
        for server, status in states.items():
            if status == "FAULT":
                text = (
                    f"MPS server {server} on {gmi_slice.gpu_uuid} is in FAULT: a client's fatal error ends all clients; "
                    "it accepts new ones once they have disconnected"
                )
                return SliceHealth(state="lost", text=text)
        if "INITIALIZING" in states.values():
            return SliceHealth(
                state="degraded", text=f"the MPS server on {gmi_slice.gpu_uuid} is still starting"
            )
        return SliceHealth(state="ok", text=f"the MPS daemon on {gmi_slice.gpu_uuid} responds")

    def evict(self, gmi_slice: Slice, pid: int) -> None:
        """Let the server terminate the client's work."""
        if gmi_slice.share is not None:
            MpsDaemon.from_pipe_directory(gmi_slice.share.pipe_directory or "").terminate_client(pid)

    def _with_rollback(
        self, gpu: Gpu, ledger: Ledger, partition: Callable[[], tuple[Share, ...]]
    ) -> tuple[Share, ...]:
        try:
            return partition()
        except BaseException:
            # Steps that cannot be undone stay in the ledger. Report the first error.
            with suppress(PartitionError):
                self.restore(gpu.uuid, ledger)
            raise


def _partition(gpu: Gpu, sizes: tuple[float, ...], ledger: Ledger, chunk: int | None) -> tuple[Share, ...]:
    """Start a daemon and describe its shares. Every step is recorded in the ledger before it is done."""
    daemon = MpsDaemon(FOLDERS / f"rayagi-mps-{secrets.token_hex(4)}")
    where = {"folder": str(daemon.folder)}
    # Under the lock: no other run claims the GPU between the check and the record.
    with exclusive_lock(ledger.path.parent):
        _reject_gpu_of_other_run(gpu, ledger)
        ledger.record("mps", gpu.uuid, "folder", where)
    daemon.make_folder()
    ledger.record("mps", gpu.uuid, "daemon", where)
    daemon.start(gpu.uuid, static=chunk is not None)
    daemon.start_server()
    return tuple(_share(gpu, size, sizes, daemon, chunk) for size in sizes)


def _share(gpu: Gpu, size: float, sizes: Sequence[float], daemon: MpsDaemon, chunk: int | None) -> Share:
    """A static partition of whole chunks, or without ``chunk`` a thread percentage."""
    sms = sms_of(gpu, size, chunk)
    return Share(
        kind="mps",
        gpu_uuid=gpu.uuid,
        sm_count=sms,
        memory_bytes=memory_of(gpu, size, sizes),
        pipe_directory=str(daemon.pipe),
        thread_percentage=round(100 * size, 2) if chunk is None else None,
        # Partitions end with their daemon and need no step of their own in the ledger.
        sm_partition=None if chunk is None else daemon.add_partition(gpu.uuid, (sms or 0) // chunk),
    )


def _undo(step: LedgerEntry) -> None:
    daemon = MpsDaemon(Path(str(step.undo["folder"])))
    if step.made == "folder":
        daemon.remove_folder()
        return
    if not daemon.processes():
        return
    with suppress(PartitionError):  # end() stops an unresponsive daemon by signals
        if not wait_until(lambda: not daemon.clients(), LEAVE_LIMIT_S):
            for client in daemon.clients():
                daemon.terminate_client(client)
    daemon.end()


def _reject_gpu_of_other_run(gpu: Gpu, ledger: Ledger) -> None:
    """Raise if another run has this GPU: two daemons on one GPU are time-sliced instead of sharing it."""
    for other in all_ledgers(ledger.path.parent)[0]:
        if other.path == ledger.path or not other.steps(gpu.uuid):
            continue
        state = other.owner_state()
        if state != "elsewhere":
            left = state == "dead"
            raise PartitionError(
                f"{gpu.uuid} on {Owner.current().host}",
                f"it is partitioned by run {other.run} (process {other.owner.pid}{', which has ended' if left else ''})",
                "Run `rayagi cleanup`"
                if left
                else "Wait for that run, leave this GPU out, or use backend='direct'",
            )


FIRST_STATIC = (13, 1)
"""First CUDA version with static SM partitions."""

MIB = 2**20


def sms_per_chunk(gpu: Gpu) -> int | None:
    """SMs of the smallest static partition; None for a MIG instance, a GPU before Ampere, or an unknown SM count."""
    if gpu.uuid.startswith("MIG-"):
        return None
    if gpu.compute_capability is None or gpu.compute_capability < (8, 0) or gpu.sm_count is None:
        return None
    return 8 if gpu.compute_capability >= (9, 0) else 4


def chunk_for(gpu: Gpu, sizes: Sequence[float]) -> int | None:
    """The chunk size in SMs if each share gets at least one chunk; else None."""
    chunk = sms_per_chunk(gpu)
    return chunk if chunk is not None and all(sms_of(gpu, size, chunk) for size in sizes) else None


def sms_of(gpu: Gpu, size: float, chunk: int | None) -> int | None:
    """SMs of a share, in whole chunks if ``chunk`` is given; None if the GPU's SM count is unknown."""
    if gpu.sm_count is None:
        return None
    if chunk is None:
        return max(1, floor(gpu.sm_count * size))
    # Fractions are cut off at Ray's smallest step: a third of 108 SMs is 0.3333 of them, and 9 chunks of 4 all the same.
    # Shares of a whole GPU do not exceed it: as many steps as there are chunks add up to less than one SM.
    return floor(gpu.sm_count * (size + FRACTION_STEP) / chunk) * chunk


def memory_of(gpu: Gpu, size: float, sizes: Sequence[float]) -> int:
    """Bytes of a share of these sizes, in whole MiB, the unit of MPS's memory limit."""
    return gpu.share_bytes(size, fsum(sizes)) // MIB * MIB
