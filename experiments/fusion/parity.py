"""Parity checks: the C kernels of a simulator against the reference in torch, from the middle of episodes.

    python -m experiments.fusion.parity lander:Lander

Steps alone, and rollouts with a policy in the kernel. Each check runs twice. In float64 both programs take all steps
independently: rounding is too small to hide a mistake in a program. In float32 rounding alone may exceed 1e-6 in 20 steps
(docs/explanation/fused.md), so every step starts from the reference's state. Differences are relative to a field's scale:
its largest absolute value in any environment, or 1 if that is more.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from actors.policy_tensors import ActivationName, PolicyTensors
from actors.protocols import EnvInfo
from actors.rollout import Rollout
from rayagi.envs.errors import EnvError
from rayagi.envs.fused.backends import EnvConfig, FusedBackend, StepBatch
from rayagi.envs.fused.c.backend import CBackend
from rayagi.envs.fused.draws import EXPLORE, seed_word, uniform
from rayagi.envs.fused.provider import make_simulator
from rayagi.envs.fused.reference import TorchBackend
from rayagi.envs.fused.simulator import Discrete, Simulator, action_dim, action_spec
from rayagi.envs.fused.vec_env import FusedRollout

EXACT = 1e-9
"""Tolerance in float64."""
_SPLIT_SHARE = 0.01
"""Largest fraction of environments that may terminate or choose differently, because a value is close to a threshold."""
Fields = Mapping[str, Tensor]
"""Results of K steps by name: (K, N), or (K, rows, N). Integers and booleans must be equal; ``final_obs`` counts only where
episodes ended."""


_ACTIVATIONS: Mapping[ActivationName, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "elu": functional.elu,
    "relu": torch.relu,
    "silu": functional.silu,
}


class ParityError(EnvError):
    """A backend differs from the reference."""

    def __init__(self, simulator: str, difference: str) -> None:
        super().__init__(simulator, difference)
        self.simulator, self.difference = simulator, difference

    def __str__(self) -> str:
        return f"{self.simulator}: {self.difference}"


@dataclass(frozen=True, slots=True)
class Parity:
    """Largest differences found, relative to a field's scale.

    Attributes:
        exact: in float64, over all steps
        single: in float32, over one step
        split: environments that ended at another step or chose another action, at a threshold
    """

    exact: float
    single: float
    split: int


def check_steps(
    simulator: Simulator,
    make_backend: Callable[[EnvConfig], FusedBackend] = CBackend,
    *,
    num_envs: int = 500,
    num_steps: int = 20,
    warm_up: int = 30,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> Parity:
    """Run a backend and the reference with the same random actions, from states after ``warm_up`` random steps.

    Args:
        simulator: the simulator to check
        make_backend: constructor of the backend; by default the C backend
        num_envs: environments; by default the last tile is partial
        num_steps: compared steps
        warm_up: random steps of the reference before
        tolerance: of one step in float32; raise it for a stiff simulator. In float64 it is EXACT
        seed: of all random numbers

    Raises:
        ParityError: they differ; the message names the step, the environment and the values.
        SimulatorError: the simulator cannot be traced.
        KernelError: the backend cannot be built on this machine.
    """

    def compare(real: torch.dtype, block: int, tolerance: float) -> tuple[float, int]:
        env_config = EnvConfig(simulator, num_envs, 7, seed, warm_up + num_steps // 2, real)
        reference, backend = TorchBackend(env_config), make_backend(env_config)
        _start_and_run(reference, warm_up)
        backend.start()
        wanted, given = zip(*_steps(reference, backend, num_steps, block), strict=True)
        return _compared(simulator, _joined(wanted), _joined(given), tolerance, free=block > 1)

    exact, single = compare(torch.float64, num_steps, EXACT), compare(torch.float32, 1, tolerance)
    return Parity(exact[0], single[0], exact[1] + single[1])


def random_actions(env_config: EnvConfig, seed: int, iteration: int, step: int) -> Tensor:
    """Uniform random actions: choices (N,) int64, or reals in the box (N, dim)."""
    simulator, actions = env_config.simulator, env_config.simulator.actions
    indices = torch.arange(env_config.first_env_index, env_config.first_env_index + env_config.num_envs)
    drawn = uniform(seed_word(seed), indices, iteration, step, EXPLORE, action_dim(simulator))
    if isinstance(actions, Discrete):
        return torch.floor(drawn[:, 0] * actions.count).to(torch.int64)
    low, high = torch.tensor(actions.low), torch.tensor(actions.high)
    return (low + (high - low) * drawn).to(env_config.real)


def _start_and_run(reference: TorchBackend, num_steps: int) -> None:
    """Start, and take some random steps."""
    env_config, obs_dim = reference.env_config, len(reference.observe())
    reference.start()
    out = StepBatch.allocate(1, env_config.num_envs, obs_dim, real=env_config.real)
    for step in range(num_steps):
        reference.run(random_actions(env_config, env_config.seed, 0, step).unsqueeze(0), out)


def _steps(
    reference: TorchBackend, backend: FusedBackend, num_steps: int, block: int
) -> Iterator[tuple[Fields, Fields]]:
    """Results of both, ``block`` steps at a time; each block starts from the reference's state."""
    env_config, obs_dim = reference.env_config, len(reference.observe())
    for begin in range(0, num_steps, block):
        drawn = [random_actions(env_config, 1, env_config.seed, begin + k) for k in range(block)]
        actions = torch.stack(drawn)
        backend.env_state.copy_(reference.env_state)
        out = [
            StepBatch.allocate(block, env_config.num_envs, obs_dim, real=env_config.real) for _ in range(2)
        ]
        reference.run(actions, out[0])
        backend.run(actions.to(backend.env_state.state.device), out[1])
        wanted, given = ({name: getattr(one, name).cpu() for name in StepBatch.__slots__} for one in out)
        yield wanted, given


