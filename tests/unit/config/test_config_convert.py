import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayagi.algorithms.appo import AppoSpec
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.convert import (
    merged,
    run_spec_from_dict,
    run_spec_to_dict,
    setting_path,
    setting_paths,
    with_settings,
)
from rayagi.config.errors import NO_VALUE, ConfigError
from rayagi.config.spec import EnvSpec, EvaluationSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.config.yaml_text import parse_yaml

counts = st.integers(1, 10_000)
fractions = st.floats(0, 1, allow_nan=False)
run_specs = st.builds(
    RunSpec,
    env=st.builds(
        EnvSpec,
        id=st.text(min_size=1),
        engine=st.sampled_from(["auto", "mujoco_cpu", "gymnasium"]),
        kwargs=st.dictionaries(st.text(), st.none() | st.booleans() | fractions | st.lists(counts)),
    ),
    gmi=st.builds(GmiSpec, num_gmis=st.none() | counts, num_envs=counts, threads_per_gmi=st.none() | counts),
    network=st.builds(NetworkSpec, hidden=st.lists(counts, min_size=1).map(tuple)),
    learning=st.builds(PPOSpec, rollout_length=counts, value_clip=st.none() | fractions, gamma=fractions),
    evaluation=st.builds(EvaluationSpec, interval=counts, num_episodes=counts),
    seed=counts,
    total_env_steps=st.none() | counts,
)


@given(run_specs)
def test_a_spec_survives_conversion_to_plain_data(spec):
    assert run_spec_from_dict(run_spec_to_dict(spec)) == spec


@given(run_specs)
def test_plain_data_holds_no_tuples_and_no_dataclasses(spec):
    def plain(value):
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        return (
            all(map(plain, value))
            if isinstance(value, list)
            else value is None or isinstance(value, str | int | float)
        )

    assert plain(run_spec_to_dict(spec))


def test_what_is_not_given_keeps_its_default():
    assert run_spec_from_dict({}) == RunSpec()
    assert run_spec_from_dict({"ppo": {"gamma": 0.9}}).learning == replace(PPOSpec(), gamma=0.9)


def test_an_unknown_key_is_refused_with_its_path_and_the_nearest_name():
    with pytest.raises(ConfigError) as caught:
        run_spec_from_dict({"ppo": {"learning_rat": 1e-4}})
    assert caught.value.path == "ppo.learning_rat"
    assert "did you mean ppo.learning_rate" in str(caught.value)


def test_a_setting_in_the_wrong_section_is_offered_where_it_belongs():
    with pytest.raises(ConfigError, match=r"num_envs = 64.*gmi\.num_envs"):
        run_spec_from_dict({"num_envs": 64})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"ppo": {"num_epochs": 1.5}}, "ppo.num_epochs = 1.5: must be a whole number, not float"),
        ({"ppo": {"num_epochs": True}}, "ppo.num_epochs = True: must be a whole number, not bool"),
        ({"ppo": {"gamma": "high"}}, "ppo.gamma = 'high': must be a number, not str"),
        ({"ppo": {"normalize_obs": 1}}, "ppo.normalize_obs = 1: must be true or false, not int"),
        (
            {"gmi": {"num_gmis": "two"}},
            "gmi.num_gmis = 'two': must be a whole number or 'auto' or null, not str",
        ),
        (
            {"gmi": {"num_envs": "autoo"}},
            "gmi.num_envs = 'autoo': must be a whole number or 'auto', not str; did you mean",
        ),
        ({"gmi": {"num_envs": None}}, "gmi.num_envs = None: must be a whole number"),
        (
            {"network": {"activation": "tanhh"}},
            "network.activation = 'tanhh': must be one of 'elu', 'relu', 'tanh', 'silu'; did you mean 'tanh'?",
        ),
        (
            {"network": {"hidden": 64}},
            "network.hidden = 64: must be a list, each item a whole number, not int",
        ),
        ({"network": {"hidden": [64, "x"]}}, "network.hidden[1] = 'x': must be a whole number, not str"),
        ({"env": {"kwargs": [1]}}, "env.kwargs = [1]: must be a mapping from names to values, not list"),
        ({"ppo": 3}, "ppo = 3: must be a mapping of settings"),
    ],
)
def test_a_wrong_type_is_refused_with_the_wanted_one(data, message):
    with pytest.raises(ConfigError) as caught:
        run_spec_from_dict(data)
    assert str(caught.value).startswith(message)


def test_whole_numbers_may_be_written_as_floats_and_the_reverse():
    spec = run_spec_from_dict({"total_env_steps": 2e6, "ppo": {"obs_clip": 5}})
    assert spec.total_env_steps == 2_000_000
    assert isinstance(spec.total_env_steps, int)
    assert isinstance(spec.learning.obs_clip, float)


def test_settings_are_applied_in_order_by_path_or_by_name_alone():
    spec = with_settings(
        RunSpec(),
        ["ppo.learning_rate=1e-4", "num_envs=64", "hidden=[32, 32]", "num_gmis=null", "num_envs=128"],
    )
    assert spec.learning.learning_rate == 1e-4
    assert spec.gmi.num_envs == 128
    assert spec.network.hidden == (32, 32)
    assert spec.gmi.num_gmis is None


