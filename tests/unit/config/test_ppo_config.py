import copy
import json
import math
import pickle

import gymnasium
import numpy as np
import pytest
from ray import cloudpickle, tune
from ray.rllib.algorithms.ppo.ppo import PPOConfig as RllibPPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from rayagi import PPOConfig
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.convert import run_spec_to_dict
from rayagi.config.errors import ConfigError
from rayagi.config.presets import preset
from rayagi.config.rllib_classes import CONFIGS
from rayagi.config.rllib_settings import PRESET, AlgorithmSettings
from rayagi.config.spec import EnvSpec, EvaluationSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import EnvironmentOptionError, env_info, make_env_factory
from tests.programs import run_python

PPO = AlgorithmSettings(definition=DEFINITIONS["ppo"])


def config(env="Ant-v5"):
    return PPOConfig().environment(env)


def value_at(spec, path):
    value = run_spec_to_dict(spec)
    for part in path.split("."):
        value = value[part]
    return value


def refusal(built):
    with pytest.raises(ConfigError) as caught:
        built.to_run_spec()
    return str(caught.value)


def test_unset_values_come_from_the_tasks_preset():
    for env in ("Ant-v5", "CartPole-v1", "Humanoid-v4"):
        assert config(env).to_run_spec() == preset(env)


def test_every_field_of_a_spec_can_be_set_by_rllibs_names():
    gmi = {
        "backend": "cpu", "template": "dp_only", "num_gmis": 3, "num_envs": 10, "threads_per_gmi": 2,
        "transport": "gloo", "composition": "hybrid:2", "reserve_timeout_s": 5.0, "collective_timeout_s": 7.0,
        "hang_timeout_s": 9.0,
    }  # fmt: skip
    learning = {
        "value_clip": 5.0, "num_epochs": 3, "lr_schedule": "kl_adaptive", "rollout_length": 30, "num_minibatches": 5,
        "gamma": 0.9, "adam_eps": 1e-6, "normalize_advantages": False, "normalize_obs": False,
        "normalize_rewards": False, "obs_clip": 4.0,
    }  # fmt: skip
    built = (
        PPOConfig()
        .environment("Hopper-v5", engine="gymnasium", env_config={"frame_skip": 2})
        .gmi(slices=[2, 1, 1], left_out=[2], **gmi)
        .training(lr=1e-3, lambda_=0.8, clip_param=0.3, vf_loss_coeff=0.7, entropy_coeff=0.01, grad_clip=1.5)
        .training(kl_target=0.02, total_env_steps=1000, **learning)
        .rl_module(
            model_config={"fcnet_hiddens": [8, 4], "fcnet_activation": "relu", "initial_log_std": -1.0}
        )
        .evaluation(evaluation_interval=4, evaluation_duration=6)
        .debugging(seed=11)
    )
    assert built.to_run_spec() == RunSpec(
        env=EnvSpec(id="Hopper-v5", engine="gymnasium", kwargs={"frame_skip": 2}),
        gmi=GmiSpec(slices=(2.0, 1.0, 1.0), left_out=(2,), **gmi),
        network=NetworkSpec(hidden=(8, 4), activation="relu", initial_log_std=-1.0),
        learning=PPOSpec(
            learning_rate=1e-3, gae_lambda=0.8, clip_ratio=0.3, value_coef=0.7, entropy_coef=0.01, target_kl=0.02,
            max_grad_norm=1.5, **learning,
        ),
        evaluation=EvaluationSpec(interval=4, num_episodes=6),
        seed=11,
        total_env_steps=1000,
    )  # fmt: skip


def test_a_value_that_equals_rllibs_default_still_wins_over_the_preset():
    rllib = RllibPPOConfig()
    spec = config().training(lr=rllib.lr, clip_param=rllib.clip_param, lambda_=rllib.lambda_).to_run_spec()
    assert (spec.learning.learning_rate, spec.learning.clip_ratio, spec.learning.gae_lambda) == (
        5e-5,
        0.3,
        1.0,
    )


