"""The whole synchronous loop in one process and spread over GMIs (threads), on a small exact environment."""

from dataclasses import replace

import pytest
import torch

from actors.errors import NonFiniteError
from actors.gmi import GmiContext
from collectives.solo import SoloCommunicator
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.errors import ConfigError
from rayagi.config.spec import EvaluationSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.models.policy import load_policy
from tests.fakes.point import make_point, make_poisoned_point
from tests.threads import in_threads, unfailed
from tests.unit.collectives.thread_group import ThreadGroup

SPEC = RunSpec(
    gmi=GmiSpec(num_envs=4),
    network=NetworkSpec(hidden=(16, 8)),
    learning=PPOSpec(rollout_length=8, num_minibatches=2, num_epochs=2, learning_rate=1e-3),
    evaluation=EvaluationSpec(),
    seed=3,
)


def build(spec=SPEC, communicator=None, make_env=make_point):
    return TrainingFactory(spec, make_env)(GmiContext.local("Point", communicator))


def run_gmis(spec, num_gmis, work):
    """Run ``work(program)`` in one thread per GMI. Returns the results in rank order."""
    return run_members(num_gmis, lambda communicator: work(build(spec, communicator)))


def run_members(num_gmis, work):
    """Run ``work(communicator)`` in one thread per member. Returns the results in rank order."""
    group = ThreadGroup.on_one_device(num_gmis, timeout_s=60.0)
    tasks = [lambda rank=rank: work(group.communicator(rank)) for rank in range(num_gmis)]
    return unfailed(in_threads(tasks, limit_s=120.0))


def losses_of_updates(program):
    return [program.iterate().metrics["value_loss"] for _ in range(3)]


def assert_one_gmi_of_2n_and_two_of_n_learn_alike(spec):
    """``spec`` has 4 environments in a GMI."""
    whole = losses_of_updates(build(replace(spec, gmi=GmiSpec(num_envs=8))))
    halves = run_gmis(spec, 2, losses_of_updates)
    assert [sum(pair) / 2 for pair in zip(*halves, strict=True)] == pytest.approx(whole, rel=1e-3)


class RecordingCommunicator(SoloCommunicator):
    """Records the buffers that it allocated."""

    def __init__(self):
        super().__init__()
        self.buffers = []

    def buffer(self, numel, dtype):
        self.buffers.append(super().buffer(numel, dtype))
        return self.buffers[-1]


def test_back_propagation_writes_gradients_into_the_communicator_s_memory():
    communicator = RecordingCommunicator()
    program = build(communicator=communicator)
    program.iterate()
    (memory,) = communicator.buffers
    flat, model = program.learner.updater.flat, program.learner.policy.model
    assert flat.gradients.data_ptr() == memory.data_ptr()
    assert memory.abs().sum() > 0
    begins = [parameter.grad.data_ptr() - memory.data_ptr() for parameter in model.parameters()]
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert begins == [4 * sum(sizes[:index]) for index in range(len(sizes))]


def gradients_of_an_update(program):
    """The reduced gradients of each step of the first update, before clipping."""
    found, updater = [], program.learner.updater
    optimizer_step = updater._optimizer_step

    class Recording:
        def step(self, learning_rate, pool):
            found.append(updater.flat.gradients.clone())
            return optimizer_step.step(learning_rate, pool)

    updater._optimizer_step = Recording()
    program.iterate()
    return found


def test_one_gmi_of_2n_and_two_gmis_of_n_have_the_same_gradients():
    program = build(replace(SPEC, gmi=GmiSpec(num_envs=8)))
    assert program.learner.updater._compiled is not None, "no compiler"
    whole = gradients_of_an_update(program)
    halves = run_gmis(SPEC, 2, gradients_of_an_update)
    assert len(whole) == 4  # 2 epochs of 2 minibatches
    scale = whole[0].abs().max()
    # The first gradient differs by float32 rounding only; later ones add what rounding did to the parameters.
    assert torch.allclose(whole[0], halves[0][0], rtol=0, atol=2e-6 * float(scale))
    assert torch.allclose(whole[-1], halves[0][-1], rtol=0, atol=1e-4 * float(scale))
    for a, b in zip(halves[0], halves[1], strict=True):
        assert torch.equal(a, b)


