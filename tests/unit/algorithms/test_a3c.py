"""A3C: every GMI steps the shared parameters on its own rollout, and waits for none."""

import threading
from dataclasses import replace

import pytest
import torch
from test_appo import spec, weights
from test_program import assert_a_resumed_run_continues, build, run_gmis

from actors.errors import NonFiniteError
from collectives import shared_tensors
from collectives.experience.errors import ChannelError

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SPEC = spec("a3c", rollout_length=8, learning_rate=0.01, rms_eps=0.1, entropy_coef=0.01)
PLAIN = spec(
    "a3c", rollout_length=8, learning_rate=0.01, rms_eps=0.1, entropy_coef=0.01, value_coef=0.3, gamma=0.95,
    max_grad_norm=0.0, normalize_obs=False, normalize_rewards=False,
)  # fmt: skip


def shared_weights(program):
    return program.learner.updater.shared["parameters"].clone()


@torch.no_grad()
def n_step_returns(rollout, values_of):
    """R = r_t + gamma R, from V of the last state or of a truncated episode's, 0 where the task ended (algorithm S3)."""
    steps, count = rollout.rewards.shape
    finals = {(step, int(i)): obs[k] for step, ids, obs in rollout.finals for k, i in enumerate(ids)}
    returns = torch.zeros(steps, count)
    for env in range(count):
        running = float(values_of(rollout.last_obs[env]))
        for t in reversed(range(steps)):
            if rollout.terminated[t, env]:
                running = 0.0
            elif rollout.truncated[t, env]:
                running = float(values_of(finals[t, env]))
            running = float(rollout.rewards[t, env]) + 0.95 * running
            returns[t, env] = running
    return returns


def test_an_update_is_one_shared_step_on_the_papers_gradient():
    program = build(PLAIN)
    learn = program.learner.learn
    model, expected = program.learner.policy.model, []

    def checked(rollout):
        returns = n_step_returns(rollout, model.values)
        values = model.values(rollout.raw_obs)
        log_probs = model.head.log_prob(model.policy(rollout.raw_obs), rollout.actions)
        loss = -(log_probs * (returns - values).detach()).mean() + 0.3 * (returns - values).square().mean()
        loss = loss - 0.01 * model.head.entropy(model.policy(rollout.raw_obs))
        d = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
        expected.append(shared_weights(program)[: len(d)] - 0.01 * d / (0.01 * d.square() + 0.1).sqrt())
        assert rollout.finals, "an episode must end within the rollout"
        return learn(rollout)

    program.learner.learn = checked
    program.iterate()
    assert torch.allclose(shared_weights(program)[: len(expected[0])], expected[0], rtol=0, atol=1e-6)


def test_no_gmi_waits_for_another_and_each_sees_the_others_steps():
    done, found = threading.Event(), {}

    def member(program):
        if program.context.identity.index == 0:
            for _ in range(3):
                program.iterate()
            found["after"] = shared_weights(program)
            found["moments"] = program.learner.policy.normaliser.moments.clone()
            done.set()
            return []
        assert done.wait(60.0)  # the other has finished three iterations without this one
        begun = weights(program)
        program.learner.refresh()
        assert not torch.equal(begun, weights(program))
        assert torch.equal(weights(program), found["after"])
        seen = program.learner.policy.normaliser.moments
        assert torch.equal(seen.packed(), found["moments"].packed())
        return [program.iterate().metrics["policy_lag_max"]]

    assert run_gmis(SPEC, 2, member) == [[], [0.0]]


def test_the_lag_counts_the_steps_of_others_since_the_copy():
    first, others = threading.Barrier(2, timeout=60), threading.Event()

    def member(program):
        if program.context.identity.index == 0:
            first.wait()  # the other has copied the parameters
            for _ in range(3):
                program.iterate()
            others.set()
            return None
        collect = program.collection.collect

        def slowly(iteration):
            first.wait()
            assert others.wait(60.0)
            return collect(iteration)

        program.collection.collect = slowly
        return program.iterate().metrics["policy_lag_mean"]

    assert run_gmis(SPEC, 2, member) == [None, 3.0]


@pytest.mark.parametrize("core", ["none", "gru"])
def test_a_resumed_run_continues_to_the_last_bit(core):
    settings = replace(SPEC, network=replace(SPEC.network, core=core, core_size=6))
    assert_a_resumed_run_continues(settings, shared_weights)


def test_a_checkpoint_holds_the_steps_of_all_gmis():
    barrier = threading.Barrier(2, timeout=60)

    def member(program):
        program.iterate()
        barrier.wait()
        state = program.state_dict()["shared"]["learner"]
        return state["model"], state["optimiser"]["square_avg"]

    (one, squares), (other, others_squares) = run_gmis(SPEC, 2, member)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(squares, others_squares)


def test_a_gradient_that_is_not_finite_does_not_reach_the_others():
    program = build(SPEC)
    before = shared_weights(program)
    program.learner._scaled_rewards = lambda rollout: torch.full_like(rollout.rewards, torch.inf)
    with pytest.raises(NonFiniteError):
        program.iterate()
    assert torch.equal(shared_weights(program), before)


def test_gmis_on_several_hosts_are_refused(monkeypatch):
    def identity():
        return threading.current_thread().name  # one host per GMI

    monkeypatch.setattr(shared_tensors, "host_identity", identity)
    with pytest.raises(ChannelError, match="on 2 hosts, which share no memory: use GMIs of one host"):
        run_gmis(SPEC, 2, lambda program: None)


def test_gradients_are_clipped():
    program = build(replace(PLAIN, learning=replace(PLAIN.learning, max_grad_norm=1e-3)))
    assert program.iterate().metrics["grad_norm"] > 1e-2  # before
    assert float(program.learner.updater.flat.gradients.norm()) == pytest.approx(1e-3, rel=1e-3)
