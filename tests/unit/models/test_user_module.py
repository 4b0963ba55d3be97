"""A user's own network: how it is found, built and checked, and that every algorithm but TRPO trains it."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rayagi.algorithms.trpo import TRPOSpec
from rayagi.cli import main
from rayagi.config.errors import ConfigError
from rayagi.config.rules import checked, refuse_unfit_network
from rayagi.config.spec import NetworkSpec
from rayagi.envs import env_info, make_env_factory
from rayagi.models.networks import make_model
from rayagi.models.policy import load_policy
from rayagi.models.recurrent import Sequences
from tests.unit.algorithms import test_collector_learner as decoupled
from tests.unit.algorithms.test_program import (
    SPEC,
    assert_one_gmi_of_2n_and_two_of_n_learn_alike,
    build,
)
from tests.unit.models.test_networks import INFO

ECHO = "tests.fakes.echo:Echo-v0"
NETWORKS = "tests.fakes.networks"
BOTH = pytest.mark.parametrize("name", ["Plain", "Remembering"])
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def named(name, **kwargs):
    return NetworkSpec(module=f"{NETWORKS}:{name}", module_kwargs=kwargs)


def test_a_file_is_found_in_the_working_folder_and_on_python_s_path(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("WIDTH = 7\n")
    (tmp_path / "net.py").write_text(
        "from helper import WIDTH\nfrom tests.fakes.networks import Plain\n\n\n"
        "class Net(Plain):\n    def __init__(self, obs_dim, output_dim):\n"
        "        super().__init__(obs_dim, output_dim, WIDTH)\n"
    )
    whole = make_model(INFO, NetworkSpec(module=f"{tmp_path}/net.py:Net"))
    assert whole.network.module.trunk[0].weight.shape == (7, 5)
    monkeypatch.chdir(tmp_path)
    make_model(INFO, NetworkSpec(module="net.py:Net"))
    monkeypatch.chdir("/")
    monkeypatch.syspath_prepend(tmp_path)
    make_model(INFO, NetworkSpec(module="net.py:Net"))
    make_model(INFO, NetworkSpec(module="net:Net"))


def test_weights_depend_on_the_seed_alone_and_torch_s_generator_is_left_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one = make_model(INFO, named("Plain"), 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    two, other = (make_model(INFO, named("Plain"), seed) for seed in (1, 2))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.network.module.value.weight, other.network.module.value.weight)


def test_layers_that_take_their_sizes_from_the_first_call_get_the_seed_s_weights():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one, two, other = (make_model(INFO, named("Fourier"), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.network.module.outputs.weight, two.network.module.outputs.weight)
    assert not torch.equal(one.network.module.outputs.weight, other.network.module.outputs.weight)
    with pytest.raises(ConfigError, match=r"changes its buffer norm\."):
        make_model(INFO, named("LazilyNormalised"))


def test_a_network_that_changes_torch_for_all_others_is_refused(tmp_path):
    (tmp_path / "net.py").write_text(net(after="torch.set_default_dtype(torch.float64)"))
    try:
        with pytest.raises(
            ConfigError, match=r"calls torch\.set_default_dtype\(torch\.float64\), which holds for"
        ):
            make_model(INFO, NetworkSpec(module=f"{tmp_path}/net.py:Net"))
    finally:
        torch.set_default_dtype(torch.float32)


def test_arguments_of_one_s_own_reach_the_constructor():
    model = make_model(INFO, named("Plain", width=9))
    assert model.network.module.trunk[0].weight.shape == (9, 5)


def test_outputs_and_values_are_the_module_s():
    model = make_model(INFO, named("Plain"))
    obs = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    outputs, values = model.network.module(obs)
    torch.testing.assert_close(model.outputs(obs), outputs)
    torch.testing.assert_close(model.values(obs), values)
    assert (model.state_dim, model.fits_kernels) == (0, False)


def test_a_state_is_carried_over_steps_and_begins_anew_with_each_episode():
    model = make_model(INFO, named("Remembered"))
    observed = torch.zeros(4, 2, 5)
    observed[:, :, 0] = torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0], [8.0, 8.0]])
    done = torch.zeros(4, 2, dtype=torch.bool)
    done[1, 1] = True
    unrolled = model.unroll_values(observed, Sequences(torch.tensor([[2.0], [0.0]]), done))
    # First: 2/2 + 1, then half of it + 2, ...; second: 1, 1/2 + 2, and after the end 4, 4/2 + 8.
    first, second = [2.0, 3.0, 5.5, 10.75], [1.0, 2.5, 4.0, 10.0]
    assert unrolled.outputs.squeeze(-1).tolist() == [
        [10 * a, 10 * b] for a, b in zip(first, second, strict=True)
    ]
    assert unrolled.last.flatten().tolist() == [10.75, 10.0]
    assert {step: states.flatten().tolist() for step, states in unrolled.ends.items()} == {1: [3.0, 2.5]}


HEAD = "import torch\nfrom torch import nn\n\n\n"
NET = HEAD + (
    "class Net(nn.Module):\n    def __init__(self, obs_dim, output_dim):\n        super().__init__()\n"
    "        self.net = nn.Linear(obs_dim, output_dim + 1){after}\n\n"
    "    def forward(self, obs{states}):\n        both = self.net(obs)\n        return {result}\n"
)


def net(result="both[:, :-1], both[:, -1]", after="", states=""):
    return NET.format(result=result, after=f"\n        {after}" if after else "", states=states)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (net("both[:, :-1], both[:, -1:]"), r"values of shape \(3, 1\) for .* shape \(3, 5\).*values of shape \(3,\)"),
        (net("both, both[:, -1]"), r"outputs of shape \(3, 4\) for .* \(3, 5\); return float32 outputs of shape \(3, 3\)"),
        (net("both[:, :-1]"), r"returns a Tensor from forward"),
        (net("both[:, :-1].double(), both[:, -1]"), r"outputs of torch.float64"),
        (net("both[:, :-1] / 0 * 0, both[:, -1]"), r"outputs that are not finite"),
        (net("both[:, :-1].detach(), both[:, -1]"), r"outputs without a gradient"),
        (net("both[:, :-1], both[:, -1].detach()"), r"returns values without a gradient; detach\(\) the trunk"),
        (net(after="self.meta = nn.Linear(2, 2, device='meta')"), r"on another device: meta.weight \(meta\), .*on the CPU"),
        (net(after="self.net = torch.jit.script(self.net)"), r"has TorchScript at 'net', .*leave torch\.jit\.script out"),
        (net("both[:, :-1], None"), r"values that are a NoneType"),
        (net("both[:, :-1], both[:, 2:].mean(0).expand(len(obs), 2)[:, 0]"), r"beside others than alone"),
        (net("nn.functional.dropout(both[:, :-1]), both[:, -1]"), r"at the second call.*Dropout"),
        (net("both[:, :-1], both[:, -1] + obs.clamp_(-0.5, 0.5)[:, 0]"), r"changes the observations that it is given"),
        (net("both[:, :-1], both[:, -1], states.mul_(0.5)", "self.state_dim = 4", ", states"), r"changes the states that"),
        (net("self.bn(both)[:, :-1], both[:, -1]", "self.bn = nn.BatchNorm1d(output_dim + 1)"), r"buffer bn.running_mean"),
        (net("both[:, :-1] * self.mean.mul_(0.9), both[:, -1]", "self.mean = nn.Parameter(torch.ones(1), False)"),
         r"changes its parameter mean as it runs"),
        (net(after="self.double()"), r"not float32: net.weight \(torch.float64\), .*\.float\(\)"),
        (net().replace("self.net = nn", "self.nets = [None]; self.nets[0] = nn"), r"has no parameters to train"),
        (net(after="self.state_dim = 2.5"), r"has state_dim = 2.5"),
        (net(after="self.state_dim = 4", states=", states"), r"returns 2 results.*next states of shape \(3, 4\)"),
        (net(after="self.state_dim = 4"), r"raises .* states of shape \(3, 5\) and \(3, 4\): TypeError"),
        (net("obs @ both, 1"), r"raises in forward .* RuntimeError at .*net.py:12: .*; return float32 outputs of shape"),
        (net().replace("obs_dim, output_dim)", "size)"), r"built with \(5, 3\): TypeError.*write __init__\(self, obs"),
        (net().replace("def forward", "def forwards"), r"has no method forward"),
        ("class Net:\n    pass\n", r"is no torch module: its bases are object"),
        ("class Nett:\n    pass\n", r"net.py has no class of that name; its classes are Nett"),
        ("import torch\n\n1 / 0\n", r"cannot be imported: ZeroDivisionError at .*net.py:3"),
        ("class Net\n", r"cannot be imported: SyntaxError"),
    ],
)  # fmt: skip
def test_a_network_that_does_not_fit_is_refused_with_what_to_do(source, reason, tmp_path):
    (tmp_path / "net.py").write_text(source)
    with pytest.raises(ConfigError, match=reason) as error:
        refuse_unfit_network(NetworkSpec(module=f"{tmp_path}/net.py:Net"), INFO)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (NetworkSpec(module="Net"), "names no class; for example my_net.py:Net"),
        (NetworkSpec(module="no/such/file.py:Net"), "there is no file no/such/file.py in .*set PYTHONPATH"),
        (NetworkSpec(module="no_such_module:Net"), "no_such_module cannot be imported: ModuleNotFoundError"),
        (NetworkSpec(module=f"{NETWORKS}:nn"), "tests.fakes.networks has a module of that name"),
    ],
)
def test_a_name_that_is_no_class_is_refused(network, reason):
    with pytest.raises(ConfigError, match=reason):
        refuse_unfit_network(network, INFO)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"core": "lstm"}, "network.core = 'lstm': means nothing with network.module"),
        ({"shared": True}, "network.shared = True: means nothing with network.module"),
        ({"module": None, "module_kwargs": {"width": 3}}, "network.module_kwargs .* none is given"),
    ],
)
def test_settings_of_rayagi_s_networks_are_refused_beside_it(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        checked(replace(SPEC, network=replace(named("Plain"), **changes)))


def test_trpo_refuses_it():
    with pytest.raises(ConfigError, match="does not go with algorithm = 'trpo'"):
        checked(replace(SPEC, algorithm="trpo", learning=TRPOSpec(), network=named("Plain")))


def test_planning_refuses_it_before_anything_starts(tmp_path, monkeypatch, capsys):
    (tmp_path / "net.py").write_text(net("both[:, :-1], both"))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "Pendulum-v1", "--set", "network.module=net.py:Net"]) == 2
    assert "rayagi: network.module = 'net.py:Net': returns values of shape (3, 2)" in capsys.readouterr().err


def spec_of(name, **changes):
    return replace(SPEC, network=named(name), learning=replace(SPEC.learning, **changes))


@BOTH
def test_before_the_first_step_the_learner_finds_the_probabilities_that_acted(name):
    program = build(spec_of(name, learning_rate=1e-12))
    for _ in range(2):
        assert program.iterate().metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)


@BOTH
def test_one_gmi_of_2n_and_two_gmis_of_n_learn_alike(name):
    assert_one_gmi_of_2n_and_two_of_n_learn_alike(spec_of(name))


@BOTH
def test_it_is_saved_restored_and_evaluated(name):
    spec = spec_of(name)
    program = build(spec)
    program.iterate()
    saved = program.state_dict()
    resumed = build(spec)
    resumed.load_state_dict(saved)
    assert resumed.iterate().metrics["policy_loss"] == program.iterate().metrics["policy_loss"]
    assert program.evaluate(3, seed=1).episode_returns == resumed.evaluate(3, seed=1).episode_returns
    policy = load_policy(saved["shared"], spec, program.learner.policy.info)
    assert torch.equal(
        policy.model.network.module.value.bias,
        saved["shared"]["learner"]["model"]["network.module.value.bias"],
    )


@BOTH
@pytest.mark.parametrize("algorithm", ["appo", "impala"])
def test_asynchronous_algorithms_train_it_on_another_gmi_s_rollouts(name, algorithm):
    spec = replace(decoupled.spec_for(algorithm), network=named(name))

    def parameters(program):
        for _ in range(3):
            program.iterate()
        return program.policy if hasattr(program, "policy") else program.learner.policy

    _, learner = decoupled.run_gmis(spec, 1, 1, parameters)
    start = make_model(learner.info, spec.network, spec.seed).network.module
    assert not torch.equal(learner.model.network.module.value.weight, start.value.weight)


@pytest.mark.parametrize("algorithm", ["ppo", "appo", "impala"])
def test_choices_that_it_masks_are_never_taken(algorithm):
    learning = SPEC.learning if algorithm == "ppo" else decoupled.spec_for(algorithm).learning
    spec = replace(
        SPEC, algorithm=algorithm, network=named("Masking"), learning=replace(learning, entropy_coef=0.01)
    )
    refuse_unfit_network(spec.network, env_info(ECHO, kwargs={"action": "discrete"}))
    program = build(spec, make_env=make_env_factory(ECHO, kwargs={"action": "discrete"}))
    for _ in range(3):
        metrics = program.iterate().metrics
        assert 0 < metrics["entropy"] <= math.log(2)  # of the two choices that are left
        positive, actions = program.rollout.obs[..., 0] > 0, program.rollout.actions
        assert not (actions[positive] == 0).any()
        assert not (actions[~positive] == 2).any()


def test_the_examples_of_the_documentation_train(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "explanation" / "models.md").read_text()
    examples = re.findall(r"```python title=\"\w+\.py\"\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 2
    for number, example in enumerate(examples):
        (tmp_path / f"net{number}.py").write_text(example)
        network = NetworkSpec(module=f"{tmp_path}/net{number}.py:Net")
        program = build(replace(SPEC, network=network))
        before = program.learner.policy.model.network.module.value.weight.clone()
        assert program.iterate().metrics["env_steps"] == 32
        assert not torch.equal(program.learner.policy.model.network.module.value.weight, before)
        assert bool(program.learner.policy.state_dim) == (number == 1)
