"""Presets: default settings per task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.offline import OfflineSpec
from rayagi.config.spec import Activation, EnvSpec, EvaluationSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs.registry import default_hidden, is_user_task


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskPreset:
    """Settings of one task that differ from the defaults in RunSpec."""

    learning: Mapping[str, Any] = field(default_factory=dict)
    """Fields of LearningSpec, for every algorithm."""
    num_envs: int = 32
    """Environments of one GMI."""
    hidden: tuple[int, ...] | None = None
    """None: the task's row of GMI-DRL Table 4, or rayagi.envs' default."""
    activation: Activation = "elu"
    initial_log_std: float = 0.0
    of_algorithms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of single algorithms on this task, by name; before those of the algorithm on all tasks."""


_CLASSIC = TaskPreset(
    num_envs=16,
    hidden=(64, 64),
    activation="tanh",
    learning={
        "rollout_length": 64,
        "num_epochs": 8,
        "num_minibatches": 4,
        "learning_rate": 1e-3,
        "normalize_rewards": False,
    },
)
"""Small tasks with short episodes: cheap steps, so many epochs; bounded rewards, so no scaling."""

_MUJOCO = TaskPreset(
    initial_log_std=-1.0,
    learning={"rollout_length": 64, "num_minibatches": 8, "lr_schedule": "kl_adaptive", "target_kl": 0.015},
)
"""Robots of MuJoCo. Chosen by a few single trials on Ant-v5 and HalfCheetah-v5 (experiments/learning/README.md)."""

_ANT_V5 = replace(_MUJOCO, of_algorithms={"sac": {"normalize_obs": False}})
"""SAC learns several times faster without (experiments/off_policy/README.md). The likely cause: most of the 105 observations
are contact forces, nearly always 0, and those that are not become spikes when they are divided by a small deviation."""

_HOPPER_V5 = replace(_MUJOCO, initial_log_std=0.0)
"""With less noise it hops later, by PPO, APPO and TRPO (experiments/learning/README.md)."""

_ANT = replace(_MUJOCO, num_envs=64)
"""rayagi's own Ant (experiments/tasks/README.md)."""

_HUMANOID = TaskPreset(
    num_envs=128,
    initial_log_std=-1.0,
    learning={"num_epochs": 5, "gamma": 0.97, "lr_schedule": "kl_adaptive", "target_kl": 0.03},
)
"""rayagi's own Humanoid. Falling takes half a second, 30 steps: a short horizon suffices. After three trials."""

_PENDULUM = replace(_CLASSIC, initial_log_std=-0.5, learning={**_CLASSIC.learning, "normalize_rewards": True})

_BALL_BALANCE = TaskPreset(
    num_envs=128,
    initial_log_std=-1.6,
    learning={"rollout_length": 32, "num_epochs": 4, "num_minibatches": 4, "lr_schedule": "kl_adaptive"},
)
"""Little noise: an action of 1 is 20 rad/s (experiments/tasks/README.md has a run with more)."""

_ANYMAL = TaskPreset(
    num_envs=256,
    initial_log_std=-1.0,
    learning={"num_epochs": 3, "num_minibatches": 8, "lr_schedule": "kl_adaptive", "target_kl": 0.02},
)
"""Steps are cheap beside updates, so few epochs; many robots, since each has one command for long."""

_DRAWER = replace(_MUJOCO, num_envs=64)
"""rayagi's own FrankaCabinet."""

_CUBE = replace(_MUJOCO, num_envs=128, initial_log_std=-1.5)
"""rayagi's own ShadowHand: with more exploration it drops the cube before it learns anything."""

_FUSED = TaskPreset(
    num_envs=64,
    hidden=(64, 64),
    activation="tanh",
    learning={"num_epochs": 8, "learning_rate": 1e-3, "normalize_rewards": False},
)
"""Fused simulators of small tasks, as _CLASSIC with more environments, since steps cost next to nothing."""

_FUSED_ACROBOT = replace(_FUSED, learning={**_FUSED.learning, "normalize_rewards": True})
"""Returns are -100 and less; unscaled rewards cost some seeds four times the steps (docs/explanation/fused.md)."""

_FUSED_PENDULUM = replace(_FUSED_ACROBOT, learning={**_FUSED_ACROBOT.learning, "gamma": 0.95})

_FUSED_QUADROTOR = replace(_FUSED, initial_log_std=-0.5, learning={"learning_rate": 1e-3, "gamma": 0.98})

_MUJOCO_IDS = (
    "HalfCheetah",
    "Humanoid",
    "HumanoidStandup",
    "Pusher",
    "Reacher",
    "Swimmer",
    "Walker2d",
)
PRESETS: dict[str, TaskPreset] = {
    "Ant-v5": _ANT_V5,
    **{f"{name}-v5": _MUJOCO for name in _MUJOCO_IDS},
    "Hopper-v5": _HOPPER_V5,
    **dict.fromkeys(("InvertedPendulum-v5", "InvertedDoublePendulum-v5"), _PENDULUM),
    **dict.fromkeys(("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3"), _CLASSIC),
    "rayagi/Ant-v0": _ANT,
    "rayagi/Humanoid-v0": _HUMANOID,
    "rayagi/Anymal-v0": _ANYMAL,
    "rayagi/BallBalance-v0": _BALL_BALANCE,
    "rayagi/FrankaCabinet-v0": _DRAWER,
    "rayagi/ShadowHand-v0": _CUBE,
    "fused/CartPole-v1": _FUSED,
    "fused/Acrobot-v1": _FUSED_ACROBOT,
    "fused/Pendulum-v1": _FUSED_PENDULUM,
    "fused/Quadrotor-v0": _FUSED_QUADROTOR,
}
"""Tasks with settings of their own; a user's MuJoCo task takes _MUJOCO, every other TaskPreset()."""


def preset(env_id: str, algorithm: str = "ppo") -> RunSpec:
    """The default run of a task with an algorithm, on the algorithm's usual template."""
    definition = DEFINITIONS[algorithm]
    task = PRESETS.get(env_id) or (_MUJOCO if is_user_task(env_id) else TaskPreset())
    network = NetworkSpec(
        hidden=task.hidden if task.hidden is not None else tuple(default_hidden(env_id)),
        activation=task.activation,
        initial_log_std=task.initial_log_std,
    )
    return RunSpec(
        algorithm=algorithm,
        env=EnvSpec(id=env_id),
        gmi=GmiSpec(num_envs=definition.preset_num_envs or task.num_envs, template=definition.templates[0]),
        network=replace(network, **definition.preset_network),
        learning=definition.settings(
            **{**task.learning, **definition.preset, **task.of_algorithms.get(algorithm, {})}
        ),
        # Without training episodes, evaluations are the only returns.
        evaluation=EvaluationSpec(interval=10 if issubclass(definition.settings, OfflineSpec) else 0),
    )
