"""e_at with its GMIs in threads: the algorithm of dp_only, to the last bit where one agent has all simulators."""

import threading
from dataclasses import replace

import pytest
import torch

from actors.collective import Collective
from actors.errors import NonFiniteError, PartnerLostError
from actors.gmi import GmiContext, GmiIdentity
from collectives.threads import ThreadGroup
from placement.types import Slice
from rayagi.algorithms.crew import Crew
from rayagi.algorithms.policy import load_policy
from rayagi.algorithms.stepwise import AgentTrainerProgram, SimulatorProgram
from rayagi.config.spec import GmiSpec, NetworkSpec, PPOSpec, RunSpec
from tests.fakes.point import PointEnv, make_point
from tests.unit.algorithms.test_program import build as build_dp_only

E, AT = ("simulator",), ("agent", "trainer")
SPEC = RunSpec(
    gmi=GmiSpec(num_envs=4, collective_timeout_s=30.0),
    network=NetworkSpec(hidden=(16, 8)),
    ppo=PPOSpec(rollout_length=8, num_minibatches=2, num_epochs=2, learning_rate=1e-3),
    seed=3,
)


def build(spec, make_env, communicator, crew, directory):
    index = communicator.rank
    identity = GmiIdentity(
        index=index, num_gmis=communicator.world_size, task="Point", roles=crew.kinds[index],
        slice=Slice(node="here", backend="cpu", cores=(0,)), kinds=crew.kinds,
    )  # fmt: skip
    context = GmiContext(
        identity=identity, communicator=communicator, device=torch.device("cpu"), directory=directory
    )
    program = SimulatorProgram if crew.kinds[index] == E else AgentTrainerProgram
    return program(spec, make_env, context, crew)


