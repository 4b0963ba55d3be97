"""Any Gymnasium environment as a VecEnv, through Gymnasium's own vector environment."""

from __future__ import annotations

import inspect
import logging
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from functools import partial
from threading import Timer
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import wrappers
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from actors.protocols import ActionSpec, EnvInfo, ObsLeaf, ObsPart, StateDict, StepResult, VecEnv
from placement.errors import counted
from rayagi.envs.checked_env import CheckedEnv
from rayagi.envs.errors import (
    EnvironmentFailedError,
    EnvironmentOptionError,
    NamedFailures,
    SimulationError,
    UnsupportedSpaceError,
    failure_text,
    place_text,
)
from rayagi.envs.lifetime import ClosableEnv, while_open
from rayagi.envs.process_state import all_process_state_kept, process_state_kept
from rayagi.envs.providers import (
    EnvProvider,
    VecEnvArgs,
    changed_modes,
    changed_torch,
    check_kind,
    check_num_envs,
    log_sim_errors,
    torch_modes,
    torch_settings,
    user_module,
)

if TYPE_CHECKING:
    from torch import Tensor

_logger = logging.getLogger("rayagi.envs")

ENGINE = "gymnasium"
_SLOW_S = 5.0
"""After which the making of an environment is named."""
_IMAGE_DIMS = 3
_MOST_CHANNELS = 4
_LEAST_PIXELS = 10
_PASSING = {
    wrappers.OrderEnforcing,
    wrappers.PassiveEnvChecker,
    wrappers.RecordEpisodeStatistics,
    wrappers.TimeLimit,
}
"""Wrappers that return observations as they are, as those of rewards and actions do."""
_MOST_OPTIONS = 1024
"""Most values of one integer in a Box action space: each needs a logit."""


def make_one(env_id: str, kwargs: Mapping[str, Any], env_index: int = 0) -> CheckedEnv:
    """One environment with flat observations; ``env_index``: its global index, for errors.

    Raises:
        EnvironmentOptionError: its package or its entry point is missing, it rejects the options, it changes torch's
            settings, or it has no space of observations or actions.
        UnsupportedSpaceError: an image of more than three dimensions, or actions other than a flat box or choices.
    """
    registered = gymnasium.registry.get(env_id.rpartition(":")[2])
    if registered is not None and registered.entry_point is None:
        reason = "it has only a vector_entry_point, which rayagi does not use: register an entry_point, of one environment"
        raise EnvironmentOptionError(env_id, reason)
    options = dict(kwargs)
    # The checker only warns about style; training and rendering make the same environment.
    options.setdefault("disable_env_checker", True)
    before = torch_settings()
    try:
        # Where a run's paths begin, what it writes to, and how it ends, whatever the constructor changes.
        with chdir(os.getcwd()), process_state_kept():
            env = gymnasium.make(env_id, **options)
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, gymnasium.error.Error) else failure_text(error)
        raise EnvironmentOptionError(
            env_id, f"Gymnasium cannot make it with {dict(kwargs)}: {reason}"
        ) from error
    if reason := changed_torch(before):
        raise EnvironmentOptionError(env_id, reason)
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, gymnasium.Space):
            reason = f"its {name} is {space!r}; it must be one of gymnasium.spaces"
            raise EnvironmentOptionError(env_id, reason)
    _check_booleans(env_id, env, kwargs)
    observation_parts(env_id, env.observation_space)
    action_spec(env_id, env.action_space)
    try:
        return CheckedEnv(env_id, env, env_index)
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedSpaceError(
            env_id, str(env.observation_space), "wrap it into a flat Box of reals and register that"
        ) from error


def _check_booleans(env_id: str, env: gymnasium.Env[Any, Any], kwargs: Mapping[str, Any]) -> None:
    """Constructors take any text for true: an option whose default is a boolean must be one.

    Raises:
        EnvironmentOptionError: it is not.
    """
    parameters = inspect.signature(type(env.unwrapped).__init__).parameters
    for name in kwargs.keys() & parameters.keys():
        if isinstance(parameters[name].default, bool):
            check_kind(env_id, name, kwargs[name], parameters[name].default)


