"""The Multi-Agent Transformer: which agent's action depends on what, and that generating equals teacher forcing."""

import math

import pytest
import torch

from experiments.replay.multi_agent_transformer import MultiAgentTransformer, TeamSizes

SIZES = TeamSizes(agents=3, obs_dim=4, action_dim=2, units=16, blocks=2, heads=2)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def network():
    return MultiAgentTransformer(SIZES, seed=1)


def log_probs(network, obs, actions):
    with torch.no_grad():
        return network.head.log_prob(network(obs, actions)[0], actions)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_an_action_depends_on_those_of_agents_before_it_alone(network, changed):
    obs, actions = drawn(5, 3, 4), drawn(5, 3, 2, seed=1)
    with torch.no_grad():
        before = network(obs, actions)[0]
        other = actions.clone()
        other[:, changed] += 1.0
        after = network(obs, other)[0]
    assert torch.equal(after[:, : changed + 1], before[:, : changed + 1])
    assert (after[:, changed + 1 :] != before[:, changed + 1 :]).any(-1).all()


def test_a_changed_action_changes_the_probabilities_of_itself_and_of_later_ones(network):
    obs, actions = drawn(5, 3, 4), drawn(5, 3, 2, seed=1)
    before, other = log_probs(network, obs, actions), actions.clone()
    other[:, 1] += 1.0
    same = log_probs(network, obs, other) == before
    assert same.tolist() == [[True, False, False]] * 5


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_values_and_actions_depend_on_the_observations_of_all_agents(network, changed):
    obs, actions = drawn(5, 3, 4), drawn(5, 3, 2, seed=1)
    other = obs.clone()
    other[:, changed] += 1.0
    with torch.no_grad():
        (means, values), (other_means, other_values) = network(obs, actions), network(other, actions)
    assert (values != other_values).all()
    assert (means != other_means).any(-1).all()


def test_generated_actions_have_the_probabilities_of_teacher_forcing(network):
    obs, noise = drawn(7, 3, 4), drawn(7, 3, 2, seed=2)
    with torch.no_grad():
        actions, step_by_step = network.act(obs, noise)
    torch.testing.assert_close(log_probs(network, obs, actions), step_by_step, rtol=1e-5, atol=1e-5)
    # log N(mean + std noise; mean, std) = -|noise|^2 / 2 - 2 log std - log 2 pi, with log std = -1
    expected = -noise.square().sum(-1) / 2 + 2 - math.log(2 * math.pi)
    torch.testing.assert_close(step_by_step, expected, rtol=1e-4, atol=1e-4)


def test_without_noise_actions_are_the_means_given_the_means_before(network):
    obs = drawn(7, 3, 4)
    with torch.no_grad():
        actions, _ = network.act(obs, torch.zeros(7, 3, 2))
        means, _ = network(obs, actions)
    torch.testing.assert_close(actions, means, rtol=1e-5, atol=1e-6)


def test_agents_with_equal_observations_act_differently(network):
    obs = drawn(1, 1, 4).expand(1, 3, 4)
    with torch.no_grad():
        encoded, _ = network.encode(obs)
        means = network.decode(encoded, torch.zeros(1, 2, 2))[0]
    assert len({tuple(row) for row in means.tolist()}) == 3


def test_a_team_of_one():
    network = MultiAgentTransformer(TeamSizes(agents=1, obs_dim=4, action_dim=2, units=8))
    actions, found = network.act(drawn(2, 1, 4), drawn(2, 1, 2))
    assert (actions.shape, found.shape) == ((2, 1, 2), (2, 1))


@pytest.mark.parametrize("wrong", [{"agents": 0}, {"units": 10, "heads": 3}])
def test_sizes_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="must"):
        TeamSizes(**{"agents": 2, "obs_dim": 3, "action_dim": 1, **wrong})
