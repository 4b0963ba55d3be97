"""DQN's step against hand arithmetic, its options on a small exact task, and its exploration."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.protocols import ActionSpec, EnvInfo
from actors.replay import Keys, Selection, gather
from actors.roles import Agent
from actors.rollout import Rollout
from collectives.solo import SoloCommunicator
from rayagi.algorithms.dqn import DQN, DQNSpec
from rayagi.algorithms.dqn.learner import LEAST_PRIORITY, DQNLearner, DQNUpdater, QModel
from rayagi.algorithms.publishing import published_tensors
from rayagi.algorithms.transitions import ACTION, DISCOUNT, NEXT_OBS, OBS, REWARD, Transitions
from rayagi.config.errors import ConfigError
from rayagi.config.presets import preset
from rayagi.config.rules import broken_rules, refuse_unfit_env
from rayagi.config.spec import NetworkSpec
from rayagi.envs import make_env_factory
from rayagi.models.policy import NetworkPolicy
from tests.unit.algorithms.test_collector_learner import after, run_gmis
from tests.unit.algorithms.test_program import build, run_members

CPU = torch.device("cpu")
INFO = EnvInfo(
    env_id="x",
    engine="x",
    obs_dim=2,
    action=ActionSpec(kind="discrete", dim=1, num_choices=2),
    max_episode_steps=None,
)
NETWORK = NetworkSpec(hidden=(32, 32), activation="relu")
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def updater(**settings):
    spec = DQNSpec(**settings)
    made = DQNUpdater(QModel(INFO, NETWORK, spec, 0), spec, SoloCommunicator(), INFO, weight=1.0)
    made.begin(seed=0, learning_rate_factor=1.0)
    return made


def constant(network, *outputs):
    """Give a network without two streams these outputs in every state."""
    with torch.no_grad():
        network.advantage[-1].weight.zero_()
        network.advantage[-1].bias.copy_(torch.tensor(outputs))


def transitions(actions, rewards, discounts, weights=None):
    count = len(actions)
    return Transitions(
        torch.ones(count, 2),
        torch.ones(count, 2),
        torch.tensor(actions),
        torch.tensor(rewards),
        torch.tensor(discounts),
        None if weights is None else torch.tensor(weights),
    )


def loss_of(batch, **settings):
    """Loss and priorities where Q = (1, 5), and (3, 2) in the target network."""
    made = updater(**settings)
    constant(made.model.network, 1.0, 5.0)
    constant(made.target.module, 3.0, 2.0)
    return made.step(batch)[0].item(), made.priorities.tolist()


def test_the_target_is_the_target_networks_best_action():
    # y = 1 + 0.5 * 3 = 2.5; error 1.5, of Huber's loss 1.5 - 0.5
    assert loss_of(transitions([0], [1.0], [0.5])) == (pytest.approx(1.0), pytest.approx([1.5]))


def test_with_double_the_network_chooses_and_the_target_network_values():
    # argmax (1, 5) = 1, of value 2: y = 1 + 0.5 * 2 = 2; error 1, loss 0.5
    found = loss_of(transitions([0], [1.0], [0.5]), double=True)
    assert found == (pytest.approx(0.5), pytest.approx([1.0]))


def test_a_terminated_episode_has_no_next_value_and_weights_weigh_each_error():
    # errors 1 - 1 = 0 and 6 - 5 = 1; then 0 * 1 + 0.5 * 0.5 over 2
    batch = transitions([0, 1], [1.0, 6.0], [0.0, 0.0], [1.0, 0.5])
    assert loss_of(batch) == (pytest.approx(0.125), pytest.approx([0.0, 1.0]))


def test_a_distribution_moves_to_the_projected_one_of_the_best_action():
    made = updater(num_atoms=3, v_min=-1.0, v_max=1.0)  # atoms -1, 0, 1
    constant(made.model.network, *[0.0] * 6)  # uniform
    # The target: action 0 is about -1 for certain, action 1 about 1
    constant(made.target.module, 40.0, 0.0, 0.0, 0.0, 0.0, 40.0)
    assert made.model.action_values(torch.ones(1, 2)).tolist() == [pytest.approx([0.0, 0.0])]
    # 0.25 + 0.5 * 1 = 0.75: m = (0, 0.25, 0.75); cross entropy log 3 = 1.0986; less the entropy 0.5623
    loss = made.step(transitions([0], [0.25], [0.5]))[0].item()
    assert loss == pytest.approx(1.0986, abs=1e-4)
    assert made.priorities.tolist() == pytest.approx([1.0986 - 0.5623], abs=1e-4)


def test_each_pass_of_a_noisy_step_has_a_sample_of_its_own():
    made, passes = updater(noisy=True, double=True), []
    for name, network in (("network", made.model.network), ("target", made.target.module)):
        network.register_forward_hook(
            lambda _, given, __, name=name: passes.append((name, given[0].clone(), given[1]))
        )
    batch = transitions([0, 1], [1.0, 1.0], [0.5, 0.5])._replace(next_obs=torch.zeros(2, 2))
    made.step(batch)
    # Q(s, .); then the target's Q(s', .), and the network's, which chooses a* (Fortunato et al. 2018, §3.2).
    assert [(name, bool(obs.any())) for name, obs, _ in passes] == [
        ("network", True),
        ("target", False),
        ("network", False),
    ]
    noises = [noise for *_, noise in passes]
    assert all(noise.shape == (1, made.model.layer_noise_dim) for noise in noises)
    assert not any(torch.equal(noises[i], noises[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_the_target_network_is_copied_every_c_steps():
    made = updater(target_interval=3)
    batch = transitions([0, 1], [1.0, 0.0], [0.9, 0.0])
    copied = []
    for _ in range(6):
        made.step(batch)
        made.steps += 1
        pairs = zip(made.model.network.parameters(), made.target.module.parameters(), strict=True)
        copied.append(all(torch.equal(a, b) for a, b in pairs))
    assert copied == [False, False, True, False, False, True]


OPTIONS = [
    {},
    {"double": True},
    {"dueling": True},
    {"num_atoms": 21, "v_min": 0.0, "v_max": 1.0},
    {"noisy": True, "sigma0": 0.05},
    {"double": True, "dueling": True, "num_atoms": 21, "v_min": 0.0, "v_max": 1.0, "noisy": True, "sigma0": 0.05},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_values_of_a_small_chain_become_the_optimal_ones(options):
    # In s_0 action 0 leads to s_1, and action 1 stays for 0.1; in s_1 action 0 ends with 1, and action 1 goes back.
    # With discount 0.5: Q(s_1) = (1, 0.25), Q(s_0) = (0.5, 0.1 + 0.25)
    s0, s1 = torch.eye(2)
    batch = Transitions(
        torch.stack((s0, s0, s1, s1)),
        torch.stack((s1, s0, s1, s0)),
        torch.tensor([0, 1, 0, 1]),
        torch.tensor([0.0, 0.1, 1.0, 0.0]),
        torch.tensor([0.5, 0.5, 0.0, 0.5]),
    )
    made = updater(learning_rate=3e-3, target_interval=20, **options)
    for _ in range(400):
        made.step(batch)
        made.steps += 1
    found = made.model.outputs(torch.eye(2)).detach()
    assert torch.allclose(found, torch.tensor([[0.5, 0.35], [1.0, 0.25]]), atol=0.06)


def policy(spec, info=INFO):
    return NetworkPolicy(QModel(info, NETWORK, spec, 0), info, None, CPU)


def learner(spec, num_envs=2):
    return DQNLearner(
        policy=policy(spec), spec=spec, communicator=SoloCommunicator(), num_envs=num_envs, first_env_index=0,
        total_envs=num_envs, seed=0, total_env_steps=80,
    )  # fmt: skip


def rollout(reward=1.0, num_steps=4, num_envs=2):
    made = Rollout.allocate(num_steps, num_envs, INFO, CPU)
    made.raw_obs.normal_(generator=torch.Generator().manual_seed(0))
    made.rewards.fill_(reward)
    return made


def test_priorities_follow_the_errors_and_new_transitions_have_the_largest_so_far():
    spec = DQNSpec(
        prioritized=True,
        learning_starts=16,
        batch_size=64,
        updates_per_step=0.125,
        priority_exponent=1.0,
        learning_rate=1e-12,
    )
    made = learner(spec)
    made.learn(rollout(1.0))
    weights = made._priorities.weights
    # Two environments of four steps: two rows.
    assert weights[:3].tolist() == [[1.0] * 4 + [0.0] * 4] * 2 + [[0.0] * 8]
    assert made.replay.status()["priority"][:3].tolist() == [4.0, 4.0, 0.0]
    made.learn(rollout(5.0))  # one gradient step, on 64 draws of 16 transitions
    row, step = weights.nonzero()
    found = made.replay.status()
    keys = Keys(row, found["generation"][row])
    everything = Selection(keys, step, np.ones(16), np.ones(16, np.float32))
    batch = gather(made.replay, everything, made.layout.subscriptions).values
    rows = {name: torch.from_numpy(column) for name, column in batch.items()}
    with torch.no_grad():
        q, following = (made.policy.model.outputs(rows[name]) for name in (OBS, NEXT_OBS))
        errors = (
            q.gather(1, rows[ACTION].unsqueeze(1)).squeeze(1)
            - rows[REWARD]
            - rows[DISCOUNT] * following.amax(1)
        )
    wanted = errors.abs().double().numpy() + LEAST_PRIORITY
    priorities = weights[row, step]
    drawn = priorities != 1.0
    assert drawn.sum() >= 8
    assert priorities[drawn] == pytest.approx(wanted[drawn], rel=1e-4)
    assert found["priority"].tolist() == pytest.approx(weights.sum(1).tolist())
    largest = priorities.max()
    assert largest > 1.0
    made._insert(rollout(0.0))
    assert weights[4:6, :4].tolist() == [[largest] * 4] * 2


def test_several_trainers_weigh_transitions_as_one_batch():
    spec = DQNSpec(
        prioritized=True, priority_exponent=1.0, importance_exponent=0.5, batch_size=16, capacity=64
    )

    def weights(communicator):
        made = DQNLearner(
            policy=policy(spec), spec=spec, communicator=communicator, num_envs=2, first_env_index=0,
            total_envs=4, seed=0, total_env_steps=None,
        )  # fmt: skip
        made._insert(rollout())
        if communicator.rank == 0:
            made._insert(rollout())
            row, ones = made.replay.status()[:1], np.ones(1)
            keys = Keys(row["index"].copy(), row["generation"].copy())
            made._priorities.update(Selection(keys, np.array([2]), ones, ones), [9.0])
        made.selector = made._priorities.selector(0.5)
        found, step = [], made.updater.step
        made.updater.step = lambda batch: found.append(batch.weights) or step(batch)
        made.updater.begin(seed=0, learning_rate_factor=1.0)
        made._step(0, 0)
        return sorted(set(found[0].tolist()))

    # Of 16 transitions (16 P)^-1/2 of P = 9/24 and 1/24: 1 / sqrt 6 and sqrt 1.5, the largest. Of 8 with P = 1/8: 1.
    first, second = run_members(2, weights)
    assert first == pytest.approx([1 / 3, 1])
    assert second == pytest.approx([1 / math.sqrt(1.5)])


def test_beta_rises_to_one_at_the_end_of_the_run():
    made = learner(DQNSpec(prioritized=True, learning_starts=1000))
    rises = []
    for _ in range(11):
        made.learn(rollout())
        rises.append(made.selector.importance)
    # 8 of 80 steps an iteration, from 0.4 to 1, before the iteration's steps
    assert rises == pytest.approx([0.4 + 0.06 * i for i in range(11)])


def test_epsilon_is_one_until_learning_starts_then_falls_by_environment_steps():
    made = learner(
        DQNSpec(learning_starts=16, epsilon_start=0.8, epsilon_end=0.2, epsilon_steps=48, batch_size=4)
    )
    found = [1.0] + [made.learn(rollout())["epsilon"] for _ in range(7)]
    # After 8, 16, ... 56 steps
    assert found == pytest.approx([1.0, 1.0, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2])
    assert DQN.metrics[-1].name == "epsilon"


def test_collectors_get_epsilon_with_the_parameters():
    spec = DQNSpec()
    learns, collects = policy(spec), policy(spec)
    learns.model.head.epsilon.fill_(0.0)
    whose = {"seed": 1, "first_env_index": 0, "number": 0}
    assert collects.noise(5, 3, **whose).isinf().any(-1).all()
    names = {f"model.{name}" for name in collects.model.state_dict()}
    assert "model.head.epsilon" in names == published_tensors(learns).keys()
    collects.model.load_state_dict(learns.model.state_dict())
    assert not collects.noise(5, 3, **whose).any()


def test_each_environment_acts_with_weights_of_its_own_and_evaluation_with_their_means():
    noisy = policy(DQNSpec(noisy=True))
    noise = noisy.noise(4, 3, seed=1, first_env_index=0, number=0)
    assert noise.shape == (4, 3, noisy.noise_dim)
    assert torch.equal(noise[0], noise[3])  # of a whole rollout
    assert not torch.equal(noise[0, 0], noise[0, 1])
    assert torch.equal(noise[:, 1:], noisy.noise(4, 2, seed=1, first_env_index=1, number=0))
    obs = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    rows = Rollout.allocate(4, 3, INFO, CPU)
    actions = Agent(noisy).through(rows, noise)(2, obs)
    values = [noisy.model.action_values(obs[i : i + 1], noise[2, i : i + 1]).detach() for i in range(3)]
    assert torch.allclose(rows.outputs[2], torch.cat(values), atol=1e-6)
    assert actions.tolist() == rows.outputs[2].argmax(-1).tolist() == rows.actions[2].tolist()
    assert torch.equal(rows.raw_obs[2], obs)
    assert Agent(noisy).act_greedily(obs).tolist() == noisy.model.outputs(obs).argmax(-1).tolist()


def test_spaces_and_networks_that_do_not_fit_are_refused_with_what_does():
    spec = replace(preset("CartPole-v1", "dqn"), network=NETWORK)
    box = replace(INFO, action=ActionSpec(kind="continuous", dim=3, low=(-1.0,) * 3, high=(1.0,) * 3))
    several = replace(INFO, action=ActionSpec(kind="multi_discrete", dim=2, choices=(2, 3)))
    refuse_unfit_env(spec, INFO)
    with pytest.raises(
        ConfigError, match=r"needs one choice as action, and x's is a box of 3 reals.*'sac', 'td3' or 'ppo'"
    ):
        refuse_unfit_env(spec, box)
    with pytest.raises(ConfigError, match=r"needs one choice as action, and x's are 2 at once.*'ppo'"):
        refuse_unfit_env(spec, several)
    for network in ({"core": "lstm"}, {"shared": True}, {"module": "net.py:Net"}, {"critic_only": ("0:1",)}):
        assert [str(error) for error in broken_rules(replace(spec, network=replace(NETWORK, **network)))]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_atoms": 51, "v_min": 3.0, "v_max": 3.0}, "less than dqn.v_max = 3.0"),
        ({"num_atoms": 51, "v_max": float("nan")}, "less than dqn.v_max"),
        ({"num_atoms": 0}, "at least 1"),
        ({"target_interval": 0}, "at least 1"),
        ({"epsilon_end": 1.5}, "between 0 and 1"),
        ({"sigma0": 0.0}, "greater than 0"),
        ({"priority_exponent": -1.0}, "at least 0"),
        ({"importance_exponent": 1.5}, "at most 1"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, said):
    assert not list(DQNSpec().broken_rules("dqn"))
    assert said in " ".join(str(error) for error in DQNSpec(**settings).broken_rules("dqn"))


@pytest.mark.parametrize("options", [{}, {"prioritized": True, "noisy": True, "n_step": 3}])
def test_a_separate_learner_tells_collectors_how_to_explore(options):
    base = preset("CartPole-v1", "dqn")
    spec = replace(
        base,
        gmi=replace(base.gmi, template="decoupled", num_envs=4, collective_timeout_s=30.0),
        network=NETWORK,
        learning=DQNSpec(
            rollout_length=8, learning_starts=64, batch_size=16, epsilon_steps=64, epsilon_end=0.1, max_lag=0, **options
        ),
    )  # fmt: skip
    (_, collected), (updates, learned) = run_gmis(
        spec, 1, 1, after(6), make_env=make_env_factory("CartPole-v1")
    )
    epsilon = 0.0 if options else 0.1
    assert float(learned["learner"]["model"]["head.epsilon"]) == pytest.approx(epsilon)
    # It may have read the parameters before the last update
    assert float(collected["learner"]["model"]["head.epsilon"]) == pytest.approx(epsilon)
    assert learned["learner"]["steps"] == sum(u.metrics["gradient_steps"] for u in updates) > 0
    assert updates[-1].metrics["replay_transitions"] == 6 * 32


def test_a_restored_run_goes_on_with_its_epsilon_and_refills_its_replay():
    base = preset("CartPole-v1", "dqn")
    learning = DQNSpec(rollout_length=8, learning_starts=32, batch_size=16, epsilon_steps=256)
    spec = replace(base, gmi=replace(base.gmi, num_envs=4), network=NETWORK, learning=learning)
    first, second = (build(spec, make_env=make_env_factory("CartPole-v1")) for _ in range(2))
    for _ in range(3):
        first.iterate()
    second.load_state_dict({"shared": first.state_dict()["shared"]})
    heads = [program.agent.policy.model.head for program in (first, second)]
    assert heads[0].epsilon == heads[1].epsilon == pytest.approx(1 - 0.95 * 96 / 256)
    steps = second.learner.updater.steps
    assert steps == first.learner.updater.steps > 0
    results = [second.iterate().metrics for _ in range(2)]
    assert [result["gradient_steps"] for result in results] == [8.0, 8.0]  # 32 steps are in at once
    assert second.learner.updater.steps == steps + 16


def test_priorities_are_restored_with_the_replay(tmp_path):
    spec = DQNSpec(prioritized=True, learning_starts=8, batch_size=16)
    run, resumed = learner(spec), learner(spec)
    run.learn(rollout(5.0))
    assert run.new_priority > 1.0
    assert run.save_replay(tmp_path / "replay")
    local = {**run.local_state(), "replay": tmp_path / "replay"}
    resumed.load_state(run.shared_state(), local)
    assert resumed.new_priority == run.new_priority
    weights = run._priorities.weights
    assert len(set(weights[weights > 0].tolist())) > 2
    assert (resumed._priorities.weights == weights).all()
    first, second = (
        [each.learn(rollout(2.0))[name] for name in DQNUpdater.measured] for each in (run, resumed)
    )
    assert first == second
    assert (resumed._priorities.weights == weights).all()
    # Of a run that drew uniformly: a row's transitions share its priority.
    resumed.load_state(run.shared_state(), {name: local[name] for name in local if name != "step_weights"})
    assert resumed._priorities.weights.sum(1).tolist() == pytest.approx(
        resumed.replay.status()["priority"].tolist()
    )
    held = resumed._priorities.weights.copy()
    resumed.load_state(run.shared_state(), None)  # without a replay: what is held keeps its priorities
    assert resumed.new_priority == 1.0
    assert (resumed._priorities.weights == held).all()


def test_smaller_errors_leave_the_largest_priority_so_far():
    spec = DQNSpec(
        prioritized=True, learning_starts=8, batch_size=8, updates_per_step=0.125, learning_rate=1e-12
    )
    made = learner(spec)
    made.learn(rollout(50.0))
    largest = made.new_priority
    assert largest > 10
    made.updater._errors = lambda batch, taken, rows: (taken.sum(1) * 0, torch.full((len(rows),), 0.5))
    made.learn(rollout(0.0))
    assert made.new_priority == largest
