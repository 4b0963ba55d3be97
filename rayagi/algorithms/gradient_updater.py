"""One optimiser step on a loss: backward pass, gradient all-reduce in one flat bucket, clipping by norm, Adam."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim.adam import adam

from actors.errors import NonFiniteError
from actors.protocols import StateDict
from collectives.communicator import Communicator
from rayagi.algorithms import losses
from rayagi.config.errors import ConfigError
from rayagi.config.learning import LearningSpec
from rayagi.models.networks import FlatParameters, Model
from rayagi.native.learning import CompiledOptimizerStep, ThreadPool, library
from rayagi.profiler import Category, activity, timed_operation

BETAS = (0.9, 0.999)


class FlatAdam:
    """Steps a flat vector with torch's fused Adam, or holds the state of the compiled step (``native/learning.py``).

    Tensors are updated in place, so a CUDA graph may hold them.

    ``torch.optim.Adam`` makes the same steps, but importing it loads torch's compiler: 1.8 s of a slow core and 30 MB in
    every process.
    """

    def __init__(
        self,
        flat: FlatParameters,
        *,
        learning_rate: float,
        eps: float,
        betas: tuple[float, float] = BETAS,
    ) -> None:
        """Start with zero moments."""
        self.flat, self.eps, self.betas = flat, eps, betas
        self.learning_rate: float | Tensor = learning_rate
        self.steps = torch.zeros((), dtype=torch.float32, device=flat.parameters.device)
        """Number of steps so far, for the bias correction of both moments; a tensor, as torch requires."""
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(flat.gradients), torch.zeros_like(flat.gradients)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of later steps, including captured ones."""
        if isinstance(self.learning_rate, Tensor):
            self.learning_rate.fill_(learning_rate)
        else:
            self.learning_rate = learning_rate

    def make_capturable(self) -> None:
        """Keep the learning rate on the device, where a captured step reads it."""
        self.learning_rate = torch.full((), float(self.learning_rate), device=self.steps.device)

    @torch.no_grad()
    def step(self) -> None:
        """One step of Adam on the flat gradients."""
        adam(
            [self.flat.parameters],
            [self.flat.gradients],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [self.steps],
            fused=True,
            capturable=isinstance(self.learning_rate, Tensor),
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.learning_rate,
            weight_decay=0.0,
            eps=self.eps,
            maximize=False,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Optimiser state by the names of torch.optim.Adam."""
        return {"step": self.steps, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def state_dict(self) -> StateDict:
        """State in the layout of torch.optim.Adam with one parameter, without settings."""
        return {"state": {0: self.tensors()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state in place; a state of torch.optim.Adam before its first step is empty."""
        saved = state["state"].get(0, {})
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name]) if saved else tensor.zero_()


class FlatOptimiser(Protocol):
    """Steps a flat vector of parameters."""

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of later steps."""

    def step(self) -> None:
        """One step on the flat gradients."""

    def state_dict(self) -> StateDict:
        """State, without settings."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state in place."""


SpecT = TypeVar("SpecT", bound=LearningSpec)


