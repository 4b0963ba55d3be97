"""A body of device work, repeated: as it stands on a CPU, captured once and replayed as one CUDA graph on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Replay:
    """``body`` again and again, with one launch each time where there is a GPU. [unverified on GPU]

    The body reads and writes the same tensors every time, never waits for the device, and draws no random numbers of
    torch's generators. It is rehearsed once before it is captured, since kernels and workspaces are made at first use.
    """

    def __init__(
        self,
        body: Callable[[], None],
        device: torch.device,
        *,
        save: Callable[[], Any],
        undo: Callable[[Any], object],
        captured: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Nothing is captured before the first call.

        Args:
            body: what is repeated
            device: where it runs
            save: a copy of all that the body changes
            undo: puts such a copy back, after the rehearsal
            captured: entered while torch captures, for libraries that must be told
        """
        self._body, self._device = body, device
        self._save, self._undo, self._captured = save, undo, captured
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Once more."""
        if self._device.type != "cuda":
            self._body()
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            saved = self._save()
            self._body()
            self._undo(saved)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()  # what is finalised while capturing would be recorded
        try:
            with (
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
                self._captured(),
            ):
                self._body()
        finally:
            if collecting:
                gc.enable()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return graph
