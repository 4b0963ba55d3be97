"""Compiled acting: the results of torch operations, whatever an environment's position in the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.protocols import ActionSpec, EnvInfo
from actors.roles import ActingByOperations, Agent
from actors.rollout import Rollout
from collectives import kernels
from rayagi.algorithms.normalisers import Moments, ObservationNormaliser
from rayagi.config.spec import NetworkSpec
from rayagi.models.networks import ActorCritic
from rayagi.models.policy import NetworkPolicy
from rayagi.native import acting
from rayagi.native.acting import CompiledActing

HOST = torch.device("cpu")
CONTINUOUS, DISCRETE = ActionSpec(kind="continuous", dim=3), ActionSpec(kind="discrete", dim=1, num_choices=5)


def info_of(obs_dim, action):
    return EnvInfo(env_id="Some", engine="none", obs_dim=obs_dim, action=action, max_episode_steps=None)


def policy_of(info, hidden=(64, 33), activation="elu", *, normalised=True, seed=0):
    """A policy with random weights, output layer included: a new one's outputs are nearly zero."""
    generator = torch.Generator().manual_seed(seed)
    model = ActorCritic(info, NetworkSpec(hidden=hidden, activation=activation, initial_log_std=-0.5))
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    normaliser = None
    if normalised:
        normaliser = ObservationNormaliser(info.obs_dim, 2.0, HOST)
        normaliser.update(Moments.from_batch(3 + 2 * torch.randn(50, info.obs_dim, generator=generator)))
    return NetworkPolicy(model, info, normaliser, HOST)


def filled(make, agent, info, obs, noise, rollout=None):
    """The rollout's fields and the returned actions after acting with ``make(agent, rollout, noise)``."""
    rollout = rollout or Rollout.allocate(len(obs), obs.shape[1], info, HOST)
    act = make(agent, rollout, noise)
    returned = torch.stack([act(t, step).clone() for t, step in enumerate(obs)])
    return {name: getattr(rollout, name) for name in ("raw_obs", "obs", "outputs", "actions")}, returned


