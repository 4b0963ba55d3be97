"""Compiled program of learners: gradients of PPO's loss, and optimizer steps, on a thread pool.

A gradient replaces some hundred operations of torch and autograd per minibatch. For minibatches of a few hundred samples,
torch spends half of its time outside matrix products. Here a tile of samples passes forward and backward through a network
while its activations are in the cache, and gradients are written straight into the flat bucket. A step replaces a dozen
operations. Between two minibatches the caches hold activations, so Python and torch run several times slower there than
alone.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from actors.policy_tensors import ActivationName
from collectives.kernels import Kernel
from collectives.mirrors import Mirrors
from rayagi.native.acting import ACTIVATIONS
from rayagi.native.binding import numbers, pointer, shared
from rayagi.profiler import Category, activity

LEARNING = Kernel(
    name="learning",
    module=__name__,
    reference="rayagi.algorithms.ppo.learner:PPOUpdater.minibatch_step",
    without="learners compute gradients with torch",
)
LANES = 32
"""Samples per tile."""
CHUNK = 16
"""Tiles that pass through the whole network before the next ones: their activations stay in the cache."""
PAD = 384
"""Unused floats between tiles, so that they do not compete for the same cache sets."""
NUM_STATS = 5
"""Policy loss, value loss, entropy, KL, share of clipped ratios."""
_SUMS = 5
"""NUM_SUMS of ppo.h: sums per tile, without log_std's gradient."""
_STEP_CHUNK, _LINE = 4096, 8
"""STEP_CHUNK of optimizer_step.h; LINE of thread_pool.h."""

_I64, _ADDRESS, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class _ThreadPoolStruct(ctypes.Structure):
    """ThreadPool of thread_pool.h."""

    shutdown: int
    _fields_ = (
        ("threads", _I64),
        ("claimed", _ADDRESS),
        ("job", _ADDRESS),
        ("argument", _ADDRESS),
        ("items", _I64),
        *((name, _I64) for name in ("posted", "accepting", "active", "shutdown")),
    )


class ThreadPool:
    """The calling thread, and workers while a program runs.

    Attributes:
        threads: workers and the calling thread
        address: of thread_pool.h's ThreadPool
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        """``library``: the compiled program."""
        self._worker = library.rayagi_pool_worker
        self._claimed = torch.zeros((threads, _LINE), dtype=torch.int64)
        self._struct = _ThreadPoolStruct(threads, pointer(self._claimed))
        self.threads = threads
        self.address = ctypes.addressof(self._struct)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Workers take items inside the block. A job does not wait for a worker that has not started."""
        workers = list[Future[None]]()
        self._struct.shutdown = 0
        try:
            for thread in range(1, self.threads):
                workers.append(_pool(self.threads - 1).submit(self._work, thread))
            yield
        finally:
            self._struct.shutdown = 1
            for worker in workers:
                if not worker.cancel():  # cancelled: it had not started
                    worker.result()

    def _work(self, thread: int) -> None:
        """One worker. A method: Ctrl-C may end the wait for it, and this object's memory must live until it returns."""
        self._worker(self.address, thread)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="learning")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads


class _OptimizerStepStruct(ctypes.Structure):
    """OptimizerStep of optimizer_step.h."""

    learning_rate: float
    _fields_ = (
        *((name, _ADDRESS) for name in ("parameters", "gradients", "exp_avg", "exp_avg_sq")),
        ("count", _I64),
        ("steps", _ADDRESS),
        *((name, _DOUBLE) for name in ("learning_rate", "beta1", "beta2", "eps", "max_grad_norm")),
        ("chunk_sums", _ADDRESS),
        *((name, ctypes.c_float) for name in ("grad_scale", "step_size", "inverse_bias")),
    )


class CompiledOptimizerStep:
    """The compiled counterpart of ``FlatAdam``. Gradients keep their values from before clipping.

    Attributes:
        library: the compiled program
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        *,
        parameters: Tensor,
        gradients: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        steps: Tensor,
        betas: tuple[float, float],
        eps: float,
        max_grad_norm: float,
    ) -> None:
        """Tensors are float32 on the host, (count,), and updated in place; ``steps``: (). max_grad_norm 0: no clipping.

        Raises:
            ValueError: a tensor is not float32.
        """
        vectors = parameters, gradients, exp_avg, exp_avg_sq
        chunk_sums = torch.zeros(-(-len(parameters) // _STEP_CHUNK), dtype=torch.float64)
        self._kept = *vectors, steps, chunk_sums
        self._optimizer_step = _OptimizerStepStruct(
            *map(_float32, vectors),
            len(parameters),
            _float32(steps),
            0.0,
            *betas,
            eps,
            max_grad_norm,
            pointer(chunk_sums),
        )
        self.library, self._address = library, ctypes.addressof(self._optimizer_step)

    def step(self, learning_rate: float, pool: ThreadPool | None = None) -> Tensor:
        """One step, on the threads of ``pool`` or on the calling thread. Returns the norm before clipping, ()."""
        self._optimizer_step.learning_rate = learning_rate
        pool, norm = pool or ThreadPool(self.library, 1), torch.empty((), dtype=torch.float32)
        with activity(Category.KERNEL_UPDATE, "optimizer step"):
            self.library.rayagi_optimizer_step(self._address, pool.address, pointer(norm))
        return norm


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Parameters of the two networks and settings of the loss. Each parameter's ``grad`` must keep its address.

    Attributes:
        policy, value: layers, each its weight (out, in) and bias (out,); float32
        activation: between layers
        log_std: of a Gaussian policy, (action_dim,); None: categorical, the outputs are logits
        clip_ratio, value_clip, value_coef, entropy_coef: as in PPOSpec
    """

    policy: Sequence[tuple[Tensor, Tensor]]
    value: Sequence[tuple[Tensor, Tensor]]
    activation: ActivationName
    log_std: Tensor | None
    clip_ratio: float
    value_clip: float | None
    value_coef: float
    entropy_coef: float


