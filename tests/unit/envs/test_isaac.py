"""Isaac Gym and Isaac Lab through stand-ins with their interfaces, in processes of their own as the real ones are.

The stand-ins' tasks raise a height that starts between 0 and 0.5 by the action; above 3 an episode ends (tests/fakes).
"""

import ast
import shlex
import sys
from pathlib import Path

import pytest
import torch

from rayagi.cli.main import main
from rayagi.envs import EnvironmentOptionError, make_env_factory
from rayagi.envs.errors import SimulationError, SimulatorLostError
from rayagi.envs.isaac import host

FAKES = Path(__file__).resolve().parents[2] / "fakes"
GYM, LAB = "isaacgym/Climb", "isaaclab/Isaac-Climb-Direct-v0"


@pytest.fixture(scope="module")
def pythons(tmp_path_factory):
    """A Python with each simulator: as Isaac Sim's own, a script that says where its packages are."""
    scripts = {}
    for engine, site in (("isaacgym", "isaac_gym_site"), ("isaaclab", "isaac_lab_site")):
        script = tmp_path_factory.mktemp(engine) / "python.sh"
        path = shlex.quote(str(FAKES / site))
        script.write_text(f'#!/bin/sh\nexport PYTHONPATH={path}\nexec {shlex.quote(sys.executable)} "$@"\n')
        script.chmod(0o755)
        scripts[engine] = str(script)
    return scripts


@pytest.fixture(scope="module")
def make(pythons):
    """Environments of a task, which are closed at the end."""
    made = []

    def environments(env_id, *, num_envs=3, **options):
        engine = env_id.partition("/")[0]
        factory = make_env_factory(env_id, kwargs={"python": pythons[engine], **options})
        env = factory(num_envs=num_envs, first_env_index=4, seed=1, num_threads=1)
        made.append(env)
        return env

    yield environments
    for env in made:
        env.close()


@pytest.fixture(scope="module")
def gym(make):
    return make(GYM)


@pytest.fixture(scope="module")
def lab(make):
    return make(LAB, clip_actions=1)


def climb(env, actions, num_steps):
    """Heights at the start, and results of steps with the same actions."""
    start = env.reset()[:, 0]
    return start, [env.step(torch.tensor(actions).unsqueeze(-1)) for _ in range(num_steps)]


def test_isaac_gym_returns_the_exact_final_observation_and_the_first_one_a_step_later(gym):
    # 2 is clipped to 1: the last environment is above 3 in step 3. The others have 5 steps, the first of them in reset().
    start, steps = climb(gym, [0.0, 0.5, 2.0], 6)
    torch.testing.assert_close(steps[1].obs[:, 0], start + torch.tensor([0.0, 1.0, 2.0]))
    assert steps[1].final_ids.tolist() == []
    over, out = steps[2], steps[3]
    assert (over.final_ids.tolist(), over.terminated.tolist()) == ([2], [False, False, True])
    assert not over.truncated.any()
    torch.testing.assert_close(over.final_obs, torch.stack([start[2] + 3, torch.tensor(3.0)]).unsqueeze(0))
    torch.testing.assert_close(over.rewards[2], start[2] + 3)
    torch.testing.assert_close(over.obs[2], over.final_obs[0])
    # The next step is the engine's reset: a new height below 0.5, progress 0, and no end.
    assert (float(out.obs[2, 0]) <= 0.5, float(out.obs[2, 1])) == (True, 0.0)
    assert (out.final_ids.tolist(), out.truncated.tolist()) == ([0, 1], [True, True, False])
    assert not out.terminated.any()
    torch.testing.assert_close(out.final_obs[:, 0], start[:2] + torch.tensor([0.0, 2.0]))
    assert steps[4].obs[:, 1].tolist() == [0.0, 0.0, 1.0]


def test_isaac_lab_returns_the_first_observation_at_once_and_the_previous_one_as_the_final(lab):
    start, steps = climb(lab, [0.0, 0.5, 2.0], 4)
    over, out = steps[2], steps[3]
    assert (over.final_ids.tolist(), over.terminated.tolist()) == ([2], [False, False, True])
    torch.testing.assert_close(over.rewards[2], start[2] + 3)
    torch.testing.assert_close(over.final_obs, torch.stack([start[2] + 2, torch.tensor(2.0)]).unsqueeze(0))
    assert (float(over.obs[2, 0]) <= 0.5, float(over.obs[2, 1])) == (True, 0.0)
    assert (out.final_ids.tolist(), out.truncated.tolist()) == ([0, 1], [True, True, False])
    assert not out.terminated.any()
    torch.testing.assert_close(out.final_obs[:, 0], start[:2] + torch.tensor([0.0, 1.5]))


