import pytest
import yaml

from rayagi.config.convert import run_spec_to_dict
from rayagi.config.errors import ConfigError
from rayagi.config.files import load_config_file
from rayagi.config.presets import preset


def written(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_yaml_file_updates_its_tasks_preset(tmp_path):
    path = written(tmp_path, "run.yaml", "env: {id: CartPole-v1}\nppo: {learning_rate: 3e-4}\nseed: 7\n")
    spec = load_config_file(path)
    assert spec.learning.learning_rate == 3e-4
    assert spec.seed == 7
    assert spec.learning.rollout_length == preset("CartPole-v1").learning.rollout_length
    assert spec.network == preset("CartPole-v1").network


def test_a_file_without_a_task_takes_the_requested_one(tmp_path):
    assert load_config_file(written(tmp_path, "a.yml", "seed: 1"), "Hopper-v5").env.id == "Hopper-v5"
    text = "from rayagi import PPOConfig\nconfig = PPOConfig().training(lr=1e-3)\n"
    spec = load_config_file(written(tmp_path, "a.py", text), "Hopper-v5")
    assert (spec.env.id, spec.learning.learning_rate) == ("Hopper-v5", 1e-3)


def test_a_file_or_the_command_line_names_the_algorithm_and_with_it_the_template(tmp_path):
    path = written(tmp_path, "a.yaml", "algorithm: appo\nappo: {max_lag: 3}\n")
    spec = load_config_file(path, "Ant-v5")
    assert (spec.algorithm, spec.gmi.template, spec.learning.max_lag) == ("appo", "decoupled", 3)
    assert load_config_file(path, "Ant-v5", "appo") == spec
    with pytest.raises(ConfigError, match=r"algorithm = 'appo': is not the requested algorithm, 'ppo'"):
        load_config_file(path, "Ant-v5", "ppo")
    path = written(tmp_path, "b.yaml", "gmi: {template: dp_only}\n")
    spec = load_config_file(path, "Ant-v5", "appo")
    assert (spec.algorithm, spec.gmi.template) == ("appo", "dp_only")
    text = "from rayagi import AppoConfig\nconfig = AppoConfig().training(max_lag=1)\n"
    spec = load_config_file(written(tmp_path, "c.py", text), "Ant-v5", "appo")
    assert (spec.algorithm, spec.learning.max_lag) == ("appo", 1)


def test_a_file_with_the_settings_of_another_algorithm_only_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("env: {id: Ant-v5}\ntrpo: {max_kl: 0.5}\n")
    with pytest.raises(
        ConfigError, match=r"trpo: holds settings of trpo, and the run is one of ppo; add algorithm: trpo"
    ):
        load_config_file(path)
    path.write_text("algorithm: trpo\nenv: {id: Ant-v5}\ntrpo: {max_kl: 0.5}\n")
    assert load_config_file(path).learning.max_kl == 0.5


def test_an_empty_yaml_file_is_the_preset(tmp_path):
    assert load_config_file(written(tmp_path, "a.yaml", ""), "Ant-v5") == preset("Ant-v5")


def test_a_saved_spec_is_read_back_as_it_was(tmp_path):
    spec = preset("HalfCheetah-v5")
    path = written(tmp_path, "config.yaml", yaml.safe_dump(run_spec_to_dict(spec)))
    assert load_config_file(path) == spec


@pytest.mark.parametrize(
    "text",
    [
        "from rayagi import RunSpec\nconfig = RunSpec(seed=3)\n",
        "from rayagi import RunSpec\ndef config():\n    return RunSpec(seed=3)\n",
        "from rayagi import PPOConfig\nconfig = PPOConfig().environment('Ant-v5').debugging(seed=3)\n",
        "from beside import SEED\nfrom rayagi import RunSpec\nconfig = RunSpec(seed=SEED)\n",
    ],
)
def test_a_python_file_defines_config(tmp_path, text):
    written(tmp_path, "beside.py", "SEED = 3\n")
    spec = load_config_file(written(tmp_path, "run.py", text))
    assert (spec.env.id, spec.seed) == ("Ant-v5", 3)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "x = 1\nconfig = 1 / 0\n", "a.py:2: raises ZeroDivisionError: division by zero"),
        ("a.py", "x = (\n", "a.py:1: is not Python"),
        ("a.py", "import sys\nsys.exit(3)\n", "a.py:2: exits (SystemExit 3)"),
        ("a.py", "import nothing_of_that_name\n", "a.py:1: raises ModuleNotFoundError"),
        ("a.py", "x = 1\n", "a.py: does not define `config`"),
        ("a.py", "config = 3\n", "a.py: config: is a int"),
        ("a.py", "def config():\n    raise KeyError('x')\n", "a.py:2: raises KeyError: 'x'"),
        (
            "a.py",
            "from rayagi import PPOConfig\nconfig = PPOConfig().training(lrr=1)\n",
            "a.py:2: training(lrr=) = 1: no such setting",
        ),
        (
            "a.py",
            "from rayagi import PPOConfig\nconfig = PPOConfig().environment('Ant-v5').training(gamma=2.0)\n",
            "a.py: training(gamma=) = 2.0: must be",
        ),
        ("a.yaml", "ppo: {learning_rat: 1}\n", "a.yaml: ppo.learning_rat = 1: no such setting; did you mean"),
        ("a.yaml", "ppo: {gamma: 2}\n", "a.yaml: ppo.gamma = 2.0: must be"),
        ("a.yaml", "ppo: [gamma\n", "a.yaml: is not YAML"),
        ("a.yaml", "seed: 1\nseed: 2\n", "'seed' is given twice"),
        ("a.yaml", "seed: 2001-99-99\n", "'2001-99-99' is no timestamp"),
        ("a.yaml", "seed: !!bool x\n", "'x' is no bool"),
        ("a.yaml", "seed: 0b_\n", "'0b_' is no int"),
        ("a.yaml", f"seed: {'[' * 5000}\n", "nested too deeply"),
        ("a.yaml", "- 1\n", "a.yaml: configuration = [1]: must be a mapping of settings"),
        (
            "a.yaml",
            "env: {id: Hopper-v5}\n",
            "a.yaml: env.id = 'Hopper-v5': is not the requested task, 'Ant-v5'",
        ),
        ("a.json", "{}", "a.json: is no configuration file; give a .yaml, .yml or .py file"),
    ],
)
def test_a_bad_file_is_named_with_the_place_and_the_reason(tmp_path, name, text, message):
    path = written(tmp_path, name, text)
    with pytest.raises(ConfigError) as caught:
        load_config_file(path, "Ant-v5")
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).count(str(path)) == 1


