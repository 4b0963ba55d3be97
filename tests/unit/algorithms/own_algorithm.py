"""The tutorial's A2C in every kind of network and space: run by test_own_algorithm.py beside the tutorial's files."""

from dataclasses import replace

import torch

from rayagi.config.presets import preset
from rayagi.config.rules import broken_rules
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec
from rayagi.envs import make_env_factory
from tests.fakes.echo import ACTIONS, OBSERVATIONS
from tests.threads import unfailed
from tests.unit.algorithms.test_program import build
from tests.unit.algorithms.test_stepwise import AT, E, run_gmis

ECHO, BARS = "tests.fakes.echo:Echo-v0", "tests.fakes.echo:Bars-v0"
NETWORKS = ({}, {"shared": True}, {"core": "gru"}, {"core": "gru", "shared": True})
SPACES = (
    *((ECHO, {"obs": "box", "action": action}) for action in ACTIONS),
    *((ECHO, {"obs": obs, "action": "multi_discrete"}) for obs in OBSERVATIONS),
    (BARS, {"kind": "dict"}),
)


def spec_of(task, kwargs, network):
    spec = preset("InvertedPendulum-v5", "a2c")
    spec = replace(
        spec,
        env=EnvSpec(id=task, kwargs=kwargs),
        gmi=GmiSpec(num_envs=4, collective_timeout_s=30.0),
        network=NetworkSpec(hidden=(16, 8), core_size=8, **network),
        learning=replace(spec.learning, rollout_length=16, num_minibatches=2),
    )
    assert not list(broken_rules(spec))
    return spec


def check_a_program_trains_evaluates_and_resumes(spec):
    make = make_env_factory(spec.env.id, kwargs=dict(spec.env.kwargs))
    first, second = build(spec, make_env=make), build(spec, make_env=make)
    before = first.learner.updater.flat.parameters.detach().clone()
    metrics = [first.iterate().metrics for _ in range(2)][-1]
    assert all(value - value == 0 for value in metrics.values()), metrics  # finite
    assert not torch.equal(before, first.learner.updater.flat.parameters)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.learner.updater.flat.parameters, second.learner.updater.flat.parameters)
    assert first.evaluate(2, seed=1) == second.evaluate(2, seed=1)
    assert first.evaluate(2, seed=1).episode_lengths == [16, 16]


def main():
    torch.set_num_threads(1)
    for network in NETWORKS:
        for task, kwargs in SPACES:
            check_a_program_trains_evaluates_and_resumes(spec_of(task, kwargs, network))
        # Where the agent acts for the simulators of other GMIs.
        spec = spec_of(ECHO, {"obs": "dict", "action": "multi_binary"}, network)
        spec = replace(spec, gmi=replace(spec.gmi, template="e_at"))
        make = make_env_factory(ECHO, kwargs=dict(spec.env.kwargs))
        unfailed(run_gmis((E, E, AT), lambda program, _: program.iterate(), spec, make))


if __name__ == "__main__":
    main()
