"""The mechanisms that exist for speed alone, and how each is switched off inside a GMI's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from actors.protocols import RolloutEnv
from actors.roles import ActingByOperations
from rayagi.algorithms import gradient_updater
from rayagi.algorithms.gradient_updater import GradientUpdater
from rayagi.algorithms.ppo.learner import PPOUpdater
from rayagi.algorithms.program import DpOnlyProgram
from rayagi.envs.mujoco_cpu import vec_env
from rayagi.envs.mujoco_cpu.vec_env import MujocoVecEnv
from rayagi.models.policy import NetworkPolicy
from rayagi.native import acting, learning
from rayagi.native.learning import CompiledGradient, ThreadPool

_apply_gradients = GradientUpdater.apply_gradients


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


def _apply_gradients_with_torch(self: GradientUpdater[Any], pool: ThreadPool | None = None) -> Tensor:
    compiled, self._optimizer_step = self._optimizer_step, None
    try:
        return _apply_gradients(self)
    finally:
        self._optimizer_step = compiled


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


def _one_thread(self: CompiledGradient) -> ThreadPool:
    return ThreadPool(self._library, 1)


def _updater(program: DpOnlyProgram) -> PPOUpdater:
    updater = program.learner.updater
    assert isinstance(updater, PPOUpdater)
    return updater


def _pool_threads(program: DpOnlyProgram) -> int:
    compiled = _updater(program)._compiled
    return 0 if compiled is None else compiled._current_pool().threads


CASES: dict[str, Case] = {
    "on": Case(ExitStack, lambda program: _updater(program)._compiled is not None),
    "whole rollouts": Case(
        _without_rollouts, lambda program: not isinstance(program.simulator.env, RolloutEnv)
    ),
    "compiled acting": Case(_without_acting, _torch_acts),
    "compiled gradient": Case(
        lambda: patch.object(PPOUpdater, "_compile", lambda _: None),
        lambda program: _updater(program)._compiled is None and _updater(program)._optimizer_step is not None,
    ),
    "compiled update": Case(
        lambda: patch.object(gradient_updater, "library", lambda: None),
        lambda program: _updater(program)._compiled is None and _updater(program)._optimizer_step is None,
    ),
    "thread pool": Case(
        lambda: patch.object(CompiledGradient, "_current_pool", _one_thread),
        lambda program: _pool_threads(program) == 1,
    ),
    "compiled optimizer step": Case(
        lambda: patch.object(GradientUpdater, "apply_gradients", _apply_gradients_with_torch),
        lambda _: GradientUpdater.apply_gradients is _apply_gradients_with_torch,
    ),
    "compiler": Case(ExitStack, lambda _: learning.library() is None and acting.library() is None),
    "torch.compile": Case(_with_torch_compile, _is_compiled_by_torch),
    "nothing": Case(ExitStack, lambda program: _updater(program)._compiled is not None),
}
"""By the name of what is off. "nothing" is "on" once more: how far equal cases differ. "torch.compile" replaces the compiled
gradient."""
