"""EnvProvider of fused simulators: rayagi's own, and users' classes named ``module:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from actors.protocols import EnvInfo, VecEnv
from placement.inventory.limits import memory_bytes
from rayagi.envs.errors import EnvironmentOptionError
from rayagi.envs.fused.backends import EnvConfig
from rayagi.envs.fused.reference import TorchBackend
from rayagi.envs.fused.simulator import Simulator, action_dim, action_spec
from rayagi.envs.fused.simulators import Acrobot, CartPole, Pendulum, Quadrotor
from rayagi.envs.fused.trace import trace
from rayagi.envs.fused.vec_env import BackendVecEnv, FusedVecEnv
from rayagi.envs.providers import EnvProvider, VecEnvArgs, check_kind, time_limit

SIMULATORS: Mapping[str, type[Simulator]] = {
    "fused/CartPole-v1": CartPole,
    "fused/Pendulum-v1": Pendulum,
    "fused/Acrobot-v1": Acrobot,
    "fused/Quadrotor-v0": Quadrotor,
}


def make_simulator(env_id: str, options: Mapping[str, Any]) -> Simulator:
    """Construct a simulator with its options. Raises EnvironmentOptionError: an unknown option or an invalid value."""
    found = FusedProvider.find(env_id)
    assert found is not None
    signature = inspect.signature(found)
    try:
        for name, value in signature.bind(**options).arguments.items():
            check_kind(env_id, name, value, signature.parameters[name].default)
        return found(**options)
    except (TypeError, ValueError) as error:
        known = ", ".join(["max_episode_steps", *signature.parameters])
        raise EnvironmentOptionError(env_id, f"{error}; it has {known}") from error


TORCH = "fused_torch"
"""The engine that runs the functions on torch tensors, which needs no compiler. ``fused`` compiles a kernel for the CPU."""


class FusedProvider(EnvProvider):
    """Registered simulators, and users' classes."""

    catalogue = SIMULATORS
    base = Simulator

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        """Trace the simulator. Raises SimulatorError or EnvironmentOptionError."""
        trace(self._simulator(env_id, kwargs)[0])

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """Sizes from the trace."""
        simulator, limit = self._simulator(env_id, kwargs)
        return EnvInfo(
            env_id=env_id,
            engine=engine,
            obs_dim=trace(simulator).obs_dim,
            action=action_spec(simulator),
            max_episode_steps=limit,
        )

    def make(self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs) -> VecEnv:
        """Compile the kernel (cached on disk) and allocate the environments."""
        simulator, limit = self._simulator(env_id, kwargs)
        env_config = EnvConfig(simulator, env_args.num_envs, env_args.first_env_index, env_args.seed, limit)
        info = self.info(env_id, engine, kwargs)
        _check_memory(env_config, info)
        if engine == TORCH:
            return BackendVecEnv(info, env_config, TorchBackend(env_config))
        return FusedVecEnv(info, env_config, env_args.num_threads)

    @staticmethod
    def _simulator(env_id: str, kwargs: Mapping[str, Any]) -> tuple[Simulator, int | None]:
        found = FusedProvider.find(env_id)
        assert found is not None
        limit, options = time_limit(env_id, kwargs, found.max_episode_steps)
        return make_simulator(env_id, options), limit


def _check_memory(env_config: EnvConfig, info: EnvInfo) -> None:
    """Raise EnvironmentOptionError if the environments exceed this process's memory limit."""
    numbers = len(env_config.simulator.state) + 2 * info.obs_dim + action_dim(env_config.simulator) + 6
    needed, limit = 4 * numbers * env_config.num_envs, memory_bytes()
    if needed > limit:
        raise EnvironmentOptionError(
            info.env_id,
            f"{env_config.num_envs} environments need {needed / 2**30:.1f} GiB, and the memory limit of this process is "
            f"{limit / 2**30:.1f} GiB; lower num_envs",
        )
