"""Detects, on a CPU, operations that would synchronise with a GPU or cannot be captured in a CUDA graph."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
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
    """An operation that a CUDA graph cannot capture."""


class NoWaiting(TorchDispatchMode):
    """Within it such operations raise. Masks as indices count, since their sizes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = _Numbers()

    def __enter__(self):
        self._numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._numbers.__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name.split("::")[1]
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if (masks or name in _WAITS) and not self._numbers.assigning:
            raise WaitedError(name)
        return operation(*args, **(kwargs or {}))


class _Numbers(TorchFunctionMode):
    """Knows when a plain number is assigned to a part: a kernel's argument on a GPU, an ``item`` on a CPU."""

    assigning = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.assigning = function is torch.Tensor.__setitem__ and isinstance(args[2], int | float)
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.assigning = False
