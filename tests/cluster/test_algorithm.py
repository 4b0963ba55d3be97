"""rayagi.PPO as an RLlib Algorithm, on a Ray of this machine."""

import itertools
import os
import pickle
import shutil

import gymnasium
import numpy as np
import pytest
import ray
import torch
from ray import tune
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.rl_module import MultiRLModule

import rayagi.algorithm
from placement.errors import PlanError
from rayagi import A3C, APPO, IMPALA, PPO, A3CConfig, AppoConfig, ImpalaConfig, PPOConfig
from rayagi.cli.main import main
from rayagi.config.errors import ConfigError
from rayagi.config.rllib_classes import CONFIGS
from rayagi.monitoring.catalogue import CATALOGUE, DERIVED
from rayagi.run.checkpoints import CheckpointStore
from rayagi.run.csv_log import read_rows
from rayagi.run.errors import CheckpointError, DiskError
from rayagi.run.folder import open_run
from rayagi.serving.errors import DatasetError
from tests.fakes.metrics import OF_OTHERS
from tests.programs import run_python
from tests.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("cluster")]

NUM_ENVS, ROLLOUT_LENGTH = 4, 32
STEPS = NUM_ENVS * ROLLOUT_LENGTH


class Seen(RLlibCallback):
    """Notes which of its methods were called."""

    calls: list[str] = []  # noqa: RUF012 - shared with the test on purpose

    def on_algorithm_init(self, *, algorithm, metrics_logger, **kwargs):
        assert metrics_logger is algorithm.metrics
        self.calls.append("init")

    def on_train_result(self, *, result, **kwargs):
        result["noted"] = True
        self.calls.append("result")

    def on_evaluate_end(self, **kwargs):
        self.calls.append("evaluated")