def describe(env_id: str, kwargs: Mapping[str, Any]) -> EnvInfo:
    """The environment's EnvInfo; makes one environment for it. Raises as ``make_one``."""
    with _named_if_slow(env_id), all_process_state_kept():
        env = make_one(env_id, kwargs)
        try:
            return _info(env_id, env)
        finally:
            env.close()


@contextmanager
def _named_if_slow(env_id: str) -> Iterator[None]:
    """Log a line after a while, and tell Ctrl-C where the environment's code was: its constructor may never return."""
    text = "still making one %s, to learn its spaces; Ctrl-C shows where its code is"
    timer = Timer(_SLOW_S, _logger.warning, (text, env_id))
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt as error:
        error.args = error.args or (f"while one {env_id} was made{place_text(error)}",)
        raise
    finally:
        timer.cancel()


def _info(env_id: str, env: CheckedEnv) -> EnvInfo:
    space = env.env.observation_space
    parts = observation_parts(env_id, space)
    members = space.spaces.items() if isinstance(space, gymnasium.spaces.Dict) else ()
    shape = env.observation_space.shape
    if shape is None or len(shape) != 1:
        raise UnsupportedSpaceError(
            env_id, str(env.observation_space), "its size varies; wrap it into a Box of fixed length"
        )
    if 0 in shape:
        raise UnsupportedSpaceError(
            env_id, f"{space} of observations", "it is empty: give it a number, such as a constant"
        )
    limit = env.spec.max_episode_steps if env.spec is not None else None
    return EnvInfo(
        env_id=env_id,
        engine=ENGINE,
        obs_dim=int(shape[0]),
        action=action_spec(env_id, env.action_space),
        obs_parts=parts if any(part.is_image for part in parts) else (),
        obs_leaves=observation_leaves(space),
        obs_members=tuple((key, gymnasium.spaces.flatdim(member)) for key, member in members),
        max_episode_steps=limit if limit is not None and limit > 0 else None,
        frames=_frames(env.env),
    )


def _frames(env: gymnasium.Env[Any, Any]) -> int:
    """Frames that an observation stacks by Gymnasium's wrapper, if nothing changes what it returns."""
    if not isinstance(env.observation_space, gymnasium.spaces.Box):
        return 1
    while isinstance(env, gymnasium.Wrapper) and _passes_observations(env):
        env = env.env
    # A subclass may do something else.
    return env.stack_size if type(env) is wrappers.FrameStackObservation else 1


def _passes_observations(env: gymnasium.Wrapper[Any, Any, Any, Any]) -> bool:
    """Whether a wrapper returns observations as they are. A user's own may leave steps out."""
    own = type(env)
    for base in (gymnasium.RewardWrapper, gymnasium.ActionWrapper):
        if isinstance(env, base):
            return own.step is base.step and own.reset is base.reset
    return own in _PASSING


def observation_leaves(space: gymnasium.Space[Any]) -> tuple[ObsLeaf, ...]:
    """Arrays of a space whose observations are no vectors already, as ``EnvInfo.obs_leaves``."""
    if isinstance(space, gymnasium.spaces.Box | gymnasium.spaces.MultiBinary) and len(space.shape) == 1:
        return ()
    leaves = list(_leaves(space, ()))
    return tuple(leaf for leaf in leaves if leaf is not None) if None not in leaves else ()


