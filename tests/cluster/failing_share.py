"""A program whose share of a GPU fails under it, once, and what a run's files would hold of it."""

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from actors.protocols import IterationResult

FAILS_AT = 5


@dataclass(frozen=True)
class Counting:
    """Adds one to a weight in every iteration; GMI 1's daemon fails once, in the fifth."""

    how: str
    failed: str
    """A file that is there once it has failed."""

    def __call__(self, context):
        return _Counter(self, context)


class _Counter:
    def __init__(self, told, context):
        self.told, self.context = told, context
        self.iteration, self.weight = 0, torch.zeros(1)

    def iterate(self):
        fails = self.context.identity.index == 1 and self.iteration + 1 == FAILS_AT
        if fails and not Path(self.told.failed).exists():
            Path(self.told.failed).touch()
            self.fail(Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]))
        one = torch.ones(1)
        self.context.communicator.all_reduce(one, "mean")
        self.weight += one
        self.iteration += 1
        return IterationResult(iteration=self.iteration, metrics={"env_steps": 10.0, "iteration_s": 0.01})

    def fail(self, pipe):
        if self.told.how == "fault":
            (pipe / "clients").write_text(str(os.getpid()))
            (pipe / "behave").write_text("fault")
            threading.Event().wait(120)  # as a process that waits for its GPU: it has to be ended
        os.kill(int((pipe / "nvidia-cuda-mps-control.pid").read_text()), signal.SIGKILL)
        raise RuntimeError("CUDA error: the MPS server is gone")

    def state_dict(self):
        shared = {"weight": self.weight.clone(), "iteration": self.iteration}
        return {"shared": shared, "local": {"index": self.context.identity.index}}

    def load_state_dict(self, state):
        assert state["local"]["index"] == self.context.identity.index
        self.weight, self.iteration = state["shared"]["weight"].clone(), state["shared"]["iteration"]

    def close(self):
        pass


class Course:
    """What the run's files would hold."""

    def __init__(self):
        self.iterations, self.rewound_to = [], []

    def iterated(self, rows, position):
        self.iterations += [row["iteration"] for row in rows]

    def rewound(self, position):
        self.rewound_to.append(position.iteration)
        self.iterations = [number for number in self.iterations if number <= position.iteration]

    def saved(self, checkpoint):
        pass