def test_an_unset_value_reads_as_what_it_will_be():
    built = config("CartPole-v1").gmi(num_gmis=2).training(minibatch_size=256, lr=tune.uniform(0, 1))
    learning = preset("CartPole-v1").learning
    assert (built.gamma, built["lambda"], built.clip_param) == (0.99, learning.gae_lambda, 0.2)
    assert (built.vf_clip_param, built.clip_actions, built.num_cpus_for_main_process) == (math.inf, True, 0)
    built.training(lr=1e-3)
    # 16 environments x 64 steps x 2 GMIs, in minibatches of 256
    assert (built.train_batch_size_per_learner, built.train_batch_size, built.num_minibatches) == (
        1024,
        2048,
        4,
    )
    assert (built.observation_filter, PPOConfig().observation_filter) == ("MeanStdFilter", "MeanStdFilter")
    assert built.copy().environment("Pendulum-v1").num_envs == preset("Pendulum-v1").gmi.num_envs


def test_the_dictionary_is_json_and_gives_the_same_run():
    built = config().gmi(num_gmis=2, slices=(2.0, 1.0)).training(minibatch_size=128, kl_target=0.02)
    built.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[8]))
    data = json.loads(json.dumps(built.to_dict()))
    assert (data["gamma"], data["num_epochs"], data["env"]) == (0.99, 4, "Ant-v5")
    assert not {"num_minibatches", "rollout_length", "callbacks", "num_env_runners"} & data.keys()
    assert PPOConfig().update_from_dict(data).to_run_spec() == built.to_run_spec()
    # A scheduler changes one value, and a search may decide on the task.
    assert PPOConfig().update_from_dict({**data, "gamma": 0.5}).to_run_spec().learning.gamma == 0.5
    assert "gamma" not in PPOConfig().environment(tune.grid_search(["Ant-v5", "CartPole-v1"])).to_dict()
    assert (
        "train_batch_size" in config().env_runners(num_env_runners=2).training(train_batch_size=64).to_dict()
    )
    with pytest.raises(ConfigError, match="num_env_runners = 2"):
        PPOConfig().update_from_dict(config().env_runners(num_env_runners=2).to_dict()).to_run_spec()


class Listener(RLlibCallback):
    def on_train_result(self, **kwargs):
        pass


def test_a_serialised_config_is_json_and_names_classes_and_functions():
    built = config(gymnasium.Env).callbacks(Listener, on_evaluate_end=lambda **kwargs: None)
    data = json.loads(json.dumps(built.training(lr=1e-3).serialize()))
    assert (data["env"], data["callbacks"]) == ("gymnasium.core.Env", f"{__name__}.Listener")
    assert (data["callbacks_on_evaluate_end"], data["lr"]) == ("__not_serializable__", 1e-3)


def test_a_filter_of_observations_is_the_normaliser():
    for name, normalises in (("NoFilter", False), ("MeanStdFilter", True)):
        built = config().env_runners(observation_filter=name)
        assert built.to_run_spec().learning.normalize_obs is normalises
    assert config().training(normalize_obs=False).observation_filter == "NoFilter"


class Counting(gymnasium.Env):
    """Observes its limit; its episodes last as long."""

    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, env_config):
        self.limit, self.worker_index = env_config.get("limit", 3), env_config.worker_index

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.full(1, self.limit, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.limit, np.float32), 1.0, self.steps == self.limit, False, {}


class MultiAgentEnv(Counting):
    """Has the name of RLlib's class."""


def made(built):
    """Environments of a config, made as in another process, and their id."""
    env = built.to_run_spec().env
    factory = pickle.loads(cloudpickle.dumps(make_env_factory(env.id, kwargs=env.kwargs)))
    return env.id, factory(num_envs=2, first_env_index=0, seed=0, num_threads=1)


def test_a_class_and_a_function_are_environments():
    for env, name in (
        (Counting, "rllib/Counting"),
        (lambda env_config: Counting(env_config), "rllib/lambda"),
    ):
        env_id, envs = made(config(env).environment(env_config={"limit": 5}))
        assert env_id == name
        assert envs.reset().tolist() == [[5.0], [5.0]]
        envs.close()
    assert made(config(Counting))[1].reset().tolist() == [[3.0], [3.0]]
    assert isinstance(config(Counting).to_dict()["gamma"], float)


