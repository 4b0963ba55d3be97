"""What GPUs did for a process while it was recorded: kernels, copies, and the calls of CUDA that asked for them.

torch.profiler (Kineto on CUPTI) sees all CUDA of the process: kernels of Warp or CuPy count as torch's do. Nothing is
started before torch first uses a GPU. Events are kept in memory while a recording lasts, and written when it ends: a process
that is killed loses them. A program that runs torch.profiler itself cannot be recorded so. Kineto prints a line with
"External init callback must run in same thread", since it is started in a thread of its own: only its network interface is
then missing.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import queue
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from collectives.files import replacing
from rayagi.profiler.layout import EVENTS, GPU_CALLS, HEADER, MAGIC, MAX_DEPTH, RECORD, VERSION, Category
from rayagi.profiler.process_folder import read_clock

_logger = logging.getLogger(__name__)

_LONGEST_START_S, _LONGEST_STOP_S = 30.0, 300.0
"""Longest waits for torch.profiler; then recording goes on without the GPU's part."""
_NVML_PERIOD_S = 1 / 6
"""The shortest over which NVML takes its means."""


class Activity(NamedTuple):
    """An event of Kineto. Times in ns of Unix time; ``lane`` is a stream of a GPU, or a thread."""

    start_ns: int
    end_ns: int
    name: str
    category: Category
    device: int
    lane: int


class GpuRecorder:
    """Starts and stops torch.profiler in a thread of its own, since whoever starts it must stop it."""

    def __init__(self, intern_all: Callable[[list[str]], list[int]], limit_bytes: int) -> None:
        self._intern_all, self._room = intern_all, limit_bytes // RECORD.size
        self._numbers = itertools.count()
        self._samples: list[tuple[int, float]] = []
        self._owner: _Owner | None = None
        self._is_wanted = self._is_queued = False
        self.lost = 0
        """Events of which nothing could be written."""

    def start(self) -> None:
        """Record from now on, or from when torch first uses a GPU."""
        self._is_wanted = True
        self.torch_is_imported()

    def torch_is_imported(self) -> None:
        """Torch may have been imported, or a part of it."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        call_when_used = getattr(cuda, "_lazy_call", None)
        if not self._is_wanted or self._is_queued or self._owner is not None or call_when_used is None:
            return
        self._is_queued = True
        call_when_used(self._begin)

    def _begin(self) -> None:
        self._is_queued = False
        if not self._is_wanted or self._owner is not None:
            return
        owner = _Owner()
        if not owner.has_begun():
            return
        if self._is_wanted:
            self._owner = owner
        else:  # recording ended meanwhile, in another thread
            owner.activities()

    def stop(self, folder: Path) -> None:
        """End it, and write what was recorded into the process's folder."""
        self._is_wanted = False
        owner, self._owner = self._owner, None
        if owner is None:
            return
        activities = owner.activities()
        self._samples += owner.samples
        self._write(folder, activities)

    def nvml_utilization(self) -> dict[str, float]:
        """Mean by device of what NVML said while it was recorded, in percent."""
        return {
            str(device): mean(percent for at, percent in self._samples if at == device)
            for device in sorted({device for device, _ in self._samples})
        }

    def forget(self) -> None:
        """In a forked child, which has no thread of its own and cannot use the GPU of its parent."""
        self._owner, self._is_wanted, self._is_queued, self.lost = None, False, False, 0

    def _write(self, folder: Path, activities: Iterable[Activity]) -> None:
        """One file for each stream of a GPU, and each thread's calls beside its other events."""
        clock = read_clock()
        shift = clock["monotonic_ns"] - clock["unix_ns"]
        lanes: dict[tuple[bool, int, int], list[Activity]] = defaultdict(list)
        for each in activities:
            lanes[each.category.is_gpu, each.device if each.category.is_gpu else 0, each.lane].append(each)
        number = next(self._numbers)
        for (on_gpu, device, lane), found in lanes.items():
            stem = f"gpu{device}.{lane}" if on_gpu else str(lane)
            path = folder / f"{stem}-{number}{EVENTS if on_gpu else GPU_CALLS}"
            found.sort()
            kept = found[: self._room]
            self._room -= len(kept)
            if not kept:
                self.lost += len(found)
                continue
            names = self._intern_all([each.name for each in kept])
            depth = 0 if on_gpu else MAX_DEPTH
            head = HEADER.pack(
                MAGIC, VERSION, RECORD.size, lane, len(kept), len(kept), len(found) - len(kept),
                kept[0].start_ns + shift, found[len(kept)].start_ns + shift if len(found) > len(kept) else 0,
            )  # fmt: skip
            records = (
                RECORD.pack(each.start_ns + shift, each.end_ns + shift, name, each.category, depth, 0)
                for each, name in zip(kept, names, strict=True)
            )
            # Whole or not at all: the header says how many records there are.
            try:
                with replacing(path) as beside:
                    beside.write_bytes(head + b"".join(records))
            except OSError as error:
                self.lost += len(found)
                _logger.warning(
                    "%d events of the GPU cannot be written to %s: %s", len(found), path, error.strerror
                )


