"""Operations of a group's kernel for other programs in C."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from collectives.transports.shm import calls
from collectives.transports.shm.kernel import KernelBarrier, Operation


class CompiledGroup:
    """Implements CompiledOperations. See ``kernel.c``: an operation that it left is taken up where it was left."""

    def __init__(
        self,
        kernel: KernelBarrier,
        reduction: Operation,
        attend: Callable[[Callable[[], Operation | None]], None],
    ) -> None:
        """
        Args:
            kernel: of this member
            reduction: into each member's share
            attend: calls a program and completes what it leaves, until it leaves nothing
        """
        meeting = kernel.meeting(calls.encoded("barrier"))
        self._operations = {ctypes.addressof(operation): operation for operation in (reduction, meeting)}
        self._attend = attend
        self.run, self.member = kernel.addresses
        self.reduce_scatter, self.barrier = self._operations

    def attend(self, program: Callable[[], int | None]) -> None:
        """Call the program until it returns None, and complete the operations whose addresses it returns."""

        def left() -> Operation | None:
            address = program()
            return None if address is None else self._operations[address]

        self._attend(left)