def test_a_name_that_several_algorithms_have_means_the_runs_own():
    assert with_settings(RunSpec(), ["gamma=0.9"]).learning.gamma == 0.9
    spec = with_settings(RunSpec(algorithm="appo"), ["gamma=0.9", "max_lag=3"])
    assert (type(spec.learning), spec.learning.gamma, spec.learning.max_lag) == (AppoSpec, 0.9, 3)


@pytest.mark.parametrize(
    ("algorithm", "setting", "message"),
    [
        (
            "ppo",
            "max_lag=2",
            "max_lag: is a setting of several sections; write appo.max_lag or impala.max_lag or sac.max_lag or "
            "td3.max_lag or dqn.max_lag or fast_td3.max_lag or fast_sac.max_lag",
        ),
        ("ppo", "appo.gamma=0.5", "appo.gamma: is a setting of appo; write ppo.gamma"),
        ("appo", "ppo.gamma=0.5", "ppo.gamma: is a setting of ppo; write appo.gamma"),
        ("appo", "ppo={gamma: 0.5}", "ppo: is a setting of ppo; write appo"),
        ("appo", "value_clip=1", "ppo.value_clip: is a setting of ppo; leave it out"),
        (
            "ppo",
            "algorithm=appo",
            "algorithm = 'appo': cannot be set: the other settings are those of ppo; "
            "name it itself: rayagi train Ant-v5 --algorithm appo",
        ),
    ],
)
def test_a_setting_that_the_runs_algorithm_does_not_read_is_refused(algorithm, setting, message):
    with pytest.raises(ConfigError) as caught:
        with_settings(RunSpec(algorithm=algorithm), [setting])
    assert str(caught.value) == message


def test_settings_reach_into_the_environments_arguments():
    spec = with_settings(RunSpec(), ["env.kwargs.healthy_reward=2", "env.kwargs.frame_skip=4"])
    assert spec.env.kwargs == {"healthy_reward": 2, "frame_skip": 4}
    assert with_settings(spec, ["env.kwargs={}"]).env.kwargs == {}


def test_a_mapping_updates_a_section_and_replaces_the_environments_arguments():
    spec = with_settings(RunSpec(), ["ppo={rollout_length: 48, gamma: 0.9}", "ppo={gamma: 0.8}"])
    assert spec.learning == replace(RunSpec().learning, rollout_length=48, gamma=0.8)
    spec = with_settings(spec, ["env.kwargs={frame_skip: 4}", "env.kwargs={healthy_reward: 2}"])
    assert spec.env.kwargs == {"healthy_reward": 2}


@pytest.mark.parametrize("setting", ["env.id=Hopper-v5", "id=Hopper-v5", "env={id: Hopper-v5}"])
def test_another_task_cannot_be_set_since_the_preset_would_stay(setting):
    with pytest.raises(ConfigError, match=r"settings are those of Ant-v5; .*rayagi train Hopper-v5"):
        with_settings(RunSpec(), [setting])
    assert with_settings(RunSpec(), ["env.id=Ant-v5"]) == RunSpec()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("ppo.learning_rate", "is not key=value"),
        ("=3", "is not key=value"),
        ("ppo.lerning_rate=3", "did you mean ppo.learning_rate"),
        ("lerning_rate=3", "did you mean ppo.learning_rate"),
        ("ppo.gamma=[1", "ppo.gamma = '[1': is not YAML"),
        ("gamma=abc", "ppo.gamma = 'abc': must be a number"),
        ("zzz=1", "no such setting"),
    ],
)
def test_a_setting_that_cannot_be_applied_says_why(setting, message):
    with pytest.raises(ConfigError) as caught:
        with_settings(RunSpec(), [setting])
    assert message in str(caught.value)


def test_every_setting_is_found_by_its_own_path():
    for path in setting_paths():
        assert setting_path(path, "ppo") == path


def test_merging_lays_sections_over_each_other_and_leaves_both_alone():
    base, changes = {"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 5}}
    assert merged(base, changes) == {"a": {"x": 1, "y": 5}, "b": 3}
    assert base == {"a": {"x": 1, "y": 2}, "b": 3}


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("1E5", 1e5), ("2", 2), ("-1.5", -1.5), (".5", 0.5), ("1e", "1e"), ("e4", "e4")],
)
def test_numbers_are_read_as_people_write_them(text, value):
    read = parse_yaml(text)
    assert read == value
    assert type(read) is type(value)


def test_a_config_error_arrives_as_itself_from_another_process():
    error = pickle.loads(pickle.dumps(ConfigError("ppo.gamma", 2, "too large", "use 0.99")))
    assert (error.path, error.value, error.reason, error.suggestion) == (
        "ppo.gamma",
        2,
        "too large",
        "use 0.99",
    )
    assert str(error) == "ppo.gamma = 2: too large; use 0.99"
    assert (
        str(pickle.loads(pickle.dumps(ConfigError("f.yaml", NO_VALUE, "no such file"))))
        == "f.yaml: no such file"
    )
