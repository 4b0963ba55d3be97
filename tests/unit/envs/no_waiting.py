"""Refuses, on a CPU, what would make a host wait for a GPU, or what a CUDA graph cannot hold."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# item and truth values, sizes that depend on values, and constants that come from the host.
_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "unique_dim",
    "_unique2",
    "lift_fresh",
    "equal",
}


class WaitedError(AssertionError):
    """An operation that a graph cannot hold."""


class NoWaiting(TorchDispatchMode):
    """Within it such operations raise. Masks as indices count, since their sizes depend on values."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name.split("::")[1]
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masks or name in _WAITS:
            raise WaitedError(name)
        return operation(*args, **(kwargs or {}))
