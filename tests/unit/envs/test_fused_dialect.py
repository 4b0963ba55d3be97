"""The dialect: supported operations, the traced graph, and error messages."""

import math

import gymnasium
import pytest
import torch

from experiments.fusion.parity import exploration_noise
from rayagi.envs.errors import SimulatorError
from rayagi.envs.fused import Box, Discrete, Simulator, draws
from rayagi.envs.fused.backends import EnvConfig, StepBatch
from rayagi.envs.fused.ops import clip, minimum, sin, where
from rayagi.envs.fused.reference import TorchBackend
from rayagi.envs.fused.simulator import action_dim, named
from rayagi.envs.fused.simulators import Acrobot, CartPole, Pendulum, Quadrotor
from rayagi.envs.fused.trace import trace, trace_function


class Drift(Simulator):
    """Moves by the action; terminates above 1."""

    state = ("x",)
    actions = Box((-1.0,), (1.0,))
    max_episode_steps = 3
    num_draws = 0

    def start(self, draws):
        return (0.0,)

    def step(self, s, action):
        x = s.x + action[0]
        return (x,), -x, x > 1.0

    def observe(self, s):
        return s.x, -s.x


def ops_of(function):
    return [node.op for node in function.nodes]


def test_equal_subexpressions_are_one_node():
    # x * y twice, sin of it twice: mul, sin, add
    function = trace_function("f", lambda x, y: [sin(x * y) + sin(x * y)], ("x", "y"))
    assert sorted(ops_of(function)) == ["add", "input", "input", "mul", "sin"]


def test_unused_nodes_are_removed():
    function = trace_function("f", lambda x, y: [x + 1.0, sin(y)][:1], ("x", "y"))
    assert ops_of(function) == ["input", "constant", "add"]
    assert function.inputs == ("x", "y")


def test_constants_are_folded():
    function = trace_function("f", lambda x: [x * (2.0 * sin(0.5) + minimum(1.0, 3.0))], ("x",))
    assert [node.value for node in function.nodes if node.op == "constant"] == [2.0 * math.sin(0.5) + 1.0]


def test_powers_are_products():
    # x^5 = (x^2)^2 x: three products
    function = trace_function("f", lambda x: [x**5], ("x",))
    assert ops_of(function) == ["input", "mul", "mul", "mul"]


def test_a_branch_is_an_error_with_its_line_and_a_remedy():
    class Branching(Drift):
        def step(self, s, action):
            return (0.0 if s.x > 1.0 else s.x,), 0.0, False

    with pytest.raises(SimulatorError) as caught:
        trace(Branching())
    text = str(caught.value)
    line = Branching.step.__code__.co_firstlineno + 1
    assert text.startswith(f"Branching.step, {__file__}:{line}: ")
    assert "where(condition, a, b)" in text


class Chained(Drift):
    def step(self, s, action):
        return (s.x,), 0.0, -1.0 < s.x < 1.0


class Maths(Drift):
    def step(self, s, action):
        return (math.sin(s.x),), 0.0, False


class Missing(Drift):
    def step(self, s, action):
        return (s.y,), 0.0, False


class NotTruth(Drift):
    def step(self, s, action):
        return (s.x,), 0.0, s.x


class TwoStates(Drift):
    def step(self, s, action):
        return (s.x, s.x), 0.0, False


class Tensor(Drift):
    def start(self, draws):
        return (torch.zeros(3),)


class NoBox(Drift):
    actions = Box((1.0,), (1.0,))


class OneChoice(Drift):
    actions = Discrete(1)


@pytest.mark.parametrize(
    ("simulator", "words"),
    [
        (Chained, "where(condition, a, b)"),
        (Maths, "rayagi.envs.fused.ops"),
        (Missing, "has no attribute 'y'"),
        (NotTruth, "should be a truth"),
        (TwoStates, "returns 2 values for its next state, which has 1"),
        (Tensor, "a Tensor is not a real"),
        (NoBox, "low below high"),
        (OneChoice, "at least 2"),
    ],
)
def test_a_mistake_is_named_with_the_simulator(simulator, words):
    with pytest.raises(SimulatorError) as caught:
        trace(simulator())
    assert str(caught.value).startswith(simulator.__name__)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("simulator", "env_id"), [(CartPole, "CartPole-v1"), (Pendulum, "Pendulum-v1"), (Acrobot, "Acrobot-v1")]
)
def test_dynamics_are_gymnasium_s(simulator, env_id):
    mine, env = simulator(), gymnasium.make(env_id, max_episode_steps=10_000)
    env.action_space.seed(3)
    for episode in range(3):
        obs, _ = env.reset(seed=episode)
        state = tuple(float(x) for x in env.unwrapped.state)
        assert mine.observe(named(mine, state)) == pytest.approx(obs.tolist(), abs=1e-6)
        for _ in range(20):
            action = env.action_space.sample()
            obs, reward, terminated, _, _ = env.step(action)
            given = (
                float(action)
                if action_dim(mine) == 1 and isinstance(mine.actions, Discrete)
                else tuple(map(float, action))
            )
            state, my_reward, my_end = mine.step(named(mine, state), given)
            assert mine.observe(named(mine, state)) == pytest.approx(obs.tolist(), abs=1e-5)
            assert my_reward == pytest.approx(float(reward), abs=1e-6)
            assert my_end == terminated
            if terminated:
                break
    env.close()


