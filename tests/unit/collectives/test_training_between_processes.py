"""The synchronous program in two processes over the transports that it has in a run."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from members import run_group, succeeded

from actors.errors import NonFiniteError
from actors.gmi import GmiContext
from actors.protocols import ActionSpec, EnvInfo
from rayagi.algorithms import gradient_updater
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.ppo.learner import PPOUpdater
from rayagi.config.spec import GmiSpec, NetworkSpec, RunSpec
from rayagi.models.networks import ActorCritic
from tests.fakes.point import make_point

INFO = EnvInfo(
    env_id="x", engine="x", obs_dim=5, action=ActionSpec(kind="continuous", dim=3), max_episode_steps=None
)
SPEC = RunSpec(
    gmi=GmiSpec(num_envs=8),
    network=NetworkSpec(hidden=(32, 16)),
    learning=PPOSpec(rollout_length=8, num_minibatches=2, num_epochs=2),
    seed=3,
)


TRANSPORTS = ["shm", pytest.param("tcp", marks=pytest.mark.slow)]


def program_of(communicator, slices=None, spec=SPEC):
    spec = replace(spec, gmi=replace(spec.gmi, slices=slices))
    return TrainingFactory(spec, make_point)(GmiContext.local("Point", communicator))


def train(slices, spec, communicator, done):
    program = program_of(communicator, slices, spec)
    start = program.learner.updater.flat.parameters.clone()
    rewards = []
    for _ in range(3):
        program.iterate()
        rewards.append(program.rollout.rewards.clone())
    weights = program.learner.updater.flat.parameters.clone()
    return start, weights, torch.stack(rewards), program.state_dict()["shared"]


@pytest.fixture(scope="module", params=[("shm", None), ("tcp", None), ("shm", (3.0, 1.0))])
def trained(request):
    transport, slices = request.param
    return succeeded(run_group(transport, 2, partial(train, slices, SPEC)))


LARGE = NetworkSpec(hidden=(128, 64))
"""So large that each member reduces its share."""


@pytest.mark.parametrize(
    ("network", "slices", "max_grad_norm"),
    [
        (LARGE, (3.0, 1.0), 0.5),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((SPEC.network, None, 0.5), (LARGE, None, 0.5), (LARGE, None, 0.0))
        ),
    ],
)
def test_trainers_of_one_host_take_the_steps_of_replicas(network, slices, max_grad_norm):
    """To rounding: the gradient's norm is summed share by share."""
    spec = replace(SPEC, network=network, learning=replace(SPEC.learning, max_grad_norm=max_grad_norm))
    steps = [
        [(answer[1] - answer[0]).detach() for answer in run_group(transport, 2, partial(train, slices, spec))]
        for transport in ("shm", "tcp")
    ]
    moved = steps[0][0].abs().max()
    assert moved > 1e-3
    torch.testing.assert_close(steps[0], steps[1], rtol=0, atol=1e-3 * float(moved))


def begin_apart(communicator, done):
    """Parameters of trainers whose models differ."""
    model = ActorCritic(INFO, NetworkSpec(hidden=(8,)), seed=communicator.rank)
    own = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    learner = PPOUpdater(model, PPOSpec(), communicator)
    return own, learner.flat.parameters.detach()[: len(own)].clone()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_begin_with_rank_0_s_parameters(transport):
    (first, began), (second, began_too) = run_group(transport, 2, begin_apart)
    assert not torch.equal(first, second)
    assert torch.equal(began, first)
    assert torch.equal(began_too, first)


def with_a_nan(prepare, rollout):
    batch, fit = prepare(rollout)
    batch.advantages[5] = torch.nan
    return batch, fit


def fail_and_go_on(communicator, done):
    """Errors of a GMI's NaN on all; parameters after going on from the state before."""
    program = program_of(communicator)
    program.iterate()
    state = program.state_dict()
    prepare = program.learner.prepare
    if communicator.rank == 1:
        program.learner.prepare = partial(with_a_nan, prepare)
    errors = []
    try:
        program.iterate()
    except NonFiniteError as error:
        errors.append(str(error))
    program.learner.prepare = prepare
    program.load_state_dict(state)
    program.iterate()
    return errors, program.learner.policy.model.policy[0].weight.detach().clone()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_gradient_of_nan_ends_the_update_of_all_who_can_go_on_from_before(transport):
    (first, weight), (second, weight_too) = run_group(transport, 2, fail_and_go_on)
    assert "grad_norm" in first[0]
    assert "policy_loss" in second[0]
    assert weight.isfinite().all()
    assert torch.equal(weight, weight_too)


def without_a_program_on_the_last(communicator, done):
    if communicator.rank == 1:
        gradient_updater.library = lambda: None
    learner = PPOUpdater(ActorCritic(INFO, NetworkSpec(hidden=(8,))), PPOSpec(), communicator)
    return learner._optimizer_step is None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_where_one_has_no_compiler_all_learn_by_torch(transport):
    assert run_group(transport, 2, without_a_program_on_the_last) == [True, True]


def two_iterations_and_three(communicator, done):
    """Parameters after three, and after one that went on from the state after two."""
    begin = program_of(communicator)
    begin.iterate()
    begin.iterate()
    state = begin.state_dict()
    begin.iterate()
    whole = begin.learner.updater.flat.parameters.clone()
    again = program_of(communicator)
    again.iterate()  # something to forget
    again.load_state_dict(state)
    again.iterate()
    return whole, again.learner.updater.flat.parameters.clone()


@pytest.mark.slow
def test_two_trainers_resume_from_a_saved_state():
    for whole, again in run_group("shm", 2, two_iterations_and_three):
        assert torch.equal(whole, again)


def leaves(state):
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in leaves(value)]
    if isinstance(state, list | tuple):
        return [leaf for value in state for leaf in leaves(value)]
    return [state]


def test_weights_stay_bitwise_equal_although_experience_differs(trained):
    (start, first, first_rewards, _), (_, second, second_rewards, _) = trained
    assert not torch.equal(first_rewards, second_rewards)
    assert not torch.equal(first, start)
    assert torch.equal(first, second)


def test_normalisers_and_optimiser_are_bitwise_equal_too(trained):
    states = [leaves(answer[3]) for answer in trained]
    assert len(states[0]) == len(states[1])
    for first, second in zip(*states, strict=True):
        assert torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second
