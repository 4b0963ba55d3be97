"""Registry of the environment providers. To add one, write its module and list its definition here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from actors.protocols import ActionSpec, EnvInfo, VecEnv
from placement.errors import counted
from rayagi.envs.creators import NAMESPACE
from rayagi.envs.errors import EnvironmentOptionError, UnknownEnvironmentError
from rayagi.envs.providers import ProviderDefinition, VecEnvArgs, unsupported_reason

PROVIDERS: tuple[ProviderDefinition, ...] = (
    ProviderDefinition(("mujoco_cpu",), "rayagi.envs.mujoco_cpu.provider:MujocoProvider"),
    ProviderDefinition(
        ("mujoco_cpu", "mujoco_warp"),
        "rayagi.envs.tasks.provider:OwnTaskProvider",
        extras={"mujoco_warp": ("gpu", ("warp", "mujoco_warp"))},
        namespace="rayagi/",
    ),
    ProviderDefinition(
        ("fused", "fused_torch"), "rayagi.envs.fused.provider:FusedProvider", namespace="fused/"
    ),
    ProviderDefinition(
        ("isaacgym",),
        "rayagi.envs.isaac.provider:IsaacProvider",
        arguments=("isaacgym",),
        namespace="isaacgym/",
        unlisted_ids="isaacgym/TASK, e.g. isaacgym/Ant: tasks of IsaacGymEnvs, in a separate Python",
    ),
    ProviderDefinition(
        ("isaaclab",),
        "rayagi.envs.isaac.provider:IsaacProvider",
        arguments=("isaaclab",),
        namespace="isaaclab/",
        unlisted_ids="isaaclab/TASK, e.g. isaaclab/Isaac-Ant-Direct-v0: tasks of Isaac Lab, in a separate Python",
    ),
    ProviderDefinition(
        ("envpool",),
        "rayagi.envs.envpool_provider:EnvPoolProvider",
        extras={"envpool": ("envpool", ("envpool",))},
        unlisted_ids="EnvPool's ids, with --set env.engine=envpool",
        only_by_engine=True,
    ),
    # Last, since it may import a module to ask whether that registers the id.
    ProviderDefinition(("gymnasium",), "rayagi.envs.gymnasium_adapter:GymnasiumProvider"),
)
"""Definitions in order of lookup."""

_LEAST_LIKENESS = 0.7
"""Of names that a message proposes, from 0 to 1."""
_LEAST_BEGINNING = 4
"""Characters that are taken for the beginning of a name."""
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
    """Engines, separated by commas, the default first."""
    obs_dim: int
    action: str
    """Text: "8 reals" or "2 choices"."""
    max_episode_steps: int | None
    description: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredEnvFactory:
    """Implements EnvFactory. Picklable: it holds only a description, and imports the environment where it is called."""

    env_id: str
    engine: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    registered: EnvSpec | None = None
    """The user's Gymnasium registration, which other processes lack."""

    def __call__(self, *, num_envs: int, first_env_index: int, seed: int, num_threads: int) -> VecEnv:
        """Construct the environments of one GMI."""
        if num_envs < 1 or num_threads < 1:
            raise EnvironmentOptionError(
                self.env_id, f"num_envs is {num_envs} and num_threads {num_threads}; both must be at least 1"
            )
        if self.registered is not None:
            gymnasium.registry[self.registered.id] = self.registered
        provider = _definition(self.env_id, self.engine).provider
        env_args = VecEnvArgs(num_envs, first_env_index, seed, num_threads)
        return provider.make(self.env_id, self.engine, self.kwargs, env_args)


def make_env_factory(
    env_id: str, *, engine: str = "auto", kwargs: Mapping[str, Any] | None = None
) -> RegisteredEnvFactory:
    """A picklable factory of batched environments. Id and options are validated; nothing is simulated yet.

    Args:
        env_id: one of ``list_envs()``, or any id of Gymnasium's registry.
        engine: auto uses the first engine that has it batched, else Gymnasium.
        kwargs: constructor arguments, as ``gymnasium.make`` takes them (``max_episode_steps`` included).

    Raises:
        UnknownEnvironmentError: no such id; the message suggests similar ones.
        EnvironmentOptionError: no such engine or option, or the environment's package is missing.
    """
    options = dict(kwargs or {})
    definition = _definition(env_id, engine)
    definition.provider.check(env_id, options)
    return RegisteredEnvFactory(
        env_id=env_id,
        engine=definition.engines[0] if engine == "auto" else engine,
        kwargs=options,
        registered=_users_registration(env_id),
    )


def env_info(env_id: str, engine: str = "auto", kwargs: Mapping[str, Any] | None = None) -> EnvInfo:
    """Sizes and limits of an environment. Raises as ``make_env_factory`` does."""
    factory = make_env_factory(env_id, engine=engine, kwargs=kwargs)
    return _definition(env_id, factory.engine).provider.info(env_id, factory.engine, factory.kwargs)


def list_envs() -> list[EnvListing]:
    """rayagi's own environments. Any other Gymnasium id works too, through its vector environments."""
    return [
        _listing(definition, env_id) for definition in PROVIDERS for env_id in definition.provider.catalogue
    ]


