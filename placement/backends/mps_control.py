"""Client of NVIDIA's MPS control daemon. One daemon per GPU, with its own folder.

Commands and responses follow NVIDIA's "MPS v2 Interface" (Multi-Process Service), the default of every driver since Volta.
Every call has a time limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from placement.errors import PartitionError

CONTROL = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"

ANSWER_LIMIT_S = 10.0
"""Time limit for one command."""
START_LIMIT_S = 60.0
"""Time limit for the daemon to start, and again for its server. Without persistence mode the driver initialises each GPU of
the host first, which takes seconds per GPU."""
END_LIMIT_S = 10.0
"""Time limit for the processes to end after ``quit``, and again after each signal."""

POLL_S = 0.05

LONGEST_SOCKET_PATH = 107
"""Maximum bytes of a UNIX socket's path on Linux; beyond it the daemon fails to bind with a misleading message."""
LONGEST_SOCKET_NAME = "/control_privileged"

INSTALL = (
    "Install the utilities of NVIDIA's driver (nvidia-compute-utils), start the container with "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility, or use backend='direct'"
)

UNKNOWN_OPTION = "Unrecognized option"
"""Output of a control program that is too old for an option."""

NO_DAEMON = "Cannot find MPS control daemon"
"""Output of the control program if no daemon listens."""

BUSY = "Cannot send command to MPS control daemon"
"""Output of the control program while the daemon serves another one: it takes one at a time."""

ServerStatus = Literal["INITIALIZING", "ACTIVE", "FAULT"]


class DaemonTimeoutError(PartitionError):
    """The daemon has ended or does not respond; the state of its clients is unknown."""


class DaemonBusyError(PartitionError):
    """Another control program is connected to the daemon, and stays; its clients are not affected."""


