"""Collectives for other C programs: addresses of the kernel's operations, and the loop that drives such a program."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager

from collectives.transports import calls
from collectives.transports.shm.kernel import KernelBarrier, Operation


class CompiledGroup:
    """Implements CompiledOperations. An operation that returned TRY_AGAIN (``kernel.c``) continues at the same step."""

    def __init__(
        self, kernel: KernelBarrier, reduction: Operation, turn: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """
        Args:
            kernel: of this member
            reduction: the reduce-scatter
            turn: context of exclusive use; closes the transport on an error
        """
        barrier_operation = kernel.barrier_operation(calls.encode_call("barrier"))
        self._operations = {
            ctypes.addressof(operation): operation for operation in (reduction, barrier_operation)
        }
        self._kernel, self._turn = kernel, turn
        self.run, self.member = kernel.addresses
        self.reduce_scatter, self.barrier = self._operations

    def drive_program(self, program: Callable[[], int | None]) -> None:
        """Call the program until it returns None, and complete the operations whose addresses it returns."""
        with self._turn():
            while (address := program()) is not None:
                self._kernel.check_open("compiled program")
                if address:
                    self._kernel.run(self._operations[address])
