"""Simulator and agent, and the loop that connects them, local or remote (GMI-DRL §3.1.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from actors.errors import NonFiniteError
from actors.policy_tensors import PolicyTensors
from actors.protocols import (
    Acting,
    EnvFactory,
    EnvInfo,
    EvaluationResult,
    Policy,
    RolloutEnv,
    StateDict,
    StepResult,
    VecEnv,
)
from actors.rollout import Rollout
from placement.errors import counted


class Agent:
    """Turns observations into actions with a policy. Holds the states of a recurrent one, of one set of environments."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._states: Tensor | None = None

    def states(self, num_envs: int, device: torch.device) -> Tensor:
        """The recurrent states to act with next, (N, state_dim); zeros at first.

        Raises:
            ValueError: the states are of another number of environments.
        """
        if self._states is None:
            self._states = torch.zeros((num_envs, self.policy.state_dim))
        self._states = self._states.to(device)
        if len(self._states) != num_envs:
            raise ValueError(
                f"the states are of {counted(len(self._states), 'environment')}; expected those of {num_envs}"
            )
        return self._states

    @torch.inference_mode()
    def reset(self, ids: Tensor) -> None:
        """Forget the episodes of these environments, (K,) int64: they begin new ones."""
        if self._states is not None and len(ids):
            self._states[ids.to(self._states.device)] = 0.0

    @torch.inference_mode()
    def act(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sampled actions.

        Args:
            obs: raw observations   (N, obs_dim)
            noise: exploration noise of this step   (N, output_dim)

        Returns:
            normalised observations (N, obs_dim), distribution parameters (N, output_dim), actions (N, dim) or (N,).
        """
        observed = self.policy.observe(obs)
        outputs = self._outputs(observed)
        return observed, outputs, self.policy.sample(outputs, noise)

    def _outputs(self, observed: Tensor) -> Tensor:
        if not self.policy.state_dim:
            return self.policy.outputs(observed)
        outputs, states = self.policy.step(observed, self.states(len(observed), observed.device))
        self._states = states.clone()  # a network may return a view of the observations, which change
        return outputs

    def through(self, rollout: Rollout, noise: Tensor) -> Acting:
        """Act through ``rollout`` with the current policy; ``noise`` (T, N, output_dim) is on the policy's device."""
        return self.policy.acting(rollout, noise) or ActingByOperations(self, rollout, noise)

    @torch.inference_mode()
    def act_greedily(self, obs: Tensor) -> Tensor:
        """The policy's mode, as the environment receives it, on the host."""
        actions = self.policy.mode(self._outputs(self.policy.observe(obs)))
        return self.policy.environment_actions(actions).cpu()

    def state_dict(self) -> StateDict:
        """The recurrent states, if there are any."""
        return {} if self._states is None else {"states": self._states.cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore saved states; an empty mapping: all episodes begin anew."""
        self._states = state["states"].clone() if "states" in state else None


class ActingByOperations:
    """Implements Acting with the policy's torch operations."""

    def __init__(self, agent: Agent, rollout: Rollout, noise: Tensor) -> None:
        self._agent, self._rollout = agent, rollout
        self._steps = list(zip(rollout.steps(), noise.unbind(0), strict=True))

    def __call__(self, t: int, obs: Tensor) -> Tensor:
        """Fill step ``t``; returns the environment's actions on the host."""
        row, noise = self._steps[t]
        rollout = self._rollout
        if rollout.states is not None and t % rollout.sequence_length == 0:
            states = self._agent.states(rollout.num_envs, rollout.states.device)
            rollout.states[t // rollout.sequence_length].copy_(states)
        row.raw_obs.copy_(obs)
        observed, outputs, actions = self._agent.act(obs, noise)
        row.obs.copy_(observed)
        row.outputs.copy_(outputs)
        row.actions.copy_(actions)
        return self._agent.policy.environment_actions(actions).cpu()


class LocalSimulator:
    """Steps a batch of environments and sums up their episodes' returns and lengths."""

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.obs: Tensor = env.reset()
        self._returns = torch.zeros(env.num_envs, dtype=torch.float64)
        self._lengths = torch.zeros(env.num_envs, dtype=torch.int64)
        self.finished_returns: list[float] = []
        self.finished_lengths: list[int] = []
        terms = env.info.reward_terms
        self._terms = torch.zeros((env.num_envs, len(terms)), dtype=torch.float64)
        """Sums of the reward terms over the running episodes, (N, terms)."""
        self._finished_terms: dict[str, list[float]] = {name: [] for name in terms}
        self._sim_errors: dict[str, int] = {}

    @property
    def info(self) -> EnvInfo:
        """Description of the environments."""
        return self.env.info

    @property
    def resumes_episodes(self) -> bool:
        """Whether restoring a saved state continues its episodes."""
        return self.env.resumes_episodes

    def begin(self, iteration: int) -> None:
        """No-op: the environments are local."""

    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment; ``actions`` on the host."""
        result = self.env.step(actions)
        self.obs = result.obs
        self.count_step(result.rewards, result.final_ids, result.reward_terms)
        return result

    def count_step(self, rewards: Tensor, ended: Tensor, reward_terms: Tensor | None) -> None:
        """Add a step to the episode statistics.

        Args:
            rewards: of the step                                     (N,)
            ended: environments whose episodes ended                 (K,) int64
            reward_terms: of the step, by ``EnvInfo.reward_terms``   (N, terms), or None
        """
        self._returns += rewards
        if reward_terms is not None:
            self._terms += reward_terms
            if len(ended):
                for finished, sums in zip(
                    self._finished_terms.values(), self._terms[ended].T.tolist(), strict=True
                ):
                    finished.extend(sums)
                self._terms[ended] = 0.0
        self._lengths += 1
        if len(ended):
            self.finished_returns += self._returns[ended].tolist()
            self.finished_lengths += self._lengths[ended].tolist()
            self._returns[ended] = 0.0
            self._lengths[ended] = 0

    def collect_rollout(self, rollout: Rollout, policy: PolicyTensors, iteration: int) -> None:
        """Collect a whole rollout in one call of a RolloutEnv. Episode statistics are the same as step by step."""
        assert isinstance(self.env, RolloutEnv)
        returns, lengths = self.env.collect_rollout(rollout, policy, iteration, self._returns)
        self.finished_returns += returns
        self.finished_lengths += lengths
        self.obs = rollout.last_obs.clone()
        ended = rollout.terminated | rollout.truncated
        # Steps since the last episode end of each environment: index of the first True in reversed time.
        since_last = ended.flip(0).to(torch.int64).argmax(0)
        self._lengths = torch.where(ended.any(0), since_last, self._lengths + rollout.num_steps)

    def take_finished(self) -> tuple[list[float], list[int]]:
        """Undiscounted returns and lengths of the episodes that ended since the last call."""
        finished = self.finished_returns, self.finished_lengths
        self.finished_returns, self.finished_lengths = [], []
        return finished

    def take_reward_terms(self) -> dict[str, list[float]]:
        """Sums of the reward terms over the episodes that ended since the last call, by name."""
        finished = self._finished_terms
        self._finished_terms = {name: [] for name in finished}
        return finished

    def take_sim_errors(self) -> dict[str, float]:
        """Simulation errors since the last call, by metric; empty if the environments do not count them."""
        counted = dict(getattr(self.env, "sim_errors", {}))
        new = {name: count - self._sim_errors.get(name, 0) for name, count in counted.items()}
        self._sim_errors = counted
        return {f"faults_{name.replace(' ', '_')}": float(count) for name, count in new.items()}

    def close(self) -> None:
        """Release the environments."""
        self.env.close()

    def state_dict(self) -> StateDict:
        """Environments, and the running episodes' returns and lengths."""
        return {
            "env": self.env.state_dict(),
            "returns": self._returns.clone(),
            "lengths": self._lengths.clone(),
            "reward_terms": self._terms.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore a saved state; None: new episodes, where any has begun.

        Episodes that the environments cannot resume count from zero.
        """
        if state is not None:
            self.obs = self.env.load_state_dict(state["env"])
        elif self._lengths.any():
            self.obs = self.env.reset()
        saved = state if state is not None and self.env.resumes_episodes else {}
        self._returns = saved["returns"].clone() if saved else torch.zeros_like(self._returns)
        self._lengths = saved["lengths"].clone() if saved else torch.zeros_like(self._lengths)
        terms = saved.get("reward_terms")
        if terms is None or terms.shape != self._terms.shape:  # the task's terms may have changed
            terms = torch.zeros_like(self._terms)
        self._terms = terms.clone()


_MOST_ENVS = 64
"""Most environments that an evaluation steps in parallel."""
LONGEST_EPISODE_STEPS = 10_000
"""Time limit of an evaluation episode on a task without one: ten times the usual 1000."""


class StepSource(Protocol):
    """A local simulator, or the simulators of other GMIs (actors.stepping)."""

    @property
    def obs(self) -> Tensor:
        """Observations to act on next, (N, obs_dim)."""

    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment; ``actions`` on the host. The result is valid until the next step."""


Timing = AbstractContextManager[Any]
"""Entered around each step of a kind, by who measures it."""
UNTIMED: Timing = nullcontext()


def collect(
    simulator: StepSource,
    agent: Agent,
    rollout: Rollout,
    noise: Tensor,
    *,
    acting: Timing = UNTIMED,
    stepping: Timing = UNTIMED,
) -> None:
    """Fill ``rollout`` with T steps of every environment.

    Args:
        simulator: steps the environments
        agent: acts
        rollout: T steps of N environments
        noise: exploration noise (T, N, output_dim) on the policy's device
        acting: entered around each step's inference and sampling
        stepping: entered around each step of the simulator
    """
    rollout.finals.clear()
    act = agent.through(rollout, noise)
    for t, row in enumerate(rollout.steps()):
        with acting:
            actions = act(t, simulator.obs)  # fills the agent's part of the row: obs, outputs, actions
        with stepping:
            step = simulator.step(actions)
        row.rewards.copy_(step.rewards)
        row.terminated.copy_(step.terminated)
        row.truncated.copy_(step.truncated)
        if len(step.final_ids):
            agent.reset(step.final_ids)
            rollout.finals.append((t, step.final_ids.clone(), step.final_obs.clone()))
    rollout.last_obs.copy_(simulator.obs)


def check_finite(rollout: Rollout, iteration: int) -> None:
    """Raise on the first NaN or infinity that the simulator or the policy returned.

    Sums of huge numbers overflow to NaN or to infinity, depending on their order: both are refused, so that a compiled
    policy ends with the same error as torch's. But a choice may have the logit -infinity: so a user's network masks it.

    Raises:
        NonFiniteError: with the quantity, the step within the rollout and the environment's number in this GMI.
    """
    outputs = rollout.outputs
    if not rollout.actions.is_floating_point():
        outputs = outputs.clamp(min=torch.finfo(outputs.dtype).min)
    checked = (
        ("an observation", rollout.raw_obs),
        ("a reward", rollout.rewards),
        ("an output of the policy", outputs),
    )
    for quantity, values in checked:
        # One cheap sum detects any; if finite values overflow it, the exact check below finds none.
        if not torch.isfinite(values.sum()):
            bad = (~torch.isfinite(values)).nonzero()
            if len(bad):
                step, env = int(bad[0, 0]), int(bad[0, 1])
                raise NonFiniteError(quantity, iteration, f"rollout step {step}, environment {env}")


Progress = Callable[[int, int], object]
"""Called with the number of episodes that are done, and of steps of each environment."""


def evaluate_in_new_envs(
    make_env: EnvFactory,
    policy: Policy,
    num_episodes: int,
    *,
    seed: int,
    num_threads: int,
    progress: Progress = lambda episodes, steps: None,
) -> EvaluationResult:
    """``evaluate`` with an agent of its own in new environments, separate from those of training."""
    env = make_env(
        num_envs=min(num_episodes, _MOST_ENVS), first_env_index=0, seed=seed, num_threads=num_threads
    )
    try:
        return evaluate(env, Agent(policy), num_episodes, progress=progress)
    finally:
        env.close()


class GreedyAgent(Protocol):
    """What ``evaluate`` needs of an agent."""

    def act_greedily(self, obs: Tensor) -> Tensor:
        """As of ``Agent``."""

    def reset(self, ids: Tensor) -> None:
        """As of ``Agent``."""


def evaluate(
    env: VecEnv,
    agent: GreedyAgent,
    num_episodes: int,
    *,
    progress: Progress = lambda episodes, steps: None,
) -> EvaluationResult:
    """Whole episodes with the policy's mode.

    Each environment contributes a fixed number of its first episodes, so that short episodes are not over-represented.
    Without a time limit, an episode is cut after LONGEST_EPISODE_STEPS. Its environment begins the next one when that ends
    by itself after all, or with a reset of all environments when none of them is in an episode that counts.
    """
    limit, n = env.info.max_episode_steps, env.num_envs
    longest = LONGEST_EPISODE_STEPS if limit is None else limit
    quota = [num_episodes // n + (i < num_episodes % n) for i in range(n)]
    obs = env.reset()
    running = torch.zeros(n, dtype=torch.float64)
    lengths = torch.zeros(n, dtype=torch.int64)
    is_cut = [False] * n
    found: list[list[tuple[float, int, bool]]] = [[] for _ in range(n)]
    steps = 0
    while unfinished := [i for i in range(n) if len(found[i]) < quota[i]]:
        if all(is_cut[i] for i in unfinished):
            obs = env.reset()
            agent.reset(torch.arange(n))
            running.zero_()
            lengths.zero_()
            is_cut = [False] * n
        step = env.step(agent.act_greedily(obs))
        obs = step.obs
        agent.reset(step.final_ids)
        running += step.rewards
        lengths += 1
        steps += 1
        ended = set(step.final_ids.tolist())
        # On a task without a time limit, an endless episode counts with its return so far.
        for i in sorted(ended | set((lengths >= longest).nonzero().flatten().tolist())):
            if not is_cut[i]:
                found[i].append((float(running[i]), int(lengths[i]), i not in ended))
            is_cut[i] = i not in ended
            running[i], lengths[i] = 0.0, 0
        progress(sum(min(len(done), wanted) for done, wanted in zip(found, quota, strict=True)), steps)
    kept = [episode for done, wanted in zip(found, quota, strict=True) for episode in done[:wanted]]
    return EvaluationResult(
        [value for value, _, _ in kept],
        [length for _, length, _ in kept],
        num_cut=sum(cut for _, _, cut in kept),
    )
