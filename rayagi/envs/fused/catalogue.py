"""The simulators by id, and a user's own: ``module:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rayagi.envs.errors import EnvironmentOptionError
from rayagi.envs.fused.simulator import Simulator
from rayagi.envs.fused.simulators.acrobot import Acrobot
from rayagi.envs.fused.simulators.cartpole import CartPole
from rayagi.envs.fused.simulators.pendulum import Pendulum
from rayagi.envs.fused.simulators.quadrotor import Quadrotor

SIMULATORS: Mapping[str, type[Simulator]] = {
    "fused/CartPole-v1": CartPole,
    "fused/Pendulum-v1": Pendulum,
    "fused/Acrobot-v1": Acrobot,
    "fused/Quadrotor-v0": Quadrotor,
}


def find(env_id: str) -> type[Simulator] | None:
    """The class of an id; None: it is none of a simulator.

    Raises:
        EnvironmentOptionError: it names a module that cannot be imported.
    """
    if env_id in SIMULATORS:
        return SIMULATORS[env_id]
    module, _, name = env_id.rpartition(":")
    if not module or not name.isidentifier():
        return None
    try:
        found = getattr(import_module(module), name, None)
    except ImportError as error:
        raise EnvironmentOptionError(env_id, f"the module {module!r} cannot be imported: {error}") from error
    return found if isinstance(found, type) and issubclass(found, Simulator) else None


def make_simulator(env_id: str, options: Mapping[str, Any]) -> Simulator:
    """The simulator with its options.

    Raises:
        EnvironmentOptionError: there is no such option, or it is refused.
    """
    found = find(env_id)
    assert found is not None
    signature = inspect.signature(found)
    try:
        signature.bind(**options)
        return found(**options)
    except (TypeError, ValueError) as error:
        known = ", ".join(["max_episode_steps", *signature.parameters])
        raise EnvironmentOptionError(env_id, f"{error}; it has {known}") from error
