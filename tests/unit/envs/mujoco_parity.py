"""Helpers of the parity tests, which compare Gymnasium's environments with ours."""

from __future__ import annotations

import gymnasium
import mujoco
import numpy as np

from actors.protocols import StateDict
from rayagi.envs import make_env_factory
from rayagi.envs.mujoco_cpu.physics import STATE_FIELDS
from rayagi.envs.mujoco_cpu.vec_env import MujocoVecEnv

ROW = int(mujoco.mjtState.mjSTATE_INTEGRATION)


def make_ours(
    env_id: str, num_envs: int, *, first: int = 0, seed: int = 3, threads: int = 1, **kwargs
) -> MujocoVecEnv:
    factory = make_env_factory(env_id, kwargs=kwargs)
    env = factory(num_envs=num_envs, first_env_index=first, seed=seed, num_threads=threads)
    assert isinstance(env, MujocoVecEnv)
    return env


def make_theirs(env_id: str, num_envs: int, **kwargs) -> list[gymnasium.Env]:
    return [gymnasium.make(env_id, disable_env_checker=True, **kwargs).unwrapped for _ in range(num_envs)]


def random_actions(theirs: list[gymnasium.Env], rng: np.random.Generator) -> np.ndarray:
    space = theirs[0].action_space
    return rng.uniform(space.low, space.high, (len(theirs), space.shape[0]))


def state_of(theirs: list[gymnasium.Env], ours: MujocoVecEnv) -> StateDict:
    """Their full state and derived fields, as a state_dict of ``ours``."""
    physics: dict[str, np.ndarray] = {}
    for name in {*STATE_FIELDS, *ours.state_dict()["physics"]} - {"rows"}:
        physics[name] = np.stack([np.array(getattr(env.data, name)) for env in theirs])
    rows = np.zeros((len(theirs), mujoco.mj_stateSize(theirs[0].model, ROW)))
    for env, row in zip(theirs, rows, strict=True):
        mujoco.mj_getState(env.model, env.data, row, ROW)
    physics["rows"] = rows
    zeros = np.zeros(len(theirs), dtype=np.int64)
    return {"physics": physics, "elapsed": zeros, "episode": zeros}


def assert_same_trajectory(
    ours: MujocoVecEnv, theirs: list[gymnasium.Env], num_steps: int, rng: np.random.Generator
) -> None:
    """Check that observations, rewards and ends are equal for ``num_steps`` of the same actions.

    Where an episode ends, Gymnasium's environment is reset and ours loads its state.
    """
    for step in range(num_steps):
        actions = random_actions(theirs, rng)
        got = ours.step_raw(actions)
        obs = got.obs.copy()
        obs[got.final_ids] = got.final_obs
        for i, env in enumerate(theirs):
            want_obs, want_reward, want_terminated, _, _ = env.step(actions[i])
            np.testing.assert_allclose(
                obs[i], want_obs, rtol=1e-9, atol=1e-9, err_msg=f"step {step}, environment {i}"
            )
            np.testing.assert_allclose(got.rewards[i], want_reward, rtol=1e-9, atol=1e-9)
            assert bool(got.terminated[i]) == want_terminated
        if got.final_ids.size:
            for i in got.final_ids:
                theirs[i].reset(seed=int(1000 * step + i))
            ours.load_state_dict(state_of(theirs, ours))
