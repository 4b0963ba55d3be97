import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.experience import file_layout
from placement import role_layout
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config import rules
from rayagi.config.convert import with_settings
from rayagi.config.errors import ConfigError
from rayagi.config.presets import PRESETS, TaskPreset, preset
from rayagi.config.rules import broken_rules, checked, nearest_divisors
from rayagi.config.spec import EnvSpec, RunSpec


def test_the_default_spec_and_every_preset_keep_all_rules():
    assert checked(RunSpec()) == RunSpec()
    for env_id in [*PRESETS, "Humanoid-v4", "SomethingElse-v0"]:
        assert list(broken_rules(preset(env_id))) == []
        assert preset(env_id).env.id == env_id


def test_a_task_without_settings_of_its_own_gets_the_networks_of_table_4():
    assert "Humanoid-v4" not in PRESETS
    assert preset("Humanoid-v4").network.hidden == (200, 400, 100)
    assert preset("Humanoid-v4").learning == PPOSpec(**TaskPreset().learning)


@pytest.mark.parametrize(
    ("settings", "path", "message"),
    [
        (["gmi.num_gmis=0"], "gmi.num_gmis", "at least 1"),
        (["gmi.num_envs=-3"], "gmi.num_envs", "at least 1"),
        (["gmi.threads_per_gmi=0"], "gmi.threads_per_gmi", "at least 1"),
        (["gmi.gmis_per_gpu=0"], "gmi.gmis_per_gpu", "at least 1"),
        (["gmi.gmis_per_gpu=2", "gmi.num_gmis=4"], "gmi.gmis_per_gpu", "gmi.num_gmis = 4"),
        (["gmi.gmis_per_gpu=2", "gmi.backend=cpu"], "gmi.gmis_per_gpu", "use gmi.num_gmis"),
        (["gmi.slices=[]"], "gmi.slices", "e.g. [3, 1]"),
        (["gmi.slices=[2, 0]"], "gmi.slices", "greater than 0"),
        (["gmi.slices=[2, 1]", "gmi.num_gmis=3"], "gmi.num_gmis", "contradicts gmi.slices, which are 2 GMIs"),
        (["gmi.slices=[0.7, 0.3]", "gmi.gmis_per_gpu=2"], "gmi.gmis_per_gpu", "leave it out"),
        (["gmi.slices=[2, 1]", "gmi.num_envs=auto"], "gmi.num_envs", "searched for equal GMIs only"),
        (["gmi.left_out=[1, 1]"], "gmi.left_out", "different indices of GMIs, from 0"),
        (["gmi.left_out=[-1]"], "gmi.left_out", "e.g. [1]"),
        (["gmi.left_out=[1]", "gmi.template=ea_t"], "gmi.left_out", "is for dp_only"),
        (["gmi.left_out=[1]", "gmi.num_envs=auto"], "gmi.left_out", "not of a search"),
        (["gmi.template=program"], "gmi.template", "use 'dp_only' to train"),
        (["gmi.template=decoupled"], "gmi.template", "or algorithm 'appo' or 'impala'"),
        (["gmi.num_learners=0", "gmi.template=ea_t"], "gmi.num_learners", "at least 1"),
        (["gmi.num_learners=1"], "gmi.num_learners", "means nothing on dp_only"),
        (["gmi.replan=true", "gmi.template=ea_t"], "gmi.replan", "is for dp_only"),
        (
            ["gmi.num_learners=3", "gmi.num_gmis=3", "gmi.template=e_at"],
            "gmi.num_learners",
            "use at most 2",
        ),
        (["gmi.num_envs=auto", "gmi.template=dp_mp"], "gmi.num_envs", "searched for ppo on dp_only only"),
        (["gmi.reserve_timeout_s=0"], "gmi.reserve_timeout_s", "greater than 0"),
        (["gmi.collective_timeout_s=.inf"], "gmi.collective_timeout_s", "finite"),
        (["gmi.hang_timeout_s=0"], "gmi.hang_timeout_s", "greater than 0"),
        (["gmi.composition=ring"], "gmi.composition", "use auto, ip_only, rp_only, har"),
        (["gmi.composition=hybrid"], "gmi.composition", "hybrid(K)"),
        (["ppo.rollout_length=0"], "ppo.rollout_length", "at least 1"),
        (["ppo.num_epochs=0"], "ppo.num_epochs", "at least 1"),
        (["ppo.num_minibatches=0"], "ppo.num_minibatches", "at least 1"),
        (["ppo.gamma=0"], "ppo.gamma", "at most 1"),
        (["ppo.gamma=1.01"], "ppo.gamma", "at most 1"),
        (["ppo.gamma=.nan"], "ppo.gamma", "at most 1"),
        (["ppo.gae_lambda=-0.1"], "ppo.gae_lambda", "between 0 and 1"),
        (["ppo.clip_ratio=0"], "ppo.clip_ratio", "greater than 0"),
        (["ppo.value_clip=-1"], "ppo.value_clip", "greater than 0"),
        (["ppo.learning_rate=.nan"], "ppo.learning_rate", "finite"),
        (["ppo.entropy_coef=-1"], "ppo.entropy_coef", "at least 0"),
        (["ppo.max_grad_norm=-1"], "ppo.max_grad_norm", "at least 0"),
        (["ppo.target_kl=0"], "ppo.target_kl", "greater than 0"),
        (["network.hidden=[64, 0]"], "network.hidden[1]", "at least 1"),
        (["network.hidden=[]"], "network.hidden", "at least one layer"),
        (["network.initial_log_std=.inf"], "network.initial_log_std", "finite"),
        (["ppo.lr_schedule=linear"], "ppo.lr_schedule", "total_env_steps"),
        (["evaluation.interval=-1"], "evaluation.interval", "at least 0"),
        (["evaluation.num_episodes=0"], "evaluation.num_episodes", "at least 1"),
        (["seed=-1"], "seed", "between 0 and 2147483647"),
        (["total_env_steps=0"], "total_env_steps", "at least 1"),
        (
            ["num_envs=1", "rollout_length=4", "num_minibatches=4"],
            "ppo.num_minibatches",
            "minibatches of one step",
        ),
    ],
)
def test_a_broken_rule_names_the_setting_and_the_limit(settings, path, message):
    with pytest.raises(ConfigError) as caught:
        checked(with_settings(RunSpec(), settings))
    assert caught.value.path == path
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "settings", "path", "message"),
    [
        ("appo", ["gmi.template=e_at"], "gmi.template", "use 'decoupled' or 'dp_only', or algorithm 'ppo'"),
        ("appo", ["gmi.template=program"], "gmi.template", "use 'decoupled' to train"),
        ("appo", ["num_gmis=auto"], "gmi.num_gmis", "give a number"),
        ("appo", ["num_gmis=40", "num_learners=17"], "gmi.num_learners", "sends to at most 16 learners"),
        ("appo", ["rollout_length=0"], "appo.rollout_length", "at least 1"),
        ("appo", ["rollout_length=48", "num_minibatches=10"], "appo.num_minibatches", "48; use num_mini"),
        ("appo", ["gamma=2"], "appo.gamma", "at most 1"),
        ("appo", ["clip_ratio=0"], "appo.clip_ratio", "greater than 0"),
        ("appo", ["rho_bar=0"], "appo.rho_bar", "greater than 0"),
        ("appo", ["c_bar=1.1"], "appo.c_bar", "at most appo.rho_bar = 1.0"),
        ("appo", ["max_lag=-1"], "appo.max_lag", "0: the synchronous learner"),
        ("appo", ["rollouts_per_update=0"], "appo.rollouts_per_update", "at least 1"),
        (
            "appo",
            ["max_lag=0", "rollouts_per_update=1"],
            "appo.rollouts_per_update",
            "leave it out, or allow a lag",
        ),
        ("appo", ["lr_schedule=linear"], "appo.lr_schedule", "total_env_steps"),
        ("appo", ["vtrace=false", "on_stale=correct"], "appo.on_stale", "use 'wait' or 'drop'"),
        (
            "appo",
            ["rollouts_per_update=1025"],
            "appo.rollouts_per_update",
            "at most 1024: collectors and learners keep memory",
        ),
        ("impala", ["max_lag=65"], "impala.max_lag", "at most 64: collectors keep memory"),
        ("impala", ["max_lag=-1"], "impala.max_lag", "0: the synchronous learner"),
        ("impala", ["c_bar=1.1"], "impala.c_bar", "at most impala.rho_bar = 1.0"),
        ("impala", ["num_epochs=4"], "impala.num_epochs", "use algorithm 'appo' for several passes"),
        ("impala", ["num_minibatches=2"], "impala.num_minibatches", "use a shorter rollout_length"),
        ("impala", ["lr_schedule=kl_adaptive"], "impala.lr_schedule", "use 'constant' or 'linear'"),
        ("impala", ["adam_eps=1e-3"], "impala.adam_eps", "use impala.rms_eps"),
        ("a3c", ["target_kl=0.5"], "a3c.target_kl", "the optimiser is RMSProp"),
        ("a3c", ["rms_decay=1"], "a3c.rms_decay", "less than 1"),
        ("a3c", ["rms_eps=0"], "a3c.rms_eps", "greater than 0"),
        ("a3c", ["gmi.template=decoupled"], "gmi.template", "use 'dp_only', or algorithm 'appo' or 'impala'"),
    ],
)
def test_the_asynchronous_algorithms_rules_name_their_section(algorithm, settings, path, message):
    with pytest.raises(ConfigError) as caught:
        checked(with_settings(preset("Point-v0", algorithm), settings))
    assert caught.value.path == path
    assert message in str(caught.value)