def _leaves(space: gymnasium.Space[Any], path: tuple[str | int, ...]) -> Iterator[ObsLeaf | None]:
    """Arrays of a space at a path, in the order of ``gymnasium.spaces.flatten``; None for a member that is none."""
    if isinstance(space, gymnasium.spaces.Dict):
        for key, member in space.spaces.items():
            yield from _leaves(member, (*path, key))
    elif isinstance(space, gymnasium.spaces.Tuple):
        for place, member in enumerate(space.spaces):
            yield from _leaves(member, (*path, place))
    elif isinstance(space, gymnasium.spaces.Discrete):
        yield ObsLeaf(path=path, shape=(), choices=(int(space.n),), starts=(int(space.start),))
    elif isinstance(space, gymnasium.spaces.MultiDiscrete):
        choices, starts = space.nvec.ravel().tolist(), space.start.ravel().tolist()
        yield ObsLeaf(path=path, shape=space.shape, choices=tuple(choices), starts=tuple(starts))
    elif isinstance(space, gymnasium.spaces.Box | gymnasium.spaces.MultiBinary):
        yield ObsLeaf(path=path, shape=space.shape)
    else:
        yield None


def observation_parts(env_id: str, space: gymnasium.Space[Any]) -> tuple[ObsPart, ...]:
    """Layout of an observation after FlattenObservation: images, and vectors of everything else.

    Raises:
        UnsupportedSpaceError: a Box of more than three dimensions.
    """
    if isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
        members = space.spaces.values() if isinstance(space, gymnasium.spaces.Dict) else space.spaces
        return tuple(part for member in members for part in observation_parts(env_id, member))
    if isinstance(space, gymnasium.spaces.Box):
        if len(space.shape) > _IMAGE_DIMS:
            raise UnsupportedSpaceError(
                env_id,
                f"Box{space.shape}",
                "join its frames and channels to an image of three dimensions (gymnasium.wrappers)",
            )
        image = _image_part(space)
        if image is not None:
            return (image,)
    size = gymnasium.spaces.flatdim(space) if space.is_np_flattenable else 0
    return (ObsPart(size=size, shape=(size,)),)


def _image_part(space: gymnasium.spaces.Box) -> ObsPart | None:
    """An image: a Box of three dimensions, or of two with bytes, of at least _LEAST_PIXELS in height and width.

    The channels are the dimension that differs from two equal ones; else the last, if it is at most four or at most the
    first. Smaller boxes, such as the boards of games, are vectors.
    """
    is_gray = len(space.shape) == _IMAGE_DIMS - 1 and space.dtype == np.uint8
    if len(space.shape) != _IMAGE_DIMS and not is_gray:
        return None
    first, second, third = map(int, (*space.shape, 1) if is_gray else space.shape)
    has_equal_pair = first == second or second == third
    channels_last = first == second if has_equal_pair else third <= _MOST_CHANNELS or third <= first
    bounded = (
        bool(np.isfinite(space.high).all()) and float(space.low.min()) >= 0 and float(space.high.max()) > 0
    )
    part = ObsPart(
        size=first * second * third,
        shape=(first, second, third),
        channels_last=channels_last,
        scale=1 / float(space.high.max()) if bounded else 1.0,
        is_bytes=space.dtype == np.uint8,
    )
    _, height, width = part.channels_height_width
    return part if min(height, width) >= _LEAST_PIXELS else None


def action_spec(env_id: str, space: gymnasium.Space[Any]) -> ActionSpec:
    """The ActionSpec of an action space.

    An integer Box and a MultiBinary are multi-discrete.

    Raises:
        UnsupportedSpaceError: neither a one-dimensional Box nor a discrete space, or one with nothing to choose.
    """
    if 0 in (space.shape or ()):
        raise UnsupportedSpaceError(env_id, f"{space} of actions", "it is empty: there is nothing to choose")
    firsts = first_options(space)
    if firsts is not None:
        choices, starts = tuple(_options(space).tolist()), tuple(firsts.tolist())
        return ActionSpec(kind="multi_discrete", dim=len(choices), choices=choices, starts=starts)
    if isinstance(space, gymnasium.spaces.Discrete):
        return ActionSpec(kind="discrete", dim=1, num_choices=int(space.n), starts=(int(space.start),))
    if isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1:
        if (space.low >= space.high).all():
            hint = "its low and high are equal, so there is nothing to choose (a MuJoCo actuator needs a ctrlrange)"
            raise UnsupportedSpaceError(env_id, f"{space} of actions", hint)
        low, high = space.low.astype(float).tolist(), space.high.astype(float).tolist()
        return ActionSpec(kind="continuous", dim=int(space.shape[0]), low=tuple(low), high=tuple(high))
    raise UnsupportedSpaceError(
        env_id,
        f"{space} of actions",
        "a policy gives a one-dimensional Box, a Discrete choice, or several (MultiDiscrete, MultiBinary); wrap it into one",
    )