class GradientUpdater(Generic[SpecT]):
    """Holds the model's parameters as one flat vector, the optimiser and the learning rate.

    All replicas make the same steps: rank 0 broadcasts its parameters, and reduced gradients are bitwise equal. Gradients
    are in the communicator's buffer, so the all-reduce copies nothing.
    """

    measured: ClassVar[tuple[str, ...]]
    """Metrics of a step, as named in rayagi.monitoring.catalogue; for ``kl_adaptive`` with "approx_kl"."""

    def __init__(
        self,
        model: Model,
        spec: SpecT,
        communicator: Communicator,
        *,
        weight: float = 1.0,
    ) -> None:
        """Collective: every trainer constructs one.

        Args:
            model: has rank 0's parameters on every trainer afterwards
            spec: the algorithm's settings
            communicator: of all trainers
            weight: samples of this trainer over the mean of all trainers. The mean of the weighted losses is then the
                mean over all samples, also where trainers have unequal numbers of them
        """
        self.weight = weight
        self.model, self.spec, self.communicator = model, spec, communicator
        program = _agreed_program(model, communicator)
        self.flat = FlatParameters(model, communicator.buffer)
        self.optimiser = self._make_optimiser()
        self._optimizer_step = (
            self._compile_optimizer_step(program, self.optimiser)
            if program is not None and isinstance(self.optimiser, FlatAdam)
            else None
        )
        self.learning_rate = spec.learning_rate
        self.sync_s = 0.0
        """Seconds in gradient reduction during the last update, including waiting for other trainers."""
        communicator.broadcast(self.flat.parameters.data)

    def _make_optimiser(self) -> FlatOptimiser:
        return FlatAdam(self.flat, learning_rate=self.spec.learning_rate, eps=self.spec.adam_eps)

    def _compile_optimizer_step(self, program: CDLL, optimiser: FlatAdam) -> CompiledOptimizerStep:
        flat = self.flat
        return CompiledOptimizerStep(
            program,
            parameters=flat.parameters.detach(),
            gradients=flat.gradients,
            exp_avg=optimiser.exp_avg,
            exp_avg_sq=optimiser.exp_avg_sq,
            steps=optimiser.steps,
            betas=BETAS,
            eps=optimiser.eps,
            max_grad_norm=self.spec.max_grad_norm,
        )

    def values(self, observed: Tensor) -> Tensor:
        """V(s): (B, obs_dim) -> (B,)."""
        return self.model.values(observed)

    def begin_update(self, learning_rate_factor: float = 1.0) -> None:
        """Set the learning rate. With the linear schedule it is ``learning_rate_factor`` of the first one."""
        self.sync_s = 0.0
        if self.spec.lr_schedule == "linear":
            self.learning_rate = self.spec.learning_rate * learning_rate_factor
        self.optimiser.set_learning_rate(self.learning_rate)

    def step(self, loss: Tensor) -> Tensor:
        """One step on the mean of this loss over all trainers' samples. Returns the gradient norm before clipping."""
        # g_k = grad(w_k loss_k), of this trainer's samples.
        self.flat.gradients.zero_()
        (loss if self.weight == 1.0 else self.weight * loss).backward()
        return self.apply_gradients()

    def apply_gradients(self, pool: ThreadPool | None = None) -> Tensor:
        """One step on the mean of all trainers' gradients. Returns its norm before clipping, ().

        ``pool``: threads for the compiled kernel, which are running.
        """
        # g = mean over trainers of g_k; then g *= min(1, max_grad_norm / |g|); then Adam.
        self._reduce(self.flat.gradients)
        if self._optimizer_step is not None:
            return self._optimizer_step.step(self.learning_rate, pool)
        norm = self.flat.norm()
        self.flat.clip(norm, self.spec.max_grad_norm)
        self.optimiser.step()
        return norm

    def end_update(
        self, rows: Sequence[Tensor], *, last_epoch: int, iteration: int, what: str
    ) -> dict[str, float]:
        """Average the metrics of the steps; for ``kl_adaptive``, adapt the learning rate to the last epoch's KL.

        Args:
            rows: values of ``measured``, one row per step
            last_epoch: number of steps in the last epoch
            iteration: number of this iteration, from 1; for error messages
            what: the update's name; for error messages

        Raises:
            ConfigError: ``kl_adaptive``, and the update does not measure its KL divergence.
            NonFiniteError: a loss or gradient became NaN or infinite; the parameters must not be saved.
        """
        if self.spec.lr_schedule == "kl_adaptive" and "approx_kl" not in self.measured:
            reason = f"needs approx_kl, which the {what} does not measure"
            raise ConfigError("lr_schedule", "kl_adaptive", reason, "measure it, or use 'constant'")
        metrics = dict(zip(self.measured, torch.stack(list(rows)).mean(0).tolist(), strict=True))
        refuse_nonfinite(metrics, iteration, what)
        metrics["learning_rate"] = self.learning_rate
        metrics["action_std"] = self.model.head.spread()
        if self.spec.lr_schedule == "kl_adaptive":
            self._adapt(torch.stack(list(rows[-last_epoch:]))[:, self.measured.index("approx_kl")].mean())
        return metrics

    def _reduce(self, tensor: Tensor) -> None:
        """The mean over all trainers, in place."""
        if self.communicator.world_size > 1:
            with timed_collective(self, "all_reduce"):
                self.communicator.all_reduce(tensor, "mean")

    def _adapt(self, kl: Tensor) -> None:
        kl = self.weight * kl.to(torch.float64).reshape(1)
        self._reduce(kl)
        self.learning_rate = losses.adapted_learning_rate(self.learning_rate, float(kl), self.spec.target_kl)

    def state_dict(self) -> StateDict:
        """Model, optimiser moments and learning rate; equal on every replica."""
        return {
            "model": on_host(self.model.state_dict()),
            "optimiser": on_host(self.optimiser.state_dict()),
            "learning_rate": self.learning_rate,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore in place: the model's parameters stay views of the flat vector.

        Settings come from this run's spec; only a KL-adaptive learning rate is restored from the state.
        """
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.flat.gradients.zero_()  # a non-finite gradient also spoils the padding, which no backward pass writes
        if self.spec.lr_schedule == "kl_adaptive":
            self.learning_rate = float(state["learning_rate"])


def _agreed_program(model: Model, communicator: Communicator) -> CDLL | None:
    """The compiled library, if every trainer can use it; else None on all of them. Mixing would break bitwise equality."""
    program = library() if next(model.parameters()).device.type == "cpu" else None
    lacking = torch.tensor([program is None], dtype=torch.int64)
    return None if communicator.all_gather(lacking).any() else program


class _Timed(Protocol):
    sync_s: float


@contextmanager
def timed_collective(owner: _Timed, name: str) -> Iterator[None]:
    """Add the seconds of a collective operation to ``owner.sync_s``, and show it in profiles."""
    with timed_operation("reduce") as reducing, activity(Category.COMMUNICATION, name):
        yield
    owner.sync_s += reducing.seconds


def refuse_nonfinite(metrics: Mapping[str, float], iteration: int, what: str) -> None:
    """Raise NonFiniteError if a metric of an update is NaN or infinite: the parameters must not be saved."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise NonFiniteError(name, iteration, what)


def on_host(state: Any) -> Any:
    """A copy of nested state with every tensor in host memory: a checkpoint must load without a GPU."""
    if isinstance(state, Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, Mapping):
        return {name: on_host(value) for name, value in state.items()}
    if isinstance(state, list):
        return [on_host(value) for value in state]
    return state
