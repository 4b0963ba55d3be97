"""Which environments there are, and how to make them: the one place that maps an id to an engine."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec

from actors.protocols import EnvInfo, VecEnv
from rayagi.envs import gymnasium_adapter
from rayagi.envs.errors import EnvironmentOptionError, UnknownEnvironmentError
from rayagi.envs.mujoco_cpu import engine as mujoco_cpu
from rayagi.envs.mujoco_cpu.catalogue import TASKS, make_task

Engine = Literal["mujoco_cpu", "gymnasium"]
ENGINES: tuple[str, ...] = ("auto", "mujoco_cpu", "gymnasium")

_MUJOCO_HIDDEN = (256, 128, 64)
_SMALL_HIDDEN = (64, 64)
# GMI-DRL (ATC'25) Table 4, by the task's name without its version.
_TABLE_4_HIDDEN: Mapping[str, tuple[int, ...]] = {
    "Ant": (256, 128, 64),
    "Anymal": (256, 128, 64),
    "BallBalance": (256, 128, 64),
    "FrankaCabinet": (256, 128, 64),
    "Humanoid": (200, 400, 100),
    "ShadowHand": (512, 512, 512, 256),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvListing:
    """One line of ``rayagi envs``."""

    env_id: str
    engine: str
    obs_dim: int
    action: str
    """For people: "8 reals" or "2 choices"."""
    max_episode_steps: int | None
    description: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredEnvFactory:
    """Implements EnvFactory: carries a description only, so it travels to any process."""

    env_id: str
    engine: Engine
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    registered: EnvSpec | None = None
    """Registration that other processes lack, since this one was told of it by the user."""

    def __call__(self, *, num_envs: int, first_env_index: int, seed: int, num_threads: int) -> VecEnv:
        """Make the environments of one GMI."""
        if num_envs < 1 or num_threads < 1:
            raise EnvironmentOptionError(
                self.env_id, f"num_envs is {num_envs} and num_threads {num_threads}; both must be at least 1"
            )
        if self.registered is not None:
            gymnasium.registry[self.registered.id] = self.registered
        if self.engine == "gymnasium":
            return gymnasium_adapter.GymnasiumVecEnv(
                self.env_id, self.kwargs, num_envs=num_envs, first_env_index=first_env_index, seed=seed
            )
        limit, options = _time_limit(self.env_id, self.kwargs)
        return mujoco_cpu.MujocoVecEnv(
            self.env_id,
            make_task(self.env_id, options),
            num_envs=num_envs,
            first_env_index=first_env_index,
            seed=seed,
            num_threads=num_threads,
            max_episode_steps=limit,
        )


def make_env_factory(
    env_id: str, *, engine: str = "auto", kwargs: Mapping[str, Any] | None = None
) -> RegisteredEnvFactory:
    """A picklable factory of batched environments; names and options are checked, nothing is simulated yet.

    Args:
        env_id: one of ``list_envs()``, or any id of Gymnasium's registry.
        engine: auto takes mujoco_cpu where the task is batched there, else gymnasium.
        kwargs: constructor arguments, as ``gymnasium.make`` takes them (``max_episode_steps`` included).

    Raises:
        UnknownEnvironmentError: no such id; the nearest ones are named.
        EnvironmentOptionError: no such engine or option, or the environment's package is missing.
    """
    options = dict(kwargs or {})
    chosen = _choose_engine(env_id, engine)
    if chosen == "mujoco_cpu":
        make_task(env_id, _time_limit(env_id, options)[1])
    return RegisteredEnvFactory(
        env_id=env_id, engine=chosen, kwargs=options, registered=_users_registration(env_id)
    )


def env_info(env_id: str, engine: str = "auto", kwargs: Mapping[str, Any] | None = None) -> EnvInfo:
    """Sizes and limits of an environment. Raises as ``make_env_factory`` does."""
    factory = make_env_factory(env_id, engine=engine, kwargs=kwargs)
    if factory.engine == "gymnasium":
        return gymnasium_adapter.describe(env_id, factory.kwargs)
    limit, options = _time_limit(env_id, factory.kwargs)
    task = make_task(env_id, options)
    return mujoco_cpu.describe(env_id, mujoco_cpu.load_robot(env_id, task), task, limit)


def list_envs() -> list[EnvListing]:
    """rayagi's own environments. Any other Gymnasium id works too, through its vector environments."""
    listings = []
    for env_id, task_class in TASKS.items():
        info = env_info(env_id)
        listings.append(
            EnvListing(
                env_id=env_id,
                engine=info.engine,
                obs_dim=info.obs_dim,
                action=f"{info.action.dim} reals",
                max_episode_steps=info.max_episode_steps,
                description=task_class.description,
            )
        )
    return listings