def record_steps(program):
    """What the environments show from now on: observation, that after the action, reward, terminated, done, (N, ...)."""
    steps, step = [], program.simulator.env.step

    def recorded(actions):
        before, result = program.simulator.obs.clone(), step(actions)
        reached = result.obs.clone()
        reached[result.final_ids] = result.final_obs
        done = result.terminated | result.truncated
        steps.append((before, reached, result.rewards, result.terminated.clone(), done))
        return result

    program.simulator.env.step = recorded
    return steps


def test_advantages_and_targets_are_those_of_each_episode_in_plain_numbers():
    """From what the environments showed alone: normalised observations, scaled rewards, V where an episode ended, GAE."""
    learning = replace(SPEC.learning, rollout_length=14, gamma=0.9, gae_lambda=0.8)
    program = build(replace(SPEC, learning=learning))
    steps = record_steps(program)
    program.iterate()
    program.collection.collect(1)
    batch, _ = program.learner.prepare(program.rollout)
    obs, reached, rewards, terminated, done = (
        torch.stack(each).double() for each in zip(*steps, strict=True)
    )
    # R_t = r_t + gamma R_(t-1) in each episode; rewards are divided by the standard deviation of all so far.
    running, returns = torch.zeros(4).double(), []
    for reward, ended in zip(rewards, done, strict=True):
        running = reward + 0.9 * running
        returns.append(running)
        running = running * (1 - ended)
    scaled = rewards / (torch.stack(returns).var(correction=0) + 1e-8).sqrt()
    # Observations are normalised by the first rollout's.
    first = obs[:14].flatten(0, 1)

    def value(states):
        normalised = (states - first.mean(0)) / (first.var(0, correction=0) + 1e-8).sqrt()
        with torch.no_grad():
            return program.learner.policy.model.values(normalised.float().clamp(-10, 10)).double()

    values, following = value(obs), value(reached)
    errors = scaled + 0.9 * (1 - terminated) * following - values
    advantages = torch.zeros(14, 4).double()
    for env in range(4):
        for t in range(14):
            for k in range(t, 14):
                advantages[t, env] += (0.9 * 0.8) ** (k - t) * errors[14 + k, env]
                if done[14 + k, env]:
                    break
    assert done[-1].any()
    assert done[14:].sum(0).max() >= 2
    torch.testing.assert_close(
        batch.targets.double(), (advantages + values[14:]).flatten(), rtol=1e-4, atol=1e-5
    )
    expected = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    torch.testing.assert_close(batch.advantages.double(), expected.flatten(), rtol=1e-4, atol=1e-4)


def test_unequal_gmis_have_the_gradients_of_their_union():
    # 3 and 1 cores share 2 x 4 environments as 6 and 2.
    unequal = replace(SPEC, gmi=GmiSpec(num_envs=4, slices=(3.0, 1.0)))
    whole = gradients_of_an_update(build(replace(SPEC, gmi=GmiSpec(num_envs=8))))
    parts = run_gmis(unequal, 2, gradients_of_an_update)
    scale = whole[0].abs().max()
    assert torch.allclose(whole[0], parts[0][0], rtol=0, atol=2e-6 * float(scale))
    assert torch.allclose(whole[-1], parts[0][-1], rtol=0, atol=1e-4 * float(scale))
    for a, b in zip(parts[0], parts[1], strict=True):
        assert torch.equal(a, b)


def test_a_gmi_has_as_many_environments_beside_one_that_is_left_out():
    unequal = replace(SPEC, gmi=GmiSpec(num_envs=4, slices=(3.0, 1.0), left_out=(1,)))
    assert build(unequal).rollout.num_envs == 6  # three quarters of 2 x 4


