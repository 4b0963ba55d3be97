"""The roles called directly, without Ray."""

from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch

from actors import roles
from actors.errors import NonFiniteError
from actors.protocols import ActionSpec, StepResult
from actors.roles import LONGEST_EPISODE_STEPS, Agent, LocalSimulator, check_finite, collect, evaluate
from actors.rollout import Rollout
from tests.fakes.point import LIMIT, PointEnv


class TowardsOrigin:
    """A policy that pushes against the displacement; noise is added as it comes."""

    action = ActionSpec(kind="continuous", dim=2)
    state_dim = 0

    def observe(self, obs):
        return obs * 2

    def outputs(self, observed):
        return -observed[..., :2]

    def sample(self, outputs, noise):
        return outputs + noise

    def mode(self, outputs):
        return outputs

    def environment_actions(self, actions):
        return actions

    def acting(self, rollout, noise):
        return None


class RemembersTheLastObservation(TowardsOrigin):
    """Its next states are the observations themselves, not a copy."""

    state_dim = 4

    def observe(self, obs):
        return obs

    def step(self, observed, states):
        return states[:, :2], observed


def test_an_agents_states_are_its_own_if_the_network_returns_the_observations():
    agent, obs, noise = Agent(RemembersTheLastObservation()), torch.ones(2, 4), torch.zeros(2, 2)
    agent.act(obs, noise)
    obs.fill_(7.0)  # the simulator's next step
    agent.reset(torch.tensor([1]))
    _, outputs, _ = agent.act(obs, noise)
    assert outputs.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert obs.tolist() == [[7.0] * 4] * 2


def test_a_simulator_counts_episodes_as_they_end():
    simulator = LocalSimulator(PointEnv(3, 0, seed=1))
    rewards = torch.zeros(3, dtype=torch.float64)
    for _ in range(LIMIT):
        rewards += simulator.step(torch.zeros(3, 2)).rewards
    returns, lengths = simulator.take_finished()
    assert lengths == [LIMIT] * 3
    assert returns == pytest.approx(rewards.tolist())
    assert simulator.take_finished() == ([], [])


def with_terms(env):
    """The rewards as two terms."""
    step = env.step
    env.info = replace(env.info, reward_terms=("near", "effort"))

    def step_with_terms(actions):
        result = step(actions)
        effort = -actions.square().sum(-1)
        return replace(result, reward_terms=torch.stack((result.rewards - effort, effort), -1))

    env.step = step_with_terms
    return env


def test_a_simulator_adds_up_reward_terms_over_episodes_and_goes_on_with_them():
    simulator = LocalSimulator(with_terms(PointEnv(2, 0, seed=1)))
    for _ in range(3):
        simulator.step(torch.ones(2, 2))
    restored = LocalSimulator(with_terms(PointEnv(2, 0, seed=1)))
    restored.load_state_dict(simulator.state_dict())
    for _ in range(2 * LIMIT):
        restored.step(torch.ones(2, 2))
    (returns, lengths), terms = restored.take_finished(), restored.take_reward_terms()
    assert terms["effort"] == [-2.0 * length for length in lengths]
    assert [near + effort for near, effort in zip(*terms.values(), strict=True)] == pytest.approx(returns)
    assert restored.take_reward_terms() == {"near": [], "effort": []}


def test_sums_saved_by_a_task_with_other_terms_are_left():
    before = LocalSimulator(PointEnv(2, 0, seed=1))
    before.step(torch.ones(2, 2))
    simulator = LocalSimulator(with_terms(PointEnv(2, 0, seed=1)))
    simulator.load_state_dict(before.state_dict())
    for _ in range(LIMIT - 1):
        simulator.step(torch.ones(2, 2))
    assert simulator.take_reward_terms()["effort"] == [-2.0 * (LIMIT - 1)] * 2