def test_an_algorithm_starts_from_its_usual_template():
    assert preset("Ant-v5").gmi.template == "dp_only"
    assert preset("Ant-v5", "a3c").gmi.template == "dp_only"
    for algorithm in ("appo", "impala"):
        assert list(broken_rules(preset("Ant-v5", algorithm))) == []
        assert preset("Ant-v5", algorithm).gmi.template == "decoupled"
        checked(with_settings(preset("Ant-v5", algorithm), ["template=dp_only"]))


def test_a_blank_task_is_refused():
    with pytest.raises(ConfigError, match=r"env\.id = ' ': must name an environment; `rayagi envs`"):
        checked(RunSpec(env=EnvSpec(id=" ")))


@pytest.mark.parametrize(
    "settings",
    [
        ["ppo.gamma=1"],
        ["ppo.gae_lambda=0"],
        ["ppo.max_grad_norm=0"],
        ["ppo.lr_schedule=linear", "total_env_steps=1000"],
        ["ppo.lr_schedule=kl_adaptive"],
        ["gmi.gmis_per_gpu=2", "gmi.backend=direct"],
        ["gmi.composition=har"],
        ["gmi.template=ea_t", "gmi.num_gmis=3", "gmi.num_learners=2"],
        ["gmi.composition=hybrid:1"],
        ["gmi.composition=hybrid(12)"],
        ["num_envs=1", "rollout_length=4", "num_minibatches=4", "normalize_advantages=false"],
    ],
)
def test_the_edge_of_a_rule_is_allowed(settings):
    checked(with_settings(RunSpec(), settings))


def test_minibatches_that_do_not_divide_the_rollout_come_with_the_nearest_that_do():
    # divisors of 48: 1 2 3 4 6 8 12 16 24 48; around 10 they are 8 and 12; 10 divides 40 and 50
    spec = with_settings(RunSpec(), ["rollout_length=48", "num_minibatches=10"])
    with pytest.raises(ConfigError, match="use num_minibatches 8 or 12, or rollout_length 40 or 50"):
        checked(spec)


@given(st.integers(1, 500), st.integers(1, 600))
def test_offered_divisors_divide_and_none_lies_between(number, wanted):
    offered = nearest_divisors(number, wanted)
    assert all(number % divisor == 0 and divisor != wanted for divisor in offered)
    low = max([divisor for divisor in offered if divisor < wanted], default=0)
    high = min([divisor for divisor in offered if divisor > wanted], default=math.inf)
    assert not [d for d in range(1, number + 1) if number % d == 0 and low < d < high and d != wanted]


def test_a_collector_sends_to_as_many_learners_as_a_ring_has_queues():
    assert rules.MOST_LEARNERS == file_layout.MAX_CONSUMERS
    assert role_layout.MOST_SENDERS == file_layout.MAX_PRODUCERS