@pytest.mark.parametrize("slices", [None, (3.0, 1.0)])
def test_training_does_not_depend_on_the_layout(slices):
    def three_iterations(program):
        results = [program.iterate() for _ in range(3)]
        return program.state_dict()["shared"], [
            value for result in results for value in result.episode_returns
        ]

    whole, whole_returns = three_iterations(build(replace(SPEC, gmi=GmiSpec(num_envs=8))))
    halves = run_gmis(replace(SPEC, gmi=GmiSpec(num_envs=4, slices=slices)), 2, three_iterations)
    for name, value in whole["learner"]["model"].items():
        assert torch.allclose(value, halves[0][0]["learner"]["model"][name], atol=2e-4), name
        assert torch.equal(halves[0][0]["learner"]["model"][name], halves[1][0]["learner"]["model"][name]), (
            name
        )
    assert whole["obs_normaliser"]["count"] == halves[0][0]["obs_normaliser"]["count"] == 3 * 8 * 8
    assert whole["env_steps"] == halves[1][0]["env_steps"] == 3 * 8 * 8
    assert torch.allclose(whole["obs_normaliser"]["mean"], halves[0][0]["obs_normaliser"]["mean"], atol=1e-4)
    assert sorted(whole_returns) == pytest.approx(sorted(halves[0][1] + halves[1][1]), abs=1e-3)


def assert_a_resumed_run_continues(spec, weights_of):
    """It makes the episodes and the weights of one that was not interrupted, to the last bit."""
    straight, resumed = build(spec), build(spec)
    for _ in range(2):
        straight.iterate()
    resumed.load_state_dict(straight.state_dict())
    assert resumed.iterate().episode_returns == straight.iterate().episode_returns
    assert torch.equal(weights_of(straight), weights_of(resumed))


def test_a_resumed_run_continues_to_the_last_bit():
    straight = build()
    for _ in range(2):
        straight.iterate()
    saved = straight.state_dict()
    resumed = build()
    resumed.load_state_dict(saved)
    expected, found = straight.iterate(), resumed.iterate()
    assert found.iteration == expected.iteration == 2
    assert found.episode_returns == expected.episode_returns
    assert found.metrics["policy_loss"] == expected.metrics["policy_loss"]
    for a, b in zip(
        straight.learner.updater.model.parameters(), resumed.learner.updater.model.parameters(), strict=True
    ):
        assert torch.equal(a, b)


def test_a_saved_state_does_not_change_while_training_goes_on():
    program = build()
    program.iterate()
    saved = program.state_dict()
    weights = {name: value.clone() for name, value in saved["shared"]["learner"]["model"].items()}
    moments = {k: v["exp_avg"].clone() for k, v in saved["shared"]["learner"]["optimiser"]["state"].items()}
    program.iterate()
    for name, value in weights.items():
        assert torch.equal(saved["shared"]["learner"]["model"][name], value), name
    for key, value in moments.items():
        assert torch.equal(saved["shared"]["learner"]["optimiser"]["state"][key]["exp_avg"], value)


def test_a_nan_reward_stops_the_iteration_before_the_update():
    program = build(make_env=make_poisoned_point)
    for _ in range(2):
        program.iterate()
    before = program.learner.updater.flat.parameters.detach().clone()
    # step 20 of the environment is step 3 of the third rollout of 8
    with pytest.raises(
        NonFiniteError,
        match=r"a reward became NaN or infinite in iteration 3 \(rollout step 3, environment 0\)",
    ):
        program.iterate()
    assert torch.equal(before, program.learner.updater.flat.parameters)


def test_training_improves_the_point():
    program = build(
        replace(SPEC, gmi=GmiSpec(num_envs=16), learning=replace(SPEC.learning, learning_rate=3e-3))
    )
    before = program.evaluate(20, seed=99).mean_return()
    for _ in range(60):
        program.iterate()
    after = program.evaluate(20, seed=99).mean_return()
    # Pushing against the displacement at full strength instead of not at all: the mean cost falls by well over a tenth.
    assert after > before + 0.1 * abs(before)


def test_evaluation_uses_the_wanted_number_of_episodes_and_a_loaded_policy_agrees():
    program = build()
    program.iterate()
    result = program.evaluate(5, seed=1)
    assert len(result.episode_returns) == len(result.episode_lengths) == 5
    policy = load_policy(program.state_dict()["shared"], SPEC, program.simulator.env.info)
    obs = program.simulator.obs
    assert torch.equal(policy.mode(policy.outputs(policy.observe(obs))), program.agent.act_greedily(obs))