def first_options(space: gymnasium.Space[Any]) -> NDArray[np.int64] | None:
    """First option of each choice of a multi-discrete action space, (dim,); None for other spaces."""
    if isinstance(space, gymnasium.spaces.MultiDiscrete) and len(space.shape) == 1:
        return space.start.astype(np.int64)
    if isinstance(space, gymnasium.spaces.MultiBinary) and len(space.shape) == 1:
        return np.zeros(space.shape, dtype=np.int64)
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.integer):
        most = space.high.astype(np.float64) - space.low.astype(np.float64)
        if len(space.shape) == 1 and most.max(initial=0) < _MOST_OPTIONS:
            return space.low.astype(np.int64)
    return None


def _options(space: gymnasium.Space[Any]) -> NDArray[np.int64]:
    """Number of options of each choice, (dim,)."""
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return space.nvec.astype(np.int64)
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return np.full(space.shape, 2, dtype=np.int64)
    assert isinstance(space, gymnasium.spaces.Box)
    return space.high.astype(np.int64) - space.low.astype(np.int64) + 1


def to_space(space: gymnasium.Space[Any], actions: NDArray[Any]) -> NDArray[Any]:
    """Convert a policy's actions, (N, ...), to the space.

    Reals are clipped to the Box, and rounded if its numbers are whole; choices are offset by ``start``.
    """
    if isinstance(space, gymnasium.spaces.Discrete):
        return actions.reshape(-1).astype(np.int64) + int(space.start)
    starts = first_options(space)
    if starts is not None:
        return (actions + starts).astype(space.dtype)
    assert isinstance(space, gymnasium.spaces.Box)
    clipped = np.clip(actions, space.low, space.high)
    return (np.rint(clipped) if space.dtype.kind in "iu" else clipped).astype(space.dtype)


def episode_seed(seed: int, env_index: int, episode: int) -> int:
    """63-bit seed of one environment, from the run's seed, its global index and the episode."""
    words = [seed % 2**64, env_index, episode]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def _first_nonfinite(values: NDArray[Any]) -> int | None:
    """The first row, (n, ...), with a value that is not finite."""
    finite = np.isfinite(values)
    return None if finite.all() else int(np.flatnonzero(~finite.all(axis=1))[0])