def _joined(parts: Sequence[Fields]) -> Fields:
    """Concatenate the blocks' results."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _compared(
    simulator: Simulator, wanted: Fields, given: Fields, tolerance: float, *, free: bool
) -> tuple[float, int]:
    """The largest difference relative to a field's scale, and the number of environments that diverged at a threshold.

    Args:
        simulator: for error messages
        wanted: the reference's results, including ``terminated`` and ``truncated``
        given: the backend's, of the same names
        tolerance: of the differences
        free: steps continue from each other, so that after a different termination the episodes no longer correspond

    Raises:
        ParityError: they differ.
    """
    # 1. Integers and booleans: equal, except in a few environments at a threshold.
    discrete = [name for name, values in wanted.items() if not values.is_floating_point()]
    differs = torch.stack([wanted[name] != given[name] for name in discrete]).any(0)
    diverged = differs.cummax(0).values if free else differs
    split = int(diverged.any(0).sum())
    if split > _SPLIT_SHARE * diverged.shape[1]:
        step, env = (int(i) for i in differs.nonzero()[0])
        raise ParityError(
            simulator.name,
            f"environment {env} ends at step {step} in one backend only, as do {split - 1} others",
        )
    # 2. Reals, in all other environments.
    ended = wanted["terminated"] | wanted["truncated"]
    reals = wanted.keys() - set(discrete)
    worst = 0.0
    for name in sorted(reals):
        mask = ~diverged & ended if name == "final_obs" else ~diverged
        mask = mask if wanted[name].ndim == 2 else mask.unsqueeze(1)
        difference = _same(simulator, name, given[name] * mask, wanted[name] * mask, tolerance)
        worst = max(worst, difference)
    return worst, split


def _same(simulator: Simulator, what: str, given: Tensor, wanted: Tensor, tolerance: float) -> float:
    """The largest difference relative to the field's scale. Raises ParityError above the tolerance."""
    scale = wanted.abs().amax((0, -1), keepdim=True).clamp(min=1.0)
    difference = (given - wanted).abs() / scale
    wrong = ~(difference <= tolerance)
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise ParityError(
            simulator.name,
            f"{what} at step and environment {place[0]}, {place[-1]} is {float(given[place])!r}, and "
            f"{float(wanted[place])!r} in the reference",
        )
    return float(difference.max())


def check_rollouts(
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
        _start_and_run(loop.backend, warm_up)
        wanted, given = zip(*loop.beside(CBackend(env_config), num_steps, block), strict=True)
        return _compared(simulator, _joined(wanted), _joined(given), tolerance, free=block > 1)

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
            yield _joined([self._step(noise) for noise in self._noise(number, block)]), _fields_of(rollout)

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


def _open_uniform(
    word: int, indices: Tensor, position: Tensor | int, step: Tensor | int, count: int
) -> Tensor:
    """Uniform random numbers in (0, 1) of 23 bits, for purpose EXPLORE: neither 0 nor 1, so that logarithms are finite.

    (floor(2^23 u) + 1/2) / 2^23
    """
    closed = uniform(word, indices, position, step, EXPLORE, count)
    return torch.floor(closed * 2.0**23) * 2.0**-23 + 2.0**-24


def exploration_noise(
    *,
    seed: int,
    first_env_index: int,
    num_envs: int,
    iteration: int,
    num_steps: int,
    dim: int,
    gumbel: bool,
    real: torch.dtype = torch.float32,
) -> Tensor:
    """Exploration noise of a fused kernel: Gumbel or standard normal (Box-Muller), (num_steps, num_envs, dim).

    Gumbel-max trick: argmax(logits + noise) is a sample of softmax(logits).
    """
    count = dim if gumbel else 2 * math.ceil(dim / 2)
    indices = torch.arange(first_env_index, first_env_index + num_envs)
    steps = torch.arange(num_steps).unsqueeze(1)
    drawn = _open_uniform(seed_word(seed), indices, iteration, steps, count).to(real)
    if gumbel:
        return -torch.log(-torch.log(drawn))  # -log(-log u)
    # Box-Muller: r = sqrt(-2 log u1), phi = 2 pi u2; r cos phi and r sin phi are independent normal numbers.
    radius = torch.sqrt(-2.0 * torch.log(drawn[..., 0::2]))
    angle = drawn[..., 1::2] * (2.0 * math.pi)
    pairs = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), -1)
    return pairs.flatten(-2)[..., :dim]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for check in (check_steps, check_rollouts):
            print(name, check.__name__, check(make_simulator(name, {})))
