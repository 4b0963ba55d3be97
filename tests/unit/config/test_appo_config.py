import pytest

from rayagi.algorithms.appo import AppoSpec
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.errors import ConfigError
from rayagi.config.presets import preset
from rayagi.config.rllib_classes import CONFIGS as CLASSES
from rayagi.config.rllib_settings import PRESET, AlgorithmSettings
from rayagi.config.spec import GmiSpec
from tests.unit.config.test_ppo_config import assert_it_keeps_its_meaning, refusal

AppoConfig, ImpalaConfig, A3CConfig = (CLASSES[name] for name in ("appo", "impala", "a3c"))
CONFIGS = [AppoConfig, ImpalaConfig, A3CConfig]
ALWAYS = {
    AppoConfig: set(),
    ImpalaConfig: {"num_epochs", "num_minibatches", "target_kl", "adam_eps"},
    A3CConfig: {"num_epochs", "num_minibatches", "target_kl", "adam_eps"},
}
"""Fields with one possible value, which RLlib's face leaves out."""


@pytest.mark.parametrize("cls", CONFIGS)
def test_unset_values_come_from_the_preset_of_task_and_algorithm(cls):
    for env in ("Ant-v5", "CartPole-v1", "Humanoid-v4"):
        spec = cls().environment(env).to_run_spec()
        assert spec == preset(env, cls.algorithm)
        assert (spec.algorithm, spec.gmi.template) == (
            cls.algorithm,
            "dp_only" if cls is A3CConfig else "decoupled",
        )


def test_every_field_of_the_section_can_be_set_by_rllibs_names():
    built = (
        AppoConfig()
        .environment("Hopper-v5")
        .gmi(num_gmis=4, num_learners=2, num_envs=10)
        .training(
            lr=1e-3,
            gamma=0.9,
            lambda_=0.8,
            clip_param=0.3,
            vtrace_clip_rho_threshold=2.0,
            c_bar=1.5,
            vtrace=False,
            vf_loss_coeff=0.7,
            entropy_coeff=0.01,
            grad_clip=None,
            num_epochs=3,
            kl_target=0.02,
            lr_schedule="kl_adaptive",
            rollout_length=30,
            rollouts_per_update=2,
            max_lag=7,
            on_stale="drop",
            num_minibatches=5,
            adam_eps=1e-6,
            normalize_advantages=False,
            normalize_obs=False,
            normalize_rewards=False,
            obs_clip=4.0,
        )
    )
    spec = built.to_run_spec()
    assert spec.gmi == GmiSpec(template="decoupled", num_gmis=4, num_learners=2, num_envs=10)
    assert spec.learning == AppoSpec(
        rollout_length=30,
        rollouts_per_update=2,
        max_lag=7,
        on_stale="drop",
        num_epochs=3,
        num_minibatches=5,
        gamma=0.9,
        gae_lambda=0.8,
        rho_bar=2.0,
        c_bar=1.5,
        vtrace=False,
        clip_ratio=0.3,
        value_coef=0.7,
        entropy_coef=0.01,
        learning_rate=1e-3,
        lr_schedule="kl_adaptive",
        target_kl=0.02,
        max_grad_norm=0.0,
        adam_eps=1e-6,
        normalize_advantages=False,
        normalize_obs=False,
        normalize_rewards=False,
        obs_clip=4.0,
    )


