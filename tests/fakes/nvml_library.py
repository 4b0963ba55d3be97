"""What stands where pynvml would load libnvidia-ml.so.1: counts calls, fails where asked to, and gives out handles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Self

import pynvml

from tests.fakes.gpus import GPU_IS_LOST, OK, FakeComputeInstance, FakeGpu, FakeGpuInstance

UNCOUNTED = ("nvmlInitWithFlags", "nvmlShutdown", "nvmlErrorString")
"""Calls that never fail by plan: without them there is no session to fail in."""


class ProcessKilled(BaseException):
    """The process under test ended here, as by SIGKILL: nothing may catch it and go on."""


class FakeLibrary:
    """The library: attributes are C functions that take ctypes values and return an error code."""

    def __init__(self, *gpus: FakeGpu, privileged: bool = True, missing: tuple[str, ...] = ()) -> None:
        self.gpus = list(gpus)
        self.privileged = privileged
        self.missing = missing
        """Functions that this driver is too old to have."""
        self.failing: dict[str, int] = {}
        """Functions that always end with an error code here."""
        self.init_code = OK
        self.process_names: dict[int, str] = {}
        self.open_sessions = 0
        self.calls: list[str] = []
        self.plan: dict[int, tuple[str, int]] = {}
        """What goes wrong at the n-th call, counted from 1: ("error", code), ("lost", 0), ("killed before", 0), or
        ("killed after", 0)."""
        self.killed = False
        """The process has ended: nothing that it still does may reach the driver."""
        self._handles: list[Any] = []

    def install(self, monkeypatch: Any) -> Self:
        """Be the library that pynvml has loaded."""
        monkeypatch.setattr(pynvml, "nvmlLib", self)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        monkeypatch.setattr(pynvml.NVMLError, "_errcode_to_string", dict(pynvml.NVMLError._errcode_to_string))
        return self

    def begin(self, plan: dict[int, tuple[str, int]] | None = None) -> None:
        """Count calls from here, with another plan of what goes wrong."""
        self.calls, self.plan, self.killed = [], plan or {}, False
        for gpu in self.gpus:
            gpu.lost = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(type(self), f"_{name}", None)
        if function is None or name in self.missing:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            if self.killed:
                raise ProcessKilled
            if name in UNCOUNTED:
                return function(self, *arguments)
            self.calls.append(name)
            what, code = self.plan.get(len(self.calls), ("", OK))
            self.killed = what.startswith("killed")
            if what == "killed before":
                raise ProcessKilled
            if what == "error":
                return code
            if what == "lost":
                for gpu in self.gpus:
                    gpu.lost = True
            if any(gpu.lost for gpu in self.gpus):
                return GPU_IS_LOST
            result = self.failing[name] if name in self.failing else function(self, *arguments)
            if what == "killed after":
                raise ProcessKilled
            return result

        return call

    # Values behind pointers.

    def _give(self, pointer: Any, thing: Any) -> int:
        """Write a handle for ``thing`` into a pointer argument."""
        if thing not in self._handles:
            self._handles.append(thing)
        address = 16 * (1 + next(i for i, known in enumerate(self._handles) if known == thing))
        ctypes.c_void_p.from_buffer(pointer._obj).value = address
        return OK

    def _give_at(self, array: Any, i: int, thing: Any) -> None:
        """The same for an element of an array."""
        slot = ctypes.c_void_p()
        self._give(ctypes.byref(slot), thing)
        ctypes.c_void_p.from_buffer(array, i * ctypes.sizeof(ctypes.c_void_p)).value = slot.value

    def _of(self, handle: Any) -> Any:
        """What a handle stands for: a tuple of a GPU's uuid, a GPU instance's id, a compute instance's id."""
        address = ctypes.cast(handle, ctypes.c_void_p).value
        return self._handles[address // 16 - 1]

    def _gpu(self, handle: Any) -> FakeGpu:
        return next(gpu for gpu in self.gpus if gpu.uuid == self._of(handle)[0])

    def _instance(self, handle: Any) -> FakeGpuInstance | None:
        return self._gpu(handle).instances.get(self._of(handle)[1])

    def _part(self, handle: Any) -> FakeComputeInstance | None:
        instance = self._instance(handle)
        return None if instance is None else instance.compute.get(self._of(handle)[2])
