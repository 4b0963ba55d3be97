"""rl_module(rl_module_spec=): RLlib's way to name an RLModule is rayagi's network.module."""

import gymnasium
import pytest
from ray.rllib.core.rl_module import MultiRLModuleSpec, RLModuleSpec

from rayagi import PPOConfig
from rayagi.config.errors import ConfigError
from tests.fakes.rl_modules import Trunk


def config(spec):
    return PPOConfig().environment("Pendulum-v1").rl_module(rl_module_spec=spec)


def test_the_class_and_its_model_config_become_the_network():
    network = config(RLModuleSpec(module_class=Trunk, model_config={"width": 9})).to_run_spec().network
    assert network.module == "tests.fakes.rl_modules:Trunk"
    assert network.module_kwargs == {"width": 9}
    assert config(RLModuleSpec(module_class=Trunk)).to_run_spec().network.module_kwargs == {}
    assert PPOConfig().environment("Pendulum-v1").to_run_spec().network.module is None


def test_a_class_that_other_processes_cannot_import_is_refused():
    class Local(Trunk):
        pass

    with pytest.raises(ConfigError, match="top of a module that other processes can import; move it"):
        config(RLModuleSpec(module_class=Local)).to_run_spec()


def test_what_the_environment_decides_is_refused():
    with pytest.raises(ConfigError, match=r"action_space = Discrete.*rayagi decides this itself"):
        config(RLModuleSpec(module_class=Trunk, action_space=gymnasium.spaces.Discrete(2))).to_run_spec()


def test_other_specs_are_refused_with_what_to_write():
    with pytest.raises(ConfigError, match=r"rayagi trains one RLModule; give RLModuleSpec"):
        config(MultiRLModuleSpec(rl_module_specs={"a": RLModuleSpec(module_class=Trunk)})).to_run_spec()
    with pytest.raises(
        ConfigError,
        match=r"^rl_module\(rl_module_spec=\)\.module_class = None: names no network; .*rl_module\(model_config=\) alone",
    ):
        config(RLModuleSpec(model_config={"fcnet_hiddens": [8]})).to_run_spec()