@pytest.mark.parametrize(
    ("cls", "build", "names", "instead"),
    [
        (
            AppoConfig,
            lambda c: c.training(vtrace=False, on_stale="correct"),
            "training(on_stale=)",
            "'wait' or 'drop'",
        ),
        (AppoConfig, lambda c: c.training(clip_param=None), "training(clip_param=)", "must be a number"),
        (AppoConfig, lambda c: c.training(tau=0.5), "tau", "no target network"),
        (AppoConfig, lambda c: c.training(use_kl_loss=True), "use_kl_loss", "kl_target="),
        (
            AppoConfig,
            lambda c: c.training(vtrace_clip_pg_rho_threshold=2.0),
            "vtrace_clip_pg",
            "vtrace_clip_rho_threshold=",
        ),
        (
            AppoConfig,
            lambda c: c.training(train_batch_size=4000),
            "train_batch_size",
            "rollouts_per_update",
        ),
        (ImpalaConfig, lambda c: c.training(opt_type="adam"), "opt_type = 'adam'", "leave it out"),
        (ImpalaConfig, lambda c: c.training(momentum=0.5), "momentum", "leave it at 0.0"),
        (ImpalaConfig, lambda c: c.training(vtrace=False), "vtrace", "AppoConfig"),
        (ImpalaConfig, lambda c: c.training(num_epochs=2), "num_epochs", "leave it at 1"),
        (ImpalaConfig, lambda c: c.training(minibatch_size=64), "minibatch_size", "leave it at None"),
        (AppoConfig, lambda c: c.training(minibatch_size=64), "minibatch_size", "num_minibatches"),
        (AppoConfig, lambda c: c.training(broadcast_interval=3), "broadcast_interval", "max_lag"),
        (AppoConfig, lambda c: c.training(learner_queue_size=9), "learner_queue_size", "max_lag"),
        (AppoConfig, lambda c: c.training(opt_type="rmsprop"), "opt_type", "Adam"),
        (AppoConfig, lambda c: c.training(replay_proportion=1.0), "replay_proportion", "num_epochs"),
        (AppoConfig, lambda c: c.learners(num_learners=2), "num_learners = 2", "gmi(num_learners="),
        (AppoConfig, lambda c: c.env_runners(num_env_runners=3), "num_env_runners = 3", "gmi(num_gmis=)"),
        (AppoConfig, lambda c: c.training(c_bar=3.0), "training(c_bar=) = 3.0", "appo.rho_bar = 1.0"),
        (AppoConfig, lambda c: c.training(max_lag=-1), "training(max_lag=) = -1", "at least 0"),
        (AppoConfig, lambda c: c.gmi(template="ea_t"), "gmi(template=)", "'decoupled' or 'dp_only'"),
        (AppoConfig, lambda c: c.gmi(num_gmis=1, num_learners=1), "gmi(num_learners=)", "at least 2 GMIs"),
        (AppoConfig, lambda c: c.gmi(num_gmis="auto"), "gmi(num_gmis=)", "give a number"),
    ],
)
def test_an_error_names_the_setting_and_the_alternative(cls, build, names, instead):
    message = refusal(build(cls().environment("Ant-v5")))
    assert names in message
    assert instead in message


def test_impala_has_rllibs_names_of_rmsprop():
    spec = (
        ImpalaConfig()
        .environment("Ant-v5")
        .training(decay=0.9, epsilon=0.1, opt_type="rmsprop")
        .to_run_spec()
    )
    assert (spec.learning.rms_decay, spec.learning.rms_eps) == (0.9, 0.1)


def test_an_argument_that_neither_rllib_nor_rayagi_has_is_refused():
    with pytest.raises(
        ConfigError, match=r"training\(max_lags=\) = 1: no such setting; did you mean max_lag"
    ):
        AppoConfig().training(max_lags=1)


@pytest.mark.parametrize("cls", CONFIGS)
def test_an_unsupported_setting_is_rejected_with_the_alternative(cls):
    settings, pristine = AlgorithmSettings(definition=DEFINITIONS[cls.algorithm]), cls._pristine()
    unhonoured = [key for key in pristine if not settings.is_honoured(key) and not key.startswith("_")]
    assert "num_env_runners" in unhonoured
    for key in unhonoured:
        with pytest.raises(ConfigError) as caught:
            settings.refuse_unhonoured({**pristine, key: "something else"}, pristine)
        assert key in caught.value.path
        assert caught.value.suggestion


@pytest.mark.parametrize("cls", CONFIGS)
def test_the_table_of_settings_agrees_with_the_config_and_the_spec(cls):
    settings, attributes = AlgorithmSettings(definition=DEFINITIONS[cls.algorithm]), vars(cls())
    assert set(settings.paths) <= set(attributes)
    assert {name for name, value in attributes.items() if value is PRESET} == set(settings.unset)
    fields = set(settings.definition.settings.__dataclass_fields__)
    assert set(settings.definition.training_names.values()) == fields - ALWAYS[cls]


@pytest.mark.parametrize("cls", CONFIGS)
def test_the_config_keeps_its_meaning_through_everything_that_rllib_and_tune_do_to_it(cls):
    built = cls().environment("Ant-v5").gmi(num_gmis=2, num_envs=8).training(lr=1e-3, gamma=0.9)
    assert_it_keeps_its_meaning(built)


def test_an_algorithm_and_its_config_name_each_other():
    import rayagi
    from rayagi.algorithm import ALGORITHMS

    expected = {
        "ppo": rayagi.PPO,
        "trpo": rayagi.TRPO,
        "appo": rayagi.APPO,
        "impala": rayagi.IMPALA,
        "a3c": rayagi.A3C,
        "sac": rayagi.SAC,
        "td3": rayagi.TD3,
        "dqn": rayagi.DQN,
        "fast_td3": rayagi.FastTD3,
        "fast_sac": rayagi.FastSAC,
        "bc": rayagi.BC,
        "iql": rayagi.IQL,
        "td3_bc": rayagi.TD3BC,
    }
    assert expected == ALGORITHMS
    for algorithm, cls in ALGORITHMS.items():
        config = cls.get_default_config()
        assert (config.algorithm, config.algo_class) == (algorithm, cls)
        assert config.min_time_s_per_iteration is None
