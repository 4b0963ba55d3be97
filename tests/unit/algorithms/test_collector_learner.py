"""Separate collectors and learners: in lockstep their updates equal those of dp_only."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from actors.gmi import GmiContext, GmiIdentity
from actors.rendezvous_actor import RendezvousActor
from placement.role_layout import make_role_layout
from placement.types import Slice
from rayagi.algorithms.appo import AppoSpec
from rayagi.algorithms.collector import CollectorProgram
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.impala import ImpalaSpec
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import GmiSpec, NetworkSpec, RunSpec
from tests.fakes.point import make_point
from tests.threads import in_threads, unfailed
from tests.unit.collectives.thread_group import ThreadGroup

PPO = PPOSpec(rollout_length=8, num_minibatches=2, num_epochs=2, learning_rate=1e-3)
SPEC = RunSpec(
    gmi=GmiSpec(num_envs=4, template="ea_t", collective_timeout_s=30.0),
    network=NetworkSpec(hidden=(16, 8)),
    learning=PPO,
    seed=3,
)
APPO = replace(
    SPEC,
    algorithm="appo",
    gmi=replace(SPEC.gmi, template="decoupled"),
    learning=AppoSpec(rollout_length=8, num_minibatches=2, num_epochs=2, learning_rate=1e-3, max_lag=0),
)
IMPALA = replace(
    APPO, algorithm="impala", learning=ImpalaSpec(rollout_length=8, learning_rate=1e-3, max_lag=0)
)


def spec_for(algorithm):
    """A decoupled run at lag 0."""
    return {"appo": APPO, "impala": IMPALA}[algorithm]


def identities(spec, num_collectors, num_learners):
    layout = make_role_layout(spec.gmi.template, num_learners=num_learners)
    worker_types = tuple(layout.assign_roles(num_collectors + num_learners))
    learners = tuple(index for index, roles in enumerate(worker_types) if "trainer" in roles)
    return [
        GmiIdentity(
            index=index, num_gmis=len(worker_types), slice=Slice(node="here", backend="cpu", cores=(0,)), roles=roles,
            task="Point", worker_types=worker_types, group=learners if layout.overlapped else None,
        )
        for index, roles in enumerate(worker_types)
    ]  # fmt: skip


def run_gmis(spec, num_collectors, num_learners, work, device="cpu", make_env=make_point):
    """``work(program)`` in a thread per GMI, which meet as GMIs do. Returns the results by index."""
    members = identities(spec, num_collectors, num_learners)
    group = ThreadGroup.on_one_device(len(members[0].members), timeout_s=30.0)
    directory = RendezvousActor(len(members))

    def member(identity):
        rank = identity.members.index(identity.index) if identity.index in identity.members else None
        communicator = (
            ThreadGroup.on_one_device(1).communicator(0) if rank is None else group.communicator(rank)
        )
        context = GmiContext(
            identity=identity, communicator=communicator, device=torch.device(device), directory=directory
        )
        program = TrainingFactory(spec, make_env)(context)
        try:
            return work(program)
        finally:
            program.close()

    return unfailed(in_threads([partial(member, identity) for identity in members]))


def iterated(program, number):
    """Results of so many rollouts or updates, however often it came back with nothing."""
    found = []
    while len(found) < number:
        result = program.iterate()
        if "iteration_s" in result.metrics:
            found.append(result)
    return found


def after(number):
    def work(program):
        results = iterated(program, number)
        return results, program.state_dict()["shared"]

    return work


def dp_only(spec, number):
    """The same environments in one GMI."""
    whole = replace(spec, gmi=replace(spec.gmi, template="dp_only", num_envs=8))
    context = GmiContext.local("Point", ThreadGroup.on_one_device(1).communicator(0))
    program = TrainingFactory(whole, make_point)(context)
    return after(number)(program)


@pytest.mark.parametrize("num_learners", [1, 2])
@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize(
    "spec",
    [SPEC, APPO, IMPALA],
    ids=["ea_t with ppo", "decoupled with appo at lag 0", "decoupled with impala at lag 0"],
)
def test_in_lockstep_the_updates_are_those_of_dp_only(spec, num_learners, core):
    spec = replace(spec, network=replace(spec.network, core=core, core_size=6))
    expected, reference = dp_only(spec, 6)
    results = run_gmis(spec, 2, num_learners, after(6))
    for other, *of_learners in zip(expected, *(found for found, _ in results[2:]), strict=True):
        assert {result.metrics["policy_lag_max"] for result in of_learners} == {0}
        losses = [result.metrics["value_loss"] for result in of_learners]
        assert sum(losses) / num_learners == pytest.approx(other.metrics["value_loss"], rel=1e-3)
    for _, shared in results[2:]:
        assert shared["env_steps"] == reference["env_steps"] == 6 * 8 * 8  # updates, environments, steps
        for name, tensor in reference["learner"]["model"].items():
            torch.testing.assert_close(shared["learner"]["model"][name], tensor, rtol=1e-4, atol=1e-5)
        for name in ("obs_normaliser", "reward_moments"):
            for key, tensor in reference[name].items():
                torch.testing.assert_close(shared[name][key], tensor, rtol=1e-6, atol=1e-9)
    episodes = sum(sum(result.metrics["episodes"] for result in found) for found, _ in results[:2])
    assert episodes == sum(result.metrics["episodes"] for result in expected) > 0


def built(spec, identity, directory):
    """A program whose calls this thread makes in an order of its own."""
    context = GmiContext(
        identity=identity, communicator=ThreadGroup.on_one_device(1).communicator(0), device=torch.device("cpu"),
        directory=directory,
    )  # fmt: skip
    return TrainingFactory(spec, make_point)(context)


@pytest.mark.parametrize(("core", "waits"), [("lstm", True), ("none", False)])
def test_a_round_of_collectors_that_form_no_whole_groups_waits_for_the_lost_one(core, waits):
    """Two minibatches of whole rollouts need pairs of environments: 3 + 3 are pairs, the 3 that are left are not."""
    spec = replace(
        APPO, network=replace(APPO.network, core=core, core_size=6), gmi=replace(APPO.gmi, num_envs=3)
    )
    directory = RendezvousActor(3)
    first_of, second_of, learner_of = identities(spec, 2, 1)
    first, second, learner = (built(spec, each, directory) for each in (first_of, second_of, learner_of))
    learner.iterate()  # publishes
    for program in (first, second, learner):
        assert iterated(program, 1)
    second._dispenser.close(timeout_s=0.0)
    learner.batcher._consumer_endpoints[0].lost.append(learner.dataflow.producer_of(1))
    iterated(first, 1)
    assert ("train_samples" in learner.iterate().metrics) is not waits
    assert learner.learner.env_steps == 6 * 8 + (0 if waits else 3 * 8)
    if waits:
        successor = built(spec, second_of, directory)
        iterated(successor, 1)
        assert iterated(learner, 1)[0].metrics["train_samples"] == 6 * 8
        successor.close()
    for program in (first, learner):
        program.close()


def test_a_round_without_a_lost_collector_weights_learners_by_the_rows_that_came():
    """Collectors 0 and 1 send to learner 0, which gets 4 of 8 rows while 1 is lost, and 2 to learner 1."""
    # One minibatch: the same samples for one learner of all rows.
    spec = replace(APPO, learning=replace(APPO.learning, num_minibatches=1))

    def work(program):
        if isinstance(program, CollectorProgram):
            return None if program.number == 1 else iterated(program, 1)
        lost = [program.dataflow.producer_of(1)] if program.number == 0 else []
        program.batcher._consumer_endpoints[0].lost.extend(lost)
        iterated(program, 1)
        return program.state_dict()["shared"]

    *_, alone = run_gmis(spec, 3, 1, work)
    *_, first, second = run_gmis(spec, 3, 2, work)
    assert first["env_steps"] == second["env_steps"] == alone["env_steps"] == 8 * 8
    for name, tensor in alone["learner"]["model"].items():
        assert torch.equal(first["learner"]["model"][name], second["learner"]["model"][name])
        torch.testing.assert_close(first["learner"]["model"][name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("on_stale", "updates"), [("drop", True), ("correct", True), ("wait", False)])
def test_a_collector_goes_on_at_its_own_pace_unless_updates_take_one_rollout_of_each(on_stale, updates):
    spec = replace(APPO, learning=replace(APPO.learning, max_lag=1, on_stale=on_stale))
    directory = RendezvousActor(3)
    first, second, learner = (built(spec, identity, directory) for identity in identities(spec, 2, 1))
    learner.iterate()  # publishes, and comes back with nothing
    iterated(first, 2)  # the second has not finished one
    found = learner.iterate().metrics
    assert ("train_samples" in found) is updates
    for program in (first, second, learner):
        program.close()


@pytest.mark.parametrize(("max_lag", "learned"), [(3, True), (2, False)])
def test_experience_beyond_the_bound_is_dropped_and_counted_and_the_bound_is_reported(max_lag, learned):
    learning = replace(APPO.learning, max_lag=max_lag, lr_schedule="linear")
    spec = replace(APPO, learning=learning, total_env_steps=1000)
    assert spec.learning.on_stale == "drop"
    directory = RendezvousActor(3)
    first, second, learner = (built(spec, identity, directory) for identity in identities(spec, 2, 1))
    learner.iterate()
    for _ in range(3):
        iterated(first, 2)
        iterated(learner, 1)
    second._parameters.read = lambda timeout_s: 0  # it began before the three updates
    iterated(second, 1)
    iterated(first, 2)
    metrics = iterated(learner, 1)[0].metrics
    assert metrics["policy_lag_bound"] == max_lag
    assert metrics["policy_lag_max"] == (3 if learned else 0)
    assert metrics["stale_samples"] == (0 if learned else second._own.num_envs * 8)
    # Nine rollouts of 4 environments and 8 steps. If the late one is learned from, one is left for the next update.
    used = 9 - learned
    assert learner.learner.env_steps == used * 4 * 8
    iterated(first, 2 - learned)
    rate = iterated(learner, 1)[0].metrics["learning_rate"]
    assert rate == pytest.approx(1e-3 * (1 - used * 4 * 8 / 1000))
    for program in (first, second, learner):
        program.close()


def test_what_a_lost_collector_left_is_learned_from_before_its_successor_s_and_within_the_bound():
    """A collector that ends without disconnecting, as a killed one does, is replaced under its producer number."""
    spec = replace(APPO, learning=replace(APPO.learning, max_lag=2, on_stale="wait"))
    directory = RendezvousActor(3)
    first, second, learner = (built(spec, identity, directory) for identity in identities(spec, 2, 1))
    learner.iterate()  # publishes, and comes back with nothing
    for collector in (first, second, first, second):
        iterated(collector, 1)
    iterated(learner, 1)
    second._dispenser.close(timeout_s=0.0)
    successor = built(spec, identities(spec, 2, 1)[1], directory)
    successor.load_state_dict({"shared": {"iteration": second.rollouts}})
    lags = []
    for _ in range(4):
        iterated(successor, 1)
        iterated(first, 1)
        lags.append(iterated(learner, 1)[0].metrics["policy_lag_max"])
    assert max(lags) <= 2
    received = learner.batcher.received
    assert received[second._dispenser.origin] == (8, 8)  # nothing of it is held
    # Without a state of its own, a collector that has run begins new episodes, with nothing summed up.
    first.load_state_dict({"shared": {"iteration": first.rollouts}})
    assert not first.simulator.env.elapsed.any()
    assert not first._running.any()
    for program in (first, successor, learner):
        program.close()
