"""e_at and dp_mp with their GMIs in threads: the algorithm of dp_only, to the last bit where one GMI acts and learns."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from actors.errors import NonFiniteError, PartnerLostError
from actors.gmi import GmiContext, GmiIdentity
from actors.rendezvous_actor import RendezvousActor
from placement.types import Slice
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import GmiSpec, NetworkSpec, RunSpec
from rayagi.models.policy import load_policy
from rayagi.monitoring.catalogue import merge
from tests.fakes.point import PointEnv, make_point
from tests.threads import in_threads, unfailed
from tests.unit.algorithms.test_program import build as build_dp_only
from tests.unit.collectives.thread_group import ThreadGroup

E, A, T, AT = ("simulator",), ("agent",), ("trainer",), ("agent", "trainer")
SPEC = RunSpec(
    gmi=GmiSpec(num_envs=4, collective_timeout_s=30.0),
    network=NetworkSpec(hidden=(16, 8)),
    learning=PPOSpec(rollout_length=8, num_minibatches=2, num_epochs=2, learning_rate=1e-3),
    seed=3,
)


def run_gmis(worker_types, work, spec=SPEC, make_env=make_point):
    """Run ``work(program, index)`` in a thread per GMI. Returns what each returned or raised, by GMI."""
    number = len(worker_types)
    group, directory = ThreadGroup.on_one_device(number, timeout_s=30.0), RendezvousActor(number)

    def member(index):
        identity = GmiIdentity(
            index=index, num_gmis=number, task="Point", roles=worker_types[index], worker_types=worker_types,
            slice=Slice(node="here", backend="cpu", cores=(0,)),
        )  # fmt: skip
        context = GmiContext(identity, group.communicator(index), torch.device("cpu"), directory)
        program = TrainingFactory(spec, make_env)(context)
        try:
            return work(program, index)
        finally:
            program.close()

    return in_threads([partial(member, index) for index in range(number)])


def three_iterations(program, index=0):
    results = [program.iterate() for _ in range(3)]
    return program.state_dict()["shared"], results


def dp_only(num_envs, spec=SPEC):
    return build_dp_only(replace(spec, gmi=GmiSpec(num_envs=num_envs)))


def unequal(sizes, num_envs, spec=SPEC):
    """Environments in proportion to these sizes of the GMIs, of which those without a simulator have none."""
    return replace(spec, gmi=replace(spec.gmi, num_envs=num_envs, slices=sizes))


def assert_same_learning(mine, theirs):
    assert mine.iteration == theirs.iteration
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm", "explained_variance"):
        assert mine.metrics[name] == theirs.metrics[name], name


@pytest.mark.parametrize("core", ["none", "gru"])
def test_one_agent_for_all_simulators_makes_the_updates_of_dp_only_to_the_last_bit(core):
    network = replace(SPEC.network, core=core, core_size=6)
    # A recurrent policy's minibatches are of whole sequences: two sequences of 4 steps for each environment.
    learning = replace(SPEC.learning, sequence_length=4)
    spec = unequal((5.0, 3.0, 1.0, 1.0), 3, replace(SPEC, network=network, learning=learning))
    expected, expected_results = three_iterations(dp_only(9, spec))
    *simulated, (found, learned) = unfailed(run_gmis((E, E, E, AT), three_iterations, spec))
    for name, value in expected["learner"]["model"].items():
        assert torch.equal(found["learner"]["model"][name], value), name
    assert torch.equal(found["obs_normaliser"]["mean"], expected["obs_normaliser"]["mean"])
    assert found["env_steps"] == expected["env_steps"] == 3 * 8 * 9
    for mine, theirs in zip(learned, expected_results, strict=True):
        assert_same_learning(mine, theirs)
    returns = [value for _, results in simulated for result in results for value in result.episode_returns]
    assert sorted(returns) == sorted(v for result in expected_results for v in result.episode_returns)
    steps = [[result.metrics["env_steps"] for result in results] for _, results in simulated]
    assert steps == [[40.0] * 3, [24.0] * 3, [8.0] * 3]


@pytest.mark.parametrize("num_simulators", [4, 3], ids=["even", "unequal agents"])
def test_several_agents_make_the_updates_of_dp_only_to_rounding(num_simulators):
    spec = replace(SPEC, gmi=replace(SPEC.gmi, num_envs=3))
    expected, _ = three_iterations(dp_only(3 * num_simulators))
    worker_types = (E,) * num_simulators + (AT, AT)
    *_, (found, _), (other, _) = unfailed(run_gmis(worker_types, three_iterations, spec))
    for name, value in expected["learner"]["model"].items():
        assert torch.allclose(found["learner"]["model"][name], value, atol=2e-4), name
        assert torch.equal(found["learner"]["model"][name], other["learner"]["model"][name]), name
    assert (
        found["obs_normaliser"]["count"] == expected["obs_normaliser"]["count"] == 3 * 8 * 3 * num_simulators
    )


@pytest.mark.parametrize("worker_types", [(E, E, A, T), (E, E, A, A, T), (E, E, E, A, A, T, T)], ids=str)
def test_three_worker_types_apart_make_the_updates_of_dp_only_to_rounding(worker_types):
    num_simulators, num_trainers = worker_types.count(E), worker_types.count(T)
    expected, expected_results = three_iterations(dp_only(4 * num_simulators))
    everyone = unfailed(run_gmis(worker_types, three_iterations))
    (found, learned), (last, _) = everyone[-num_trainers], everyone[-1]
    for name, value in expected["learner"]["model"].items():
        assert torch.allclose(found["learner"]["model"][name], value, atol=2e-4), name
        assert torch.equal(found["learner"]["model"][name], last["learner"]["model"][name]), name
    assert found["obs_normaliser"]["count"] == 3 * 8 * 4 * num_simulators
    assert [result.iteration for result in learned] == [0, 1, 2]
    merged = [merge(results) for results in zip(*(results for _, results in everyone), strict=True)]
    for mine, theirs in zip(merged, expected_results, strict=True):
        assert mine.metrics["env_steps"] == theirs.metrics["env_steps"] == 8 * 4 * num_simulators
        assert sorted(mine.episode_returns) == pytest.approx(sorted(theirs.episode_returns), abs=1e-3)
        assert mine.metrics["policy_loss"] == pytest.approx(theirs.metrics["policy_loss"], abs=1e-4)


@pytest.mark.parametrize("worker_types", [(E, E, AT), (E, E, A, T)], ids=str)
def test_a_resumed_run_continues_to_the_last_bit(worker_types):
    straight = {}

    def until_saved(program, index):
        program.iterate()
        saved = program.state_dict()
        straight[index] = program.iterate()
        return saved

    saved = unfailed(run_gmis(worker_types, until_saved))

    def resumed(program, index):
        # As a session does: every GMI gets what all hold alike, and its own.
        program.load_state_dict({"shared": saved[-1]["shared"], "local": saved[index]["local"]})
        return program.iterate()

    for index, result in enumerate(unfailed(run_gmis(worker_types, resumed))):
        assert result.iteration == straight[index].iteration == 1
        assert result.episode_returns == straight[index].episode_returns
        if "trainer" in worker_types[index]:
            assert_same_learning(result, straight[index])


@pytest.mark.parametrize("worker_types", [(E, AT), (E, A, T)], ids=str)
def test_an_iteration_and_its_parts_take_no_longer_than_the_call(worker_types):
    def measured(program, index):
        begun = time.perf_counter()
        result = program.iterate()
        return time.perf_counter() - begun, result

    for took_s, result in unfailed(run_gmis(worker_types, measured)):
        assert 0.0 < result.metrics["iteration_s"] <= took_s
        for name in ("simulate_s", "act_s", "exchange_s", "wait_s", "update_s", "sync_s"):
            assert 0.0 <= result.metrics.get(name, 0.0) <= result.metrics["iteration_s"], name


def test_a_checkpoint_of_dp_only_goes_on_with_new_environments():
    other = dp_only(4)
    other.iterate()
    shared = other.state_dict()["shared"]

    def resumed(program, index):
        program.load_state_dict({"shared": shared})
        return program.iterate().iteration

    assert unfailed(run_gmis((E, AT), resumed)) == [1, 1]


def test_an_agent_evaluates_with_environments_of_its_own():
    def evaluated(program, index):
        program.iterate()
        before = program.state_dict()["local"]
        result = program.evaluate(5, seed=1)
        return result, before, program.state_dict()

    simulator, agent = unfailed(run_gmis((E, AT), evaluated))
    assert simulator[0].episode_returns == []
    result, _, state = agent
    assert len(result.episode_returns) == 5
    alone = dp_only(4)
    alone.load_state_dict({"shared": state["shared"]})
    assert alone.evaluate(5, seed=1).episode_returns == result.episode_returns
    assert load_policy(state["shared"], SPEC, PointEnv(1, 0, 0).info).normaliser is not None


def test_a_nan_of_a_simulator_stops_all_before_the_update():
    def poisoned(*, num_envs, first_env_index, seed, num_threads):
        # Step 20 of the second simulator is step 3 of the third rollout of 8, the fifth of the agent's environments.
        return PointEnv(num_envs, first_env_index, seed, poison_step=20 if first_env_index else None)

    weights = {}

    def until_error(program, index):
        while True:
            if index == 2:
                weights[program.learner.iteration] = program.learner.updater.flat.parameters.detach().clone()
            program.iterate()

    *simulators, agent = run_gmis((E, E, AT), until_error, make_env=poisoned)
    assert isinstance(agent, NonFiniteError)
    assert "a reward became NaN or infinite in iteration 3 (rollout step 3, environment 4)" in str(agent)
    assert sorted(weights) == [0, 1, 2]
    for error in simulators:
        assert isinstance(error, PartnerLostError)
        assert "GMI 2 (agent+trainer) was lost" in str(error)


def test_a_simulator_that_fails_is_named():
    class Broken(PointEnv):
        def step(self, actions):
            if self.first and self.steps == 3:
                raise FloatingPointError("unstable")
            return super().step(actions)

    def broken(*, num_envs, first_env_index, seed, num_threads):
        return Broken(num_envs, first_env_index, seed)

    first, second, agent = run_gmis((E, E, AT), lambda program, _: program.iterate(), make_env=broken)
    assert isinstance(second, FloatingPointError)
    assert isinstance(agent, PartnerLostError)
    assert (agent.partner, agent.has_ended) == ("GMI 1 (simulator)", False)
    assert agent.asked == "the outcome of step 4 of iteration 1"
    assert isinstance(first, PartnerLostError)
    assert first.partner == "GMI 2 (agent+trainer)"


def test_environments_that_cannot_resume_restart_with_zero_returns():
    class Forgetful(PointEnv):
        resumes_episodes = False

    def forgetful(*, num_envs, first_env_index, seed, num_threads):
        return Forgetful(num_envs, first_env_index, seed)

    def saved_and_loaded(program, index):
        program.iterate()
        state = program.state_dict()
        program.load_state_dict(state)
        return None if index == 0 else (state["local"], program.state_dict()["local"])

    _, (before, after) = unfailed(run_gmis((E, AT), saved_and_loaded, make_env=forgetful))
    assert before["training"]["running_returns"].abs().sum() > 0
    assert after["training"]["running_returns"].abs().sum() == 0