def default_hidden(env_id: str) -> tuple[int, ...]:
    """Hidden layers of a task's policy: GMI-DRL (ATC'25) Table 4 for its tasks and Gymnasium's namesakes."""
    name = env_id.rsplit("/", 1)[-1].rsplit("-v", 1)[0]
    if name in _TABLE_4_HIDDEN:
        return _TABLE_4_HIDDEN[name]
    spec = gymnasium.registry.get(env_id)
    is_mujoco = env_id in TASKS or (spec is not None and "mujoco" in str(spec.entry_point))
    return _MUJOCO_HIDDEN if is_mujoco else _SMALL_HIDDEN


def _choose_engine(env_id: str, engine: str) -> Engine:
    if engine not in ENGINES:
        raise EnvironmentOptionError(
            env_id, f"there is no engine {engine!r}; choose from {', '.join(ENGINES)}"
        )
    if env_id not in TASKS and not gymnasium_adapter.is_registered(env_id):
        raise UnknownEnvironmentError(env_id, _nearest(env_id))
    if engine == "mujoco_cpu" and env_id not in TASKS:
        raise EnvironmentOptionError(
            env_id, f"mujoco_cpu does not have it (it has {', '.join(TASKS)}); take engine gymnasium or auto"
        )
    if engine == "auto":
        return "mujoco_cpu" if env_id in TASKS else "gymnasium"
    return cast(Engine, engine)


def _users_registration(env_id: str) -> EnvSpec | None:
    """How an id was registered, unless Gymnasium itself did it, as it does in every process."""
    spec = gymnasium.registry.get(env_id.rpartition(":")[2])
    if spec is None:
        return None
    entry = spec.entry_point
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    return None if module.startswith("gymnasium.") else spec


def _nearest(env_id: str) -> tuple[str, ...]:
    # Gymnasium keeps retired ids, whose entry point is a function that raises, to say where they went.
    alive = [
        name for name, spec in gymnasium.registry.items() if not isinstance(spec.entry_point, FunctionType)
    ]
    known = sorted({*TASKS, *alive})
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(env_id.lower(), by_lower, n=4, cutoff=0.5)
    # "ant" alone is nearer to nothing by edit distance than to names that it is a part of.
    bare = env_id.lower().rsplit("-v", 1)[0]
    close += [lower for lower in by_lower if bare and lower.rsplit("-v", 1)[0] == bare]
    ranked = sorted(dict.fromkeys(by_lower[lower] for lower in close), key=lambda name: name not in TASKS)
    return tuple(ranked[:4])


def _time_limit(env_id: str, kwargs: Mapping[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """The time limit, registered or asked for (-1: none, as in ``gymnasium.make``), and the other options."""
    options = dict(kwargs)
    limit = options.pop("max_episode_steps", None)
    if limit is None:
        return gymnasium.spec(env_id).max_episode_steps, options
    if not isinstance(limit, int) or (limit < 1 and limit != -1):
        raise EnvironmentOptionError(
            env_id, f"max_episode_steps is {limit!r}; it must be a positive integer, or -1 for no limit"
        )
    return (None if limit == -1 else limit), options
