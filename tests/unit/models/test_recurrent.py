"""Recurrent cores: sequences with resets, stored states, values of final observations, and layouts that agree."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from actors.gmi import GmiContext
from actors.protocols import ActionSpec, EnvInfo
from actors.rollout import minibatch_orders
from rayagi.algorithms.factory import training_factory
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.trpo import TRPOSpec
from rayagi.config.errors import ConfigError
from rayagi.config.rules import checked
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.models.networks import ActorCritic
from rayagi.models.recurrent import RecurrentNetwork, RolloutMemory, Sequences
from tests.unit.algorithms.test_program import SPEC, build, gradients_of_an_update, run_gmis

CORES = pytest.mark.parametrize("core", ["lstm", "gru"])
INFO = EnvInfo(
    env_id="Some-v0",
    engine="fake",
    obs_dim=3,
    action=ActionSpec(kind="continuous", dim=2),
    max_episode_steps=9,
)
LENGTH, COUNT = 7, 4
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def network_of(core, seed=0):
    return ActorCritic(INFO, NetworkSpec(hidden=(6,), core=core, core_size=5), seed).policy


def some_sequences(state_dim):
    generator = torch.Generator().manual_seed(1)
    observed = torch.randn(LENGTH, COUNT, 3, generator=generator)
    done = torch.zeros(LENGTH, COUNT, dtype=torch.bool)
    done[2, 1] = done[2, 3] = done[5, 0] = done[6, 2] = True
    return observed, Sequences(torch.randn(COUNT, state_dim, generator=generator), done)


def by_cells(network, observed, sequences):
    """The same pass, one environment and step at a time, by the textbook's equations of the gates."""
    weights = {name: value.detach() for name, value in network.core.named_parameters()}
    outputs = torch.zeros(LENGTH, COUNT, 2)
    for env in range(COUNT):
        h, c = sequences.states[env][:5], sequences.states[env][5:]
        for t in range(LENGTH):
            x = network.hidden(observed[t, env])
            from_x = weights["weight_ih_l0"] @ x + weights["bias_ih_l0"]
            from_h = weights["weight_hh_l0"] @ h + weights["bias_hh_l0"]
            if isinstance(network.core, nn.LSTM):
                i, f, g, o = (from_x + from_h).split(5)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            else:
                (r, z, n), (hr, hz, hn) = from_x.split(5), from_h.split(5)
                r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
                h = (1 - z) * (n + r * hn).tanh() + z * h
            outputs[t, env] = network.output(h)
            if sequences.done[t, env]:
                h, c = torch.zeros(5), torch.zeros(5)
    return outputs


@CORES
def test_a_pass_over_sequences_is_that_of_single_cells_with_a_reset_after_each_episode(core):
    network = network_of(core)
    observed, sequences = some_sequences(network.state_dim)
    expected = by_cells(network, observed, sequences)
    torch.testing.assert_close(network.unroll(observed, sequences).outputs, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        network(observed.flatten(0, 1), sequences), expected.flatten(0, 1), atol=1e-6, rtol=1e-5
    )


@CORES
def test_single_steps_leave_the_states_of_the_pass(core):
    network = network_of(core)
    observed, sequences = some_sequences(network.state_dim)
    unrolled = network.unroll(observed, sequences)
    states = sequences.states
    assert sorted(unrolled.ends) == [2, 5, 6]
    for t in range(LENGTH):
        outputs, states = network.step(observed[t], states)
        torch.testing.assert_close(outputs, unrolled.outputs[t], atol=1e-6, rtol=1e-5)
        if t in unrolled.ends:
            torch.testing.assert_close(states, unrolled.ends[t], atol=1e-6, rtol=1e-5)
        states = states * ~sequences.done[t].unsqueeze(1)
    torch.testing.assert_close(states, unrolled.last, atol=1e-6, rtol=1e-5)
    assert unrolled.last[2].abs().sum() == 0  # its episode ended on the last step


@CORES
def test_initial_weights_depend_on_the_seed_alone_and_the_forget_gate_starts_open(core):
    torch.manual_seed(1)
    one = network_of(core)
    torch.manual_seed(2)
    two, other = network_of(core), network_of(core, seed=3)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    weight = one.core.weight_hh_l0
    assert not torch.equal(weight, other.core.weight_hh_l0)
    torch.testing.assert_close(weight[:5] @ weight[:5].T, torch.eye(5))  # a gate's weights are orthogonal
    if core == "lstm":
        assert one.core.bias_ih_l0.tolist() == [0.0] * 5 + [1.0] * 5 + [0.0] * 10


def test_a_minibatch_takes_the_states_and_ends_of_its_sequences():
    # T = 4 steps of N = 3 environments in sequences of 2: states before steps 0 and 2.
    states = torch.arange(6.0).view(2, 3, 1)
    done = torch.zeros(4, 3, dtype=torch.bool)
    done[3, 1] = True
    memory = RolloutMemory(states, done)
    # Sequences: steps 2, 3 of environment 1, and steps 0, 1 of environment 2. Sample index = step * 3 + environment.
    sequences = memory.of(torch.tensor([7, 2, 10, 5]))
    assert sequences.states.flatten().tolist() == [4.0, 2.0]
    assert sequences.done.tolist() == [[False, False], [True, False]]
    assert memory.whole().states.flatten().tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("length", "minibatches", "num_envs"), [(2, 4, 3), (8, 4, 4), (4, 4, 6), (8, 1, 3)])
