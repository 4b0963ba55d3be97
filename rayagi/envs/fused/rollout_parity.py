"""Parity check of rollouts: compares the fused rollout kernel with a torch loop of simulator and policy, like parity.py.

from rayagi.envs.fused import rollout_parity
rollout_parity.check(MySimulator())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from actors.policy_tensors import ActivationName, PolicyTensors
from actors.protocols import EnvInfo
from actors.rollout import Rollout
from rayagi.envs.fused.backends import EnvConfig, StepBatch
from rayagi.envs.fused.c.backend import CBackend
from rayagi.envs.fused.draws import exploration_noise
from rayagi.envs.fused.parity import EXACT, Fields, Parity, compared, joined, wandered
from rayagi.envs.fused.reference import TorchBackend
from rayagi.envs.fused.rollout import FusedRollout
from rayagi.envs.fused.simulator import Simulator, action_spec

_ACTIVATIONS: Mapping[ActivationName, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "elu": functional.elu,
    "relu": torch.relu,
    "silu": functional.silu,
}


def check(
    simulator: Simulator,
    *,
    hidden: tuple[int, ...] = (20, 13),
    activation: ActivationName = "tanh",
    num_envs: int = 200,
    num_steps: int = 20,
    warm_up: int = 30,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> Parity:
    """Run a random policy in the kernel and in torch, with the same random numbers.

    Args:
        simulator: the simulator to check
        hidden: sizes of the policy's hidden layers
        activation: of the hidden layers
        num_envs: environments; by default the last tile is partial
        num_steps: T in float64; as many rollouts of one step in float32
        warm_up: random steps of the reference before
        tolerance: of one step in float32. In float64 it is EXACT
        seed: of all random numbers

    Raises:
        ParityError: they differ; the message names the step, the environment and the values.
        SimulatorError: the simulator cannot be traced.
        KernelError: the kernel cannot be built on this machine.
    """

    def compare(real: torch.dtype, block: int, tolerance: float) -> tuple[float, int]:
        env_config = EnvConfig(simulator, num_envs, 7, seed, warm_up + num_steps // 2, real)
        loop = _TorchLoop(env_config, hidden, activation)
        wandered(loop.backend, warm_up)
        wanted, given = zip(*loop.beside(CBackend(env_config), num_steps, block), strict=True)
        return compared(simulator, joined(wanted), joined(given), tolerance, free=block > 1)

    exact, single = compare(torch.float64, num_steps, EXACT), compare(torch.float32, 1, tolerance)
    return Parity(exact[0], single[0], exact[1] + single[1])


class _TorchLoop:
    """Unfused loop: observe, infer, sample and step in eager torch."""

    def __init__(self, env_config: EnvConfig, hidden: tuple[int, ...], activation: ActivationName) -> None:
        self.env_config, self.backend = env_config, TorchBackend(env_config)
        self._spec = action_spec(env_config.simulator)
        self._discrete = self._spec.kind == "discrete"
        self._num_outputs = self._spec.num_choices if self._discrete else self._spec.dim
        self._obs_dim = len(self.backend.observe())
        sizes = [self._obs_dim, *hidden, self._num_outputs]
        self.policy = _random_policy(sizes, activation, env_config.real, drawn_reals=not self._discrete)

    def beside(self, backend: CBackend, num_steps: int, block: int) -> Iterator[tuple[Fields, Fields]]:
        """Results of both, ``block`` steps at a time; each block starts from this loop's state."""
        kernel = FusedRollout(backend)
        for number in range(num_steps // block):
            backend.env_state.copy_(self.backend.env_state)
            rollout = self._storage(block)
            kernel.collect_rollout(
                rollout, self.policy, number, torch.zeros(self.env_config.num_envs, dtype=torch.float64)
            )
            yield joined([self._step(noise) for noise in self._noise(number, block)]), _fields_of(rollout)

    def _step(self, noise: Tensor) -> Fields:
        raw, policy = self.backend.observe(), self.policy
        obs = raw.t()
        if policy.shift is not None and policy.scale is not None:
            obs = ((obs - policy.shift) * policy.scale).clamp(-policy.clip, policy.clip)
        outputs = _inferred(policy, obs)
        actions = (outputs + noise).argmax(-1) if policy.std is None else outputs + policy.std * noise
        out = StepBatch.allocate(1, self.env_config.num_envs, self._obs_dim, real=self.env_config.real)
        self.backend.run(actions.unsqueeze(0), out)
        acted = {"raw_obs": raw, "obs": obs.t(), "outputs": outputs.t(), "actions": actions.t()}
        after = {"rewards": out.rewards, "terminated": out.terminated, "truncated": out.truncated}
        after |= {"next_obs": out.obs, "final_obs": out.final_obs}
        return {name: values.unsqueeze(0) for name, values in acted.items()} | after

    def _noise(self, number: int, num_steps: int) -> Tensor:
        env_config = self.env_config
        return exploration_noise(
            seed=env_config.seed,
            first_env_index=env_config.first_env_index,
            num_envs=env_config.num_envs,
            iteration=number,
            num_steps=num_steps,
            dim=self._num_outputs,
            gumbel=self._discrete,
            real=env_config.real,
        )

    def _storage(self, num_steps: int) -> Rollout:
        """An empty rollout with reals of ``env_config.real``."""
        env_config = self.env_config
        info = EnvInfo(
            env_id=env_config.simulator.name,
            engine="fused",
            obs_dim=self._obs_dim,
            action=self._spec,
            max_episode_steps=env_config.max_episode_steps,
        )
        empty = Rollout.allocate(num_steps, env_config.num_envs, info, torch.device("cpu"))
        names = [one for one in Rollout.__slots__ if isinstance(getattr(empty, one), Tensor)]
        reals = {name: getattr(empty, name) for name in names if getattr(empty, name).is_floating_point()}
        return replace(empty, **{name: values.to(env_config.real) for name, values in reals.items()})


def _fields_of(rollout: Rollout) -> Fields:
    """A rollout's fields in the loop's layout: the environment is the last dimension."""
    final_obs = torch.zeros_like(rollout.raw_obs)
    for step, ids, obs in rollout.finals:
        final_obs[step, ids] = obs
    next_obs = torch.cat([rollout.raw_obs[1:], rollout.last_obs.unsqueeze(0)])
    fields = {name: getattr(rollout, name) for name in ("raw_obs", "obs", "outputs", "actions")}
    fields |= {"next_obs": next_obs, "final_obs": final_obs}
    columns = {name: values.movedim(-1, 1) if values.ndim == 3 else values for name, values in fields.items()}
    return columns | {name: getattr(rollout, name) for name in ("rewards", "terminated", "truncated")}


def _inferred(policy: PolicyTensors, obs: Tensor) -> Tensor:
    """Distribution parameters (N, outputs)."""
    *inner, (weight, bias) = zip(policy.weights, policy.biases, strict=True)
    hidden = obs
    for hidden_weight, hidden_bias in inner:
        hidden = _ACTIVATIONS[policy.activation](functional.linear(hidden, hidden_weight, hidden_bias))
    return functional.linear(hidden, weight, bias)


def _random_policy(
    sizes: list[int], activation: ActivationName, real: torch.dtype, *, drawn_reals: bool
) -> PolicyTensors:
    """Random weights of variance 1 / fan_in, drawn in float32, so that float32 and float64 get the same."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(real)

    return PolicyTensors(
        weights=tuple(drawn(out, size) / size**0.5 for size, out in pairwise(sizes)),
        biases=tuple(0.1 * drawn(size) for size in sizes[1:]),
        activation=activation,
        shift=0.1 * drawn(sizes[0]),
        scale=1.0 + 0.1 * drawn(sizes[0]).abs(),
        clip=3.0,
        std=0.5 + 0.1 * drawn(sizes[-1]).abs() if drawn_reals else None,
    )