def small_config(cls=PPOConfig):
    epochs = {} if cls in (ImpalaConfig, A3CConfig) else {"num_minibatches": 4, "num_epochs": 2}
    return (
        cls()
        .environment("InvertedPendulum-v5")
        .gmi(num_gmis=1, num_envs=NUM_ENVS, threads_per_gmi=1)
        .training(lr=1e-3, lr_schedule="constant", rollout_length=ROLLOUT_LENGTH, **epochs)
        .rl_module(model_config={"fcnet_hiddens": [16, 16]})
        .evaluation(evaluation_interval=2, evaluation_duration=3)
        .debugging(seed=3)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Results of three iterations, a checkpoint after them, its policy, and one more iteration."""
    Seen.calls.clear()
    algo = small_config().callbacks(Seen).build_algo()
    try:
        shown = repr(algo)
        results = [algo.train() for _ in range(3)]
        path = algo.save_to_path(tmp_path_factory.mktemp("run") / "checkpoint")
        module, state = algo.get_module(), algo.get_state()
        results.append(algo.train())
    finally:
        algo.stop()
    return {"results": results, "path": path, "module": module, "state": state, "repr": shown, "algo": algo}


def test_results_carry_rllibs_keys_and_ours(trained):
    result = trained["results"][2]
    assert result["training_iteration"] == 3
    assert result["num_env_steps_sampled_lifetime"] == 3 * STEPS
    sampled = result["env_runners"]
    assert sampled["num_env_steps_sampled"] == STEPS
    assert sampled["num_env_steps_sampled_lifetime"] == 3 * STEPS
    assert sampled["episode_return_min"] <= sampled["episode_return_mean"] <= sampled["episode_return_max"]
    # The pendulum pays 1 for every step but the one on which it falls.
    assert sampled["episode_return_mean"] == pytest.approx(sampled["episode_len_mean"] - 1)
    assert result["learners"]["default_policy"]["learning_rate"] == 1e-3
    assert {"policy_loss", "value_loss", "entropy"} <= set(result["learners"]["default_policy"])
    assert set(result["rayagi"]) == {metric.name for metric in (*CATALOGUE, *DERIVED)} - OF_OTHERS
    assert result["rayagi"]["env_steps_total"] == result["num_env_steps_sampled_lifetime"]
    assert result["timers"]["gmi_iteration"] > 0


def test_the_mean_return_is_over_all_episodes_of_the_window_not_only_the_last_iterations(trained):
    third = trained["results"][2]["env_runners"]
    assert third["num_episodes_lifetime"] > third["num_episodes"]
    saved = trained["state"]["episodes"]["returns"]
    assert len(saved) == third["num_episodes_lifetime"] <= 100
    assert third["episode_return_mean"] == pytest.approx(sum(saved) / len(saved))


def test_evaluation_runs_at_its_interval_and_callbacks_are_called(trained):
    assert ["evaluation" in result for result in trained["results"]] == [False, True, False, True]
    evaluated = trained["results"][1]["evaluation"]["env_runners"]
    assert evaluated["num_episodes"] == 3
    assert evaluated["episode_len_mean"] == pytest.approx(evaluated["num_env_steps_sampled"] / 3)
    assert Seen.calls == ["init", "result", "evaluated", "result", "result", "evaluated", "result"]
    assert trained["results"][0]["noted"]


def test_it_says_what_it_is(trained):
    assert trained["repr"] == "rayagi.PPO(env=InvertedPendulum-v5; gmis=1)"


def test_a_stopped_algorithm_says_so(trained):
    trained["algo"].stop()  # a second time does nothing
    with pytest.raises(RuntimeError, match="was stopped"):
        trained["algo"].train()


def test_a_restored_algorithm_goes_on_as_if_nothing_had_happened(trained):
    restored = Algorithm.from_checkpoint(trained["path"])
    try:
        assert isinstance(restored, PPO)
        assert restored.iteration == 3
        result = restored.train()
    finally:
        restored.stop()
    wanted = trained["results"][3]
    assert result["training_iteration"] == 4
    assert result["num_env_steps_sampled_lifetime"] == 4 * STEPS
    assert result["env_runners"]["num_episodes_lifetime"] == wanted["env_runners"]["num_episodes_lifetime"]
    # Weights, optimiser, statistics and environments go on, so the fourth iteration is the same as without a stop.
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm"):
        assert result["rayagi"][name] == pytest.approx(wanted["rayagi"][name], rel=1e-5, abs=1e-7), name


def test_what_does_not_fit_is_refused_and_the_algorithm_goes_on(trained, tmp_path):
    damaged = shutil.copytree(trained["path"], tmp_path / "damaged")
    (damaged / "algorithm_state.pkl").write_bytes(b"")
    algo = small_config().rl_module(model_config={"fcnet_activation": "relu"}).build_algo()
    try:
        before = algo.train()["training_iteration"]
        with pytest.raises(
            ValueError, match=r"has network.hidden = \(16, 16\), and this algorithm \(64, 64\)"
        ):
            algo.restore_from_path(trained["path"])
        with pytest.raises(CheckpointError, match="damaged is damaged: EOFError"):
            algo.restore_from_path(damaged)
        assert algo.train()["training_iteration"] == before + 1
    finally:
        algo.stop()
    with pytest.raises(CheckpointError):
        PPO.from_checkpoint(damaged)
    until(lambda: ray.available_resources().get("CPU") == 2.0)


def test_after_ctrl_c_an_algorithm_goes_on_with_the_iteration_that_was_interrupted(trained):
    algo = small_config().build_algo()
    try:
        results, collect = [algo.train()], algo.session.collect

        def interrupted():
            algo.session.collect = collect
            raise KeyboardInterrupt

        algo.session.collect = interrupted
        with pytest.raises(KeyboardInterrupt):
            algo.train()
        results.append(algo.train())
        wanted = trained["results"]
        for i, name in itertools.product(range(2), ("value_loss", "grad_norm")):
            assert results[i]["rayagi"][name] == pytest.approx(wanted[i]["rayagi"][name], rel=1e-5), name
        algo.session.collect = interrupted
        with pytest.raises(KeyboardInterrupt):
            algo.train()
        algo.restore_from_path(trained["path"])  # its result is discarded
        result = algo.train()
        assert result["rayagi"]["value_loss"] == pytest.approx(
            trained["results"][3]["rayagi"]["value_loss"], rel=1e-5
        )
    finally:
        algo.stop()


@pytest.mark.slow
def test_stop_leaves_ray_to_its_user():
    """It was started by build_algo()."""
    program = """
        import ray
        from rayagi import PPOConfig

        algo = PPOConfig().environment("CartPole-v1").gmi(num_gmis=1, num_envs=2, threads_per_gmi=1).build_algo()
        mine = ray.put("mine")
        algo.stop()
        print(ray.get(mine))
    """
    assert run_python(program, env=os.environ).stdout.splitlines()[-1] == "mine"


@pytest.mark.slow
def test_another_algorithm_can_load_a_checkpoint_from_a_relative_path(trained, monkeypatch):
    monkeypatch.chdir(trained["path"])
    algo = small_config().build_algo()
    try:
        algo.restore_from_path(".")
        assert algo.iteration == 3
        assert torch.equal(weights(algo.get_module()), weights(trained["module"]))
        with pytest.raises(ValueError, match="whole checkpoints only"):
            algo.restore_from_path(".", component="learner_group")
    finally:
        algo.stop()


def test_a_checkpoint_holds_the_policy_in_rllibs_layout(trained):
    modules = MultiRLModule.from_checkpoint(f"{trained['path']}/learner_group/learner/rl_module")
    assert torch.equal(weights(modules["default_policy"]), weights(trained["module"]))
    outputs = modules["default_policy"].forward_inference({"obs": torch.zeros(5, 4)})["action_dist_inputs"]
    assert outputs.shape == (5, 2)  # mean and log standard deviation of one force


@pytest.mark.slow
def test_a_checkpoint_is_a_run_that_the_commands_take(trained, tmp_path, capfd):
    run = str(shutil.copytree(trained["path"], tmp_path / "run"))
    assert open_run(tmp_path / "run").record.environment["action"]["low"] == [-3.0]
    (name,) = CheckpointStore(tmp_path / "run" / "checkpoints").names()
    for each in (run, f"{run}/checkpoints/{name}"):
        assert main(["evaluate", each, "--episodes", "2"]) == 0
    assert main(["serve", run, "--gmis", "1", "--steps", "64"]) == 0
    assert main(["train", "--resume", run, "--iterations", "5"]) == 0
    assert main(["report", run]) == 0
    rows = read_rows(tmp_path / "run" / "progress.csv")
    assert [row["env_steps_total"] for row in rows] == [STEPS * i for i in range(1, 6)]
    wanted = trained["results"][3]["rayagi"]
    assert rows[3]["value_loss"] == pytest.approx(wanted["value_loss"], rel=1e-5)
    evaluations = read_rows(tmp_path / "run" / "evaluations.csv")
    assert [row["iteration"] for row in evaluations] == [2, 4, 5]  # every second iteration, and at the end
    assert f"({3 * STEPS} environment steps)" in capfd.readouterr().out


def test_weights_are_set_and_what_gmis_do_not_have_is_refused_with_what_to_use():
    algo = small_config().build_algo()
    try:
        assert algo.config.gamma == 0.99
        before = algo.get_weights()
        algo.set_weights(
            {"default_policy": {name: value + 1 for name, value in before["default_policy"].items()}}
        )
        after = algo.get_weights(["default_policy"])["default_policy"]
        for name, value in before["default_policy"].items():
            np.testing.assert_allclose(after[name], value + 1)
        assert algo.get_weights(["another"]) == {}
        with pytest.raises(ValueError, match="names and shapes"):
            algo.set_weights({"default_policy": {}})
        parameters = algo.train()["learners"]["default_policy"]["num_trainable_parameters"]
        assert parameters == sum(value.size for value in after.values())
        for call, instead in (
            (lambda: algo.compute_single_action(np.zeros(4)), r"get_module\(\)\.forward_inference"),
            (algo.get_policy, "get_module"),
            (lambda: algo.export_model("torch"), "learner_group/learner/rl_module"),
            (lambda: algo.add_module("another"), "one policy"),
        ):
            with pytest.raises(NotImplementedError, match=instead):
                call()
    finally:
        algo.stop()


def test_a_checkpoint_that_cannot_be_completed_leaves_the_one_before_it(tmp_path, monkeypatch):
    def state(path):
        return pickle.loads((path / "algorithm_state.pkl").read_bytes())

    def fail(*args):
        raise DiskError("it", "No space left on device")

    algo = small_config().build_algo()
    try:
        for iteration in (1, 2):
            algo.train()
            assert algo.save_to_path(tmp_path) == str(tmp_path)
            assert CheckpointStore(tmp_path / "checkpoints").names() == [f"iteration_{iteration:06d}"]
            assert state(tmp_path)["training_iteration"] == iteration
        algo.train()
        monkeypatch.setattr(rayagi.algorithm, "write_run", fail)
        with pytest.raises(DiskError):
            algo.save_to_path(tmp_path)
    finally:
        algo.stop()
    assert state(tmp_path)["training_iteration"] == 2
    assert CheckpointStore(tmp_path / "checkpoints").load().counters["iteration"] == 2
    assert not list(tmp_path.glob(".*"))


def test_actions_of_a_dataset_beyond_the_tasks_range_are_told_or_refused(tmp_path, caplog):
    """The pendulum's force is within 3."""
    steps = {"obs": torch.zeros(4, 4), "terminated": torch.tensor([0, 1, 0, 1])}
    configs = {}
    for name, actions in (("some", [0.0, 5, -3, 1]), ("all", [5.0, 5, -6, 4])):
        path = tmp_path / f"{name}.pt"
        torch.save({**steps, "action": torch.tensor(actions)[:, None]}, path)
        config = CONFIGS["bc"]().environment("InvertedPendulum-v5").offline_data(input_=str(path))
        configs[name] = config.training(num_updates=1).gmi(num_gmis=1)
    with pytest.raises(DatasetError, match="component 0 of every action beyond"):
        configs["all"].build_algo()
    algo = configs["some"].build_algo()
    try:
        algo.train()
        algo.train()
    finally:
        algo.stop()
    assert caplog.text.count("some.pt has actions beyond InvertedPendulum-v5's range: 1 of 4") == 1


def test_an_environment_of_tune_s_registry_is_called_with_its_config():
    class Own(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, limit):
            self.limit = limit

        def reset(self, *, seed=None, options=None):
            self.steps = 0
            return np.zeros(2, np.float32), {}

        def step(self, action):
            self.steps += 1
            return np.zeros(2, np.float32), 2.0, self.steps == self.limit, False, {}

    tune.register_env("my env", lambda env_config: Own(env_config["limit"]))
    algo = small_config().environment("my env", env_config={"limit": 4}).build_algo()
    try:
        assert algo.train()["env_runners"]["episode_return_mean"] == 8.0
    finally:
        algo.stop()


def weights(module):
    return torch.cat([value.reshape(-1) for value in module.state_dict().values()])


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "algorithm"), [(AppoConfig, APPO), (ImpalaConfig, IMPALA), (A3CConfig, A3C)])
def test_the_asynchronous_algorithms_are_rllibs_algorithms_too(tmp_path, cls, algorithm):
    algo = small_config(cls).gmi(template="dp_only").build_algo()  # in step: the synchronous learner
    try:
        assert type(algo) is algorithm
        assert repr(algo) == f"rayagi.{algorithm.__name__}(env=InvertedPendulum-v5; gmis=1)"
        result = algo.train()
        path, module = algo.save_to_path(tmp_path / "checkpoint"), algo.get_module()
        wanted = algo.train()["rayagi"]["value_loss"]
    finally:
        algo.stop()
    assert result["num_env_steps_sampled_lifetime"] == STEPS
    if algorithm is A3C:
        assert result["rayagi"]["policy_lag_max"] == 0.0  # one GMI
    else:
        assert result["rayagi"]["importance_ratio"] == pytest.approx(1.0, abs=1e-4)
        assert "importance_truncated" in result["rayagi"]
    restored = Algorithm.from_checkpoint(path)
    try:
        assert type(restored) is algorithm
        assert torch.equal(weights(restored.get_module()), weights(module))
        assert restored.train()["rayagi"]["value_loss"] == pytest.approx(wanted, rel=1e-5)
    finally:
        restored.stop()