def test_minibatches_are_whole_sequences_that_cover_the_rollout_once(length, minibatches, num_envs):
    common = {"seed": 5, "iteration": 2, "num_steps": 8, "num_epochs": 2, "num_minibatches": minibatches}
    orders = minibatch_orders(first_env_index=0, num_envs=num_envs, sequence_length=length, **common)
    for epoch in orders:
        assert sorted(epoch.flatten().tolist()) == list(range(8 * num_envs))
        for order in epoch:
            steps, envs = order.view(length, -1) // num_envs, order.view(length, -1) % num_envs
            assert (steps[0] % length == 0).all()
            assert torch.equal(steps, steps[0] + torch.arange(length).unsqueeze(1))
            assert (envs == envs[0]).all()
    assert minibatches == 1 or not torch.equal(orders[0], orders[1])


def test_two_gmis_deal_out_the_sequences_of_one():
    common = {
        "seed": 5, "iteration": 2, "num_steps": 8, "num_epochs": 2, "num_minibatches": 2, "sequence_length": 8
    }  # fmt: skip
    whole = minibatch_orders(first_env_index=0, num_envs=8, **common)
    parts = [minibatch_orders(first_env_index=first, num_envs=4, **common) for first in (0, 4)]
    for epoch in range(2):
        for number in range(2):
            envs = set((whole[epoch, number] % 8).tolist())
            halves = [
                set((part[epoch, number] % 4 + first).tolist())
                for part, first in zip(parts, (0, 4), strict=True)
            ]
            assert envs == halves[0] | halves[1]


def spec_of(core, learning=None, **changes):
    network = replace(SPEC.network, core=core, core_size=6)
    algorithm = {TRPOSpec: "trpo", PPOSpec: "ppo"}[type(learning or SPEC.learning)]
    return replace(
        SPEC, network=network, algorithm=algorithm, learning=replace(learning or SPEC.learning, **changes)
    )


@CORES
@pytest.mark.parametrize("length", [None, 4, 2])
def test_before_the_first_step_the_learner_finds_the_probabilities_that_acted(core, length):
    # Episodes of at most 7 steps end within rollouts of 8; the second rollout begins with states of the first.
    program = build(spec_of(core, sequence_length=length, learning_rate=1e-12))
    for _ in range(2):
        metrics = program.iterate().metrics
        assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
        assert metrics["clip_fraction"] == 0.0
    learner = program.learner
    batch, _ = learner.prepare(program.rollout)
    outputs = learner.policy.model.outputs(batch.obs, batch.memory.whole())
    torch.testing.assert_close(outputs, program.rollout.outputs.flatten(0, 1), atol=1e-5, rtol=1e-4)
    assert program.rollout.states.abs().sum() > 0


@CORES
def test_values_follow_each_episode_to_its_final_observation(core):
    program = build(spec_of(core))
    program.iterate()
    learner, rollout = program.learner, program.rollout
    _, everything = learner._observed(rollout)
    values, next_values = learner._values(rollout, everything)
    model = learner.policy.model
    # One environment after the other, a step at a time, with the state at the start of the rollout.
    ends = {
        (step, int(env)): obs
        for step, ids, found in rollout.finals
        for env, obs in zip(ids, found, strict=True)
    }
    assert len(ends) >= rollout.num_envs
    for env in range(rollout.num_envs):
        states = rollout.states[0, env : env + 1]
        for t in range(rollout.num_steps):
            with torch.no_grad():
                seen = rollout.obs[t, env : env + 1]
                value_state = states[:, model.policy.state_dim :]
                value, _ = model.value.step(seen, value_state)
                _, states = model.step(seen, states)
                torch.testing.assert_close(values[t, env], value[0, 0], atol=1e-5, rtol=1e-4)
                following = ends.get((t, env))
                if following is not None:
                    last = learner.policy.observe(following.unsqueeze(0))
                    expected = model.step_values(last, states[:, model.policy.state_dim :])[0]
                    torch.testing.assert_close(next_values[t, env], expected, atol=1e-5, rtol=1e-4)
                    states = torch.zeros_like(states)
                elif t + 1 < rollout.num_steps:
                    assert next_values[t, env] == values[t + 1, env]


@CORES
@pytest.mark.parametrize("length", [None, 4])
def test_one_gmi_of_2n_and_two_gmis_of_n_have_the_same_recurrent_gradients(core, length):
    spec = spec_of(core, sequence_length=length)
    whole = gradients_of_an_update(build(replace(spec, gmi=GmiSpec(num_envs=8))))
    halves = run_gmis(spec, 2, gradients_of_an_update)
    assert len(whole) == len(halves[0]) == 4  # 2 epochs of 2 minibatches
    scale = float(whole[0].abs().max())
    assert torch.allclose(whole[0], halves[0][0], rtol=0, atol=2e-6 * scale)
    assert torch.allclose(whole[-1], halves[0][-1], rtol=0, atol=1e-4 * scale)
    for a, b in zip(*halves, strict=True):
        assert torch.equal(a, b)