class MpsDaemon:
    """One private control daemon, identified by its folder with ``pipe`` (sockets) and ``log``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pipe = folder / "pipe"
        self.log = folder / "log"

    @classmethod
    def from_pipe_directory(cls, pipe_directory: str) -> MpsDaemon:
        """The daemon of a pipe directory."""
        return cls(Path(pipe_directory).parent)

    def make_folder(self) -> None:
        """Create the folder, for this user only.

        Raises:
            PartitionError: it exists, its path is too long for a socket, or it cannot be created.
        """
        if len(os.fsencode(f"{self.pipe}{LONGEST_SOCKET_NAME}")) > LONGEST_SOCKET_PATH:
            raise PartitionError(
                f"the MPS pipe directory {self.pipe}",
                f"is too long for a socket in it ({LONGEST_SOCKET_PATH} bytes in all)",
                "Use a shorter path",
            )
        try:
            self.folder.mkdir(mode=0o700)
            self.pipe.mkdir(mode=0o700)
            self.log.mkdir(mode=0o700)
        except OSError as error:
            raise PartitionError(
                f"the MPS pipe directory {self.pipe}",
                f"could not be created ({error.strerror})",
                "Check the disk",
            ) from error

    def remove_folder(self) -> None:
        """Remove the folder and its contents. Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.exists():
            raise PartitionError(f"the MPS folder {self.folder}", "could not be removed", "Remove it by hand")

    def start(self, gpu_uuid: str, *, static: bool) -> None:
        """Start the daemon for one GPU and wait until it responds.

        Args:
            gpu_uuid: UUID of the GPU or MIG instance
            static: enable static SM partitions, which every client then has to name

        Raises:
            PartitionError: MPS is not installed, or the daemon exits with an error.
            DaemonTimeoutError: it does not respond in time.
        """
        start_log = self.log / "start.log"
        command = [CONTROL, "-d", *(["-S"] if static else [])]
        # Output to a file: the daemon keeps it open, so reading a pipe would never end. A new session: no Ctrl-C.
        with start_log.open("wb") as output:
            result = _run(
                command,
                self._environment() | {"CUDA_VISIBLE_DEVICES": gpu_uuid},
                limit_s=START_LIMIT_S,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        # A control program that does not know an option prints its usage and ends with 0: no daemon then runs.
        output_text = start_log.read_text(errors="replace")
        if UNKNOWN_OPTION in output_text:
            problem = "the control program does not know one of these options"
            raise PartitionError(f"`{' '.join(command)}` for {gpu_uuid}", problem, self._see_log())
        if result is None or result.returncode != 0:
            why = "did not return" if result is None else f"ended with exit code {result.returncode}"
            last = last_line(output_text)
            raise PartitionError(f"`{' '.join(command)}` for {gpu_uuid}", f"{why}: {last}", self._see_log())
        self._wait_until(self._is_responding, START_LIMIT_S, "start")

    def start_server(self) -> None:
        """Start the server for this user and wait until it is active. This detects a GPU that is in use.

        Raises:
            PartitionError: the server faults.
            DaemonTimeoutError: the server does not become active (the GPU is in use), or the daemon does not respond.
        """
        self.send_command(f"start_server -uid {os.getuid()}")
        self._wait_until(self._is_active, START_LIMIT_S, "have an active server")

    def servers(self) -> list[int]:
        """Process ids of the servers: none or one, since the daemon serves only this user."""
        return self._numbers("get_server_list")

    def server_status(self, server: int) -> ServerStatus:
        """Status of a server."""
        answer = " ".join(self.send_command(f"get_server_status {server}")).upper()
        for status in ("FAULT", "INITIALIZING", "ACTIVE"):
            if status in answer:
                return status
        raise self._unexpected(f"get_server_status {server}", answer)

    def clients(self) -> dict[int, int]:
        """Client process id -> server process id."""
        return {
            client: server
            for server in self.servers()
            for client in self._numbers(f"get_client_list {server}")
        }

    def terminate_client(self, client: int) -> None:
        """Let the server terminate a client's work. Killing the client with kernels in flight could harm the others."""
        server = self.clients().get(client)
        if server is not None:
            self.send_command(f"terminate_client {server} {client}")

    def add_partition(self, gpu_uuid: str, chunks: int) -> str:
        """Create a static SM partition; returns its name, for CUDA_MPS_SM_PARTITION. [unverified on GPU]

        Raises:
            PartitionError: the daemon does not know the command, or has too few free chunks.
        """
        command = f"sm_partition add {gpu_uuid} {chunks}"
        answer = "\n".join(self.send_command(command))
        name = parse_partition(answer, gpu_uuid)
        if name is None:
            raise PartitionError(f"`{command}`", f"was rejected: {last_line(answer)}", self._see_log())
        return name

    def send_command(self, command: str) -> list[str]:
        """Send one command; returns the non-empty lines of the response.

        Raises:
            DaemonTimeoutError: the daemon has ended or does not respond in time.
            DaemonBusyError: another control program uses it all the time.
            PartitionError: the command failed.
        """
        result = self._result_of(command)
        if result is None:
            problem = f"did not respond to `{command}` within {ANSWER_LIMIT_S:.0f} s"
            raise DaemonTimeoutError(f"the MPS daemon at {self.pipe}", problem, self._see_log())
        if result.returncode != 0:
            output = last_line(result.stdout + result.stderr)
            if BUSY in output:
                problem = f"has served another {CONTROL} for {ANSWER_LIMIT_S:.0f} s: `{command}` had no turn"
                raise DaemonBusyError(f"the MPS daemon at {self.pipe}", problem, f"End that {CONTROL}")
            kind = DaemonTimeoutError if NO_DAEMON in output else PartitionError
            raise kind(f"the MPS daemon at {self.pipe}", f"rejected `{command}`: {output}", self._see_log())
        return [line.strip() for line in result.stdout.splitlines() if line.strip()]

    def _result_of(self, command: str) -> subprocess.CompletedProcess[str] | None:
        """Of the control program; None if it does not end in time. Waits its turn: GMIs of one GPU ask at the same time."""
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while True:
            result = _run(
                [CONTROL],
                self._environment(),
                limit_s=ANSWER_LIMIT_S,
                input=f"{command}\n",
                text=True,
                capture_output=True,
            )
            if result is None or BUSY not in result.stdout + result.stderr or time.monotonic() > deadline:
                return result
            time.sleep(POLL_S)

    def end(self) -> None:
        """Stop daemon and server: by ``quit``, then SIGTERM, then SIGKILL. Idempotent.

        Raises:
            PartitionError: a process is still running.
        """
        if not self.processes():
            return
        with contextlib.suppress(PartitionError):
            self.send_command("quit")
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            for pid in self.processes() if number is not None else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number or signal.SIGTERM)
            if wait_until(lambda: not self.processes(), END_LIMIT_S):
                return
        pids = ", ".join(map(str, self.processes()))
        raise PartitionError(
            f"the MPS daemon at {self.pipe}", f"does not end (processes {pids})", "Kill it as root"
        )

    def processes(self) -> list[int]:
        """Daemon and server processes of this folder, whatever their current parent."""
        mark = f"CUDA_MPS_PIPE_DIRECTORY={self.pipe}".encode()
        return [pid for pid in own_processes((CONTROL, SERVER)) if mark in environment_of(pid)]

    def _environment(self) -> dict[str, str]:
        """This process's environment without CUDA_MPS_*, plus this daemon's directories."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
        return kept | {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log)}

    def _is_responding(self) -> bool:
        try:
            self.servers()
        except PartitionError:
            return False
        return True

    def _is_active(self) -> bool:
        status = [self.server_status(server) for server in self.servers()]
        if "FAULT" in status:
            raise PartitionError(f"the MPS server at {self.pipe}", "is in FAULT", self._see_log())
        return "ACTIVE" in status

    def _wait_until(self, condition: Callable[[], bool], limit_s: float, awaited: str) -> None:
        if not wait_until(condition, limit_s):
            problem = f"did not {awaited} within {limit_s:.0f} s"
            raise DaemonTimeoutError(f"the MPS daemon at {self.pipe}", problem, self._see_log())

    def _numbers(self, command: str) -> list[int]:
        lines = self.send_command(command)
        if not all(line.isdecimal() for line in lines):
            raise self._unexpected(command, " ".join(lines))
        return [int(line) for line in lines]

    def _unexpected(self, command: str, answer: str) -> PartitionError:
        return PartitionError(
            f"the MPS daemon at {self.pipe}", f"responded to `{command}` with {answer!r}", self._see_log()
        )

    def _see_log(self) -> str:
        """Last lines of the logs, for the error message: the logs are removed with the folder."""
        lines = [last_line(path.read_text(errors="replace")) for path in sorted(self.log.glob("*.log"))]
        ends = "; ".join(line for line in lines if line)
        found = (
            f"Its logs end with: {ends}"
            if ends
            else "It wrote no log; see `dmesg` and the driver's installation"
        )
        return f"{found}. backend='direct' needs no MPS"


def parse_partition(answer: str, gpu_uuid: str) -> str | None:
    """The partition's name in the daemon's response; None if there is none.

    Some versions print only the name (``GPU-.../Dx4A...``), others a sentence (``Partition ... created``), in which the
    name may lack the GPU.
    """
    bare = re.search(rf"{re.escape(gpu_uuid)}/\S+", answer)
    if bare:
        return bare.group()
    sentence = re.search(r"\bpartition\s+(\S+)\s+created", answer, re.IGNORECASE)
    return f"{gpu_uuid}/{sentence.group(1)}" if sentence else None


def _run(
    command: list[str], environment: dict[str, str], *, limit_s: float, **options: object
) -> subprocess.CompletedProcess[str] | None:
    """Run a command; None if it exceeds the limit."""
    try:
        return subprocess.run(command, env=environment, timeout=limit_s, check=False, **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return None
    except FileNotFoundError as error:
        raise PartitionError(command[0], "is not on PATH", INSTALL) from error
    except OSError as error:
        raise PartitionError(command[0], f"could not be run ({error.strerror})", INSTALL) from error


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Poll until the condition holds; False on timeout."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def own_processes(names: tuple[str, ...]) -> list[int]:
    """This user's processes that run one of these programs, directly or through an interpreter."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            words = (entry / "cmdline").read_bytes().split(b"\0")[:4]
            if entry.stat().st_uid == os.getuid() and {os.path.basename(os.fsdecode(w)) for w in words} & {
                *names
            }:
                found.append(int(entry.name))
    return found


def environment_of(pid: int) -> set[bytes]:
    """Initial environment of a process as ``NAME=value``; empty if it has ended or is not readable."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def last_line(text: str) -> str:
    """The last non-empty line, truncated for an error message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