def run_crew(crew, work, spec=SPEC, make_env=make_point):
    """Run ``work(program, index)`` in a thread per GMI. Returns what each returned or raised, by GMI."""
    group = ThreadGroup.of(len(crew.kinds), timeout_s=30.0)
    directory = Collective(len(crew.kinds))
    results = [None] * len(crew.kinds)

    def member(index):
        program = None
        try:
            program = build(spec, make_env, group.communicator(index), crew, directory)
            results[index] = work(program, index)
        except Exception as error:
            results[index] = error
        finally:
            if program is not None:
                program.close()

    threads = [threading.Thread(target=member, args=(index,)) for index in range(len(crew.kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return results


def unfailed(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def three_iterations(program, index=0):
    results = [program.iterate() for _ in range(3)]
    return program.state_dict()["shared"], results


def dp_only(num_envs, spec=SPEC):
    return build_dp_only(replace(spec, gmi=GmiSpec(num_envs=num_envs)))


def test_one_agent_for_all_simulators_makes_the_updates_of_dp_only_to_the_last_bit():
    crew = Crew((E, E, E, AT), (4, 3, 1, 0))
    expected, expected_results = three_iterations(dp_only(8))
    *simulated, (found, learned) = unfailed(run_crew(crew, three_iterations))
    for name, value in expected["learner"]["model"].items():
        assert torch.equal(found["learner"]["model"][name], value), name
    assert torch.equal(found["obs_normaliser"]["mean"], expected["obs_normaliser"]["mean"])
    assert found["env_steps"] == expected["env_steps"] == 3 * 8 * 8
    for mine, theirs in zip(learned, expected_results, strict=True):
        for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm"):
            assert mine.metrics[name] == theirs.metrics[name], name
    returns = [value for _, results in simulated for result in results for value in result.episode_returns]
    assert sorted(returns) == sorted(v for result in expected_results for v in result.episode_returns)
    assert [result.metrics["env_steps"] for result in simulated[0][1]] == [32.0] * 3
    assert [result.iteration for result in simulated[0][1]] == [0, 1, 2]


@pytest.mark.parametrize("envs", [(2, 2, 2, 2, 0, 0), (3, 3, 2, 0, 0)], ids=["even", "unequal agents"])
def test_several_agents_make_the_updates_of_dp_only_to_rounding(envs):
    crew = Crew((E,) * (len(envs) - 2) + (AT, AT), envs)
    expected, _ = three_iterations(dp_only(8))
    *_, (found, _), (other, _) = unfailed(run_crew(crew, three_iterations))
    for name, value in expected["learner"]["model"].items():
        assert torch.allclose(found["learner"]["model"][name], value, atol=2e-4), name
        assert torch.equal(found["learner"]["model"][name], other["learner"]["model"][name]), name
    assert found["obs_normaliser"]["count"] == expected["obs_normaliser"]["count"] == 3 * 8 * 8


def test_a_resumed_run_continues_to_the_last_bit():
    crew = Crew((E, E, AT), (2, 2, 0))
    straight = {}

    def until_saved(program, index):
        program.iterate()
        saved = program.state_dict()
        straight[index] = program.iterate()
        return saved

    saved = unfailed(run_crew(crew, until_saved))

    def resumed(program, index):
        # As a session does: every GMI gets what all hold alike, and its own.
        program.load_state_dict({"shared": saved[2]["shared"], "local": saved[index]["local"]})
        return program.iterate()

    for index, result in enumerate(unfailed(run_crew(crew, resumed))):
        assert result.iteration == straight[index].iteration == 1
        assert result.episode_returns == straight[index].episode_returns
        if crew.kinds[index] == AT:
            assert result.metrics["policy_loss"] == straight[index].metrics["policy_loss"]


def test_a_checkpoint_of_dp_only_goes_on_with_new_environments():
    other = dp_only(4)
    other.iterate()
    shared = other.state_dict()["shared"]

    def resumed(program, index):
        program.load_state_dict({"shared": shared})
        return program.iterate().iteration

    assert unfailed(run_crew(Crew((E, AT), (4, 0)), resumed)) == [1, 1]


def test_an_agent_evaluates_with_environments_of_its_own():
    def evaluated(program, index):
        program.iterate()
        before = program.state_dict()["local"]
        result = program.evaluate(5, seed=1)
        return result, before, program.state_dict()

    simulator, agent = unfailed(run_crew(Crew((E, AT), (4, 0)), evaluated))
    assert simulator[0].episode_returns == []
    result, _, state = agent
    assert len(result.episode_returns) == 5
    alone = dp_only(4)
    alone.load_state_dict({"shared": state["shared"]})
    assert alone.evaluate(5, seed=1).episode_returns == result.episode_returns
    assert load_policy(state["shared"], SPEC, PointEnv(1, 0, 0).info).normaliser is not None


def test_a_nan_of_a_simulator_stops_all_before_the_update():
    def poisoned(*, num_envs, first_env_index, seed, num_threads):
        # Step 20 of the second simulator is step 3 of the third rollout of 8, in environment 2 of the agent's.
        return PointEnv(num_envs, first_env_index, seed, poison_step=20 if first_env_index else None)

    weights = {}

    def until_error(program, index):
        while True:
            if index == 2:
                weights[program.trainer.iteration] = program.training.learner.flat.parameters.detach().clone()
            program.iterate()

    *simulators, agent = run_crew(Crew((E, E, AT), (2, 2, 0)), until_error, make_env=poisoned)
    assert isinstance(agent, NonFiniteError)
    assert "a reward became NaN or infinite in iteration 3 (rollout step 3, environment 2)" in str(agent)
    assert sorted(weights) == [0, 1, 2]
    for told in simulators:
        assert isinstance(told, PartnerLostError)
        assert "GMI 2 (agent+trainer) was lost" in str(told)


def test_a_simulator_that_fails_is_named():
    class Broken(PointEnv):
        def step(self, actions):
            if self.first and self.steps == 3:
                raise FloatingPointError("unstable")
            return super().step(actions)

    def broken(*, num_envs, first_env_index, seed, num_threads):
        return Broken(num_envs, first_env_index, seed)

    first, second, agent = run_crew(
        Crew((E, E, AT), (2, 2, 0)), lambda program, _: program.iterate(), make_env=broken
    )
    assert isinstance(second, FloatingPointError)
    assert isinstance(agent, PartnerLostError)
    assert (agent.partner, agent.how) == ("GMI 1 (simulator)", "it has left")
    assert agent.asked == "the outcome of step 4 of iteration 1"
    assert isinstance(first, PartnerLostError)
    assert first.partner == "GMI 2 (agent+trainer)"


def test_environments_that_cannot_resume_start_anew_with_their_returns():
    class Forgetful(PointEnv):
        resumes_episodes = False

    def forgetful(*, num_envs, first_env_index, seed, num_threads):
        return Forgetful(num_envs, first_env_index, seed)

    def saved_and_loaded(program, index):
        program.iterate()
        state = program.state_dict()
        program.load_state_dict(state)
        return None if index == 0 else (state["local"], program.state_dict()["local"])

    _, (before, after) = unfailed(run_crew(Crew((E, AT), (4, 0)), saved_and_loaded, make_env=forgetful))
    assert before["training"]["running_returns"].abs().sum() > 0
    assert after["training"]["running_returns"].abs().sum() == 0
