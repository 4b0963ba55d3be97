"""Parts of serving programs: environments with a sink that records their steps, and the agent."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

import torch
from torch import Tensor

from actors.gmi import GmiContext
from actors.protocols import Acting, EnvInfo
from actors.roles import Agent, LocalSimulator
from actors.rollout import Rollout
from rayagi.models.policy import NetworkPolicy
from rayagi.serving.program import ServingJob, ServingProgram, ServingResult
from rayagi.serving.recording import open_sink

_STEPS = 32
"""Steps of one block of noise."""


class ServingAgent:
    """Acts for a GMI's environments. The noise of an environment does not depend on the GMI that draws it."""

    def __init__(
        self, job: ServingJob, policy: NetworkPolicy, *, num_envs: int, first_env_index: int
    ) -> None:
        self._agent, self._policy, self._greedy = Agent(policy), policy, job.greedy
        self._seed, self._num_envs, self._first_env_index = job.seed, num_envs, first_env_index
        self._rollout = _one_row(policy.info, num_envs, policy.device)
        self._block, self._step = 0, _STEPS
        self._acting: Acting
        action, clips = policy.action, not policy.model.head.bounded and policy.action.kind == "continuous"
        bounds = (action.low, action.high)
        self._range = [torch.tensor(bound, device=policy.device) for bound in bounds] if clips else None

    def act(self, obs: Tensor) -> Tensor:
        """Actions (N, dim) or (N,) for raw observations (N, obs_dim), on the host, valid until the next call."""
        # The mode needs no new noise: the first block is reused.
        if self._step == _STEPS and not (self._greedy and self._block):
            self._acting = self._agent.through(self._rollout, self._noise())
            self._block += 1
        self._step = self._step % _STEPS + 1
        return self._acting(self._step - 1, obs)

    @torch.inference_mode()
    def log_probs(self) -> Tensor:
        """log p(a | s) of the last actions under the policy's distribution, (N,) float32 on the host.

        Of what the environment receives: of an action that is clipped to its range, the density at the limit; of a squashed
        one, the density after the change of variables. Of the mode too, if the agent is greedy.
        """
        actions = self._rollout.actions[0]
        if self._range is not None:
            actions = actions.clamp(*self._range)
        return self._policy.model.head.log_prob(self._rollout.outputs[0], actions).cpu()

    def reset(self, ids: Tensor) -> None:
        """Begin new episodes in these environments, (K,) int64: a recurrent policy forgets the old ones."""
        self._agent.reset(ids)

    def _noise(self) -> Tensor:
        """Noise of a block of steps, (T, N, noise_dim) float32, on the policy's device."""
        if self._greedy:
            policy = self._policy
            shape = (_STEPS, self._num_envs, policy.noise_dim)
            return torch.full(shape, policy.model.head.mode_noise, device=policy.device)
        return self._policy.noise(
            _STEPS, self._num_envs, seed=self._seed, first_env_index=self._first_env_index, number=self._block
        )


def _one_row(info: EnvInfo, num_envs: int, device: torch.device) -> Rollout:
    """A rollout whose steps all share the memory of one step: earlier steps are not read again."""
    row = Rollout.allocate(1, num_envs, info, device)
    for field in fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Tensor) and field.name != "last_obs":
            setattr(row, field.name, value.expand(_STEPS, *value.shape[1:]))
    return row


_CLOSE_S = 3.0
"""Time limit for the writer on ``close`` without ``finish``; it continues by itself."""


class SimulatingProgram(ServingProgram):
    """A serving program that simulates and records."""

    def __init__(self, job: ServingJob, context: GmiContext, envs: Sequence[int]) -> None:
        """Create the environments, and open the sink.

        Args:
            job: what to serve
            context: of this GMI
            envs: number of environments of each GMI

        Raises:
            DiskError, WriterError: the writer cannot start or write.
        """
        index = context.identity.index
        self.num_envs, self.first_env_index = envs[index], sum(envs[:index])
        env = job.spec.env.factory()(
            num_envs=self.num_envs,
            first_env_index=self.first_env_index,
            seed=job.seed,
            num_threads=context.identity.slice.num_threads,
        )
        self.simulator = LocalSimulator(env)
        self.sink = open_sink(
            job,
            context,
            env.info,
            num_envs=self.num_envs,
            first_env_index=self.first_env_index,
            total_envs=sum(envs),
        )

    @contextmanager
    def measured(self, num_steps: int) -> Iterator[ServingResult]:
        """Yield the result of ``num_steps`` steps of every environment, and fill it in after the block."""
        result, waited_s, begin = ServingResult(), self.sink.wait_s, time.perf_counter()
        yield result
        result.wall_s = time.perf_counter() - begin
        result.env_steps = num_steps * self.num_envs
        result.write_wait_s = self.sink.wait_s - waited_s
        result.episode_returns, result.episode_lengths = self.simulator.take_finished()

    def finish(self, timeout_s: float) -> None:
        """Wait until everything recorded is written.

        Raises:
            DiskError, WriterError: it could not be written.
        """
        self.sink.close(timeout_s)

    def close(self) -> None:
        """Close the sink and the environments; the writer finishes by itself."""
        try:
            self.sink.close(_CLOSE_S)
        finally:
            self.simulator.close()