@pytest.mark.slow
def test_a_checkpoint_remembers_how_many_gmis_the_machine_gave(tmp_path, caplog):
    chosen = small_config().gmi(num_gmis=None)
    algo = chosen.build_algo()
    try:
        path, num_gmis = algo.save_to_path(tmp_path / "checkpoint"), algo.plan.num_gmis
    finally:
        algo.stop()
    assert num_gmis == 2  # one for each of the two CPUs
    restored = Algorithm.from_checkpoint(path)
    try:
        assert (restored.config.num_gmis, restored.plan.num_gmis) == (2, 2)
    finally:
        restored.stop()
    assert "continues with" not in caplog.text
    other = small_config().gmi(num_gmis=1).build_algo()
    try:
        other.restore_from_path(path)
    finally:
        other.stop()
    assert "num_gmis=2 and continues with 1: iterations have 0.5 times as many steps" in caplog.text


@pytest.mark.slow
def test_a_checkpoint_continues_with_another_number_of_environments(tmp_path, caplog):
    algo = small_config().gmi(num_gmis=1, num_envs=4).build_algo()
    try:
        algo.train()
        path, weights_then = algo.save_to_path(tmp_path / "checkpoint"), weights(algo.get_module())
    finally:
        algo.stop()
    wider = small_config().gmi(num_gmis=1, num_envs=8).build_algo()
    try:
        wider.restore_from_path(path)
        assert torch.equal(weights(wider.get_module()), weights_then)
        assert wider.train()["training_iteration"] == 2
    finally:
        wider.stop()
    assert "the checkpoint has 4 environments and continues with 8, which restart" in caplog.text


