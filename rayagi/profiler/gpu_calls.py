"""What recording adds to calls of CUDA: they are made without and with it, and timed from outside (RL-Scope, appendix C.2).

    python -m rayagi.profiler.gpu_calls     prints a line of JSON: of each case its calls, and ns without and with recording

Each repeat is a process of its own: once CUPTI has been started, torch does not detach it. A call costs what it costs in a
loop of this module, not in the program that is calibrated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from rayagi.profiler.calibration import CalibrationError
from rayagi.profiler.session import profile

REPEATS = 5
_CALLS_EACH, _BETWEEN_WAITS = 20_000, 500
_LONGEST_WAIT_S = 300.0
_NO_GPU = "calls of CUDA cannot be calibrated: torch sees no GPU here; leave out --gpu"


class CallTimes(NamedTuple):
    """CPU time of calls of one function: all of them without recording, and as many with it."""

    calls: int
    ns: int
    recorded_ns: int


def measured_once() -> dict[str, CallTimes]:
    """Times of one repeat, in a process that has not recorded yet. A case is a function, for copies with the direction.

    Raises:
        CalibrationError: there is no GPU that torch can use.
    """
    # Imported here: a program without a GPU is profiled without torch.
    import torch

    if not torch.cuda.is_available():
        raise CalibrationError(_NO_GPU)
    device = torch.zeros(1024, device="cuda")
    pinned = torch.zeros(1024).pin_memory()
    ready = torch.cuda.Event()
    cases: dict[str, Callable[[], object]] = {
        "cudaLaunchKernel": lambda: device.add_(1.0),
        "cudaMemcpyAsync, to the device": lambda: device.copy_(pinned, non_blocking=True),
        "cudaMemcpyAsync, to the host": lambda: pinned.copy_(device, non_blocking=True),
        "cudaStreamSynchronize": torch.cuda.current_stream().synchronize,
        "cudaEventRecord": ready.record,
    }
    plain = {name: _cpu_ns(call, torch.cuda.synchronize) for name, call in cases.items()}
    with (
        tempfile.TemporaryDirectory() as scratch,
        profile(Path(scratch) / "profile", gpu=True, intercept=False),
    ):
        recorded = {name: _cpu_ns(call, torch.cuda.synchronize) for name, call in cases.items()}
    return {name: CallTimes(_CALLS_EACH, plain[name], recorded[name]) for name in cases}


def _cpu_ns(call: Callable[[], object], wait: Callable[[], None]) -> int:
    """Of this thread. The queue of the GPU is emptied now and then, so that no call waits for it."""
    total = 0
    for _ in range(_CALLS_EACH // _BETWEEN_WAITS):
        wait()
        began = time.thread_time_ns()
        for _ in range(_BETWEEN_WAITS):
            call()
        total += time.thread_time_ns() - began
    wait()
    return total


def measured(repeats: int = REPEATS) -> list[dict[str, CallTimes]]:
    """Times of several processes, one after another.

    Raises:
        CalibrationError: there is no GPU that torch can use, or a process fails.
    """
    command = [sys.executable, "-m", "rayagi.profiler.gpu_calls"]
    found = []
    for _ in range(repeats):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_LONGEST_WAIT_S
            )
        except subprocess.TimeoutExpired:
            raise CalibrationError(
                f"calls of CUDA have not ended within {_LONGEST_WAIT_S:.0f} s: is the GPU busy?"
            ) from None
        if done.returncode:
            raise CalibrationError((done.stderr.strip().splitlines() or ["calls of CUDA failed"])[-1])
        found.append({name: CallTimes(*times) for name, times in json.loads(done.stdout).items()})
    return found


def function_costs(repeats: Iterable[Mapping[str, CallTimes]]) -> dict[str, float]:
    """What recording adds to a call of each function, in ns: the mean over its cases and all repeats."""
    calls: Counter[str] = Counter()
    added_ns: Counter[str] = Counter()
    for name, times in (pair for each in repeats for pair in each.items()):
        function = name.partition(",")[0]
        calls[function] += times.calls
        added_ns[function] += times.recorded_ns - times.ns
    # The difference of averages: both have as many calls. Below 0 it is noise.
    return {function: max(0.0, added_ns[function] / count) for function, count in calls.items()}


def main() -> int:
    """One repeat, printed; returns the exit code."""
    try:
        sys.stdout.write(json.dumps(measured_once()) + "\n")
    except CalibrationError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except ImportError:
        sys.stderr.write(f"{_NO_GPU} (there is no torch)\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