def test_a_hovering_quadrotor_stays_with_a_reward_of_one():
    quadrotor = Quadrotor()
    state, reward, lost = quadrotor.step(named(quadrotor, (0.0,) * 6), (0.0, 0.0))
    assert state == pytest.approx((0.0,) * 6, abs=1e-12)
    assert reward == pytest.approx(1.0)
    assert not lost


def test_an_episode_ends_by_the_task_before_the_limit_cuts_it():
    # 0.5, 1.0, 1.5: ends at step 3 by the task, though the limit is 3 too; -0.5 three times: cut
    backend = TorchBackend(EnvConfig(Drift(), 2, max_episode_steps=3))
    backend.start()
    out = StepBatch.allocate(4, 2, 2)
    backend.run(torch.tensor([[[0.5], [-0.5]]] * 4), out)
    assert out.terminated[:, 0].tolist() == [False, False, True, False]
    assert out.truncated[:, 0].tolist() == [False] * 4
    assert out.truncated[:, 1].tolist() == [False, False, True, False]
    assert out.final_obs[2].tolist() == [[1.5, -1.5], [-1.5, 1.5]]
    assert out.obs[:, 0].tolist() == [[0.5, -0.5], [1.0, -1.0], [0.0, 0.0], [0.5, -0.5]]
    assert backend.env_state.episode.tolist() == [1, 1]
    assert backend.env_state.elapsed.tolist() == [1, 1]


def test_actions_are_clipped_to_the_box():
    backend = TorchBackend(EnvConfig(Drift(), 1))
    backend.start()
    out = StepBatch.allocate(1, 1, 2)
    backend.run(torch.tensor([[[7.0]]]), out)
    assert out.obs.flatten().tolist() == [1.0, -1.0]


def test_draws_are_those_of_the_paper_s_function():
    # PCG-4D of (1, 2, 3, 4) in Python's integers
    mask = 0xFFFFFFFF
    x, y, z, w = ((one * 1664525 + 1013904223) & mask for one in (1, 2, 3, 4))
    for turn in range(2):
        x = (x + y * w) & mask
        y = (y + z * x) & mask
        z = (z + x * y) & mask
        w = (w + y * z) & mask
        if turn == 0:
            x, y, z, w = (one ^ (one >> 16) for one in (x, y, z, w))
    words = [torch.tensor(one) for one in (1, 2, 3, 4)]
    assert [int(one) for one in draws.pcg4d(*words)] == [x, y, z, w]


def test_draws_are_uniform_and_alike_in_every_layout():
    indices = torch.arange(1000)
    numbers = draws.uniform(draws.seed_word(1), indices, torch.arange(20).unsqueeze(1), 0, draws.START, 6)
    assert numbers.shape == (20, 1000, 6)
    assert float(numbers.min()) >= 0.0
    assert float(numbers.max()) < 1.0
    # Mean of 120,000 numbers: 0.5 within five standard errors of 1 / sqrt(12 * 120,000)
    assert float(numbers.mean()) == pytest.approx(0.5, abs=5 / math.sqrt(12 * 120_000))
    correlations = torch.corrcoef(numbers.flatten(0, 1).t()).fill_diagonal_(0.0)
    assert float(correlations.abs().max()) < 5 / math.sqrt(20_000)
    part = draws.uniform(draws.seed_word(1), indices[300:310], 7, 0, draws.START, 6)
    assert torch.equal(part, numbers[7, 300:310])


@pytest.mark.parametrize(
    ("gumbel", "mean", "std"), [(True, 0.5772, math.pi / math.sqrt(6)), (False, 0.0, 1.0)]
)
def test_noise_has_its_distribution_s_moments(gumbel, mean, std):
    noise = exploration_noise(
        seed=2, first_env_index=0, num_envs=500, iteration=4, num_steps=40, dim=3, gumbel=gumbel
    )
    assert noise.shape == (40, 500, 3)
    assert torch.isfinite(noise).all()
    assert float(noise.mean()) == pytest.approx(mean, abs=0.02)
    assert float(noise.std()) == pytest.approx(std, abs=0.02)


def test_operations_take_python_s_numbers():
    assert clip(3.0, -1.0, 1.0) == 1.0
    assert where(2.0 > 1.0, 5.0, 6.0) == 5.0
    assert float(where(torch.tensor(False), 5.0, torch.tensor(6.0))) == 6.0
