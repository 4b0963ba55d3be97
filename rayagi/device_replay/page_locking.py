"""Memory of this process that a CUDA device reads itself (zero-copy access)."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.page_locking import MAPPED, PORTABLE, page_lock, unlock
from rayagi.device_replay.buffers import UnavailableError


class PageLockedArray:
    """An array's memory, registered with the CUDA driver until ``close``.

    Attributes:
        device_address: where a kernel finds the first byte
    """

    def __init__(self, array: NDArray[np.generic]) -> None:
        """Register.

        Raises:
            UnavailableError: the driver refuses.
        """
        self._array = array
        """Kept, so that the memory is not unmapped while it is registered."""
        self.address = int(array.__array_interface__["data"][0])
        status = page_lock(self.address, array.nbytes, PORTABLE | MAPPED)
        self._is_registered = status == 0
        if not self._is_registered:
            raise UnavailableError(
                f"CUDA does not page-lock the store's {array.nbytes / 2**20:,.0f} MiB (error {status}): see ulimit -l, and "
                "the container's limit of locked memory"
            )
        try:
            self.device_address = _device_address(self.address)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unregister, after the device has finished its work. Safe to call twice."""
        if self._is_registered:
            self._is_registered = False
            torch.cuda.synchronize()
            unlock(self.address)

    def __del__(self) -> None:
        if (
            getattr(self, "_is_registered", False) and not sys.is_finalizing()
        ):  # the driver ends with the process
            self.close()


def _device_address(address: int) -> int:
    """Where the current device sees registered memory; torch does not have this call.

    Raises:
        UnavailableError: it does not see it.
    """
    found = ctypes.c_uint64()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2(
            ctypes.byref(found), ctypes.c_void_p(address), 0
        )
    except OSError as error:
        raise UnavailableError(f"the CUDA driver's library cannot be opened: {error}") from error
    if status != 0:
        raise UnavailableError(f"the device has no access to page-locked memory (error {status})")
    return found.value