class RestartingVecEnv(ClosableEnv):
    """What environments whose state cannot be saved have in common: episodes' counters, and what is not finite."""

    resumes_episodes = False

    def __init__(self, info: EnvInfo, num_envs: int, first_env_index: int) -> None:
        super().__init__()
        self.info, self.num_envs, self._first_env_index = info, num_envs, first_env_index
        self._episode = np.full(num_envs, -1, dtype=np.int64)
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        self._num_unstable = 0

    @property
    def sim_errors(self) -> Mapping[str, int]:
        """Count of environments that became non-finite, since construction."""
        return {"unstable": self._num_unstable}

    @abstractmethod
    def reset(self) -> Tensor:
        """Start a new episode in every environment. Returns (N, obs_dim)."""

    def _next_seeds(self, seed: int) -> list[int]:
        """Count the next episode of every environment. Returns their seeds."""
        self._episode += 1
        self._elapsed[:] = 0
        return [
            episode_seed(seed, self._first_env_index + i, int(episode))
            for i, episode in enumerate(self._episode)
        ]

    def _refuse_nonfinite_actions(self, actions: NDArray[Any]) -> None:
        """Raise SimulationError at the first environment whose action, (N, dim), is not finite."""
        row = _first_nonfinite(actions)
        if row is not None:
            raise SimulationError(self._first_env_index + row, int(self._elapsed[row]), "action")

    def _refuse_nonfinite_starts(self, obs: NDArray[Any], ids: NDArray[Any] | None = None) -> None:
        """Raise EnvironmentFailedError at the first of these environments (None: all) whose episode cannot begin.

        Args:
            obs: first observations of episodes; also others, which are finite   (n, obs_dim)
        """
        row = _first_nonfinite(obs)
        if row is not None:
            index = self._first_env_index + (row if ids is None else int(ids[row]))
            reason = "the first observation of an episode is NaN, or infinite in float32"
            raise EnvironmentFailedError(self.info.env_id, f"environment {index}, reset", reason)

    @while_open
    def state_dict(self) -> StateDict:
        """Episode counters: the environments do not expose their state."""
        return {"episode": self._episode.copy()}

    @while_open
    def load_state_dict(self, state: Mapping[str, Any]) -> Tensor:
        """Start new episodes with other seeds than the saved ones. Returns their first observation."""
        check_num_envs(self.info.env_id, len(state["episode"]), self.num_envs)
        self._episode[:] = state["episode"]
        return self.reset()

    def _release(self) -> None:
        """Log simulation errors, for users without metrics."""
        log_sim_errors(self.info.env_id, self.sim_errors)