def compiled(agent, rollout, noise):
    program = acting.library()
    assert program is not None, "no compiler"
    return CompiledActing(program, agent.policy.tensors(), rollout, noise)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 70),
    st.integers(1, 40),
    st.lists(st.integers(1, 40), min_size=0, max_size=3),
    st.sampled_from(["elu", "relu", "tanh", "silu"]),
    st.sampled_from([CONTINUOUS, DISCRETE]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_it_fills_what_operations_fill(num_envs, obs_dim, hidden, activation, action, normalised, seed):
    info = info_of(obs_dim, action)
    policy = policy_of(info, tuple(hidden), activation, normalised=normalised, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    obs = 3 + 2 * torch.randn(2, num_envs, obs_dim, generator=generator)
    noise = torch.randn(2, num_envs, action.num_choices or action.dim, generator=generator)
    expected, wanted = filled(ActingByOperations, Agent(policy), info, obs, noise)
    found, returned = filled(compiled, Agent(policy), info, obs, noise)
    assert torch.equal(found["raw_obs"], obs)
    assert torch.equal(found["obs"], expected["obs"])
    scale = expected["outputs"].abs().max() + 1
    assert (found["outputs"] - expected["outputs"]).abs().max() <= 2e-6 * scale
    assert torch.equal(found["actions"], returned)
    if action is DISCRETE:
        scores = found["outputs"] + noise
        assert torch.equal(scores.gather(-1, returned.unsqueeze(-1)).squeeze(-1), scores.amax(-1))
    else:
        torch.testing.assert_close(returned, wanted, atol=2e-6 * float(scale), rtol=0)


def test_an_environments_bits_do_not_depend_on_its_batch():
    info = info_of(27, CONTINUOUS)
    agent = Agent(policy_of(info, (256, 128, 64)))
    generator = torch.Generator().manual_seed(1)
    obs, noise = (torch.randn(1, 100, width, generator=generator) for width in (27, 3))
    together, _ = filled(compiled, agent, info, obs, noise)
    for begin, end in ((0, 1), (1, 34), (40, 100)):
        alone, _ = filled(compiled, agent, info, obs[:, begin:end], noise[:, begin:end])
        assert torch.equal(alone["outputs"], together["outputs"][:, begin:end])


def test_threads_change_no_bit(monkeypatch):
    info = info_of(27, CONTINUOUS)
    agent = Agent(policy_of(info, (64,)))
    generator = torch.Generator().manual_seed(1)
    obs, noise = (torch.randn(3, 150, width, generator=generator) for width in (27, 3))
    one, _ = filled(compiled, agent, info, obs, noise)
    monkeypatch.setattr(acting, "_PRODUCTS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert acting._spans(150, 1 << 30) == [(0, 32), (32, 96), (96, 150)]
    three, _ = filled(compiled, agent, info, obs, noise)
    assert all(torch.equal(one[name], three[name]) for name in one)


def test_rows_may_lie_environment_first_as_in_a_channel():
    info = info_of(5, CONTINUOUS)
    agent = Agent(policy_of(info))
    generator = torch.Generator().manual_seed(1)
    obs, noise = (torch.randn(4, 9, width, generator=generator) for width in (5, 3))
    expected, _ = filled(compiled, agent, info, obs, noise)
    rollout = Rollout.allocate(4, 9, info, HOST)
    for name in ("raw_obs", "actions"):
        setattr(rollout, name, getattr(rollout, name).transpose(0, 1).contiguous().transpose(0, 1))
    found, _ = filled(compiled, agent, info, obs, noise, rollout)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_observations_of_another_kind_are_converted():
    info = info_of(5, CONTINUOUS)
    agent = Agent(policy_of(info))
    obs, noise = torch.randn(1, 9, 5, generator=torch.Generator().manual_seed(1)), torch.zeros(1, 9, 3)
    expected, _ = filled(compiled, agent, info, obs, noise)
    for other in (obs.double(), obs.transpose(1, 2).contiguous().transpose(1, 2)):
        found, _ = filled(compiled, agent, info, other, noise)
        assert torch.equal(found["outputs"], expected["outputs"])


def test_weights_are_those_at_the_start_of_a_rollout():
    info = info_of(5, CONTINUOUS)
    policy = policy_of(info)
    obs, noise = torch.ones(1, 2, 5), torch.zeros(1, 2, 3)
    before, _ = filled(compiled, Agent(policy), info, obs, noise)
    with torch.no_grad():
        next(policy.model.policy.parameters()).add_(0.1)
    after, _ = filled(compiled, Agent(policy), info, obs, noise)
    assert not torch.equal(before["outputs"], after["outputs"])


def test_without_a_compiler_agents_act_with_torch(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    acting.library.cache_clear()
    kernels._log_once.cache_clear()
    try:
        with caplog.at_level("INFO", logger="rayagi.native.acting"):
            info = info_of(5, CONTINUOUS)
            agent = Agent(policy_of(info))
            rollout = Rollout.allocate(1, 2, info, HOST)
            for _ in range(2):
                assert isinstance(agent.through(rollout, torch.zeros(1, 2, 3)), ActingByOperations)
        assert [record.getMessage() for record in caplog.records] == [
            "agents act with torch: no C compiler (looked for no-such-compiler); install one or set CC"
        ]
    finally:
        acting.library.cache_clear()


def test_nan_is_propagated():
    info = info_of(5, CONTINUOUS)
    agent = Agent(policy_of(info))
    obs = torch.full((1, 1, 5), float("nan"))
    found, _ = filled(compiled, agent, info, obs, torch.zeros(1, 1, 3))
    assert found["outputs"].isnan().all()


def test_partial_tiles():
    info = info_of(2, DISCRETE)
    agent = Agent(policy_of(info, (7,)))
    for num_envs in (1, 15, 16, 17, 31, 32, 33, 64, 65):
        obs = torch.randn(1, num_envs, 2, generator=torch.Generator().manual_seed(num_envs))
        noise = torch.zeros(1, num_envs, 5)
        expected, _ = filled(ActingByOperations, agent, info, obs, noise)
        found, _ = filled(compiled, agent, info, obs, noise)
        assert found["outputs"] == pytest.approx(expected["outputs"], abs=1e-5)


@pytest.mark.parametrize("activation", ["elu", "relu", "tanh"])
def test_activations_to_all_digits_of_numbers_of_any_size(activation):
    """The mean is the activation of the observation: near 0 an exponential less 1 has few digits left."""
    info = info_of(1, ActionSpec(kind="continuous", dim=1))
    policy = policy_of(info, (1,), activation, normalised=False)
    with torch.no_grad():
        for name, parameter in policy.model.policy.named_parameters():
            parameter.fill_(1.0 if "weight" in name else 0.0)
    sizes = torch.logspace(-37, 37, 500, dtype=torch.float64).float()
    obs = torch.cat([sizes, -sizes, torch.zeros(1)]).view(1, -1, 1)
    found, _ = filled(compiled, Agent(policy), info, obs, torch.zeros_like(obs))
    expected = policy.model.policy[1](obs.double())
    torch.testing.assert_close(found["outputs"].double(), expected, rtol=1e-6, atol=1e-37)
