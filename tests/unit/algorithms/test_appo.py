"""APPO: beside PPO on the policy's own experience, and on experience of another policy by definition."""

from dataclasses import fields, replace

import pytest
import torch
from test_program import assert_a_resumed_run_continues, build, run_gmis
from test_vtrace import defined

from actors.errors import NonFiniteError
from actors.rollout import Rollout
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.algorithms.returns import discounted_returns
from rayagi.config.presets import preset
from rayagi.config.spec import GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import make_env_factory

ONE_PASS = {"rollout_length": 8, "num_minibatches": 2, "num_epochs": 1, "learning_rate": 1e-3}
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def spec(algorithm, **settings):
    return RunSpec(
        algorithm=algorithm,
        gmi=GmiSpec(num_envs=4),
        network=NetworkSpec(hidden=(16, 8)),
        learning=DEFINITIONS[algorithm].settings(**settings),
        seed=3,
    )


def weights(program):
    return program.learner.updater.flat.parameters.detach().clone()


@pytest.mark.parametrize("vtrace", [True, False])
@pytest.mark.parametrize("schedule", ["constant", "kl_adaptive"])
def test_one_pass_over_its_own_experience_is_ppos(vtrace, schedule):
    # V-trace is GAE there, and the importance ratios are one.
    ppo = build(spec("ppo", **ONE_PASS, lr_schedule=schedule))
    other = build(spec("appo", **ONE_PASS, lr_schedule=schedule, vtrace=vtrace))
    for _ in range(3):
        expected, found = ppo.iterate().metrics, other.iterate().metrics
        for name in ("policy_loss", "value_loss", "explained_variance", "grad_norm", "clip_fraction"):
            assert found[name] == pytest.approx(expected[name], abs=2e-4), name
        assert found["importance_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert torch.allclose(weights(ppo), weights(other), rtol=0, atol=2e-5)
    assert found["learning_rate"] == expected["learning_rate"]


def test_training_does_not_depend_on_the_layout():
    assert_training_does_not_depend_on_the_layout(spec("appo", **{**ONE_PASS, "num_epochs": 2}))


def assert_training_does_not_depend_on_the_layout(settings):
    def three_iterations(program):
        for _ in range(3):
            program.iterate()
        return weights(program)

    whole = three_iterations(build(replace(settings, gmi=GmiSpec(num_envs=8))))
    halves = run_gmis(settings, 2, three_iterations)
    assert torch.equal(halves[0], halves[1])
    assert torch.allclose(whole, halves[0], rtol=0, atol=2e-4)


def test_a_resumed_run_continues_to_the_last_bit():
    settings = spec("appo", **{**ONE_PASS, "num_epochs": 2})
    assert_a_resumed_run_continues(settings, weights)


def elsewhere(program, log_probs=None):
    """The program's rollout as a remote collector sends it: without ``obs`` and ``outputs``."""
    own = program.rollout
    head = program.learner.policy.model.head
    done = own.terminated | own.truncated
    running, _ = discounted_returns(own.rewards, done, torch.zeros(own.num_envs), program.learner.spec.gamma)
    sent = {each.name: getattr(own, each.name) for each in fields(Rollout)}
    sent["obs"], sent["outputs"] = torch.full_like(own.obs, torch.nan), torch.empty(0)
    sent["log_probs"] = head.log_prob(own.outputs, own.actions).detach() if log_probs is None else log_probs
    sent["running_returns"] = running
    for name in ("raw_obs", "actions", "rewards", "terminated", "truncated", "log_probs", "running_returns"):
        sent[name] = (
            sent[name].transpose(0, 1).contiguous().transpose(0, 1)
        )  # rows of one environment, as they travel
    return Rollout(**sent)


def collected(settings):
    """A program with a rollout, and its twin that has not learned from it either."""
    one, other = build(settings), build(settings)
    one.learner.learn = other.learner.learn = lambda rollout: {"sync_s": 0.0}
    one.iterate()
    other.iterate()
    del one.learner.learn, other.learner.learn
    assert torch.equal(one.rollout.raw_obs, other.rollout.raw_obs)
    return one, other


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("ppo", {**ONE_PASS, "num_epochs": 2}),
        ("appo", {**ONE_PASS, "num_epochs": 2}),
        ("impala", {"rollout_length": 8}),
    ],
)
def test_a_received_rollout_gives_the_same_update_as_a_local_one(algorithm, settings):
    here, there = collected(spec(algorithm, **settings))
    expected = here.learner.learn(here.rollout)
    found = there.learner.learn(elsewhere(there))
    assert torch.allclose(weights(here), weights(there), rtol=0, atol=1e-6)
    assert found["value_loss"] == pytest.approx(expected["value_loss"], rel=1e-5)
    for one, other in (
        (here.learner.reward_scaler.moments, there.learner.reward_scaler.moments),
        (here.learner.policy.normaliser.moments, there.learner.policy.normaliser.moments),
    ):
        assert torch.equal(one.count, other.count)
        assert torch.allclose(one.mean, other.mean)
        assert torch.allclose(one.m2, other.m2)