@CORES
def test_a_resumed_recurrent_run_continues_to_the_last_bit(core):
    straight = build(spec_of(core))
    for _ in range(2):
        straight.iterate()
    saved = straight.state_dict()
    resumed = build(spec_of(core))
    resumed.load_state_dict(saved)
    assert resumed.iterate().metrics["policy_loss"] == straight.iterate().metrics["policy_loss"]
    again = build(spec_of(core))
    again.load_state_dict({"shared": saved["shared"]})  # environments restart, and so do the states
    again.iterate()
    assert again.rollout.states[0].abs().sum() == 0


def test_evaluation_does_not_touch_the_states_of_training():
    program, other = build(spec_of("lstm")), build(spec_of("lstm"))
    for each in (program, other):
        each.iterate()
    program.evaluate(3, seed=1)
    assert program.iterate().metrics["policy_loss"] == other.iterate().metrics["policy_loss"]


@CORES
def test_trpo_keeps_its_bound_with_a_recurrent_policy(core):
    learning = TRPOSpec(rollout_length=8, num_minibatches=2, num_epochs=2, max_kl=0.01)
    program = build(spec_of(core, learning))
    for _ in range(3):
        metrics = program.iterate().metrics
        assert 0 < metrics["approx_kl"] <= 0.0105
        assert metrics["backtracks"] < 10


@CORES
def test_trpo_differentiates_a_core_twice_without_cudnn_and_leaves_its_parameters_in_place(core, monkeypatch):
    def refuse(self):
        raise AssertionError("on a GPU torch would move the parameters out of the flat vector")

    program = build(spec_of(core, TRPOSpec(rollout_length=8, num_minibatches=2, num_epochs=1)))
    model, enabled = program.learner.policy.model, []
    model.policy.core.register_forward_hook(lambda *_: enabled.append(torch.backends.cudnn.enabled))
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", refuse)
    program.iterate()
    assert enabled.count(False) >= 3  # the old policy, its Fisher products, and a candidate
    assert enabled.count(True) == 8  # acting
    assert torch.backends.cudnn.enabled


@pytest.mark.parametrize(
    ("changes", "num_envs", "reason"),
    [
        ({"sequence_length": 3}, 4, "sequence_length = 3: must divide ppo.rollout_length = 8; use 2 or 4"),
        ({"sequence_length": 8, "num_minibatches": 4}, 6, "make gmi.num_envs a multiple of 4, or ppo.sequence_length"),
        ({"sequence_length": 0}, 4, "sequence_length = 0: must be at least 1"),
    ],
)  # fmt: skip
def test_sequences_that_cannot_be_shared_are_refused_with_what_to_do(changes, num_envs, reason):
    spec = replace(spec_of("lstm", **changes), gmi=GmiSpec(num_envs=num_envs))
    with pytest.raises(ConfigError) as error:
        checked(spec)
    assert reason in str(error.value)


def test_unequal_gmis_whose_environments_form_no_whole_groups_are_refused():
    # 6 and 2 environments, each to be shared as whole sequences by 4 minibatches.
    spec = replace(spec_of("lstm", num_minibatches=4), gmi=GmiSpec(num_envs=4, slices=(3.0, 1.0)))
    with pytest.raises(ConfigError, match=r"cannot share the sequences of a GMI's [62] environments"):
        run_gmis(spec, 2, lambda program: None)


def test_a_model_without_a_core_has_no_state():
    assert ActorCritic(INFO, NetworkSpec(hidden=(4,))).state_dim == 0
    assert ActorCritic(INFO, NetworkSpec(hidden=(4,), core="lstm", core_size=5)).state_dim == 2 * 2 * 5
    assert ActorCritic(INFO, NetworkSpec(hidden=(4,), core="gru", core_size=5)).state_dim == 2 * 5
    assert isinstance(ActorCritic(INFO, NetworkSpec(hidden=(4,), core="gru")).value, RecurrentNetwork)


@pytest.mark.parametrize(
    ("core", "solves"),
    [("lstm", True), pytest.param("gru", True, marks=pytest.mark.slow), ("none", False)],
)
def test_a_recurrent_policy_solves_a_maze_that_one_without_memory_cannot(core, solves):
    spec = RunSpec(
        env=EnvSpec(id="experiments.learning.tmaze:TMaze-v0", kwargs={"length": 5}),
        gmi=GmiSpec(num_envs=16),
        network=NetworkSpec(hidden=(32,), core=core, core_size=32),
        learning=PPOSpec(rollout_length=32, num_minibatches=4, learning_rate=1e-3, entropy_coef=0.01),
    )
    program = training_factory(spec)(GmiContext.local("TMaze"))
    for _ in range(18):
        program.iterate()
    mean = program.evaluate(40, seed=5).mean_return()
    program.close()
    assert mean == 1.0 if solves else mean < 0.5