@pytest.mark.parametrize("text", ["seed: 1\n", "", "env: {kwargs: {frame_skip: 4}}\n"])
def test_a_yaml_file_without_a_task_needs_a_requested_one(tmp_path, text):
    path = written(tmp_path, "a.yaml", text)
    with pytest.raises(ConfigError, match=r"a\.yaml: env\.id: names no task; give env\.id, or `rayagi train"):
        load_config_file(path)
    assert load_config_file(path, "Ant-v5").env.id == "Ant-v5"


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (".callbacks(on_train_result=print)", "callbacks_on_train_result"),
        (".reporting(metrics_num_episodes_for_smoothing=7)", "metrics_num_episodes_for_smoothing"),
        (".reporting(min_time_s_per_iteration=5)", "min_time_s_per_iteration"),
        (".resources(num_cpus_for_main_process=2)", "num_cpus_for_main_process"),
        ('.debugging(log_level="INFO")', "log_level"),
    ],
)
def test_settings_that_need_an_algorithm_are_rejected_in_a_file(tmp_path, setting, name):
    text = f"from rayagi import PPOConfig\nconfig = PPOConfig().environment('Ant-v5'){setting}\n"
    with pytest.raises(
        ConfigError, match=f"a.py: {name} = .*works with build_algo\\(\\), not with `rayagi train`"
    ):
        load_config_file(written(tmp_path, "a.py", text))


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_config_file(tmp_path / "none.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.yaml: cannot be read"):
        load_config_file(tmp_path / "folder.yaml")
