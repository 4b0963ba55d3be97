"""CUDA graph capture and replay of a repeated body of device work. On a CPU the body runs eagerly."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Replay:
    """Runs ``body`` on each call: on a GPU as one graph launch.

    The body reads and writes the same tensors every time, never synchronizes with the device, and uses none of torch's
    random generators. A warm-up run precedes the capture, since kernels and workspaces are created at first use.
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
            body: the work to repeat
            device: where it runs
            save: returns a copy of all state that the body changes
            undo: restores such a copy after the warm-up run
            captured: context entered during the capture, for libraries that need to know of it
        """
        self._body, self._device = body, device
        self._save, self._undo, self._captured = save, undo, captured
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run the body once."""
        if self._device.type != "cuda":
            self._body()
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        gc.collect()  # what earlier programs left, before memory is asked for
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Warm-up run on a side stream, with its effects undone.
            saved = self._save()
            self._body()
            self._undo(saved)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # device work of finalisers would be recorded
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