@pytest.mark.slow
def test_time_limits_of_tasks_with_a_finite_horizon_are_ends(make):
    _, steps = climb(make("isaaclab/Isaac-Climb-v0", num_envs=1), [0.0], 4)
    assert (steps[3].terminated.tolist(), steps[3].truncated.tolist()) == ([True], [True])


def test_sizes_come_from_the_simulator(gym, lab):
    # Isaac Lab's actions are unbounded; clip_actions sets a range.
    for env, limit in ((gym, 5), (lab, 4)):
        limits = (env.info.action.low, env.info.action.high)
        assert (env.info.obs_dim, env.info.action.dim, *limits) == (2, 1, (-1.0,), (1.0,))
        assert env.info.max_episode_steps == limit


def test_a_run_is_planned_with_the_python_that_is_named(pythons, capsys):
    assert main(["plan", GYM, "--gmis", "1", "--set", f"env.kwargs.python={pythons['isaacgym']}"]) == 0
    assert "simulator" in capsys.readouterr().out


def test_resets_have_seeds_that_a_saved_state_goes_on_from(gym):
    first = gym.reset()
    state, second = gym.state_dict(), gym.reset()
    assert not torch.equal(first, second)
    assert torch.equal(gym.load_state_dict(state), second)
    with pytest.raises(EnvironmentOptionError, match="holds 8 environments, not 3"):
        gym.load_state_dict({**state, "num_envs": 8})


def test_an_action_that_is_not_finite_is_refused(lab):
    lab.reset()
    with pytest.raises(
        SimulationError, match="environment 5 became unstable in step 1 of its episode: action"
    ):
        lab.step(torch.tensor([[0.0], [float("nan")], [0.0]]))


def test_a_python_without_the_simulator_gets_installation_instructions(pythons):
    factory = make_env_factory(GYM, kwargs={"python": pythons["isaaclab"]})
    with pytest.raises(EnvironmentOptionError) as caught:
        factory(num_envs=1, first_env_index=0, seed=0, num_threads=1)
    text = str(caught.value)
    for part in ("no package 'isaacgym'", "Preview 4", "Python 3.8", "--set env.kwargs.python="):
        assert part in text


@pytest.mark.parametrize(
    ("env_id", "error", "reason"),
    [
        ("isaaclab/Isaac-Climb-Apart-v0", EnvironmentOptionError, "its observations are Dict"),
        pytest.param(
            "isaacgym/Hopeless",
            SimulatorLostError,
            "(?s)ended with exit code 0.*Failed to create sim",
            marks=pytest.mark.slow,
        ),
        ("isaacgym/Patient", SimulatorLostError, "does not reset environments by itself"),
        ("isaacgym/Dying", SimulatorLostError, "(?s)ended with exit code 139.*fail to allocate memory"),
    ],
)
def test_failures_of_a_simulator_are_reported_with_a_reason(make, env_id, error, reason):
    with pytest.raises(error, match=reason):
        make(env_id).reset()


@pytest.mark.parametrize(
    ("env_id", "options", "reason"),
    [
        (GYM, {"clip_actions": 1.0}, "no option 'clip_actions'; isaacgym has python"),
        (LAB, {"clip_actions": -1.0}, "must be greater than 0"),
        (LAB, {"python": "/nowhere/python"}, "python=/nowhere/python is no executable here"),
    ],
)
def test_options_are_checked_before_anything_starts(env_id, options, reason):
    with pytest.raises(EnvironmentOptionError, match=reason):
        make_env_factory(env_id, kwargs=options)


def test_an_id_says_its_engine():
    with pytest.raises(EnvironmentOptionError, match="use engine isaacgym, or auto"):
        make_env_factory(GYM, engine="isaaclab")


def test_the_host_keeps_to_python_3_8():
    ast.parse(Path(host.__file__).read_text(), feature_version=(3, 8))
