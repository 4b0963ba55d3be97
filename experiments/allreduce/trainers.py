"""Members of a labelled layout that train, each in a process without Ray, with several compositions in turns."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from actors.gmi import GmiContext, GmiIdentity
from collectives.layout import Layout
from experiments.throughput.settings import run_spec
from placement.types import Slice
from rayagi.algorithms.factory import training_factory
from rayagi.algorithms.program import DpOnlyProgram
from rayagi.benchmark.member import BenchMember
from rayagi.config.spec import NetworkSpec, RunSpec
from rayagi.envs import env_info
from rayagi.models.networks import ActorCritic, FlatParameters

TASK, ENVS_PER_GMI = "Ant-v5", 16


@dataclass(frozen=True, slots=True)
class Model:
    """Networks as large as one of the preprint's Table 7.

    Attributes:
        name: the benchmark whose size it has; the task is Ant-v5 for all
        hidden: layers of the policy and of the value network; chosen so that the size is Table 7's on Ant-v5's observations
    """

    name: str
    hidden: tuple[int, ...]

    def spec(self, num_gmis: int) -> RunSpec:
        """Ant-v5 with the peers' settings (experiments/throughput), and fewer environments on each GMI."""
        spec = run_spec(1, threads_per_gmi=1)
        return replace(
            spec,
            gmi=replace(spec.gmi, num_gmis=num_gmis, num_envs=ENVS_PER_GMI),
            network=NetworkSpec(hidden=self.hidden, activation="elu", initial_log_std=0.0),
        )

    def gradient_bytes(self) -> int:
        """Of the flat float32 bucket that is reduced."""
        network = self.spec(1).network
        return FlatParameters(ActorCritic(env_info(TASK), network)).gradients.nbytes


MODELS = (Model("AT", (200, 128, 64)), Model("HM", (208, 400, 100)), Model("SH", (600, 512, 512, 256)))
"""1.1e5, 2.9e5 and 1.5e6 parameters."""


@dataclass(frozen=True, slots=True)
class Span:
    """One member's iterations: begin and end in seconds on the host's clock."""

    begin_s: float
    end_s: float


class TrainingMember(BenchMember):
    """A bench member that also trains: one program per composition, with the same seeds."""

    def __init__(self, rank: int, layout: Layout) -> None:
        super().__init__(rank, layout)
        self._rank_of_all, self._num_gmis = rank, layout.world_size
        self._programs: dict[str, DpOnlyProgram] = {}

    def build(self, model: Model, compositions: tuple[str, ...]) -> None:
        """Replace the programs, and run an iteration of each that does not count."""
        self.end_programs()
        spec = model.spec(self._num_gmis)
        for composition in compositions:
            identity = GmiIdentity(
                index=self._rank_of_all,
                num_gmis=self._num_gmis,
                slice=Slice(node="", backend="cpu", num_threads=1),
                roles=("simulator", "agent", "trainer"),
                task=TASK,
            )
            context = GmiContext(
                identity=identity,
                communicator=self.communicator(composition),
                device=torch.device("cpu"),
            )
            self._programs[composition] = training_factory(spec)(context)
            self._programs[composition].iterate()

    def train(self, composition: str, iterations: int) -> Span:
        """Iterations with one composition."""
        program = self._programs[composition]
        begin_s = time.perf_counter()
        for _ in range(iterations):
            program.iterate()
        return Span(begin_s, time.perf_counter())

    def parameters(self, composition: str) -> float:
        """A number that is equal on all members exactly if they still hold equal parameters: their sum."""
        flat = self._programs[composition].learner.updater.flat.parameters
        return float(flat.detach().double().sum())

    def end_programs(self) -> None:
        """Release the simulators."""
        for program in self._programs.values():
            program.close()
        self._programs.clear()

    def close(self) -> None:
        """Release all."""
        self.end_programs()
        super().close()
