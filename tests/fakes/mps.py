"""The stand-in of nvidia-cuda-mps-control on PATH, and what a test sees and does around it."""

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from placement.backends import mps, mps_control
from placement.backends.mps_control import MpsDaemon
from placement.types import Gpu

FAKES = Path(__file__).resolve().parent
ROOT = FAKES.parents[1]


def path_with_fakes() -> str:
    """The interpreter itself comes next: a version manager's ``python3`` would start a shell before each command."""
    interpreter = Path(sys.executable).resolve().parent
    return os.pathsep.join([str(FAKES), str(interpreter), os.environ["PATH"]])


def gpu(uuid="GPU-1", *, capability=(9, 0), sms=132, index=0) -> Gpu:
    return Gpu(
        index=index, uuid=uuid, name="NVIDIA H100 80GB HBM3", memory_total_bytes=80 * 2**30,
        sm_count=sms, compute_capability=capability,
    )  # fmt: skip


class Surroundings:
    """A place for pipe directories and ledgers, and everything that partitioning may leave in it."""

    def __init__(self, root: Path) -> None:
        self.folders, self.ledgers = root / "pipes", root / "ledgers"
        self.folders.mkdir()

    def daemons(self) -> list[MpsDaemon]:
        return [MpsDaemon(folder) for folder in sorted(self.folders.iterdir())]

    def left(self) -> tuple[list[str], list[str], list[int]]:
        """Folders, ledgers and processes; all empty where nothing was left."""
        folders = [folder.name for folder in self.folders.iterdir()]
        ledgers = [path.name for path in self.ledgers.glob("*.json")]
        mark = f"CUDA_MPS_PIPE_DIRECTORY={self.folders}/".encode()
        processes = [
            pid
            for pid in mps_control.own_processes((mps_control.CONTROL,))
            if any(word.startswith(mark) for word in mps_control.environment_of(pid))
        ]
        return folders, ledgers, processes

    def behave(self, words: str) -> None:
        """From now on, all daemons here."""
        for daemon in self.daemons():
            (daemon.pipe / "behave").write_text(words)


NOTHING = ([], [], [])


@contextmanager
def surroundings(patch: pytest.MonkeyPatch, behave: str = ""):
    """The stand-in on PATH, with limits for tests; ends what is left when the block does."""
    # Short: sockets are in it.
    with tempfile.TemporaryDirectory(prefix="rg", dir="/tmp", ignore_cleanup_errors=True) as root:
        place = Surroundings(Path(root))
        patch.setenv("PATH", path_with_fakes())
        patch.setenv("FAKE_MPS", behave)
        patch.setattr(mps, "FOLDERS", place.folders)
        patch.setattr(mps, "LEAVE_LIMIT_S", 0.5)
        for name, limit_s in (("ANSWER_LIMIT_S", 5.0), ("START_LIMIT_S", 10.0), ("END_LIMIT_S", 5.0)):
            patch.setattr(mps_control, name, limit_s)
        try:
            yield place
        finally:
            place.behave("")
            for daemon in place.daemons():
                daemon.end()


@contextmanager
def client(daemon: MpsDaemon):
    """A process that the daemon takes for its client."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (daemon.pipe / "clients").write_text(str(process.pid))
    try:
        yield process
    finally:
        process.kill()
        process.wait()
