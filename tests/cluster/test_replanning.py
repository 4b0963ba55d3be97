"""A GMI that is slowed on purpose is noticed, and left out at the next checkpoint, on a Ray of this machine."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import torch

from actors.protocols import IterationResult
from placement.inventory import local_machine
from rayagi.config.spec import EnvSpec, GmiSpec, RunSpec
from rayagi.coordinator.health_monitor import RunHealthMonitor
from rayagi.coordinator.session import Session
from rayagi.run.checkpoints import CheckpointStore
from rayagi.run.interrupt import Interrupt
from rayagi.run.limits import Limits
from rayagi.run.training_loop import Interval, LoopSettings, TrainingLoop

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TIMES_THE_WORK = 12


@dataclass(frozen=True)
class Slowed:
    """A program that computes the same many times over on one core."""

    core: int

    def __call__(self, context):
        return _Running(context, self.core)


class _Running:
    def __init__(self, context, slow_core):
        self.context = context
        self.rounds = TIMES_THE_WORK if slow_core in context.identity.slice.cores else 1
        self.matrix = torch.rand(192, 192, generator=torch.Generator().manual_seed(0))
        self.iteration, self.weight = 0, torch.zeros(1)

    def iterate(self):
        begin = time.perf_counter()
        for _ in range(4 * self.rounds):
            self.matrix @ self.matrix
        worked = time.perf_counter()
        gradient = torch.ones(1)
        self.context.communicator.all_reduce(gradient, "mean")
        ended = time.perf_counter()
        self.weight += gradient
        self.iteration += 1
        times = {"iteration_s": ended - begin, "sync_s": ended - worked}
        return IterationResult(iteration=self.iteration, metrics={"env_steps": 100.0, **times})

    def state_dict(self):
        shared = {"weight": self.weight.clone(), "iteration": self.iteration}
        return {"shared": shared, "local": {"index": self.context.identity.index}}

    def load_state_dict(self, state):
        self.weight, self.iteration = state["shared"]["weight"].clone(), state["shared"]["iteration"]

    def close(self):
        pass


@pytest.fixture
def cluster(pytestconfig):
    path = f"{Path(__file__).resolve().parent}:{pytestconfig.rootpath}"
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    yield
    ray.shutdown()


@pytest.mark.parametrize("straggler", [0, 1])
def test_a_gmi_that_holds_up_the_others_is_left_out_at_the_next_checkpoint(cluster, tmp_path, straggler):
    cores = local_machine().nodes[0].usable_cores
    spec = RunSpec(
        env=EnvSpec(id="Slowed"), gmi=GmiSpec(num_gmis=2, num_envs=4, threads_per_gmi=1, replan=True)
    )
    sessions, plans, logged, kept = [], [], [], []

    def open_session(own):
        sessions.append(Session(own, factory=Slowed(cores[straggler]), on_plan=plans.append))
        return sessions[-1].__enter__()

    health_monitor = RunHealthMonitor(
        spec, open_session(spec), reopen=open_session, log=logged.append, save_spec=kept.append, window=8
    )
    store = CheckpointStore(tmp_path / "checkpoints")
    settings = LoopSettings(limits=Limits(iterations=60), seed=0, checkpoint_every=Interval(iterations=20))
    loop = TrainingLoop(
        sessions[0], store, [], settings, interrupt=Interrupt(), health_monitor=health_monitor
    )
    try:
        outcome = loop.run()
    finally:
        for session in sessions:
            session.close()
    assert outcome.position.iteration == 60
    assert f"GMI {straggler} runs at" in " ".join(logged)
    assert f"without GMI {straggler} the run is faster" in " ".join(logged)
    assert "Continuing with 1 GMI and 4 environments in total instead of 8" in logged[-1]
    assert len(sessions) == 2
    # What is left runs on the other core.
    assert [[gmi_slice.cores for gmi_slice in plan.slices] for plan in plans] == [
        [(cores[0],), (cores[1],)],
        [(cores[1 - straggler],)],
    ]
    assert [own.gmi.left_out for own in kept] == [(straggler,)]
    last = store.load()
    assert last.state["num_gmis"] == 1
    # One for every iteration, before and after.
    assert last.state["shared"]["weight"].item() == last.state["shared"]["iteration"] == 60
