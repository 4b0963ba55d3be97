"""Client of the child process that runs an Isaac simulator (host.py)."""

from __future__ import annotations

import json
import mmap
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, from_numpy

from rayagi.envs.errors import EnvironmentOptionError, SimulatorLostError
from rayagi.envs.isaac import host

START_S = 900.0
"""Timeout of constructing a simulation. Isaac Sim compiles shaders for minutes the first time."""
STEP_S = 300.0
"""Timeout of a step or a reset; the first ones compile too."""
_POLL_S, _CLOSE_S = 0.2, 10.0
_TAIL_BYTES, _TAIL_LINES = 4096, 8

INSTALL: Mapping[str, str] = {
    "isaacgym": "Isaac Gym Preview 4 is an archive of NVIDIA's (developer.nvidia.com/isaac-gym) for Python 3.8: make an "
    "environment of that Python, `pip install -e isaacgym/python` there, then IsaacGymEnvs (github.com/isaac-sim/"
    "IsaacGymEnvs, `pip install -e .`)",
    "isaaclab": "Isaac Lab 2.x needs an environment of its own, with Isaac Sim (isaac-sim.github.io/IsaacLab): `pip install "
    "'isaaclab[isaacsim,all]' --extra-index-url https://pypi.nvidia.com` there",
}
"""Installation instructions by engine."""


class SimulatorProcess:
    """A child process with a simulation. The shared tensors are mapped on the first ``reset``."""

    def __init__(self, engine: str, task: str, *, num_envs: int, seed: int, python: str | None) -> None:
        """Start the process, and wait until it has constructed the simulation.

        Raises:
            EnvironmentOptionError: the Python lacks the simulator, or the simulator lacks the task.
            SimulatorLostError: the process exited, or did not respond for START_S.
        """
        self.name, self._num_envs = f"{engine}/{task}", num_envs
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in _release)
        self._memory = os.memfd_create("rayagi-isaac")
        self._replies, replies = os.pipe()
        self._buffer = b""
        chosen = python or sys.executable
        try:
            self._process = subprocess.Popen(
                [chosen, str(Path(host.__file__))],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(self._memory, replies),
                env=_environment(own_python=python is None),
                start_new_session=True,  # Ctrl-C goes to rayagi only, which then closes this process
            )
        except OSError as error:
            self._release()
            raise EnvironmentOptionError(self.name, f"python={chosen} does not start: {error}") from error
        finally:
            os.close(replies)
        job = {"engine": engine, "task": task, "num_envs": num_envs, "seed": seed}
        try:
            self.about = self._made(
                self._ask({**job, "memory": self._memory, "replies": replies}, START_S), chosen
            )
        except BaseException:
            self.close()
            raise
        self._tensors: dict[str, Tensor] = {}

    def _made(self, reply: Mapping[str, Any], python: str) -> Mapping[str, Any]:
        engine = self.name.partition("/")[0]
        if "missing" in reply:
            raise EnvironmentOptionError(
                self.name,
                f"{python} has no package {reply['missing']!r}. {INSTALL[engine]}. Then name that Python: "
                "--set env.kwargs.python=/path/to/bin/python",
            )
        if "failed" in reply:
            raise EnvironmentOptionError(self.name, f"{engine} cannot make it: {reply['failed']}")
        return reply

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The shared memory: actions (N, dim), obs and final_obs (N, obs_dim), rewards, terminated, truncated (N,)."""
        if not self._tensors:
            sizes = (self._num_envs, self.about["obs_dim"], self.about["action_dim"])
            os.ftruncate(self._memory, host.num_bytes(*sizes))
            arrays = host.views(mmap.mmap(self._memory, host.num_bytes(*sizes)), *sizes)
            self._tensors = {name: from_numpy(array) for name, array in arrays.items()}
        return self._tensors

    def reset(self, seed: int) -> Mapping[str, Tensor]:
        """Start new episodes in every environment, with this seed. Returns the tensors, with the first observations.

        Raises:
            SimulatorLostError: the simulator failed, exited or does not respond.
        """
        tensors = self.tensors
        self._do({"do": "reset", "seed": seed})
        return tensors

    def step(self) -> Mapping[str, Tensor]:
        """One step with the actions in the shared tensors. Raises as ``reset`` does."""
        self._do({"do": "step"})
        return self.tensors

    def _do(self, request: Mapping[str, Any]) -> None:
        reply = self._ask(request, STEP_S)
        if "failed" in reply:
            raise SimulatorLostError(self.name, f"failed with {reply['failed']}")

    def _ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(
            BrokenPipeError
        ):  # the process has exited; _line reads its last reply or reports the exit
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._line(limit_s))
        return reply

    def _line(self, limit_s: float) -> bytes:
        """The next line of its replies."""
        deadline = time.monotonic() + limit_s
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        while b"\n" not in self._buffer:
            if time.monotonic() > deadline:
                reason = f"has not answered for {limit_s:.0f} s"
                raise SimulatorLostError(self.name, f"{reason}{self._log_tail()}")
            # Polled before the pipe is read, which may still hold the last reply of an exited process.
            exit_code = self._process.poll()
            if poll.poll(_POLL_S * 1000):
                received = os.read(self._replies, 4096)
                self._buffer += received
                if received:
                    continue
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_POLL_S)
            if exit_code is not None:
                raise SimulatorLostError(self.name, f"ended with exit code {exit_code}{self._log_tail()}")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _log_tail(self) -> str:
        """The last lines of its output."""
        size = os.fstat(self._log.fileno()).st_size
        printed = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        lines = printed.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        return "; its last lines:\n  " + "\n  ".join(lines) if lines else ""

    def close(self) -> None:
        """Terminate the process. Safe to call twice."""
        if self._log.closed:
            return
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._release()

    def _release(self) -> None:
        self._log.close()
        os.close(self._memory)
        os.close(self._replies)


def _environment(*, own_python: bool) -> dict[str, str]:
    """Environment variables of the child; for another Python without those that locate this one's packages."""
    hidden = () if own_python else ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in hidden}