class _Owner:
    """The thread that has started torch.profiler, and waits to stop it."""

    def __init__(self) -> None:
        self._begun: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._results: list[Activity] = []
        self.samples: list[tuple[int, float]] = []
        """Device and percent."""
        self._thread = threading.Thread(target=self._run, name="rayagi-gpu-recorder", daemon=True)
        self._thread.start()

    def has_begun(self) -> bool:
        """Wait until it records; whether it does."""
        try:
            error = self._begun.get(timeout=_LONGEST_START_S)
        except queue.Empty:
            error = TimeoutError(f"it has not started within {_LONGEST_START_S:.0f} s")
            self._is_over.set()
        if error is not None:
            _logger.warning("the GPU is not recorded: %s: %s", type(error).__name__, error)
        return error is None

    def activities(self) -> list[Activity]:
        """Stop it; what it recorded."""
        self._is_over.set()
        self._thread.join(_LONGEST_STOP_S)
        if self._thread.is_alive():
            _logger.warning("what the GPU did is lost: torch.profiler has not ended")
            return []
        return self._results

    def _run(self) -> None:
        try:
            # Imported here: a program without a GPU is profiled without torch.
            from torch.profiler import ProfilerActivity, profile

            recording = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
            recording.start()
        except Exception as error:  # of CUPTI, of another profiler, of a torch without CUDA
            self._begun.put(error)
            return
        self._begun.put(None)
        self._sample()
        try:
            recording.stop()
            found = recording.profiler.kineto_results.events()  # type: ignore[union-attr]  # set by start
            own = threading.get_native_id()  # its calls are the recorder's, not the program's
            self._results = [
                each
                for each in activities_of(found, _thread_ids())
                if each.category.is_gpu or each.lane != own
            ]
        except Exception as error:
            _logger.warning("what the GPU did is lost: %s: %s", type(error).__name__, error)

    def _sample(self) -> None:
        """NVML's utilisation of all devices, until recording is over."""
        # Imported here: a program without a GPU is profiled without torch.
        import torch

        try:
            while not self._is_over.wait(_NVML_PERIOD_S):
                self.samples += [
                    (device, float(torch.cuda.utilization(device)))
                    for device in range(torch.cuda.device_count())
                ]
        except Exception as error:  # no NVML, or no such figure of this device, as of a MIG instance
            _logger.info("NVML's utilisation is not recorded: %s: %s", type(error).__name__, error)
            self._is_over.wait()


def activities_of(events: Iterable[Any], threads: dict[int, int]) -> Iterable[Activity]:
    """Kernels, copies and calls of CUDA among Kineto's events.

    Args:
        events: Kineto's
        threads: kernel ids of threads by what CUPTI calls them, the low 32 bits of their pthread_t
    """
    for event in events:
        start, name = event.start_ns(), event.name()
        end = start + max(0, event.duration_ns())
        if event.device_type().name == "CUDA":
            is_copy = name.startswith(("Memcpy", "Memset"))
            category = Category.GPU_COPY if is_copy else Category.GPU_KERNEL
            yield Activity(start, end, name, category, event.device_index(), event.device_resource_id())
        elif name.startswith("cu"):  # others tell of CUPTI's buffers
            thread = event.device_resource_id()
            known = threads.get(
                thread, thread & 0xFFFFFFFF
            )  # of one that has ended CUPTI's own number, if any
            yield Activity(start, end, name, Category.GPU_RUNTIME, 0, known)


def _thread_ids() -> dict[int, int]:
    return {
        ctypes.c_int32(each.ident).value: each.native_id
        for each in threading.enumerate()
        if each.ident is not None and each.native_id is not None
    }
