"""TRPO's update: conjugate gradient, line search, and the value network's epochs (Schulman et al. 2015, appendix C)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, kl_divergence
from torch.func import functional_call
from torch.nn.functional import pad

from rayagi.algorithms import losses
from rayagi.algorithms.rollout_learner import OnPolicyBatch, OnPolicyLearner, OnPolicyUpdater
from rayagi.algorithms.trpo import TRPOSpec
from rayagi.models.networks import Model
from rayagi.models.recurrent import Sequences


class TRPOUpdater(OnPolicyUpdater[TRPOSpec]):
    """Steps the policy along the natural gradient, the value network along its loss."""

    measured = ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm", "backtracks")

    def update(self, batch: OnPolicyBatch, orders: Tensor, iteration: int) -> dict[str, float]:
        """One step of the policy, then all epochs of the value network, by the minibatches in ``orders``."""
        loss, entropy, kl, norm, backtracks = self._step_policy(batch)
        value_losses = [self._step_value(batch, order) for epoch in orders for order in epoch]
        row = torch.stack((loss, torch.stack(value_losses).mean(), entropy, kl, norm, backtracks))
        return self.end_update([row], last_epoch=1, iteration=iteration, what="TRPO update")

    def _step_policy(self, batch: OnPolicyBatch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns the surrogate loss, the entropy, the KL divergence of the step, the gradient's norm, and backtracks."""
        model, spec = self.model, self.spec
        names, parameters = _policy_parameters(model)
        start = _flat(parameters).detach()  # theta_old: a copy, which the step does not overwrite
        old = _distribution(model, dict(zip(names, _like(start, parameters), strict=True)), batch)

        def measured(flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Surrogate gain E[(pi / pi_old) A], mean KL(pi_old || pi), and the entropy, of this trainer's samples."""
            new = _distribution(model, dict(zip(names, _like(flat, parameters), strict=True)), batch)
            ratio = (new.log_prob(batch.actions) - batch.log_probs).exp()
            return (ratio * batch.advantages).mean(), kl_divergence(old, new).mean(), new.entropy().mean()

        # g = grad of the surrogate at theta_old, over all trainers' samples.
        theta = start.clone().requires_grad_()
        gain, kl, _ = measured(theta)
        (gradient,) = torch.autograd.grad(gain, theta, retain_graph=True)
        gradient = self._mean(gradient)
        # F v = grad((grad KL)^T v): the Fisher matrix is the Hessian of the mean KL divergence at theta_old (appendix C.1).
        (slope,) = torch.autograd.grad(kl, theta, create_graph=True)

        def fisher_product(vector: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(slope @ vector, theta, retain_graph=True)
            return self._mean(product) + spec.cg_damping * vector

        direction = conjugate_gradient(fisher_product, gradient, spec.cg_iterations)
        # The longest step within the bound: beta = sqrt(2 delta / s^T F s) (appendix C).
        curvature = dot(direction, fisher_product(direction))
        step = (2 * spec.max_kl / curvature.clamp(min=torch.finfo(curvature.dtype).tiny)).sqrt() * direction
        accepted, backtracks = self._line_search(measured, start, step, gain.detach())
        with torch.no_grad():
            for parameter, values in zip(parameters, _like(accepted, parameters), strict=True):
                parameter.copy_(values)
            gain, kl, entropy = measured(accepted)
        norm = torch.linalg.vector_norm(gradient)
        return (
            -gain,
            entropy,
            self._mean(kl.reshape(1))[0],
            norm,
            torch.tensor(float(backtracks), device=norm.device),
        )

    @torch.no_grad()
    def _line_search(
        self,
        measured: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
        start: Tensor,
        step: Tensor,
        start_gain: Tensor,
    ) -> tuple[Tensor, int]:
        """The longest tried step that improves the surrogate within the KL bound, over all trainers' samples; or no step."""
        # Backtracking: theta = theta_old + ratio^j s, for j = 0, 1, ... (appendix C).
        for backtracks in range(self.spec.line_search_steps):
            candidate = start + self.spec.backtrack_ratio**backtracks * step
            gain, kl, _ = measured(candidate)
            improvement, divergence = self._mean(torch.stack((gain - start_gain, kl))).tolist()
            if improvement > 0 and divergence <= self.spec.max_kl:
                return candidate, backtracks
        return start, self.spec.line_search_steps

    def _step_value(self, batch: OnPolicyBatch, order: Tensor) -> Tensor:
        """One step of Adam on the value loss of the samples in ``order``. The policy has zero gradients and stays."""
        values = self.model.values(batch.obs[order], batch.sequences(order))
        loss = losses.value_loss(values, batch.values[order], batch.targets[order], None)
        self.step(self.spec.value_coef * loss)
        return loss.detach()

    def _mean(self, tensor: Tensor) -> Tensor:
        """The mean over all trainers' samples, bitwise equal on all trainers."""
        tensor = self.weight * tensor.detach()
        self._reduce(tensor)
        return tensor


def conjugate_gradient(product: Callable[[Tensor], Tensor], target: Tensor, iterations: int) -> Tensor:
    """x with A x = target, approximately, for a symmetric positive definite A given by its products.

    Args:
        product: v (P,) -> A v (P,)
        target: (P,)
        iterations: at most; fewer once the residual is 1e-10 of the target's norm

    Returns:
        x, (P,). P iterations would be exact.
    """
    # x = 0, r = target - A x, p = r.
    x, residual = torch.zeros_like(target), target.clone()
    search = residual.clone()
    squared = dot(residual, residual)
    enough = 1e-20 * squared
    for _ in range(iterations):
        image = product(search)
        along = dot(search, image)
        # Rounding can leave a direction without curvature, from where on an iteration would only lose.
        if squared <= enough or along <= 0:
            break
        # alpha = r^T r / p^T A p;  x += alpha p;  r -= alpha A p.
        alpha = squared / along
        x = x + alpha * search
        residual = residual - alpha * image
        # p = r + beta p, beta = r^T r / (r^T r before): conjugate to all earlier directions.
        before, squared = squared, dot(residual, residual)
        search = residual + squared / before * search
    return x


_ROW = 512
"""Elements that one thread adds up."""


def dot(one: Tensor, other: Tensor) -> Tensor:
    """The scalar product of two vectors, alike to the last bit whatever the number of threads: summed row by row.

    Trainers with other thread counts take the same step, and stop at the same iteration.
    """
    products = pad(one * other, (0, -len(one) % _ROW))
    return products.view(-1, _ROW).sum(1).sum()


def _policy_parameters(model: Model) -> tuple[list[str], list[Tensor]]:
    """Names and tensors of the policy's parameters: all but the value network's."""
    named = [(name, each) for name, each in model.named_parameters() if not name.startswith("value.")]
    return [name for name, _ in named], [each for _, each in named]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in tensors])


def _like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    parts = flat.split([each.numel() for each in tensors])
    return [part.view_as(each) for part, each in zip(parts, tensors, strict=True)]


def _distribution(model: Model, parameters: dict[str, Tensor], batch: OnPolicyBatch) -> Distribution:
    """The action distribution of each sample, with these parameters in place of the model's."""
    sequences = None if batch.memory is None else batch.memory.whole()
    # cuDNN's recurrent networks have no second derivative, which the Fisher products need. [unverified on GPU]
    with nullcontext() if sequences is None else torch.backends.cudnn.flags(enabled=False):
        return functional_call(
            _Distribution(model),
            {f"model.{name}": each for name, each in parameters.items()},
            (batch.obs, sequences),
        )


class _Distribution(nn.Module):
    """A model's action distribution as a module, for ``functional_call``."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, obs: Tensor, sequences: Sequences | None) -> Distribution:
        """Of each row."""
        return self.model.head.distribution(self.model.outputs(obs, sequences))


class TRPOLearner(OnPolicyLearner[TRPOSpec]):
    """The learner of TRPO."""

    updater_class = TRPOUpdater
    updater: TRPOUpdater
