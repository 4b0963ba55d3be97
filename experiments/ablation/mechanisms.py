"""The mechanisms that exist for speed alone, and how each is switched off inside a GMI's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import rayagi.algorithms.program as program_module
from actors.protocols import RolloutEnv
from actors.roles import ActingByOperations
from rayagi.algorithms import gradient_updater
from rayagi.algorithms.ppo.learner import MEASURED, PPOUpdater
from rayagi.algorithms.program import DpOnlyProgram
from rayagi.algorithms.rollout_learner import OnPolicyBatch
from rayagi.algorithms.sharded_optimizer import ShardedOptimizer
from rayagi.envs.mujoco_cpu.engine import MujocoVecEnv
from rayagi.envs.mujoco_cpu.whole_rollouts import vec_env
from rayagi.models.policy import NetworkPolicy
from rayagi.native import acting, learning
from rayagi.native.optimizer_step import CompiledOptimizerStep
from rayagi.native.ppo import CompiledUpdate
from rayagi.native.thread_pool import ThreadPool

_AGAIN = 4
"""AGAIN of optimizer_step.h."""
_compiled_call = CompiledUpdate.__call__


@dataclass(frozen=True)
class Case:
    """One way of training: everything on, or one mechanism off."""

    off: Callable[[], AbstractContextManager[object]]
    """Context in which the program is built and run."""
    is_off: Callable[[DpOnlyProgram], bool]
    """Asked inside the context, after an iteration."""


def _torch_acts(program: DpOnlyProgram) -> bool:
    rollout = program.rollout
    noise = torch.zeros_like(rollout.outputs)
    return isinstance(program.agent.through(rollout, noise), ActingByOperations)


@contextmanager
def _without_acting() -> Iterator[None]:
    with _without_rollouts(), patch.object(NetworkPolicy, "acting", lambda *_: None):
        yield


def _without_rollouts() -> AbstractContextManager[object]:
    return patch.object(vec_env, "make_vec_env", MujocoVecEnv)


def _without_sharding() -> AbstractContextManager[object]:
    return patch.object(ShardedOptimizer, "create", lambda *_: None)


def _call_per_minibatch(
    self: CompiledUpdate, fields: Any, orders: Tensor, learning_rate: float
) -> tuple[Tensor, float]:
    found = [_compiled_call(self, fields, order.unsqueeze(0), learning_rate) for order in orders]
    return torch.cat([stats for stats, _ in found]), sum(waited for _, waited in found)


def _gradient_only(self: CompiledOptimizerStep, program: Callable[[], int], learning_rate: float) -> float:
    """Stops where the program asks for the reduction: the gradient is ready."""
    self._optimizer_step.next, self._optimizer_step.reduces = 0, 1
    while program() == _AGAIN:
        pass
    return 0.0


def _update_with_torch_optimizer(
    self: PPOUpdater, batch: OnPolicyBatch, orders: Tensor, iteration: int, env_steps_total: int
) -> dict[str, float]:
    self.begin_update(env_steps_total)
    assert self._compiled is not None
    rows = []
    for order in orders.flatten(0, 1):
        stats, _ = self._compiled(batch.fields(), order.unsqueeze(0), self.learning_rate)
        self._reduce(self.flat.gradients)
        norm = self.flat.norm()
        self.flat.clip(norm, self.spec.max_grad_norm)
        self.optimiser.step()
        rows.append(torch.cat((stats[0, :-1], norm.reshape(1))))
    return self.end_update(MEASURED, rows, last_epoch=orders.shape[1], iteration=iteration, what="PPO update")


@contextmanager
def _with_torch_optimizer() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_without_sharding())
        stack.enter_context(patch.object(CompiledOptimizerStep, "run", _gradient_only))
        stack.enter_context(patch.object(PPOUpdater, "update", _update_with_torch_optimizer))
        yield


@contextmanager
def _with_torch_compile() -> Iterator[None]:
    torch._inductor.config.compile_threads = 1
    with (
        patch.object(PPOUpdater, "_compile", lambda _: None),
        patch.object(PPOUpdater, "loss", torch.compile(PPOUpdater.loss, dynamic=False)),
    ):
        yield


def _is_compiled_by_torch(program: DpOnlyProgram) -> bool:
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return _updater(program)._compiled is None and graphs > 0


def _one_thread(self: CompiledUpdate) -> ThreadPool:
    return ThreadPool(self._optimizer_step.library, 1)


def _updater(program: DpOnlyProgram) -> PPOUpdater:
    updater = program.learner.updater
    assert isinstance(updater, PPOUpdater)
    return updater


def _pool_threads(program: DpOnlyProgram) -> int:
    compiled = _updater(program)._compiled
    return 0 if compiled is None else compiled._current_pool().threads


def _is_sharded(program: DpOnlyProgram) -> bool:
    step = _updater(program)._optimizer_step
    return step is not None and step._operations is not None


CASES: dict[str, Case] = {
    "on": Case(ExitStack, lambda program: _updater(program)._compiled is not None),
    "whole rollouts": Case(
        _without_rollouts, lambda program: not isinstance(program.simulator.env, RolloutEnv)
    ),
    "compiled acting": Case(_without_acting, _torch_acts),
    "core sharing": Case(
        lambda: patch.object(program_module, "share_idle_cores", lambda *_: False),
        lambda program: not program._shares_idle_cores,
    ),
    "compiled gradient": Case(
        lambda: patch.object(PPOUpdater, "_compile", lambda _: None),
        lambda program: _updater(program)._compiled is None and _updater(program)._optimizer_step is not None,
    ),
    "compiled update": Case(
        lambda: patch.object(gradient_updater, "library", lambda: None),
        lambda program: _updater(program)._compiled is None and _updater(program)._optimizer_step is None,
    ),
    "thread pool": Case(
        lambda: patch.object(CompiledUpdate, "_current_pool", _one_thread),
        lambda program: _pool_threads(program) == 1,
    ),
    "sharded optimizer": Case(_without_sharding, lambda program: not _is_sharded(program)),
    "one call": Case(
        lambda: patch.object(CompiledUpdate, "__call__", _call_per_minibatch),
        lambda _: CompiledUpdate.__call__ is _call_per_minibatch,
    ),
    "compiled optimizer step": Case(
        _with_torch_optimizer,
        lambda program: (
            PPOUpdater.update is _update_with_torch_optimizer
            and float(_updater(program).optimiser.steps) > 0
            and not _is_sharded(program)
        ),
    ),
    "compiler": Case(ExitStack, lambda _: learning.library() is None and acting.library() is None),
    "torch.compile": Case(_with_torch_compile, _is_compiled_by_torch),
    "nothing": Case(ExitStack, lambda program: _updater(program)._compiled is not None),
}
"""By the name of what is off. "nothing" is "on" once more: how far equal cases differ. "torch.compile" replaces the compiled
gradient."""