class GymnasiumVecEnv(RestartingVecEnv):
    """Implements VecEnv on a SyncVectorEnv with same-step auto-reset.

    Gymnasium seeds one generator per environment once; later episodes continue it. The seed depends on (seed, global
    index), so an environment's trajectory does not depend on the GMI that hosts it. Steps run on one thread: most of these
    environments hold the GIL.

    A non-finite reward or observation terminates the episode, with a reward of 0 and the last finite observation. It is
    counted in ``sim_errors``, and the environment is reset.
    """

    def __init__(
        self,
        env_id: str,
        kwargs: Mapping[str, Any],
        *,
        num_envs: int,
        first_env_index: int = 0,
        seed: int = 0,
    ) -> None:
        """Make them.

        Raises:
            EnvError: as of ``make_one``; or their spaces differ.
        """
        with NamedFailures(env_id, lambda: f"making {counted(num_envs, 'environment')}"):
            made = [make_one(env_id, kwargs, first_env_index + i) for i in range(num_envs)]
            _refuse_differing(env_id, made, first_env_index)
            self._envs = SyncVectorEnv(
                [partial(_given, env) for env in made], autoreset_mode=AutoresetMode.SAME_STEP
            )
        first = made[0]
        super().__init__(_info(env_id, first), num_envs, first_env_index)
        self._seed, self._action_space = seed, self._envs.single_action_space
        self._obs = np.zeros((num_envs, self.info.obs_dim), self.info.obs_dtype)

    @while_open
    def reset(self) -> Tensor:
        """Start a new episode in every environment. Returns (N, obs_dim).

        Raises:
            EnvironmentFailedError: as of ``step``.
        """
        before = torch_settings()
        obs = self._copy(self._envs.reset(seed=self._next_seeds(self._seed))[0])
        if reason := changed_torch(before):
            raise EnvironmentFailedError(self.info.env_id, "reset", reason)
        self._refuse_nonfinite_starts(obs)
        self._obs = obs.copy()
        return _as_tensor(obs)

    @while_open
    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment; continuous actions are clipped to the Box, choices count from 0.

        Raises:
            EnvironmentFailedError: an environment's code raised an exception, returned another shape than declared, began an
                episode with an observation that is not finite, or changed torch's settings.
            SimulationError: an action is not finite.
        """
        self._elapsed += 1
        given = self._to_space(actions.detach().cpu().numpy())
        before = torch_modes()
        observed, rewards, terminated, truncated, info = self._envs.step(given)
        if torch_modes() != before:
            raise EnvironmentFailedError(self.info.env_id, "step", changed_modes(before))
        # First float32: a larger float64 is infinite.
        obs, rewards = self._copy(observed), _as_float32(rewards)
        done = terminated | truncated
        final_ids = np.flatnonzero(done)
        final_obs = obs[:0]
        if final_ids.size:
            final_obs = self._copy(np.stack([info["final_obs"][i] for i in final_ids]))
        # State that each action led to: the final observation where an episode ended.
        reached = obs.copy()
        reached[final_ids] = final_obs
        unstable = ~(np.isfinite(rewards) & np.isfinite(reached).all(axis=1))
        if unstable.any():
            self._num_unstable += int(unstable.sum())
            rewards, terminated = np.where(unstable, 0.0, rewards), terminated | unstable
            reached[unstable] = self._obs[unstable]
            going_on = unstable & ~done
            if going_on.any():
                obs = self._copy(self._envs.reset(options={"reset_mask": going_on})[0])
            final_ids = np.flatnonzero(done | unstable)
            final_obs = reached[final_ids]
        self._refuse_nonfinite_starts(obs)
        self._obs = obs.copy()
        self._elapsed[final_ids] = 0
        self._episode[final_ids] += 1
        return StepResult(
            obs=_as_tensor(obs),
            rewards=float32_copy(rewards),
            terminated=_as_tensor(terminated.copy()),
            truncated=_as_tensor(truncated.copy()),
            final_ids=_as_tensor(final_ids),
            final_obs=_as_tensor(final_obs.copy()),
        )

    def _copy(self, observed: Any) -> NDArray[Any]:
        """Observations of their own: the vector environment reuses its buffer. Beyond float32 they become infinite."""
        with np.errstate(over="ignore"):
            return np.array(observed, self.info.obs_dtype)

    def _to_space(self, actions: NDArray[Any]) -> NDArray[Any]:
        if not self.info.action.is_discrete:
            self._refuse_nonfinite_actions(actions)
        return to_space(self._action_space, actions)

    def _release(self) -> None:
        super()._release()
        self._envs.close()


def _given(env: CheckedEnv) -> CheckedEnv:
    return env


def _refuse_differing(env_id: str, made: Sequence[CheckedEnv], first_env_index: int) -> None:
    """Raise EnvironmentOptionError if environments of one run have different spaces."""
    for i, env in enumerate(made):
        for name in ("observation_space", "action_space"):
            first, own = getattr(made[0], name), getattr(env, name)
            if own != first:
                raise EnvironmentOptionError(
                    env_id,
                    f"the {name} of environment {first_env_index} is {first}, and that of environment "
                    f"{first_env_index + i} is {own}; all environments of a run must have the same",
                )


def _as_float32(values: Any) -> NDArray[np.float32]:
    """A copy. What float32 cannot hold becomes infinite."""
    with np.errstate(over="ignore"):
        return np.array(values, np.float32)


def float32_copy(values: Any) -> Tensor:
    """A copy as a tensor."""
    return _as_tensor(_as_float32(values))


def _as_tensor(values: NDArray[Any]) -> Tensor:
    """A tensor of the array's memory."""
    # Imported here: a run is checked and planned before torch is loaded.
    import torch

    return torch.from_numpy(values)


class GymnasiumProvider(EnvProvider):
    """Lists no ids, since the registry belongs to Gymnasium, which checks options when it makes an environment."""

    def knows(self, env_id: str) -> bool:
        """Whether ``gymnasium.make`` knows the id; "module:id" imports the module first, as it does there."""
        user_module(env_id)
        return env_id.rpartition(":")[2] in gymnasium.registry

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """Describe the environment; makes one instance for it."""
        return describe(env_id, kwargs)

    def make(self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs) -> VecEnv:
        """Make a vectorized environment that steps its environments in sequence in this process."""
        return GymnasiumVecEnv(
            env_id,
            kwargs,
            num_envs=env_args.num_envs,
            first_env_index=env_args.first_env_index,
            seed=env_args.seed,
        )
