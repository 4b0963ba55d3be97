"""The perfect-overlap limit: what our own work costs in CPU time when each phase runs alone on one core.

    limit = environment steps of an iteration / (CPU s of simulation and acting + CPU s of the update, each alone) * cores

Nothing that waits, synchronises or drives is in it; no schedule on these cores can beat it with this code. Simulation and
acting are measured as training does them, in one call of a compiled program; what they would cost step by step, each alone,
is told beside it.

    python -m experiments.throughput.limits --seconds 5 --cores 2
    python -m experiments.throughput.limits --seconds 5 --cores 2 --together

With ``--together`` every core does the same work at once, and the limit is the sum of what the cores reach: it shows
how much less the machine itself gives when all its cores are busy (shared caches, memory, clock).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import count, repeat
from multiprocessing import get_context

import torch

from actors.gmi import GmiContext
from actors.rollout import minibatch_orders
from experiments.scripts import command_line
from experiments.throughput.settings import ROLLOUT_LENGTH, TOTAL_ENVS, run_spec
from rayagi.algorithms.factory import training_factory


def cpu_seconds_each(work: Callable[[], None], seconds: float) -> float:
    """CPU time of one call, the mean of as many as fit in ``seconds``, after two to warm up."""
    for _ in range(2):
        work()
    started, calls = time.process_time(), 0
    while time.process_time() - started < seconds:
        work()
        calls += 1
    return (time.process_time() - started) / calls


class Alone:
    """All environments in one GMI on one core, whose phases are called one by one.

    Each answer is CPU seconds per iteration, the mean of calls that take so many seconds.
    """

    def __init__(self, core: int) -> None:
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)
        torch.manual_seed(0)
        context = GmiContext.local("Ant-v5")
        self._program = training_factory(run_spec(num_gmis=1, threads_per_gmi=1))(context)
        self._program.iterate()
        self._numbers = count(1)

    def rollout_s(self, seconds: float) -> float:
        """A rollout as training makes it: simulation and acting."""
        return cpu_seconds_each(self._collect, seconds)

    def update_s(self, seconds: float) -> float:
        """An update from the last rollout: values, advantages, minibatches."""
        return cpu_seconds_each(self._update, seconds)

    def stepwise_simulate_s(self, seconds: float) -> float:
        """A rollout's physics, observation, reward and reset, with an untrained policy's actions."""
        simulator, actions = self._program.simulator, torch.randn(ROLLOUT_LENGTH, TOTAL_ENVS, 8)

        def simulate() -> None:
            for t in range(ROLLOUT_LENGTH):
                simulator.step(actions[t])

        return cpu_seconds_each(simulate, seconds)

    def stepwise_act_s(self, seconds: float) -> float:
        """A rollout's inference and sampling, with given observations."""
        agent, seen = self._program.agent, self._program.rollout.raw_obs
        noise = torch.randn(ROLLOUT_LENGTH, TOTAL_ENVS, 8)

        def act() -> None:
            for t in range(ROLLOUT_LENGTH):
                agent.act(seen[t], noise[t])

        return cpu_seconds_each(act, seconds)

    def _collect(self) -> None:
        program = self._program
        program.simulator.collect_rollout(
            program.rollout, program.learner.policy.tensors(), next(self._numbers)
        )

    def _update(self) -> None:
        batch, _ = self._program.learner.prepare(self._program.rollout)
        orders = minibatch_orders(
            seed=0,
            first_env_index=0,
            num_envs=TOTAL_ENVS,
            iteration=0,
            num_steps=ROLLOUT_LENGTH,
            num_epochs=4,
            num_minibatches=4,
        )
        self._program.learner.updater.update(batch, orders, 0)


def measure_on(core: int, seconds: float) -> dict[str, float]:
    """CPU milliseconds of each phase for one iteration on one core, and what that could reach alone."""
    alone = Alone(core)
    rollout_s, update_s = alone.rollout_s(seconds), alone.update_s(seconds / 2)
    return {
        "rollout_cpu_ms": 1e3 * rollout_s,
        "update_cpu_ms": 1e3 * update_s,
        "limit_steps_per_s": TOTAL_ENVS * ROLLOUT_LENGTH / (rollout_s + update_s),
        "stepwise_simulate_cpu_ms": 1e3 * alone.stepwise_simulate_s(seconds / 2),
        "stepwise_act_cpu_ms": 1e3 * alone.stepwise_act_s(seconds / 2),
    }


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="CPU time to spend on rollouts; half on each other"
    )
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--together", action="store_true", help="load all cores at the same time")
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: given.cores]
    if given.together:
        with ProcessPoolExecutor(len(cores), mp_context=get_context("spawn")) as pool:
            found = list(pool.map(measure_on, cores, repeat(given.seconds)))
    else:
        found = [measure_on(cores[0], given.seconds)] * len(cores)
    result = {name: sum(each[name] for each in found) / len(found) for name in found[0]}
    result["limit_steps_per_s"] = sum(each["limit_steps_per_s"] for each in found)
    print(json.dumps({name: round(value, 3) for name, value in result.items()}), flush=True)


if __name__ == "__main__":
    main()