def test_kl_adaptive_steps_stay_equal_on_all_gmis():
    spec = replace(SPEC, learning=replace(SPEC.learning, lr_schedule="kl_adaptive", target_kl=1e-9))
    rates = run_gmis(spec, 2, lambda program: [program.iterate().metrics["learning_rate"] for _ in range(4)])
    assert rates[0] == rates[1]
    assert rates[0] == pytest.approx([1e-3 / 1.5**k for k in range(4)])


def test_kl_adaptive_steps_need_an_update_that_measures_its_kl():
    adaptive = replace(SPEC, learning=replace(SPEC.learning, lr_schedule="kl_adaptive"))
    updater = build(adaptive).learner.updater
    updater.measured = ("value_loss",)
    with pytest.raises(
        ConfigError, match=r"lr_schedule = 'kl_adaptive'.*approx_kl, which the A2C update does"
    ):
        updater.end_update([torch.ones(1)], last_epoch=1, iteration=1, what="A2C update")


def test_the_linear_schedule_ends_at_zero():
    spec = replace(SPEC, total_env_steps=4 * 8 * 2, learning=replace(SPEC.learning, lr_schedule="linear"))
    program = build(spec)
    # 32 steps an iteration of 64 in all
    assert [program.iterate().metrics["learning_rate"] for _ in range(3)] == pytest.approx([1e-3, 5e-4, 0.0])


def test_the_linear_schedule_goes_on_where_it_was_after_a_resume_with_fewer_environments():
    spec = replace(SPEC, total_env_steps=8 * 8 * 4, learning=replace(SPEC.learning, lr_schedule="linear"))
    larger = build(replace(spec, gmi=GmiSpec(num_envs=8)))
    larger.iterate()  # 64 steps of 256
    smaller = build(spec)
    smaller.load_state_dict({"shared": larger.state_dict()["shared"]})
    assert smaller.iterate().metrics["learning_rate"] == pytest.approx(0.75e-3)
    assert smaller.iterate().metrics["learning_rate"] == pytest.approx((1 - 96 / 256) * 1e-3)


def test_a_restored_run_uses_its_own_learning_rate_unless_that_was_adapted():
    saved = build().state_dict()
    other = build(replace(SPEC, learning=replace(SPEC.learning, learning_rate=5e-4)))
    other.load_state_dict(saved)
    assert other.iterate().metrics["learning_rate"] == 5e-4
    adaptive = replace(SPEC, learning=replace(SPEC.learning, lr_schedule="kl_adaptive", target_kl=1e-9))
    first = build(adaptive)
    first.iterate()
    second = build(adaptive)
    second.load_state_dict(first.state_dict())
    assert second.iterate().metrics["learning_rate"] == pytest.approx(1e-3 / 1.5)


def test_two_gmis_resume_to_the_last_bit():
    saved, straight = [None, None], [None, None]

    def until_saved(program):
        rank = program.context.identity.index
        program.iterate()
        saved[rank] = program.state_dict()
        straight[rank] = program.iterate().metrics["policy_loss"]

    run_gmis(SPEC, 2, until_saved)

    def resumed(program):
        program.load_state_dict(saved[program.context.identity.index])
        return program.iterate().metrics["policy_loss"]

    assert run_gmis(SPEC, 2, resumed) == straight


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_state_without_its_own_part_begins_new_episodes_in_a_program_that_has_run(core):
    spec = replace(SPEC, network=replace(SPEC.network, core=core))
    program = build(spec)
    shared = program.state_dict()["shared"]
    program.iterate()
    assert program.simulator.env.elapsed.any()
    program.load_state_dict({"shared": shared})
    assert not program.simulator.env.elapsed.any()
    program.iterate()
    # Episodes end after 7 steps at the latest, so a rollout of 8 from the start has one end per environment at least.
    assert (program.rollout.terminated | program.rollout.truncated)[:7].any(0).all()
