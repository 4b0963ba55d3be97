"""The synchronous program in two processes over the transports that it has in a run."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from members import Failed, run_group

from actors.gmi import GmiContext, GmiIdentity
from placement.types import Slice
from rayagi.algorithms.program import DpOnlyFactory
from rayagi.config.spec import GmiSpec, NetworkSpec, PPOSpec, RunSpec
from tests.fakes.point import make_point

SPEC = RunSpec(
    gmi=GmiSpec(num_envs=8),
    network=NetworkSpec(hidden=(32, 16)),
    ppo=PPOSpec(rollout_length=8, num_minibatches=2, num_epochs=2),
    seed=3,
)


def train(communicator, done, slices=None):
    spec = replace(SPEC, gmi=replace(SPEC.gmi, slices=slices))
    identity = GmiIdentity(
        index=communicator.rank,
        num_gmis=communicator.world_size,
        slice=Slice(node="here", backend="cpu"),
        roles=("simulator", "agent", "trainer"),
        task="Point",
    )
    context = GmiContext(identity=identity, communicator=communicator, device=torch.device("cpu"))
    program = DpOnlyFactory(spec, make_point)(context)
    start = program.training.learner.flat.parameters.clone()
    rewards = []
    for _ in range(3):
        program.iterate()
        rewards.append(program.rollout.rewards.clone())
    weights = program.training.learner.flat.parameters.clone()
    return start, weights, torch.stack(rewards), program.state_dict()["shared"]


@pytest.fixture(scope="module", params=[("shm", None), ("gloo", None), ("shm", (3.0, 1.0))])
def trained(request):
    transport, slices = request.param
    answers = run_group(transport, 2, partial(train, slices=slices))
    for answer in answers:
        if isinstance(answer, Failed):
            raise answer.error
    return answers


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
