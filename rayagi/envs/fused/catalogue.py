"""Registered fused simulators by id, and users' own by ``module:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rayagi.envs.errors import EnvironmentOptionError
from rayagi.envs.fused.simulator import Simulator
from rayagi.envs.fused.simulators.acrobot import Acrobot
from rayagi.envs.fused.simulators.cartpole import CartPole
from rayagi.envs.fused.simulators.pendulum import Pendulum
from rayagi.envs.fused.simulators.quadrotor import Quadrotor
from rayagi.envs.user_class import user_class

SIMULATORS: Mapping[str, type[Simulator]] = {
    "fused/CartPole-v1": CartPole,
    "fused/Pendulum-v1": Pendulum,
    "fused/Acrobot-v1": Acrobot,
    "fused/Quadrotor-v0": Quadrotor,
}


def find(env_id: str) -> type[Simulator] | None:
    """The simulator class of an id; None if it names no simulator.

    Raises:
        EnvironmentOptionError: it names a module that cannot be imported.
    """
    return SIMULATORS.get(env_id) or user_class(env_id, Simulator)


def make_simulator(env_id: str, options: Mapping[str, Any]) -> Simulator:
    """Construct a simulator with its options.

    Raises:
        EnvironmentOptionError: an unknown option or an invalid value.
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