PLAIN = {
    "rollout_length": 8, "num_minibatches": 1, "num_epochs": 1, "max_grad_norm": 0.0,
    "normalize_advantages": False, "normalize_obs": False, "normalize_rewards": False,
    "rho_bar": 1.5, "c_bar": 1.1, "gae_lambda": 0.9, "gamma": 0.95, "value_coef": 0.3, "entropy_coef": 0.01,
}  # fmt: skip


def another_policys_experience(program):
    """The program's rollout as another policy's, and what Espeholt et al. 2018, §4.2, make of it.

    rho grad log pi (r + gamma v' - V), (v - V) grad V, grad entropy; lambda of remark 2.

    Returns:
        the rollout, the importance ratios (T, N), the policy's loss, and the gradient of the whole loss
    """
    own, model = program.rollout, program.learner.policy.model
    noise = 0.5 * torch.randn(own.rewards.shape, generator=torch.Generator().manual_seed(1))
    mine = model.head.log_prob(own.outputs, own.actions).detach()
    sent = elsewhere(program, mine + noise)  # the behaviour's log probabilities: ratios of exp(-noise)
    values = model.values(own.raw_obs).double().detach()
    next_values = torch.cat([values[1:], model.values(own.last_obs).double().detach().unsqueeze(0)])
    for step, ids, obs in own.finals:
        next_values[step, ids] = model.values(obs).double().detach()
    assert own.finals, "an episode must end within the rollout"
    ratios = (-noise).double().exp()
    assert ((ratios > 1.5).any(), (ratios < 0.7).any()) == (True, True)
    found = [
        defined(
            *(each[:, env].tolist() for each in (ratios, own.rewards.double(), values, next_values)),
            *(each[:, env].tolist() for each in (own.terminated, own.terminated | own.truncated)),
            gamma=0.95, lam=0.9, rho_bar=1.5, c_bar=1.1,
        )
        for env in range(own.num_envs)
    ]  # fmt: skip
    advantages, targets = (torch.tensor([each[i] for each in found], dtype=torch.float32).T for i in range(2))
    log_probs = model.head.log_prob(model.policy(own.raw_obs), own.actions)
    policy_loss = -(ratios.float().clamp(max=1.5) * log_probs * advantages).mean()
    loss = policy_loss + 0.3 * (model.values(own.raw_obs) - targets).square().mean()
    loss = loss - 0.01 * model.head.entropy(model.policy(own.raw_obs))
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
    return sent, ratios, policy_loss.detach(), gradient


