"""Compiled gradient of PPO's loss.

It replaces some hundred operations of torch and autograd per minibatch. For minibatches of a few hundred samples, torch
spends half of its time outside matrix products. Here a tile of samples passes forward and backward through a network while
its activations are in the cache, and gradients are written straight into the flat bucket.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.policy_tensors import ActivationName
from collectives.mirrors import Mirrors
from rayagi.native.binding import pointer
from rayagi.native.learning import CHUNK, LANES, PAD
from rayagi.native.packed_policy import ACTIVATIONS
from rayagi.native.thread_pool import ThreadPool

NUM_STATS = 5
"""Policy loss, value loss, entropy, KL, share of clipped ratios."""
_SUMS = 5
"""NUM_SUMS of ppo.h: sums per tile, without log_std's gradient."""

_I64, _ADDRESS, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class _Network(ctypes.Structure):
    """Network of backprop.h."""

    _fields_ = (
        ("layers", _I64),
        *((name, _ADDRESS) for name in ("sizes", "weights", "biases")),
        *((name, _ADDRESS) for name in ("weight_gradients", "bias_gradients", "activations", "grads")),
    )


class _Learner(ctypes.Structure):
    """Learner of ppo.h."""

    samples: int
    _fields_ = (
        ("policy", _Network),
        ("value", _Network),
        ("activation", _I64),
        ("samples", _I64),
        ("log_std", _ADDRESS),
        ("log_std_gradient", _ADDRESS),
        *((name, _DOUBLE) for name in ("clip_ratio", "value_clip", "value_coef", "entropy_coef", "weight")),
        ("sums", _ADDRESS),
    )


class _Batch(ctypes.Structure):
    """Batch of ppo.h."""

    _fields_ = tuple(
        (name, _ADDRESS) for name in ("obs", "actions", "log_probs", "values", "advantages", "targets")
    )