def named_env(env_id: str) -> list[EnvListing]:
    """Listing of a user's ``module:Name``; empty for an id without a module. Raises as ``make_env_factory`` does."""
    return [_listing(_definition(env_id, "auto"), env_id)] if ":" in env_id else []


def _listing(definition: ProviderDefinition, env_id: str) -> EnvListing:
    info = env_info(env_id, definition.engines[0])
    return EnvListing(
        env_id=env_id,
        engine=", ".join(definition.engines),
        obs_dim=info.obs_dim,
        action=_text_of(info.action),
        max_episode_steps=info.max_episode_steps,
        description=getattr(definition.provider.find(env_id), "description", ""),
    )


def _text_of(action: ActionSpec) -> str:
    if action.kind == "multi_discrete":
        return " x ".join(map(str, action.choices)) + " choices"
    return counted(action.num_choices, "choice") if action.kind == "discrete" else counted(action.dim, "real")


def default_hidden(env_id: str) -> tuple[int, ...]:
    """Hidden layer sizes of a task's policy: GMI-DRL (ATC'25) Table 4 for its tasks and Gymnasium's of the same name."""
    name = env_id.rsplit("/", 1)[-1].rsplit("-v", 1)[0]
    if name in _TABLE_4_HIDDEN:
        return _TABLE_4_HIDDEN[name]
    spec = gymnasium.registry.get(env_id)
    is_robot = spec is not None and "mujoco" in str(spec.entry_point)
    large = is_robot or is_user_task(env_id) or env_id.startswith("isaaclab/")
    return _MUJOCO_HIDDEN if large else _SMALL_HIDDEN


def is_user_task(env_id: str) -> bool:
    """Whether an id names a user's class that runs on MuJoCo. Raises as ``make_env_factory`` does."""
    return ":" in env_id and "mujoco_cpu" in _definition(env_id, "auto").engines


def _definition(env_id: str, engine: str) -> ProviderDefinition:
    """The definition of the provider that has an environment on an engine."""
    engines = dict.fromkeys(("auto", *(name for each in PROVIDERS for name in each.engines)))
    if engine not in engines:
        raise EnvironmentOptionError(
            env_id, f"there is no engine {engine!r}; choose from {', '.join(engines)}"
        )
    having: list[str] = []
    for definition in PROVIDERS:
        if definition.only_by_engine and engine not in definition.engines:
            continue
        if definition.knows(env_id):
            if engine == "auto" or engine in definition.engines:
                reason = definition.unsupported_reason(engine)
                if reason is not None:
                    raise EnvironmentOptionError(env_id, reason)
                return definition
            having += definition.engines
    if having:
        others = [name for each in PROVIDERS if engine in each.engines for name in each.provider.catalogue]
        has = f" (it has {', '.join(others)})" if others else ""
        raise EnvironmentOptionError(
            env_id, f"{engine} does not have it{has}; use engine {' or '.join(having)}, or auto"
        )
    reason = unsupported_reason(env_id)
    if reason is not None:
        raise EnvironmentOptionError(env_id, reason)
    if env_id.startswith(NAMESPACE):
        reason = (
            "it exists in the program that registered it only; use the run there (Algorithm.from_checkpoint), "
            "or train with an id that a module registers with Gymnasium: environment('MODULE:ID')"
        )
        raise EnvironmentOptionError(env_id, reason)
    for definition in PROVIDERS:
        (only, *_) = definition.engines
        is_installed = definition.only_by_engine and definition.unsupported_reason(only) is None
        if is_installed and definition.knows(env_id):
            raise EnvironmentOptionError(env_id, f"use engine {only}, which alone has it")
    raise UnknownEnvironmentError(env_id, nearest_ids(env_id))


def _users_registration(env_id: str) -> EnvSpec | None:
    """The registration of an id, unless it is Gymnasium's own, which every process has."""
    spec = gymnasium.registry.get(env_id.rpartition(":")[2])
    if spec is None:
        return None
    entry = spec.entry_point
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    return None if module.startswith("gymnasium.") else spec


def nearest_ids(env_id: str) -> tuple[str, ...]:
    """At most four ids with a similar name, whatever their namespace and version: the most similar ones, rayagi's first."""
    # Gymnasium keeps retired ids; their entry point is a function that raises with directions.
    alive = [
        name for name, spec in gymnasium.registry.items() if not isinstance(spec.entry_point, FunctionType)
    ]
    own = {name for definition in PROVIDERS for name in definition.provider.catalogue}
    likeness = {name: _likeness(_bare(env_id), _bare(name)) for name in sorted({*own, *alive})}
    near = [name for name in likeness if likeness[name] >= _LEAST_LIKENESS]
    near.sort(key=lambda name: (name.lower() != env_id.lower(), -likeness[name], name not in own))
    return tuple(near[:4])


def _likeness(asked: str, name: str) -> float:
    """From 0 to 1, of names without namespace and version, in which all ids are alike."""
    if len(asked) >= _LEAST_BEGINNING and name.startswith(asked):
        return 1.0
    return difflib.SequenceMatcher(None, asked, name).ratio()


def _bare(env_id: str) -> str:
    """The id in lower case, without namespace and version."""
    return env_id.lower().rsplit("/", 1)[-1].rsplit("-v", 1)[0]