def test_the_gradient_on_another_policys_experience_is_the_papers():
    program, _ = collected(spec("appo", **PLAIN))
    sent, ratios, _, expected = another_policys_experience(program)
    metrics = program.learner.learn(sent)
    gradients = program.learner.updater.flat.gradients[: expected.numel()]
    # At the parameters before the update nothing is clipped yet.
    assert torch.allclose(gradients, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert metrics["importance_ratio"] == pytest.approx(float(ratios.mean()), rel=1e-4)
    assert metrics["importance_truncated"] == pytest.approx(float((ratios > 1.5).float().mean()))


@pytest.mark.parametrize("length", [None, 2])
def test_a_recurrent_policys_first_ratios_are_one_on_another_policys_experience(length):
    settings = spec("appo", **{**ONE_PASS, "sequence_length": length, "learning_rate": 1e-12})
    network = replace(settings.network, core="gru", core_size=6)
    program, _ = collected(replace(settings, network=network))
    with torch.no_grad():
        program.learner.policy.model.policy.output.weight.mul_(100.0)
        program.learner.policy.model.policy.core.weight_hh_l0.mul_(-1.0)
    metrics = program.learner.learn(elsewhere(program))
    assert abs(metrics["importance_ratio"] - 1.0) > 0.01
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0


def test_vtrace_depends_on_the_behaviour_policy_and_gae_does_not():
    changed = {}
    for vtrace in (False, True):
        one, other = collected(spec("appo", **ONE_PASS, vtrace=vtrace))
        one.learner.learn(elsewhere(one))
        other.learner.learn(elsewhere(other, torch.full(one.rollout.rewards.shape, -1.0)))
        changed[vtrace] = not torch.equal(weights(one), weights(other))
    assert changed == {False: False, True: True}


def test_every_epoch_recomputes_the_estimates():
    program, _ = collected(spec("appo", **{**ONE_PASS, "num_epochs": 3}))
    training, recorded = program.learner, []
    estimate = training.estimate

    def noted(rollout, batch, first):
        fit = estimate(rollout, batch, first=first)
        recorded.append(batch.targets)
        return fit

    training.estimate = noted
    training.learn(elsewhere(program))
    targets = recorded
    assert len(targets) == 3
    assert not torch.equal(targets[0], targets[1])


def test_what_diverges_is_not_kept():
    program, _ = collected(spec("appo", **ONE_PASS))
    sent = elsewhere(program)
    sent.log_probs[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"policy_loss became NaN .* \(APPO update\)"):
        program.learner.learn(sent)


def test_the_number_of_environments_may_change_from_rollout_to_rollout():
    # a learner that drops stale rollouts, or whose collectors are unequal
    program, _ = collected(spec("appo", **ONE_PASS))
    wide = build(replace(spec("appo", **ONE_PASS), gmi=GmiSpec(num_envs=6)))
    wide.learner.learn = lambda rollout: {"sync_s": 0.0}
    wide.iterate()
    program.learner.learn(elsewhere(wide))
    program.learner.learn(elsewhere(program))
    assert torch.isfinite(weights(program)).all()


def test_training_improves_the_point_on_stale_experience():
    """Every rollout is trained on with a policy lag of two updates."""
    settings = spec("appo", **{**ONE_PASS, "num_epochs": 4, "learning_rate": 3e-3})
    program = build(replace(settings, gmi=GmiSpec(num_envs=16)))
    before, waiting = program.evaluate(20, seed=99).mean_return(), []
    learn = program.learner.learn

    def learn_late(rollout):
        sent = elsewhere(program)
        copies = {
            each.name: getattr(sent, each.name).clone()
            for each in fields(Rollout)
            if each.name not in ("finals", "final_obs", "states")
        }
        waiting.append(Rollout(**copies, finals=list(sent.finals)))
        return learn(waiting.pop(0)) if len(waiting) > 2 else {"sync_s": 0.0}

    program.learner.learn = learn_late
    for _ in range(32):
        program.iterate()
    after = program.evaluate(20, seed=99).mean_return()
    assert after > before + 0.1 * abs(before)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["appo", "impala", "a3c"])
def test_the_preset_balances_the_inverted_pendulum(algorithm):
    """1000 steps is as long as an episode gets; a policy that does nothing falls within 10."""
    task = preset("InvertedPendulum-v5", algorithm)
    settings = replace(task, gmi=replace(task.gmi, template="dp_only"))
    program = build(settings, make_env=make_env_factory("InvertedPendulum-v5"))
    best = 0.0
    while program.learner.iteration < 200 and best < 1000:
        program.iterate()
        if program.learner.iteration % 10 == 0:
            best = max(best, program.evaluate(5, seed=99).mean_return())
    assert best == 1000


def test_later_epochs_weigh_by_the_present_policy():
    program, _ = collected(spec("appo", **ONE_PASS))
    training = program.learner
    sent = elsewhere(program)
    samples = training.prepare(sent)
    with torch.no_grad():
        training.updater.flat.parameters.mul_(1.2)
    training.estimate(sent, samples, first=False)
    now = replace(samples, log_probs=training._log_probs(samples.obs, samples.actions, None).detach())
    assert not torch.allclose(now.log_probs, samples.log_probs)
    training.estimate(sent, now, first=True)
    torch.testing.assert_close(samples.targets, now.targets)
