"""Compiled acting: normalise, infer and sample in one call per step, instead of some twenty torch operations.

A simulation step evicts torch's code and data from the caches: for the 32 environments of a GMI with two cores, acting with
torch takes four times as long after physics as alone. One short function that reads the weights in order does not suffer.
Without a compiler, agents act with torch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from actors.policy_tensors import ActivationName, PolicyTensors
from actors.rollout import Rollout
from collectives.kernels import Kernel
from collectives.mirrors import Mirrors
from rayagi.native.binding import numbers, pointer, shared, wrong_dtype

ACTING = Kernel(
    name="acting",
    module=__name__,
    reference="actors.roles:ActingByOperations",
    without="agents act with torch",
)
ACTIVATIONS: Mapping[ActivationName, int] = {"tanh": 0, "elu": 1, "relu": 2, "silu": 3}
LANES = 32
"""Environments per tile: activations of 256 units fit the L1 cache."""
_PRODUCTS_PER_THREAD = 4 << 20
"""Multiplications that are worth waking up a thread for."""


class _Policy(ctypes.Structure):
    """Policy of policy.h."""

    _fields_ = (
        ("layers", ctypes.c_int64),
        ("sizes", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("activation", ctypes.c_int64),
        ("normalise", ctypes.c_int64),
        ("shift", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("clip", ctypes.c_double),
        ("std", ctypes.c_void_p),
    )


POLICY_MIRRORS: Mirrors = {"Policy": _Policy, **{name.upper(): value for name, value in ACTIVATIONS.items()}}


class PackedPolicy:
    """A packed copy of a policy's weights. Normalisation and std are not copied.

    Attributes:
        address: of a policy.h Policy; valid while this object lives
        widest: units of the widest layer, inputs and padding included
    """

    def __init__(self, policy: PolicyTensors, rows: int, real: torch.dtype = torch.float32) -> None:
        """
        Args:
            policy: to be packed
            rows: ROWS of policy.h in the compiled program (rayagi_rows)
            real: type of the program's reals

        Raises:
            ValueError: a tensor has another type.
        """
        sizes = torch.tensor([policy.weights[0].shape[1], *(len(bias) for bias in policy.biases)])
        # Rows are padded to whole blocks: (out, in) -> (ceil(out / rows), in, rows).
        padded = [pad(weight.detach(), (0, 0, 0, -len(weight) % rows)) for weight in policy.weights]
        blocks = [weight.view(-1, rows, weight.shape[1]).transpose(1, 2) for weight in padded]
        weights = torch.cat([block.flatten() for block in blocks])
        biases = torch.cat([pad(bias.detach(), (0, -len(bias) % rows)) for bias in policy.biases])
        vectors = (policy.shift, policy.scale, policy.std)
        plain = [None if vector is None else vector.detach().contiguous() for vector in vectors]
        shift, scale, std = plain
        self._pointers = _Policy(
            len(policy.weights),
            pointer(sizes),
            pointer(weights, real),
            pointer(biases, real),
            ACTIVATIONS[policy.activation],
            scale is not None,
            None if shift is None else pointer(shift, real),
            None if scale is None else pointer(scale, real),
            policy.clip,
            None if std is None else pointer(std, real),
        )
        self._kept = [sizes, weights, biases, *plain]
        self.address = ctypes.addressof(self._pointers)
        self.widest = max(-(-size // rows) * rows for size in sizes.tolist())


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
    """The program, the same for every policy; None if it cannot be compiled, which is logged once."""
    return ACTING.made_or_none(_load)


def _load() -> ctypes.CDLL:
    program = "\n".join(
        [f"#define L {LANES}", numbers(torch.float32), shared("policy.h"), shared("acting.h")]
    )
    mirrors: Mirrors = {"Field": _Field, "Acting": _Acting, **POLICY_MIRRORS}
    found = ACTING.load(program, mirrors=mirrors)
    i64, address = ctypes.c_int64, ctypes.c_void_p
    found.rayagi_act.argtypes = (address, address, i64, i64, i64, address, i64, address)
    found.rayagi_act.restype = None
    found.rayagi_rows.restype = i64
    return found


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="acting")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads


class CompiledActing:
    """Implements actors.protocols.Acting. Results depend neither on threads nor on the number of environments.

    Attributes:
        policy: packed when this object was made
        address: of an acting.h Acting; valid while this object lives
    """

    def __init__(self, program: ctypes.CDLL, policy: PolicyTensors, rollout: Rollout, noise: Tensor) -> None:
        """Pack the policy's current weights. All tensors are on the CPU, their last dimension contiguous.

        Raises:
            ValueError: a tensor is not float32; actions may be int64.
        """
        self._call = program.rayagi_act
        self.policy = PackedPolicy(policy, int(program.rayagi_rows()))
        self._rollout, self._noise = rollout, noise  # kept: the program has their addresses
        self._actions = rollout.actions.unbind(0)
        discrete = rollout.actions.dtype == torch.int64
        reals = (noise, rollout.raw_obs, rollout.obs, rollout.outputs)
        for tensor in (*reals, *(() if discrete else (rollout.actions,))):
            if tensor.dtype != torch.float32:
                raise wrong_dtype(tensor, torch.float32)
        self._fields = _Acting(
            noise.shape[-1] if discrete else 0,
            *map(_field, (*reals, rollout.actions)),
        )
        self.address = ctypes.addressof(self._fields)
        products = rollout.num_envs * sum(weight.numel() for weight in policy.weights)
        self._spans = _spans(rollout.num_envs, products)
        self._scratch = [self.make_scratch() for _ in self._spans]
        self._scratch_pointers = [pointer(scratch) for scratch in self._scratch]

    @property
    def function(self) -> int:
        """The address of rayagi_act, for C code that calls it with ``policy.address`` and ``address``."""
        found = ctypes.cast(self._call, ctypes.c_void_p).value
        assert found is not None
        return found

    def make_scratch(self) -> Tensor:
        """Buffers for one thread: two layers' activations of a tile."""
        return torch.zeros((2, self.policy.widest, LANES), dtype=torch.float32)

    def __call__(self, t: int, obs: Tensor) -> Tensor:
        """Fill in step ``t`` of the rollout, without rewards and ends. Returns the actions."""
        if obs.dtype != torch.float32 or obs.stride(-1) != 1:
            obs = obs.to(torch.float32).contiguous()
        start, row = obs.data_ptr(), obs.stride(0) * obs.element_size()

        def act_on_span(k: int) -> None:
            self._call(
                self.policy.address,
                self.address,
                t,
                *self._spans[k],
                start,
                row,
                self._scratch_pointers[k],
            )

        others, futures = range(1, len(self._spans)), list[Future[None]]()
        try:
            for k in others:
                futures.append(_pool(len(others)).submit(act_on_span, k))
            act_on_span(0)
        finally:
            for future in futures:
                future.result()  # also after Ctrl-C: the tensors must live until all threads have ended
        return self._actions[t]


def compiled_acting(policy: PolicyTensors, rollout: Rollout, noise: Tensor) -> CompiledActing | None:
    """Acting into ``rollout`` with the policy's current weights; None without a compiler."""
    program = library()
    return None if program is None else CompiledActing(program, policy, rollout, noise)


def _field(tensor: Tensor) -> _Field:
    """The Field of a tensor (T, N, ...) with a contiguous last dimension, or (T, N)."""
    size = tensor.element_size()
    return _Field(tensor.data_ptr(), tensor.stride(0) * size, tensor.stride(1) * size)


def _spans(num_envs: int, products: int) -> list[tuple[int, int]]:
    """(begin, end) of each thread's environments, in whole tiles."""
    tiles = -(-num_envs // LANES)
    parts = max(1, min(torch.get_num_threads(), tiles, products // _PRODUCTS_PER_THREAD))
    borders = [min(num_envs, tiles * part // parts * LANES) for part in range(parts + 1)]
    return list(pairwise(borders))
