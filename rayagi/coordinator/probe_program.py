"""What a probe runs in a GMI: training, in parts of an iteration where a whole one would last too long to wait for several.

A part has fewer steps and as many times fewer minibatches: each step, each minibatch and each reduction is what it is in
training, there are only fewer of them in an iteration. What is done once per iteration (statistics, a few reductions of a
few numbers) counts for more, which is milliseconds. Memory is that of whole rollouts, and is taken from one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from actors.gmi import GmiContext
from actors.host_memory import peak_bytes, reset_peak
from actors.protocols import EnvFactory, IterationResult
from actors.rollout import Rollout, StepRow
from rayagi.algorithms.ppo.learner import PPOTraining
from rayagi.algorithms.program import DpOnlyProgram
from rayagi.config.spec import RunSpec

MIN_PART_STEPS = 8
"""Of a part: below, what is done once per iteration would show."""


def parts_of(spec: RunSpec, iteration_s: float, wanted_s: float) -> int:
    """Into how many parts to cut an iteration so that one lasts ``wanted_s`` or less: a power of two, 1 for whole ones.

    Steps and minibatches have to divide by it, which limits it. Iterations of other algorithms than PPO stay whole.

    Args:
        spec: the run
        iteration_s: how long a whole iteration is expected to last
        wanted_s: how long a part may
    """
    steps, minibatches = spec.learning.rollout_length, spec.learning.num_minibatches
    parts = 1
    while (
        spec.algorithm == "ppo"
        and iteration_s / parts > wanted_s
        and steps % (2 * parts) == 0
        and minibatches % (2 * parts) == 0
        and steps // (2 * parts) >= MIN_PART_STEPS
    ):
        parts *= 2
    return parts


@dataclass(frozen=True, slots=True)
class ProbeFactory:
    """Builds the program in its GMI; picklable."""

    spec: RunSpec
    """Of the run whose speed is wanted."""
    make_env: EnvFactory
    parts: int

    def __call__(self, context: GmiContext) -> ProbeProgram:
        """Build it."""
        return ProbeProgram(self.spec, self.make_env, context, self.parts)


class ProbeProgram(DpOnlyProgram):
    """Trains in parts of an iteration, and says the most memory that it ever held."""

    def __init__(self, spec: RunSpec, make_env: EnvFactory, context: GmiContext, parts: int) -> None:
        self._knows_peak = reset_peak()
        if context.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(context.device)
        steps, minibatches = spec.learning.rollout_length, spec.learning.num_minibatches
        learning = replace(spec.learning, rollout_length=steps // parts, num_minibatches=minibatches // parts)
        super().__init__(replace(spec, learning=learning), make_env, context)
        self._parts = parts
        self._whole: Rollout | None = None
        """A rollout as training has it, and keeps."""

    def iterate(self) -> IterationResult:
        """One part; with the first one, a whole rollout goes through what holds most memory."""
        result = super().iterate()
        if self._parts > 1 and self._whole is None:
            self._whole = _repeated(self.rollout, self._parts)
            assert isinstance(self.training, PPOTraining)  # parts_of cuts no other's iterations
            self.training.prepare(self._whole)
            result.metrics.update(self._memory())
        return result

    def _memory(self) -> dict[str, float]:
        """The most so far, where the system tells. [unverified on GPU]"""
        held = super()._memory()
        if self._knows_peak:
            held["resident_bytes"] = max(held["resident_bytes"], float(peak_bytes()))
        return held


def _repeated(rollout: Rollout, times: int) -> Rollout:
    """One rollout after another, all alike."""
    whole = {
        name: getattr(rollout, name).repeat(times, *[1] * (getattr(rollout, name).dim() - 1))
        for name in StepRow._fields
    }
    steps = rollout.num_steps
    finals = [(part * steps + t, ids, obs) for part in range(times) for t, ids, obs in rollout.finals]
    return Rollout(**whole, last_obs=rollout.last_obs.clone(), finals=finals)