def test_an_environment_that_the_user_registered_exists_inside_the_gmis():
    class Own(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32), {}

        def step(self, action):
            return np.full(2, 0.5, np.float32), 1.0, False, False, {}

    gymnasium.register("OfTheUser-v0", Own, max_episode_steps=5)
    try:
        algo = small_config().environment("OfTheUser-v0").build_algo()
        try:
            assert algo.train()["env_runners"]["episode_return_mean"] == 5.0
        finally:
            algo.stop()
    finally:
        del gymnasium.registry["OfTheUser-v0"]


def test_a_refused_setting_stops_the_build():
    with pytest.raises(ConfigError, match="num_env_runners = 2"):
        small_config().env_runners(num_env_runners=2).build_algo()


def test_a_trial_asks_for_its_own_process_and_one_bundle_per_gmi():
    request = PPO.default_resource_request(small_config().gmi(num_gmis=2).to_dict())
    assert request.bundles == [{"CPU": 1.0}, {"CPU": 1.0}]
    assert request.head_bundle_is_empty
    asked = PPO.default_resource_request(small_config().resources(num_cpus_for_main_process=1).to_dict())
    assert asked.bundles == [{"CPU": 1.0}, {"CPU": 1.0}]
    assert not asked.head_bundle_is_empty


def test_a_trial_that_cannot_fit_asks_for_no_bundles_and_its_setup_fails():
    assert PPO.default_resource_request(small_config().gmi(num_gmis=64).to_dict()) is None
    with pytest.raises(PlanError, match="64"):
        small_config().gmi(num_gmis=64).build_algo()