class CompiledGradient:
    """Gradient of PPO's loss as in ``rayagi.algorithms.losses``, for a Gaussian or a categorical policy.

    It does not depend on the number of threads.
    """

    def __init__(self, library: ctypes.CDLL, trained: Trained) -> None:
        """``library``: the compiled program.

        Raises:
            ValueError: a parameter is not float32.
        """
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
            None if log_std is None else _float32(log_std),
            None if log_std_grad is None else _float32(log_std_grad),
            trained.clip_ratio,
            math.inf if trained.value_clip is None else trained.value_clip,
            trained.value_coef,
            trained.entropy_coef,
            1.0,  # weight: minibatches() sets it
            pointer(self._sums),
        )

    @contextmanager
    def minibatches(self, fields: Sequence[Tensor], weight: float = 1.0) -> Iterator[Minibatches]:
        """The samples of a rollout, for ``Minibatches.gradient``. The threads run inside the block.

        Args:
            fields: obs (B, obs_dim), actions (B, dim) or (B,) int64, log_probs, values, advantages and targets (B,)
            weight: of this trainer's gradient in the mean over trainers

        Raises:
            ValueError: a discrete action is outside the policy's choices.
        """
        obs, actions, *others = fields
        taken = self._choices(actions) if self._trained.log_std is None else actions.to(torch.float32)
        plain = [obs.to(torch.float32), taken, *(field.to(torch.float32) for field in others)]
        pool = self._current_pool()
        self._learner.weight = weight
        with pool.running():
            yield Minibatches(self._library, self._learner, pool, [field.contiguous() for field in plain])

    def values(self, obs: Tensor) -> Tensor:
        """V(s) of the value network: (B, obs_dim) -> (B,)."""
        plain, pool = obs.to(torch.float32).contiguous(), self._current_pool()
        values = torch.empty(len(plain), dtype=torch.float32)
        at = ctypes.addressof(self._learner), pool.address, pointer(plain), len(plain), pointer(values)
        with pool.running(), activity(Category.KERNEL_UPDATE, "values"):
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
        return torch.zeros(CHUNK * (units * LANES + PAD), dtype=torch.float32)

    def _addresses(self, tensors: Sequence[Tensor]) -> int:
        array = (_ADDRESS * len(tensors))(*map(_float32, tensors))
        self._kept.append(array)
        return ctypes.addressof(array)


class Minibatches:
    """Samples of a rollout, of which minibatches are drawn. ``pool``: threads that compute."""

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
        order, stats = order.contiguous(), torch.empty(NUM_STATS, dtype=torch.float32)
        self._learner.samples = len(order)
        learner, batch = ctypes.addressof(self._learner), ctypes.addressof(self._batch)
        with activity(Category.KERNEL_UPDATE, "gradient"):
            self._library.rayagi_ppo_gradient(
                learner, batch, pointer(order), self.pool.address, pointer(stats)
            )
        return stats


def _float32(tensor: Tensor) -> int:
    return pointer(tensor, torch.float32)


@cache
def library() -> ctypes.CDLL | None:
    """The program, the same for all networks; None if it cannot be compiled, which is logged once."""
    return LEARNING.made_or_none(_load)


def _load() -> ctypes.CDLL:
    sizes = f"#define L {LANES}\n#define CHUNK {CHUNK}\n#define PAD {PAD}"
    headers = map(shared, ("thread_pool.h", "optimizer_step.h", "backprop.h", "ppo.h"))
    mirrors: Mirrors = {
        "ThreadPool": _ThreadPoolStruct,
        "LINE": _LINE,
        "OptimizerStep": _OptimizerStepStruct,
        "STEP_CHUNK": _STEP_CHUNK,
        "Network": _Network,
        "Learner": _Learner,
        "Batch": _Batch,
        "NUM_SUMS": _SUMS,
        **{name.upper(): value for name, value in ACTIVATIONS.items()},
    }
    found = LEARNING.load("\n".join([sizes, numbers(torch.float32), *headers]), mirrors=mirrors)
    found.rayagi_pool_worker.argtypes, found.rayagi_pool_worker.restype = (_ADDRESS, _I64), None
    found.rayagi_optimizer_step.argtypes, found.rayagi_optimizer_step.restype = (_ADDRESS,) * 3, None
    found.rayagi_ppo_gradient.argtypes, found.rayagi_ppo_gradient.restype = (_ADDRESS,) * 5, None
    found.rayagi_ppo_values.argtypes = (*(_ADDRESS,) * 3, _I64, _ADDRESS)
    found.rayagi_ppo_values.restype = None
    return found
