"""The gradient of PPO's loss in a compiled program, in place of some hundred operations of torch and of its autograd.

With a few hundred samples and the networks of robots, torch's time is half matrix products and half what is around them.
Here a tile of samples goes through a network and back while its activations are in the cache, and gradients go straight into
the flat bucket.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from actors.policy_tensors import ActivationName
from collectives.compiler import CompilerError, load
from rayagi.native.headers import numbers, shared
from rayagi.native.packed_policy import ACTIVATIONS
from rayagi.native.pointers import pointer

LANES = 32
"""Samples of a tile."""
CHUNK = 16
"""Tiles that go all the way before the next ones do."""
_PAD = 384
"""Floats between tiles."""
TOLD = 5
"""Policy loss, value loss, entropy, KL, share of clipped ratios."""
_SUMS = 4
"""Of these, per tile; beside them log_std's gradient."""

_log = logging.getLogger(__name__)
_I64, _ADDRESS, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class _Network(ctypes.Structure):
    """Network of ppo.h."""

    _fields_ = (
        ("layers", _I64),
        *((name, _ADDRESS) for name in ("sizes", "weights", "biases")),
        *((name, _ADDRESS) for name in ("weight_gradients", "bias_gradients", "seen", "slopes")),
    )


class _Learner(ctypes.Structure):
    """Learner of ppo.h."""

    _fields_ = (
        ("policy", _Network),
        ("value", _Network),
        ("activation", _I64),
        ("samples", _I64),
        ("log_std", _ADDRESS),
        ("log_std_gradient", _ADDRESS),
        *((name, _DOUBLE) for name in ("clip_ratio", "value_clip", "value_coef", "entropy_coef")),
        ("sums", _ADDRESS),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Parameters of two networks whose ``grad`` stays where it is, and the settings of the loss.

    Attributes:
        policy, value: linear maps, each its weight (out, in) and bias (out,); float32
        activation: between them
        log_std: (action_dim,)
        clip_ratio, value_clip, value_coef, entropy_coef: as in PPOSpec
    """

    policy: Sequence[tuple[Tensor, Tensor]]
    value: Sequence[tuple[Tensor, Tensor]]
    activation: ActivationName
    log_std: Tensor
    clip_ratio: float
    value_clip: float | None
    value_coef: float
    entropy_coef: float


@cache
def library() -> ctypes.CDLL | None:
    """The program, the same for all networks; None where it cannot be compiled, which is logged once."""
    sizes = f"#define L {LANES}\n#define PAD {_PAD}"
    try:
        found = load("\n".join([sizes, numbers(torch.float32), shared("ppo.h")]))
    except CompilerError as error:
        _log.info("PPO learns by torch: %s", error)
        return None
    found.rayagi_ppo_tiles.argtypes = (_ADDRESS, _ADDRESS, _ADDRESS, _I64, _I64, _I64)
    found.rayagi_ppo_weights.argtypes = (_ADDRESS, _I64, _I64, _I64, _I64)
    found.rayagi_ppo_end.argtypes = (_ADDRESS, _I64, _ADDRESS)
    for name in ("rayagi_ppo_tiles", "rayagi_ppo_weights", "rayagi_ppo_end"):
        getattr(found, name).restype = None
    return found


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="learning")


class CompiledLoss:
    """PPO's loss by ``rayagi.algorithms.losses`` and a Gaussian head, and its gradient. Numbers do not depend on threads."""

    def __init__(self, program: ctypes.CDLL, trained: Trained) -> None:
        self._program = program
        self._trained = trained  # while its addresses are used
        self._kept: list[object] = []
        action_dim = len(trained.log_std)
        self._obs = self._tiles(trained.policy[0][0].shape[1])
        self._sums = torch.zeros((CHUNK, _SUMS + action_dim), dtype=torch.float64)
        assert trained.log_std.grad is not None
        self._learner = _Learner(
            self._network(trained.policy),
            self._network(trained.value),
            ACTIVATIONS[trained.activation],
            0,
            pointer(trained.log_std),
            pointer(trained.log_std.grad),
            trained.clip_ratio,
            math.inf if trained.value_clip is None else trained.value_clip,
            trained.value_coef,
            trained.entropy_coef,
            pointer(self._sums),
        )
        self._address = ctypes.addressof(self._learner)

    def __call__(self, fields: Sequence[Tensor], order: Tensor) -> Tensor:
        """Put the gradient of the samples' mean loss into the parameters' ``grad``.

        Args:
            fields: obs (B, obs_dim), actions (B, dim), log_probs, values, advantages and targets (B,) of a rollout
            order: the samples that count   (S,) int64

        Returns:
            TOLD, (5,) float32.
        """
        samples = self._learner.samples = len(order)
        plain = [field.to(torch.float32).contiguous() for field in fields]
        batch = (_ADDRESS * len(plain))(*map(pointer, plain))
        where, threads = pointer(order), torch.get_num_threads()
        self._sums.zero_()
        for first in range(0, samples, CHUNK * LANES):
            count = min(CHUNK * LANES, samples - first)
            self._chunk(ctypes.addressof(batch), where + 8 * first, count, threads, adds=first > 0)
        told = torch.empty(TOLD)
        self._program.rayagi_ppo_end(self._address, CHUNK, pointer(told))
        return told

    def _chunk(self, batch: int, order: int, count: int, threads: int, *, adds: bool) -> None:
        tiles = -(-count // LANES)
        borders = list(pairwise(tiles * part // threads for part in range(threads + 1)))
        _shared(
            threads,
            lambda part: self._program.rayagi_ppo_tiles(self._address, batch, order, count, *borders[part]),
        )
        _shared(
            threads, lambda part: self._program.rayagi_ppo_weights(self._address, tiles, part, threads, adds)
        )

    def _network(self, layers: Sequence[tuple[Tensor, Tensor]]) -> _Network:
        sizes = [layers[0][0].shape[1], *(len(bias) for _, bias in layers)]
        seen = [self._obs, *map(self._tiles, sizes[1:])]
        slopes = [self._obs, *map(self._tiles, sizes[1:])]  # nobody asks for those by the observations
        numbers_of = (_I64 * len(sizes))(*sizes)
        self._kept += [numbers_of, seen, slopes]
        gradients = [(weight.grad, bias.grad) for weight, bias in layers]
        columns = (*zip(*layers, strict=True), *zip(*gradients, strict=True), seen, slopes)
        return _Network(
            len(layers), ctypes.addressof(numbers_of), *(self._addresses(column) for column in columns)
        )

    def _tiles(self, units: int) -> Tensor:
        """Of a layer, in a chunk."""
        return torch.zeros(CHUNK * (units * LANES + _PAD))

    def _addresses(self, tensors: Sequence[Tensor]) -> int:
        array = (_ADDRESS * len(tensors))(*map(pointer, tensors))
        self._kept.append(array)
        return ctypes.addressof(array)


def _shared(threads: int, work: Callable[[int], None]) -> None:
    """Each thread does its part of the work; this one is the first."""
    waiting = [_pool(threads - 1).submit(work, part) for part in range(1, threads)]
    work(0)
    for one in waiting:
        one.result()


def compiled_loss(trained: Trained) -> CompiledLoss | None:
    """None where there is no compiler."""
    program = library()
    return None if program is None else CompiledLoss(program, trained)