MIRRORS: Mirrors = {
    "Network": _Network,
    "Learner": _Learner,
    "Batch": _Batch,
    "NUM_SUMS": _SUMS,
    **{name.upper(): value for name, value in ACTIVATIONS.items()},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Parameters of the two networks and settings of the loss. Each parameter's ``grad`` must keep its address.

    Attributes:
        policy, value: layers, each its weight (out, in) and bias (out,); float32
        activation: between layers
        log_std: of a Gaussian policy, (action_dim,); None: categorical, the outputs are logits
        clip_ratio, value_clip, value_coef, entropy_coef: as in PPOSpec
        weight: of this trainer's gradient in the mean over trainers
    """

    policy: Sequence[tuple[Tensor, Tensor]]
    value: Sequence[tuple[Tensor, Tensor]]
    activation: ActivationName
    log_std: Tensor | None
    clip_ratio: float
    value_clip: float | None
    value_coef: float
    entropy_coef: float
    weight: float


class CompiledGradient:
    """Gradient of PPO's loss as in ``rayagi.algorithms.losses``, for a Gaussian or a categorical policy.

    It does not depend on the number of threads.
    """

    def __init__(self, library: ctypes.CDLL, trained: Trained) -> None:
        """``library``: of ``rayagi.native.learning``."""
        self._library, self._trained = library, trained  # kept: the program has the parameters' addresses
        self._kept: list[object] = []
        self._obs = self._tiles(trained.policy[0][0].shape[1])
        self._sums = torch.zeros((CHUNK, _SUMS + len(trained.policy[-1][1])), dtype=torch.float64)
        self._pool = ThreadPool(library, torch.get_num_threads())
        log_std = trained.log_std
        log_std_grad = None if log_std is None else log_std.grad
        self._learner = _Learner(
            self._network(trained.policy),
            self._network(trained.value),
            ACTIVATIONS[trained.activation],
            0,
            None if log_std is None else pointer(log_std),
            None if log_std_grad is None else pointer(log_std_grad),
            trained.clip_ratio,
            math.inf if trained.value_clip is None else trained.value_clip,
            trained.value_coef,
            trained.entropy_coef,
            trained.weight,
            pointer(self._sums),
        )

    @contextmanager
    def minibatches(self, fields: Sequence[Tensor]) -> Iterator[Minibatches]:
        """The samples of a rollout, for ``Minibatches.gradient``. The threads run inside the block.

        Args:
            fields: obs (B, obs_dim), actions (B, dim) or (B,) int64, log_probs, values, advantages and targets (B,)

        Raises:
            ValueError: a discrete action is outside the policy's choices.
        """
        obs, actions, *others = fields
        taken = self._choices(actions) if self._trained.log_std is None else actions.to(torch.float32)
        plain = [obs.to(torch.float32), taken, *(field.to(torch.float32) for field in others)]
        pool = self._current_pool()
        with pool.running():
            yield Minibatches(self._library, self._learner, pool, [field.contiguous() for field in plain])

    def values(self, obs: Tensor) -> Tensor:
        """V(s) of the value network: (B, obs_dim) -> (B,)."""
        plain, pool = obs.to(torch.float32).contiguous(), self._current_pool()
        values = torch.empty(len(plain))
        at = ctypes.addressof(self._learner), pool.address, pointer(plain), len(plain), pointer(values)
        with pool.running():
            self._library.rayagi_ppo_values(*at)
        return values

    def _choices(self, choices: Tensor) -> Tensor:
        """Check discrete actions and convert them to (B,) int64: the program uses them as indices unchecked.

        Raises:
            ValueError: one is outside the policy's choices.
        """
        count = len(self._trained.policy[-1][1])
        if choices.ndim != 1 or choices.is_floating_point():
            raise ValueError(
                f"discrete actions must be integers (B,), not {choices.dtype} {tuple(choices.shape)}"
            )
        wrong = ((choices < 0) | (choices >= count)).nonzero()
        if len(wrong):
            sample = int(wrong[0])
            raise ValueError(
                f"sample {sample} has action {int(choices[sample])}: the policy's are 0 to {count - 1}"
            )
        return choices.to(torch.int64)

    def _current_pool(self) -> ThreadPool:
        if torch.get_num_threads() != self._pool.threads:
            self._pool = ThreadPool(self._library, torch.get_num_threads())
        return self._pool

    def _network(self, layers: Sequence[tuple[Tensor, Tensor]]) -> _Network:
        sizes = [layers[0][0].shape[1], *(len(bias) for _, bias in layers)]
        activations = [self._obs, *map(self._tiles, sizes[1:])]
        grads = [self._obs, *map(self._tiles, sizes[1:])]  # the first is not used
        c_sizes = (_I64 * len(sizes))(*sizes)
        self._kept += [c_sizes, activations, grads]
        gradients = [(weight.grad, bias.grad) for weight, bias in layers]
        columns = (*zip(*layers, strict=True), *zip(*gradients, strict=True), activations, grads)
        return _Network(
            len(layers), ctypes.addressof(c_sizes), *(self._addresses(column) for column in columns)
        )

    def _tiles(self, units: int) -> Tensor:
        """A layer's activations: CHUNK tiles of (units, LANES), and PAD floats after each."""
        return torch.zeros(CHUNK * (units * LANES + PAD))

    def _addresses(self, tensors: Sequence[Tensor]) -> int:
        array = (_ADDRESS * len(tensors))(*map(pointer, tensors))
        self._kept.append(array)
        return ctypes.addressof(array)


class Minibatches:
    """Samples of a rollout, of which minibatches are drawn.

    Attributes:
        pool: threads that compute
    """

    def __init__(
        self, library: ctypes.CDLL, learner: _Learner, pool: ThreadPool, fields: Sequence[Tensor]
    ) -> None:
        self.pool, self._fields = pool, fields  # kept: the program has their addresses
        self._library, self._learner = library, learner
        self._batch = _Batch(*map(pointer, fields))

    def gradient(self, order: Tensor) -> Tensor:
        """Overwrite the parameters' ``grad`` with the gradient of the samples ``order``, (S,) int64.

        Returns:
            The NUM_STATS statistics of the minibatch, (5,) float32.
        """
        order, stats = order.contiguous(), torch.empty(NUM_STATS)
        self._learner.samples = len(order)
        learner, batch = ctypes.addressof(self._learner), ctypes.addressof(self._batch)
        self._library.rayagi_ppo_gradient(learner, batch, pointer(order), self.pool.address, pointer(stats))
        return stats