def test_a_registered_name_is_an_environment_and_several_agents_are_refused():
    tune.register_env("of the user", Counting)
    assert made(config("of the user"))[0] == "rllib/of_the_user"
    with pytest.raises(EnvironmentOptionError, match="several agents, and rayagi trains one policy"):
        env_info(config(MultiAgentEnv).to_run_spec().env.id)
    with pytest.raises(
        EnvironmentOptionError, match=r"program that registered it only.*environment\('MODULE:ID'\)"
    ):
        make_env_factory("rllib/Elsewhere")


def test_rllibs_values_for_none_are_converted():
    spec = config().training(grad_clip=None, vf_clip_param=float("inf")).to_run_spec()
    assert (spec.learning.max_grad_norm, spec.learning.value_clip) == (0.0, None)
    assert config().evaluation(evaluation_interval=None).to_run_spec().evaluation.interval == 0
    assert config().debugging(seed=None).to_run_spec().seed == 0


def test_batch_sizes_become_rollout_length_and_minibatches():
    built = config().gmi(num_envs=16, num_gmis=2).training(train_batch_size=1024, minibatch_size=128)
    ppo = built.to_run_spec().learning
    assert (ppo.rollout_length, ppo.num_minibatches) == (32, 4)  # 1024 / (2 * 16); 32 * 16 / 128


def test_numbers_may_be_left_to_a_search_but_not_with_batch_sizes_that_need_them():
    config = (
        PPOConfig().environment("Ant-v5").gmi(num_gmis="auto", num_envs="auto").training(rollout_length=16)
    )
    spec = config.to_run_spec()
    assert (spec.gmi.num_gmis, spec.gmi.num_envs, spec.gmi.wants_search) == ("auto", "auto", True)
    assert spec.learning.rollout_length == 16
    with pytest.raises(ValueError, match="resolve_auto"):
        _ = spec.gmi.envs
    with pytest.raises(ConfigError, match=r"minibatch_size = 64: needs the numbers .* give rollout_length"):
        config.training(minibatch_size=64).to_run_spec()


def test_a_model_config_object_gives_sizes_and_activation():
    spec = (
        config()
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[32], fcnet_activation="swish"))
        .to_run_spec()
    )
    assert (spec.network.hidden, spec.network.activation) == ((32,), "silu")
    assert spec.network.shared  # RLlib's DefaultModelConfig says so
    assert not spec.network.free_log_std  # and this
    free = config().rl_module(model_config=DefaultModelConfig(free_log_std=True))
    assert free.to_run_spec().network.free_log_std
    assert config().rl_module(model_config={"fcnet_hiddens": [8]}).to_run_spec().network.free_log_std
    apart = config().rl_module(model_config=DefaultModelConfig(vf_share_layers=False))
    assert not apart.to_run_spec().network.shared
    recurrent = config().rl_module(model_config=DefaultModelConfig(use_lstm=True, lstm_cell_size=32))
    network = recurrent.training(sequence_length=16).to_run_spec().network
    assert (network.core, network.core_size) == ("lstm", 32)
    assert config().rl_module(model_config={"core": "gru"}).to_run_spec().network.core == "gru"
    assert config().rl_module(model_config={"vf_share_layers": True}).to_run_spec().network.shared
    assert "training(sequence_length=)" in refusal(
        config().rl_module(model_config=DefaultModelConfig(use_lstm=True, max_seq_len=8))
    )


