"""Sample Factory's loop in one process, annotated from outside. A module of its own: the process that looks at the
environment first imports it, too."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import Any

import gymnasium
from sample_factory.algo.learning.learner import Learner
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.sampling import non_batched_sampling
from sample_factory.algo.sampling.inference_worker import InferenceWorker
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from sf_examples.mujoco.mujoco_params import mujoco_override_defaults

from experiments.profiler.stages import INFER, LEARN, SEED, SIMULATE
from rayagi import profiler

# Sample Factory 2.1.1 wants a Gymnasium whose wrappers pass attributes on, the tasks want a later one.
gymnasium.Wrapper.__getattr__ = lambda self, name: getattr(object.__getattribute__(self, "env"), name)


def make_env(task: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> Any:
    """One environment, as Sample Factory asks for it."""
    return gymnasium.make(task, render_mode=render_mode)


def annotate() -> None:
    """Name the stages. Its own wrappers of an environment are simulation, as those of the other libraries."""
    make_wrapped = non_batched_sampling.make_env_func_non_batched

    def make_annotated(*args: Any, **kwargs: Any) -> Any:
        env = make_wrapped(*args, **kwargs)
        env.step = profiler.operation(SIMULATE)(env.step)
        return env

    non_batched_sampling.make_env_func_non_batched = make_annotated
    InferenceWorker._handle_policy_steps = profiler.operation(INFER)(InferenceWorker._handle_policy_steps)
    Learner.train = profiler.operation(LEARN)(Learner.train)


class Iterations(AlgoObserver):
    """From the end of one update to the end of the next, a number of times; then training ends."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._scope = ExitStack()

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        """After each update."""
        self._scope.close()
        if training_iteration_since_resume <= self._count:
            self._scope.enter_context(profiler.iteration())
        else:
            runner.cfg.train_for_env_steps = -1


def train(task: str, iterations: int) -> None:
    """Train for a number of updates: 64 environments of 64 steps each."""
    register_env(task, make_env)
    annotate()
    with tempfile.TemporaryDirectory() as folder:
        given = [
            f"--env={task}",
            "--experiment=survey",
            f"--train_dir={folder}",
            "--device=cpu",
            f"--seed={SEED}",
        ]
        # Without the pauses of its workers before the first rollout, which are for workers of several processes.
        given += ["--serial_mode=True", "--decorrelate_experience_max_seconds=0"]
        parser, _ = parse_sf_args(given)
        mujoco_override_defaults(task, parser)
        _, runner = make_runner(parse_full_cfg(parser, given))
        runner.register_observer(Iterations(iterations))
        runner.init()
        runner.run()
