"""Program that a probe runs in a GMI: training, in parts of an iteration if a whole iteration would take too long.

A part has 1/k of the steps and 1/k of the minibatches. Each step, minibatch and reduction is the same as in training; only
their number is smaller. Work that is done once per iteration (statistics, a few small reductions) therefore weighs more, by
milliseconds. Memory is measured with one whole rollout.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from actors.gmi import GmiContext
from actors.host_memory import memory_metrics, peak_bytes, reset_peak
from actors.protocols import EnvFactory, IterationResult
from actors.rollout import Rollout, StepRow
from rayagi.algorithms.ppo.learner import PPOLearner
from rayagi.algorithms.program import DpOnlyProgram
from rayagi.config.spec import RunSpec

MIN_PART_STEPS = 8
"""Minimum steps of a part: with fewer, the work that is done once per iteration would distort the measurement."""


def parts_of(spec: RunSpec, iteration_s: float, wanted_s: float) -> int:
    """Number of parts of an iteration so that one takes at most ``wanted_s``: a power of two; 1: not divided.

    It has to divide the steps and the minibatches. Only PPO's iterations are divided, and only of networks without a state,
    whose minibatches are of single steps.

    Args:
        spec: the run
        iteration_s: expected duration of a whole iteration
        wanted_s: maximum duration of a part
    """
    steps, minibatches = spec.learning.rollout_length, spec.learning.num_minibatches
    stateless = spec.network.core == "none" and spec.network.module is None
    parts = 1
    while (
        spec.algorithm == "ppo"
        and stateless
        and iteration_s / parts > wanted_s
        and steps % (2 * parts) == 0
        and minibatches % (2 * parts) == 0
        and steps // (2 * parts) >= MIN_PART_STEPS
    ):
        parts *= 2
    return parts


class ProbeProgram(DpOnlyProgram):
    """Trains in parts of an iteration, and reports its peak memory."""

    def __init__(self, spec: RunSpec, make_env: EnvFactory, parts: int, context: GmiContext) -> None:
        self._knows_peak = reset_peak()
        if context.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(context.device)
        steps, minibatches = spec.learning.rollout_length, spec.learning.num_minibatches
        learning = replace(spec.learning, rollout_length=steps // parts, num_minibatches=minibatches // parts)
        super().__init__(replace(spec, learning=learning), make_env, context)
        self._parts = parts
        self._whole: Rollout | None = None
        """A whole rollout, kept as in training."""

    def iterate(self) -> IterationResult:
        """Run one part; the first one also prepares a whole rollout, the step with the highest memory use."""
        result = super().iterate()
        if self._parts > 1 and self._whole is None:
            self._whole = _repeated(self.rollout, self._parts)
            assert isinstance(self.learner, PPOLearner)  # parts_of cuts no other's iterations
            self.learner.prepare(self._whole)
        result.metrics.update(memory_metrics(self.context.device))
        if self._knows_peak:
            result.metrics["resident_bytes"] = float(peak_bytes())
        return result


def _repeated(rollout: Rollout, times: int) -> Rollout:
    """The rollout repeated ``times`` times along the step axis."""
    whole = {
        name: getattr(rollout, name).repeat(times, *[1] * (getattr(rollout, name).dim() - 1))
        for name in (*StepRow._fields, *([] if rollout.final_obs is None else ["final_obs"]))
    }
    steps = rollout.num_steps
    finals = [(part * steps + t, ids, obs) for part in range(times) for t, ids, obs in rollout.finals]
    return Rollout(**whole, last_obs=rollout.last_obs.clone(), finals=finals)
