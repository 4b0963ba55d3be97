"""Batches that the CPU gathers into page-locked memory, and that are copied to the device whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.replay import Gatherer, ReplayStore, Selection, Subscription
from actors.replay.subscriptions import Gathered, ReadableShards
from rayagi.device_replay.buffers import DeviceBatch, StagingBuffers, as_batch, batch_fields


class CopyGatherer:
    """Available for every store and device."""

    def __init__(
        self,
        store: ReplayStore | ReadableShards,
        subscriptions: Sequence[Subscription],
        n: int,
        device: torch.device,
    ) -> None:
        """Arguments and errors as of ``Gatherer``; ``device``: of the batches."""
        fields = batch_fields(store.schema, subscriptions, n)
        self._staging = StagingBuffers(fields, device)
        self._host = as_batch(self._staging.host, subscriptions)
        self._batch = as_batch(self._staging.there, subscriptions)
        self._gatherer = Gatherer(store, subscriptions, n, out=self._host.values)

    def stage(self, selection: Selection) -> Gathered:
        """Gather on the host."""
        self._staging.wait()
        found = self._gatherer(selection)
        for name, mask in found.masks.items():
            self._host.masks[name].numpy()[...] = mask
        self._host.current.numpy()[:] = found.current
        return found

    def upload(self) -> DeviceBatch:
        """Copy what was staged."""
        self._staging.upload()
        return self._batch

    def __call__(self, selection: Selection) -> DeviceBatch:
        """The windows of these n rows.

        Raises:
            ReplayError: as of ``Gatherer``.
        """
        self.stage(selection)
        return self.upload()

    def close(self) -> None:
        """Nothing is to be released."""