def other_than(value):
    """A value that differs from a default, of a like kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return "something else"


@pytest.mark.parametrize("key", sorted(key for key in PPOConfig._pristine() if not PPO.is_honoured(key)))
def test_an_unsupported_setting_is_rejected_by_name(key):
    pristine = PPOConfig._pristine()
    with pytest.raises(ConfigError) as caught:
        PPO.refuse_unhonoured({**pristine, key: other_than(pristine[key])}, pristine)
    name = {"_rl_module_spec": "rl_module_spec", "_learner_class": "learner_class"}.get(key, key)
    assert name in caught.value.path
    assert caught.value.suggestion


@pytest.mark.parametrize(
    ("build", "names", "instead"),
    [
        (lambda c: c.env_runners(num_env_runners=4), "num_env_runners = 4", "gmi(num_gmis=)"),
        (lambda c: c.env_runners(num_envs_per_env_runner=1), "num_envs_per_env_runner = 1", "gmi(num_envs=)"),
        (
            lambda c: c.env_runners(rollout_fragment_length=50),
            "rollout_fragment_length",
            "training(rollout_length=)",
        ),
        (
            lambda c: c.env_runners(observation_filter="Other"),
            "(observation_filter=) = 'Other'",
            "normalize_obs",
        ),
        (
            lambda c: c.env_runners(observation_filter="NoFilter").training(normalize_obs=True),
            "(observation_filter=) = 'NoFilter': contradicts training(normalize_obs=True)",
            "give one of them",
        ),
        (lambda c: c.environment(clip_actions=False), "clip_actions = False", "clipped to its action space"),
        (lambda c: c.env_runners(explore=False), "explore", "evaluate()"),
        (
            lambda c: c.env_runners(env_to_module_connector=lambda env: None),
            "_env_to_module_connector",
            "gymnasium",
        ),
        (lambda c: c.learners(num_learners=2), "num_learners = 2", "gmi(num_gmis=)"),
        (lambda c: c.learners(num_gpus_per_learner=1), "num_gpus_per_learner = 1", 'gmi(backend="direct"'),
        (lambda c: c.resources(num_gpus=1), "num_gpus = 1", "gmis_per_gpu"),
        (lambda c: c.framework("tf2"), "framework = 'tf2'", "torch only"),
        (lambda c: c.multi_agent(policies={"a", "b"}), "policies", "one policy"),
        (lambda c: c.training(use_kl_loss=True), "use_kl_loss = True", "kl_adaptive"),
        (lambda c: c.training(kl_coeff=0.2), "kl_coeff = 0.2", "kl_adaptive"),
        (lambda c: c.training(use_gae=False), "use_gae", "GAE"),
        (lambda c: c.training(grad_clip_by="value"), "grad_clip_by", "global_norm"),
        (
            lambda c: c.training(entropy_coeff=[[0, 0.1], [1000, 0.0]]),
            "training(entropy_coeff=) = [[0, 0.1], [1000, 0.0]]: has no schedule in rayagi",
            "use one number, such as training(entropy_coeff=0.1)",
        ),
        (lambda c: c.training(entropy_coeff="high"), "training(entropy_coeff=)", "must be a number"),
        (
            lambda c: c.training(lr=[[0, 1e-3], [1000, 1e-4], [2000, 0.0]]),
            "training(lr=) = [[0, 0.001], [1000, 0.0001], [2000, 0.0]]: is not a line to 0",
            "use [[0, 0.001], [STEPS, 0]], or one number, such as training(lr=0.001)",
        ),
        (lambda c: c.training(lr=[[0, 1e-3], [1000, 1e-4]]), "training(lr=)", "is not a line to 0"),
        (lambda c: c.training(lr=[[5, 1e-3], [1000, 0]]), "training(lr=)", "is not a line to 0"),
        (
            lambda c: c.training(lr=[[0, 1e-3], [1000, 0]], lr_schedule="constant"),
            "contradicts training(lr_schedule='constant')",
            "give one of them",
        ),
        (
            lambda c: c.training(lr=[[0, 1e-3], [1000, 0]], total_env_steps=2000),
            "contradicts training(total_env_steps=2000)",
            "give one of them",
        ),
        (
            lambda c: c.api_stack(False),
            "api_stack(enable_rl_module_and_learner=) = False",
            "leave it out: the policy is an RLModule",
        ),
        (
            lambda c: c.api_stack(enable_env_runner_and_connector_v2=False),
            "api_stack(enable_env_runner_and_connector_v2=) = False",
            "rayagi has a loop of its own",
        ),
        (lambda c: c.training(lr_schedule=[[0, 0.1]]), "training(lr_schedule=)", "must be one of 'constant'"),
        (
            lambda c: c.training(kl_target=0.02, lr_schedule="constant"),
            "training(kl_target=) = 0.02: has no effect",
            "kl_adaptive",
        ),
        (lambda c: c.training(minibatch_size="all"), "training(minibatch_size=) = 'all'", "whole number"),
        (lambda c: c.environment(clip_rewards=True), "clip_rewards", "normalize_rewards"),
        (lambda c: c.environment(normalize_actions=True), "normalize_actions", "wrap"),
        (lambda c: c.environment(object), "environment(env=)", "gymnasium.register"),
        (
            lambda c: c.evaluation(evaluation_num_env_runners=2),
            "evaluation_num_env_runners",
            "evaluation_interval=",
        ),
        (
            lambda c: c.evaluation(evaluation_duration_unit="timesteps"),
            "evaluation_duration_unit",
            "episodes",
        ),
        (
            lambda c: c.evaluation(evaluation_duration="auto"),
            "evaluation(evaluation_duration=)",
            "whole number",
        ),
        (lambda c: c.offline_data(input_="/data"), "input = '/data'", "online"),
        (
            lambda c: c.fault_tolerance(restart_failed_env_runners=True),
            "restart_failed_env_runners",
            "checkpoint",
        ),
        (lambda c: c.callbacks(on_episode_end=print), "callbacks_on_episode_end", "on_train_result"),
        (
            lambda c: c.rl_module(model_config={"free_log_std": False, "head": "squashed_gaussian"}),
            "free_log_std",
            "leave one of them out",
        ),
        (
            lambda c: c.rl_module(model_config=DefaultModelConfig(use_lstm=True)),
            "max_seq_len=)) = 20",
            "training(sequence_length=)",
        ),
        (
            lambda c: c.rl_module(model_config={"fcnet_hidden": [8]}),
            "fcnet_hidden'",
            "did you mean fcnet_hiddens",
        ),
        (lambda c: c.gmi(num_envs=0), "gmi(num_envs=) = 0", "at least 1"),
        (lambda c: c.gmi(num_gmis=2, gmis_per_gpu=2), "gmi(gmis_per_gpu=) = 2", "num_gmis"),
        (lambda c: c.gmi(backend="gpu"), "gmi(backend=) = 'gpu'", "must be one of 'auto'"),
        (lambda c: c.training(gamma=1.5), "training(gamma=) = 1.5", "at most 1"),
        (lambda c: c.training(rollout_length=0), "training(rollout_length=) = 0", "at least 1"),
        (
            lambda c: c.training(rollout_length=48, num_minibatches=10),
            "training(num_minibatches=)",
            "8 or 12",
        ),
        (lambda c: c.training(lr_schedule="linear"), "training(lr_schedule=)", "total_env_steps"),
    ],
)
def test_an_error_names_the_setting_as_written_and_the_alternative(build, names, instead):
    message = refusal(build(config()))
    assert names in message
    assert instead in message


def test_a_line_to_0_is_the_schedule_that_rayagi_has():
    built = config().training(lr=[[0, 1e-3], [1e6, 0.0]])
    wanted = config().training(lr=1e-3, lr_schedule="linear", total_env_steps=1_000_000)
    assert built.to_run_spec() == wanted.to_run_spec()
    assert (built.lr_schedule, built.total_env_steps) == ("linear", 1_000_000)
    assert (
        built.training(lr_schedule="linear", total_env_steps=1_000_000).to_run_spec() == wanted.to_run_spec()
    )
    dqn = CONFIGS["dqn"]().environment("CartPole-v1").training(lr=[[0, 1e-3], [5000, 0]]).to_run_spec()
    assert (dqn.learning.learning_rate, dqn.learning.lr_schedule, dqn.total_env_steps) == (
        1e-3,
        "linear",
        5000,
    )
    offline = CONFIGS["bc"]().environment("Hopper-v5").offline_data(input_="data")
    assert "use one number, such as training(lr=0.001)" in refusal(
        offline.training(lr=[[0, 1e-3], [5000, 0]])
    )


@pytest.mark.parametrize("given", [None, {"explore": False}])
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_evaluation_with_the_policys_mode_is_what_rayagi_does_anyway(algorithm, given):
    config = CONFIGS[algorithm]().environment("CartPole-v1").evaluation(evaluation_config=given)
    assert config.to_run_spec() == preset("CartPole-v1", algorithm)


def test_settings_that_say_what_rayagi_does_anyway_are_allowed():
    built = (
        config()
        .training(use_kl_loss=False, kl_coeff=0.0, use_gae=True, use_critic=True)
        .learners(num_learners=0)
    )
    assert built.environment(clip_actions=True, disable_env_checking=True).to_run_spec() == preset("Ant-v5")


def test_an_attribute_that_neither_rllib_nor_rayagi_has_is_refused():
    built = config()
    built.num_gmi = 2
    assert "num_gmi = 2: PPOConfig has no such setting; did you mean num_gmis" in refusal(built)
    with pytest.raises(ConfigError, match=r"training\(learning_rat=\) = 1: no such setting"):
        config().training(learning_rat=1)


def test_callbacks_that_the_driver_never_calls_are_refused():
    class OnEpisodeEnd(RLlibCallback):
        def on_episode_end(self, **kwargs):
            pass

    class OnTrainResult(RLlibCallback):
        def on_train_result(self, **kwargs):
            pass

    assert "OnEpisodeEnd.on_episode_end" in refusal(config().callbacks(OnEpisodeEnd))
    assert config().callbacks(OnTrainResult).to_run_spec() == preset("Ant-v5")


def test_a_task_is_needed():
    assert refusal(PPOConfig()).startswith("environment(env=): is not given")


def assert_it_keeps_its_meaning(built):
    spec, cls = built.to_run_spec(), type(built)
    assert built.copy().to_run_spec() == spec
    assert copy.deepcopy(built).to_run_spec() == spec
    assert pickle.loads(pickle.dumps(built)).to_run_spec() == spec
    assert cls.from_state(built.get_state()).to_run_spec() == spec
    assert cls().update_from_dict(built.to_dict()).to_run_spec() == spec


def test_the_config_keeps_its_meaning_through_everything_that_rllib_and_tune_do_to_it():
    built = config().gmi(num_gmis=2, num_envs=8).training(lr=1e-3, lambda_=0.9)
    assert_it_keeps_its_meaning(built)


def test_a_frozen_config_refuses_changes():
    built = config()
    built.freeze()
    with pytest.raises(AttributeError, match="frozen"):
        built.gmi(num_gmis=2)


def test_the_tables_of_settings_agree_with_each_other():
    attributes = vars(PPOConfig())
    assert set(PPO.paths) <= set(attributes)
    assert {name for name, value in attributes.items() if value is PRESET} == set(PPO.unset)
    assert set(PPO.definition.rllib.fixed) <= set(PPO.unset)
    for path, _ in PPO.paths.values():
        value_at(RunSpec(), path)
    assert repr(PRESET) == "<preset>"


def test_importing_rayagi_loads_neither_ray_nor_torch():
    code = (
        "import sys, rayagi; assert rayagi.__version__; "
        "print(sorted({'ray', 'torch', 'gymnasium', 'mujoco'} & set(sys.modules))); "
        "rayagi.RunSpec; print('ray' in sys.modules)"
    )
    done = run_python(code)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]


def test_rayagi_names_what_it_has():
    import rayagi

    assert {"PPO", "PPOConfig", "RunSpec", "Session"} <= set(dir(rayagi))
    with pytest.raises(AttributeError, match="PPOConfig"):
        rayagi.PPOconfig  # noqa: B018


def test_rllibs_bound_of_the_squared_error_is_refused_with_what_there_is():
    """``value_clip`` is another thing: with a small value one would clip the loss, the other the step."""
    with pytest.raises(ConfigError, match=r"training\(value_clip=\) bounds how far the value may move"):
        config().training(vf_clip_param=10.0).to_run_spec()


def test_the_older_dictionary_of_a_model_is_refused_whatever_it_holds():
    """RLlib merges it into its default, so that one which equals the default would have no effect, and say nothing."""
    with pytest.raises(ConfigError, match="model_config="):
        PPOConfig().training(model={"fcnet_hiddens": [256, 256]})


def test_reading_is_atari_leaves_a_config_valid():
    config = PPOConfig().environment("CartPole-v1")
    assert config.is_atari is False
    config.validate()


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda config: config.debugging(log_level="FOO"), "log_level"),
        (lambda config: config.reporting(metrics_num_episodes_for_smoothing=0), "metrics_num_episodes"),
    ],
)
def test_what_would_fail_or_do_nothing_later_is_refused_before(build, named):
    with pytest.raises(ConfigError, match=named):
        build(PPOConfig().environment("CartPole-v1")).validate()