def test_a_simulator_reports_new_sim_errors_by_metric_and_none_if_not_counted():
    env = PointEnv(2, 0, seed=1)
    simulator = LocalSimulator(env)
    assert simulator.take_sim_errors() == {}
    env.sim_errors = {"unstable": 3, "contact overflow": 0}
    assert simulator.take_sim_errors() == {"faults_unstable": 3.0, "faults_contact_overflow": 0.0}
    env.sim_errors = {"unstable": 4, "contact overflow": 2}
    assert simulator.take_sim_errors() == {"faults_unstable": 1.0, "faults_contact_overflow": 2.0}


def test_a_restored_simulator_goes_on_in_the_middle_of_an_episode():
    simulator = LocalSimulator(PointEnv(2, 0, seed=1))
    for _ in range(3):
        simulator.step(torch.ones(2, 2))
    restored = LocalSimulator(PointEnv(2, 0, seed=1))
    restored.load_state_dict(simulator.state_dict())
    for _ in range(LIMIT):
        a, b = simulator.step(torch.ones(2, 2)), restored.step(torch.ones(2, 2))
        assert torch.equal(a.rewards, b.rewards)
    assert simulator.take_finished() == restored.take_finished()


class Count(AbstractContextManager):
    entered = 0

    def __exit__(self, *_error):
        self.entered += 1


def test_collecting_stores_observations_actions_and_step_results():
    simulator, agent = LocalSimulator(PointEnv(2, 0, seed=1)), Agent(TowardsOrigin())
    rollout = Rollout.allocate(LIMIT + 2, 2, simulator.env.info, torch.device("cpu"))
    first = simulator.obs.clone()
    noise = torch.full((LIMIT + 2, 2, 2), 0.25)
    acting, stepping = Count(), Count()
    collect(simulator, agent, rollout, noise, acting=acting, stepping=stepping)
    assert torch.equal(rollout.raw_obs[0], first)
    assert torch.equal(rollout.obs, rollout.raw_obs * 2)
    assert torch.allclose(rollout.actions, rollout.outputs + 0.25)
    assert rollout.truncated.nonzero()[:, 0].tolist() == [LIMIT - 1, LIMIT - 1]
    assert torch.equal(rollout.last_obs, simulator.obs)
    (step, ids, obs) = rollout.finals[0]
    assert (step, ids.tolist()) == (LIMIT - 1, [0, 1])
    # The last observation before the reset shows a full clock; the next step's shows an empty one.
    assert obs[:, 2].tolist() == [1.0, 1.0]
    assert rollout.raw_obs[LIMIT, :, 2].tolist() == [0.0, 0.0]
    assert acting.entered == stepping.entered == LIMIT + 2


def test_the_first_non_finite_value_is_named():
    rollout = Rollout.allocate(4, 3, PointEnv(1, 0, seed=0).info, torch.device("cpu"))
    check_finite(rollout, 0)
    rollout.outputs[3, 0, 1] = -float("inf")
    with pytest.raises(NonFiniteError, match=r"an output of the policy .* \(rollout step 3, environment 0\)"):
        check_finite(rollout, 7)
    rollout.rewards[2, 1] = float("inf")
    with pytest.raises(NonFiniteError, match=r"a reward .* iteration 7 \(rollout step 2, environment 1\)"):
        check_finite(rollout, 7)
    rollout.raw_obs[1, 2, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"an observation .* \(rollout step 1, environment 2\)"):
        check_finite(rollout, 7)


def test_choices_may_be_masked_with_logits_of_minus_infinity():
    info = replace(PointEnv(1, 0, seed=0).info, action=ActionSpec(kind="discrete", dim=1, num_choices=3))
    rollout = Rollout.allocate(4, 3, info, torch.device("cpu"))
    rollout.outputs[:, 1, 0] = -float("inf")
    check_finite(rollout, 7)
    for refused in (float("inf"), float("nan")):
        rollout.outputs[2, 0, 1] = refused
        with pytest.raises(
            NonFiniteError, match=r"an output of the policy .* \(rollout step 2, environment 0\)"
        ):
            check_finite(rollout, 7)


