"""Acting in a compiled program: one call a step in place of some twenty operations of torch.

Between two steps a simulator has the caches to itself, and each operation of torch comes back to cold code: for the 32
environments of a GMI that shares two cores, acting takes four times as long after physics as by itself. One short function
that reads the weights in order does not. Where there is no compiler, agents act by torch.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from actors.policy_tensors import PolicyTensors
from actors.rollout import Rollout
from collectives.kernels import Kernel
from collectives.mirrors import Mirrors
from rayagi.native import packed_policy
from rayagi.native.headers import numbers, shared
from rayagi.native.packed_policy import PackedPolicy
from rayagi.native.pointers import pointer

ACTING = Kernel(
    name="acting",
    module=__name__,
    reference="actors.agent:ActingByOperations",
    without="agents act by torch",
)
LANES = 32
"""Environments of a tile: its activations fit the first-level cache for layers of 256 units."""
_PRODUCTS_PER_THREAD = 4 << 20
"""Multiplications that are worth waking a thread for."""


class _Field(ctypes.Structure):
    """Field of acting.h."""

    _fields_ = (("start", ctypes.c_void_p), ("step", ctypes.c_int64), ("row", ctypes.c_int64))


class _Acting(ctypes.Structure):
    """Acting of acting.h."""

    _fields_ = (
        ("choices", ctypes.c_int64),
        *((name, _Field) for name in ("noise", "raw_obs", "obs", "outputs", "actions")),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The program, the same for every policy; None where it cannot be compiled, which is logged once."""
    return ACTING.made_or_none(_load)


def _load() -> ctypes.CDLL:
    program = "\n".join(
        [f"#define L {LANES}", numbers(torch.float32), shared("policy.h"), shared("acting.h")]
    )
    mirrors: Mirrors = {"Field": _Field, "Acting": _Acting, **packed_policy.MIRRORS}
    found = ACTING.load(program, mirrors=mirrors)
    i64, address = ctypes.c_int64, ctypes.c_void_p
    found.rayagi_act.argtypes = (address, address, i64, i64, i64, address, i64, address)
    found.rayagi_act.restype = None
    found.rayagi_rows.restype = i64
    return found


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="acting")


class CompiledActing:
    """Implements actors.protocols.Acting. Numbers depend neither on threads nor on an environment's neighbours.

    Attributes:
        policy: as it was
        address: of acting.h's Acting, while this object lives
    """

    def __init__(self, program: ctypes.CDLL, policy: PolicyTensors, rollout: Rollout, noise: Tensor) -> None:
        """Pack the policy as it is now. Everything is on the host, and the last dimension of each tensor is dense."""
        self._call = program.rayagi_act
        self.policy = PackedPolicy(policy, int(program.rayagi_rows()))
        self._rollout, self._noise = rollout, noise  # kept while their addresses are used
        self._actions = rollout.actions.unbind(0)
        discrete = rollout.actions.dtype == torch.int64
        self._fields = _Acting(
            noise.shape[-1] if discrete else 0,
            *map(_field, (noise, rollout.raw_obs, rollout.obs, rollout.outputs, rollout.actions)),
        )
        self.address = ctypes.addressof(self._fields)
        products = rollout.num_envs * sum(weight.numel() for weight in policy.weights)
        self._spans = _spans(rollout.num_envs, products)
        self._scratch = [self.make_scratch() for _ in self._spans]
        self._scratch_pointers = [pointer(scratch) for scratch in self._scratch]

    @property
    def function(self) -> int:
        """The address of rayagi_act, for programs that call it themselves, with ``policy.address`` and ``address``."""
        found = ctypes.cast(self._call, ctypes.c_void_p).value
        assert found is not None
        return found

    def make_scratch(self) -> Tensor:
        """What a thread needs to act in."""
        return torch.zeros((2, self.policy.widest, LANES))

    def __call__(self, t: int, obs: Tensor) -> Tensor:
        """Fill step ``t`` of the rollout but for its outcome. Returns the actions."""
        if obs.dtype != torch.float32 or obs.stride(-1) != 1:
            obs = obs.to(torch.float32).contiguous()
        start, row = obs.data_ptr(), obs.stride(0) * obs.element_size()

        def on_span(place: int) -> None:
            self._call(
                self.policy.address,
                self.address,
                t,
                *self._spans[place],
                start,
                row,
                self._scratch_pointers[place],
            )

        others = range(1, len(self._spans))
        waiting = [_pool(len(others)).submit(on_span, place) for place in others] if others else []
        on_span(0)
        for one in waiting:
            one.result()
        return self._actions[t]


def compiled_acting(policy: PolicyTensors, rollout: Rollout, noise: Tensor) -> CompiledActing | None:
    """Acting through ``rollout`` with the policy as it is now; None where there is no compiler."""
    program = library()
    return None if program is None else CompiledActing(program, policy, rollout, noise)


def _field(tensor: Tensor) -> _Field:
    """Rows (T, N, ...) with a dense last dimension, or numbers (T, N)."""
    size = tensor.element_size()
    return _Field(tensor.data_ptr(), tensor.stride(0) * size, tensor.stride(1) * size)


def _spans(num_envs: int, products: int) -> list[tuple[int, int]]:
    """(begin, end) of environments for each thread, whole tiles."""
    tiles = -(-num_envs // LANES)
    parts = max(1, min(torch.get_num_threads(), tiles, products // _PRODUCTS_PER_THREAD))
    borders = [min(num_envs, tiles * part // parts * LANES) for part in range(parts + 1)]
    return list(pairwise(borders))
