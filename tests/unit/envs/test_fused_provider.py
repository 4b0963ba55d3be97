"""Fused simulators as environments: ids, options, the documented example, and PPO that learns from them."""

import importlib
import re
import sys
from dataclasses import replace

import pytest
import torch

from experiments.fusion import parity
from rayagi import envs
from rayagi.cli import main
from rayagi.config.presets import preset
from rayagi.envs.errors import EnvironmentOptionError, RenderingError, SimulationError, SimulatorError
from rayagi.envs.fused import provider
from tests.documents import ROOT, blocks
from tests.unit.envs.test_fused_rollout import program_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")
PAGE = ROOT / "docs" / "how-to" / "fused-simulators.md"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The simulator that the documentation shows, as a module of the user's."""
    (text,) = [block.text for block in blocks(PAGE) if block.title == "lander.py"]
    (tmp_path / "lander.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield text
    sys.modules.pop("lander", None)


def made(env_id, num_envs=5, engine="auto", **kwargs):
    factory = envs.make_env_factory(env_id, engine=engine, kwargs=kwargs)
    return factory(num_envs=num_envs, first_env_index=0, seed=1, num_threads=1)


def test_simulators_are_listed_with_their_sizes():
    listing = {line.env_id: line for line in envs.list_envs()}
    assert set(provider.SIMULATORS) <= set(listing)
    cartpole = listing["fused/CartPole-v1"]
    assert (cartpole.obs_dim, cartpole.action, cartpole.max_episode_steps) == (4, "2 choices", 500)
    assert cartpole.engine.startswith("fused, fused_torch")


def test_the_documented_example_is_short_and_runs_on_every_backend(example):
    assert len(example.splitlines()) < 60
    lander = importlib.import_module("lander").Lander()
    for found in (parity.check_steps(lander), parity.check_rollouts(lander)):
        assert found.exact < 1e-9
        assert found.single < 1e-6
    info = envs.env_info("lander:Lander")
    assert (info.obs_dim, info.action.dim, info.max_episode_steps, info.engine) == (3, 1, 300, "fused")
    run = program_of(replace(preset("lander:Lander"), seed=2))
    run.iterate()
    assert run.iterate().metrics["env_steps"] == 32 * 32


def test_the_documented_example_learns_to_land(example):
    """A crash returns at most -1, hovering or flying away -20 and less: only landings are above 0."""
    run = program_of(replace(preset("lander:Lander"), seed=1))
    assert run.evaluate(20, 1).mean_return() < -5.0
    for _ in range(400):
        run.iterate()
        if run.learner.iteration % 20 == 0 and min(run.evaluate(20, 1).episode_returns) > 3.0:
            break
    assert min(run.evaluate(20, 2).episode_returns) > 3.0


def test_the_list_shows_a_user_s_own_where_it_is_named(example, capsys):
    assert main(["envs", "lander:Lander"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.split(r"\s{2,}", line) == [
        "lander:Lander", "fused, fused_torch", "3", "1 real", "300", "a rocket lands gently"
    ]  # fmt: skip


def test_too_many_environments_are_refused_before_anything_is_allocated():
    # 4 of state, twice 4 of observation, 1 of action, 6 more: 19 numbers of 4 bytes
    with pytest.raises(
        EnvironmentOptionError, match=r"need 70780\.5 GiB, and the memory limit .*lower num_envs"
    ):
        made("fused/CartPole-v1", num_envs=10**12)


def test_fused_simulators_have_no_frames():
    with pytest.raises(RenderingError, match="no rgb_array frames"):
        envs.render_env("fused/CartPole-v1")


def test_an_option_reaches_the_simulator(example):
    # Without gravity and thrust, speed stays what it was.
    env = made("lander:Lander", gravity=0.0, thrust=0.0)
    before = env.reset()[:, 1]
    assert torch.equal(env.step(torch.ones((5, 1))).obs[:, 1], before)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "words"),
    [
        (
            "fused/CartPole-v1",
            {"weight": 1.0},
            "unexpected keyword argument 'weight'; it has max_episode_steps, gravity",
        ),
        ("fused/CartPole-v1", {"max_episode_steps": 0}, "must be a positive integer"),
        ("no_such_module:Mine", {}, "the module 'no_such_module' cannot be imported"),
    ],
)
def test_bad_options_are_refused(env_id, kwargs, words):
    with pytest.raises(EnvironmentOptionError, match=words):
        envs.make_env_factory(env_id, kwargs=kwargs)


def test_a_simulator_that_cannot_be_traced_is_refused_at_set_up(example, tmp_path):
    (tmp_path / "broken.py").write_text(
        "from lander import Lander\n\n\nclass Broken(Lander):\n    def observe(self, s):\n"
        "        return (max(s.fuel, 1.0),)\n"
    )
    with pytest.raises(SimulatorError, match=r"^Broken\.observe, .*broken\.py:6: .*maximum"):
        envs.make_env_factory("broken:Broken")
    sys.modules.pop("broken", None)


def test_both_engines_have_the_same_dynamics():
    compiled, torchs = (made("fused/Pendulum-v1", engine=engine) for engine in ("fused", "fused_torch"))
    torch.testing.assert_close(compiled.reset(), torchs.reset())
    for step in range(5):
        actions = torch.full((5, 1), 0.5 * step - 1)
        mine, other = compiled.step(actions), torchs.step(actions)
        torch.testing.assert_close(mine.obs, other.obs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.rewards, other.rewards, rtol=1e-5, atol=1e-5)


def test_the_time_limit_truncates_and_returns_the_final_observation():
    env = made("fused/Pendulum-v1", max_episode_steps=3)
    env.reset()
    actions = torch.zeros((5, 1))
    for _ in range(2):
        assert len(env.step(actions).final_ids) == 0
    last = env.step(actions)
    assert last.truncated.all()
    assert last.final_ids.tolist() == [0, 1, 2, 3, 4]
    assert not torch.equal(last.final_obs, last.obs)


def test_a_restored_state_continues_bit_identically():
    env, other = made("fused/Acrobot-v1"), made("fused/Acrobot-v1")
    env.reset()
    other.reset()
    actions = torch.tensor([0, 1, 2, 0, 1])
    for _ in range(4):
        env.step(actions)
    assert torch.equal(other.load_state_dict(env.state_dict()), env.step(actions).obs) is False
    other.load_state_dict(env.state_dict())
    assert torch.equal(env.step(actions).obs, other.step(actions).obs)


def test_an_action_that_is_no_number_is_named():
    env = made("fused/Pendulum-v1")
    env.reset()
    actions = torch.zeros((5, 1))
    actions[3] = float("nan")
    with pytest.raises(SimulationError, match=r"environment 3 .*step 1"):
        env.step(actions)


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """A simulator that pays its state; and one whose state is named like its action."""
    (tmp_path / "runner.py").write_text(
        "from rayagi.envs.fused import Box, Simulator\n\n\n"
        "class Runner(Simulator):\n"
        '    state, actions, num_draws = ("x", "speed"), Box((-1.0,), (1.0,)), 0\n\n'
        "    def start(self, draws):\n        return 0.0, 1.0\n\n"
        "    def step(self, s, action):\n        return (s.x + s.speed, s.speed + 1.0), s.speed, False\n\n\n"
        "class Named(Runner):\n"
        '    state = ("action0", "speed")\n\n\n'
        "class Divided(Runner):\n"
        "    def step(self, s, action):\n        return (s.x, s.speed - 1.0), s.x / s.speed, False\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("runner", None)


@pytest.mark.parametrize("engine", ["fused", "fused_torch"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_results_are_those_of_their_step_and_stay(runner, engine, num_envs):
    env = made("runner:Runner", num_envs, engine=engine)
    found, obs = [], env.reset()
    for _ in range(3):
        result = env.step(torch.zeros(num_envs, 1))
        found.append((obs[0].tolist(), result.rewards[0].item(), result.obs))
        obs = result.obs
    assert [(before, reward) for before, reward, _ in found] == [([0, 1], 1), ([1, 2], 2), ([3, 3], 3)]
    assert [after[0].tolist() for *_, after in found] == [[1, 2], [3, 3], [6, 4]]


@pytest.mark.parametrize("engine", ["fused", "fused_torch"])
def test_a_state_that_is_not_finite_is_named(runner, engine):
    env = made("runner:Divided", 2, engine=engine)
    env.reset()
    env.step(torch.zeros(2, 1))  # 0 / 1
    with pytest.raises(
        SimulationError, match=r"the reward.*environment 0 .*step 2|environment 0 .*step 2.*the reward"
    ):
        env.step(torch.zeros(2, 1))  # 0 / 0


def test_a_state_named_like_the_action_is_refused(runner):
    with pytest.raises(SimulatorError, match="'action0' in state is what step's action is called"):
        envs.make_env_factory("runner:Named")


@pytest.mark.parametrize("engine", ["fused", "fused_torch"])
def test_a_time_limit_beyond_32_bits_is_none(engine):
    env = made("fused/Acrobot-v1", engine=engine, max_episode_steps=3_000_000_000)
    env.reset()
    assert not env.step(torch.zeros(5, dtype=torch.int64)).truncated.any()


def test_ppo_from_fused_rollouts_solves_cartpole():
    run = program_of(preset("fused/CartPole-v1"))
    for _ in range(150):
        run.iterate()
        if run.learner.iteration % 20 == 0 and run.evaluate(10, 1).mean_return() == 500.0:
            break
    assert run.evaluate(20, 2).mean_return() >= 495.0


@pytest.mark.parametrize(
    ("env_id", "iterations", "goal"),
    [
        ("fused/Acrobot-v1", 50, -100.0),
        pytest.param("fused/Pendulum-v1", 120, -250.0, marks=pytest.mark.slow),
    ],
)
def test_presets_solve_what_gymnasium_has_too(env_id, iterations, goal):
    """Within 100,000 and 250,000 steps, seconds of one core."""
    run = program_of(replace(preset(env_id), seed=1))
    for _ in range(iterations):
        run.iterate()
    assert run.evaluate(50, 1).mean_return() >= goal


def test_a_saved_state_of_another_number_of_environments_is_refused():
    make = envs.make_env_factory("fused/CartPole-v1", engine="fused_torch")
    three, one = (make(num_envs=n, first_env_index=0, seed=0, num_threads=1) for n in (3, 1))
    one.reset()
    with pytest.raises(EnvironmentOptionError, match="holds 1 environment, not 3; resume with num_envs=1"):
        three.load_state_dict(one.state_dict())
