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

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import count, repeat
from multiprocessing import get_context

import torch

from actors.agent import Agent
from actors.gmi import GmiContext, GmiIdentity
from actors.noise import minibatch_orders
from actors.rollout import Rollout
from actors.simulator import Simulator
from collectives.solo import SoloCommunicator
from experiments.throughput.settings import ROLLOUT_LENGTH, TOTAL_ENVS, run_spec
from placement.types import Slice
from rayagi.algorithms.program import DpOnlyProgram, dp_only_factory


def cpu_seconds_each(work: Callable[[], None], seconds: float) -> float:
    """CPU time of one call, the mean of as many as fit in ``seconds``, after two to warm up."""
    for _ in range(2):
        work()
    started, calls = time.process_time(), 0
    while time.process_time() - started < seconds:
        work()
        calls += 1
    return (time.process_time() - started) / calls


def collect(program: DpOnlyProgram, number: int) -> None:
    """One rollout as training makes it: simulation and acting."""
    program.simulator.fill(program.rollout, program.training.policy.tensors(), number)


def simulate(simulator: Simulator, actions: torch.Tensor) -> None:
    """One rollout's physics, observation, reward and reset, with given actions."""
    for t in range(ROLLOUT_LENGTH):
        simulator.step(actions[t])


def act(agent: Agent, rollout: Rollout, noise: torch.Tensor) -> None:
    """One rollout's inference and sampling, with given observations."""
    for t in range(ROLLOUT_LENGTH):
        agent.act(rollout.raw_obs[t], noise[t])


def update(program: DpOnlyProgram) -> None:
    """One update from a rollout: values, advantages, minibatches."""
    batch, _ = program.training.prepare(program.rollout)
    orders = minibatch_orders(
        seed=0,
        first_env_index=0,
        num_envs=TOTAL_ENVS,
        iteration=0,
        num_steps=ROLLOUT_LENGTH,
        num_epochs=4,
        num_minibatches=4,
    )
    program.training.learner.update(batch, orders, 0, 0)


def measure_on(core: int, seconds: float) -> dict[str, float]:
    """CPU milliseconds of each phase for one iteration of all 64 environments on one core, and what it could reach alone."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    spec = run_spec(num_gmis=1, threads_per_gmi=1)
    identity = GmiIdentity(
        index=0,
        num_gmis=1,
        slice=Slice(node="here", backend="cpu", cores=(0,)),
        roles=("simulator", "agent", "trainer"),
        task="Ant-v5",
    )
    program = dp_only_factory(spec)(
        GmiContext(identity=identity, communicator=SoloCommunicator(), device=torch.device("cpu"))
    )
    program.iterate()
    rollouts = count(1)
    rollout_s = cpu_seconds_each(lambda: collect(program, next(rollouts)), seconds)
    # An untrained policy's actions: the same mix of contacts, falls and resets as at the start of training.
    noise = torch.randn(ROLLOUT_LENGTH, TOTAL_ENVS, 8)
    simulate_s = cpu_seconds_each(lambda: simulate(program.simulator, noise), seconds / 2)
    act_s = cpu_seconds_each(lambda: act(program.agent, program.rollout, noise), seconds / 2)
    update_s = cpu_seconds_each(lambda: update(program), seconds / 2)
    program.close()
    steps = TOTAL_ENVS * ROLLOUT_LENGTH
    return {
        "rollout_cpu_ms": 1e3 * rollout_s,
        "update_cpu_ms": 1e3 * update_s,
        "limit_steps_per_s": steps / (rollout_s + update_s),
        "stepwise_simulate_cpu_ms": 1e3 * simulate_s,
        "stepwise_act_cpu_ms": 1e3 * act_s,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