def test_evaluation_takes_each_environments_first_episodes():
    # 5 episodes on 2 environments: 3 of the first, 2 of the second
    result = evaluate(PointEnv(2, 0, seed=4), Agent(TowardsOrigin()), 5)
    assert result.episode_lengths == [LIMIT] * 5
    alone = evaluate(PointEnv(1, 0, seed=4), Agent(TowardsOrigin()), 3)
    assert result.episode_returns[:3] == pytest.approx(alone.episode_returns)
    assert result.mean_return() == pytest.approx(sum(result.episode_returns) / 5)


class EndlessEnv(PointEnv):
    """A point whose episodes never end."""

    def __init__(self):
        super().__init__(1, 0, seed=0)
        self.info = replace(self.info, max_episode_steps=None)

    def step(self, actions):
        self.elapsed[:] = 0
        self.position[:] = 0
        return super().step(actions)


def test_evaluation_cuts_an_endless_episode():
    result = evaluate(EndlessEnv(), Agent(TowardsOrigin()), 1)
    assert result.episode_lengths == [LONGEST_EPISODE_STEPS]
    assert result.num_cut == 1


class Counters(PointEnv):
    """Counters of steps since the reset, which end by themselves after some, or never; the reward is the counter."""

    def __init__(self, ends_after):
        super().__init__(len(ends_after), 0, seed=0)
        self.info = replace(self.info, max_episode_steps=None)
        self.ends_after = torch.tensor(ends_after)
        self.resets = 0

    def reset(self):
        self.resets += 1
        self.count = torch.zeros(self.num_envs, dtype=torch.int64)
        return self.count.float().unsqueeze(1)

    def step(self, actions):
        self.count += 1
        rewards, done = self.count.float(), self.count == self.ends_after
        self.count[done] = 0
        ids = done.nonzero().flatten()
        obs = self.count.float().unsqueeze(1)
        return StepResult(obs, rewards, done, torch.zeros_like(done), ids, obs[ids])


class Remembering:
    """An agent that counts the steps of each environment's episode, and takes no part in it."""

    def __init__(self, num_envs):
        self.steps = torch.zeros(num_envs, dtype=torch.int64)

    def act_greedily(self, obs):
        assert self.steps.tolist() == obs[:, 0].long().tolist()  # it forgets exactly where an episode begins
        self.steps += 1
        return obs

    def reset(self, ids):
        self.steps[ids] = 0


def test_the_episode_after_one_that_was_cut_begins_anew(monkeypatch):
    monkeypatch.setattr(roles, "LONGEST_EPISODE_STEPS", 5)
    env, done = Counters([0, 2, 7]), []
    result = evaluate(env, Remembering(3), 9, progress=lambda episodes, steps: done.append((episodes, steps)))
    assert result.episode_lengths == [5, 5, 5, 2, 2, 2, 5, 5, 5]
    assert result.episode_returns == [15.0] * 3 + [3.0] * 3 + [15.0] * 3
    assert result.num_cut == 6
    assert env.resets == 3
    assert done[-1] == (9, len(done))


def test_an_environment_that_ends_by_itself_after_the_cut_begins_its_next_episode_there(monkeypatch):
    monkeypatch.setattr(roles, "LONGEST_EPISODE_STEPS", 5)
    env, steps = Counters([4, 7]), []
    result = evaluate(env, Remembering(2), 6, progress=lambda episodes, step: steps.append(step))
    # The second is cut in step 5, ends in step 7, is cut in step 12, when the first is done, and after a reset in step 17.
    assert result.episode_lengths == [4] * 3 + [5] * 3
    assert (steps[-1], env.resets) == (17, 2)


def test_a_simulator_without_a_saved_state_begins_new_episodes_where_any_has_begun():
    env = PointEnv(2, 0, seed=1)
    simulator = LocalSimulator(env)
    simulator.load_state_dict(None)
    assert env.episode.tolist() == [1, 1]  # the first episodes have not begun
    for _ in range(3):
        simulator.step(torch.ones(2, 2))
    simulator.load_state_dict(None)
    assert (env.episode.tolist(), env.elapsed.tolist()) == ([2, 2], [0, 0])
    assert torch.equal(simulator.obs, env._obs())
    for _ in range(LIMIT):
        simulator.step(torch.zeros(2, 2))
    assert simulator.take_finished()[1] == [LIMIT, LIMIT]
