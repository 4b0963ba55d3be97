"""rayagi.PPO inside tune.Tuner."""

import logging
import sys
from pathlib import Path

import pytest
import ray
from ray import cloudpickle, tune
from ray.rllib.algorithms.algorithm import Algorithm

from rayagi import PPO, PPOConfig
from rayagi.cli.main import main

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("rates", [[1e-3], [1e-4, 1e-3]])
def test_a_grid_of_learning_rates_runs_and_its_checkpoints_go_on(tmp_path, capfd, rates):
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .gmi(num_gmis=1, num_envs=4, threads_per_gmi=1)
        .training(lr=tune.grid_search(rates), rollout_length=16, num_minibatches=4, lr_schedule="constant")
        .rl_module(model_config={"fcnet_hiddens": [16, 16]})
    )
    results = tune.Tuner(
        PPO,
        param_space=config,
        run_config=tune.RunConfig(
            stop={"training_iteration": 2},
            storage_path=str(tmp_path),
            verbose=0,
            log_to_file=True,
            sync_config=tune.SyncConfig(sync_artifacts=True),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        ),
    ).fit()
    assert not results.errors
    assert sorted(result.config["lr"] for result in results) == rates
    for result in results:
        assert result.metrics["training_iteration"] == 2
        assert result.metrics["num_env_steps_sampled_lifetime"] == 2 * 4 * 16
        assert result.metrics["rayagi"]["learning_rate"] == result.config["lr"]
        assert result.metrics["env_runners"]["episode_return_mean"] > 0
    printed = capfd.readouterr()
    assert len((printed.out + printed.err).splitlines()) < 40  # not a line per setting

    for result in results:
        logged = Path(result.path, "stderr").read_text()
        assert logged.count("seed is None, which rayagi takes as 0") == 1

    best = results.get_best_result("env_runners/episode_return_mean", mode="max")
    algo = Algorithm.from_checkpoint(best.checkpoint)
    try:
        assert algo.train()["training_iteration"] == 3
    finally:
        algo.stop()


def small(**training):
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .gmi(num_gmis=1, num_envs=4, threads_per_gmi=1)
        .training(rollout_length=16, num_minibatches=4, lr_schedule="constant", **training)
        .rl_module(model_config={"fcnet_hiddens": [16, 16]})
    )


def run_config(folder, **options):
    return tune.RunConfig(storage_path=str(folder), name="run", verbose=0, **options)


def test_trials_with_invalid_settings_fail_with_the_sentence_and_the_others_run(tmp_path):
    config = small(lr=tune.grid_search([1e-3, -1.0])).gmi(
        num_gmis=tune.grid_search([1, 3]), threads_per_gmi=1
    )
    results = tune.Tuner(
        PPO, param_space=config, run_config=run_config(tmp_path, stop={"training_iteration": 1})
    ).fit()
    good, bad_rate, too_many, both = results
    assert good.error is None
    assert good.metrics["training_iteration"] == 1
    assert "num_gmis=3 with threads_per_gmi=1: there are" in str(too_many.error)
    for each in (bad_rate, both):
        assert "training(lr=) = -1.0: must be finite and greater than 0" in str(each.error)


@pytest.mark.slow
def test_asha_stops_the_worse_trial_of_a_grid(tmp_path):
    # Judged by the learning rate itself, so that it is known which one is the worse.
    scheduler = tune.schedulers.ASHAScheduler(grace_period=1, reduction_factor=2, max_t=3)
    results = tune.Tuner(
        PPO,
        param_space=small(lr=tune.grid_search([1e-3, 1e-4])),
        tune_config=tune.TuneConfig(
            metric="rayagi/learning_rate", mode="max", scheduler=scheduler, max_concurrent_trials=1
        ),
        run_config=run_config(tmp_path),
    ).fit()
    assert not results.errors
    assert [(each.config["lr"], each.metrics["training_iteration"]) for each in results] == [
        (1e-3, 3),
        (1e-4, 1),
    ]


@pytest.mark.slow
def test_population_based_training_changes_settings_that_were_not_given(tmp_path):
    scheduler = tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=1,
        quantile_fraction=0.5,
        resample_probability=0.0,
        perturbation_factors=(0.9, 0.8),
        hyperparam_mutations={"gamma": tune.uniform(0.5, 0.9)},
        synch=True,
    )
    results = tune.Tuner(
        PPO,
        param_space=small(lr=tune.grid_search([1e-3, 1e-4])),
        tune_config=tune.TuneConfig(metric="rayagi/learning_rate", mode="max", scheduler=scheduler),
        run_config=run_config(tmp_path, stop={"training_iteration": 2}),
    ).fit()
    assert not results.errors
    better, worse = results
    # The worse one continues the better one with a factor of PBT on the preset's gamma.
    assert better.config["gamma"] == 0.99
    assert round(worse.config["gamma"] / 0.99, 6) in (0.8, 0.9)
    assert worse.config["lr"] == worse.metrics["rayagi"]["learning_rate"] == 1e-3
    # It may have the better one's last iteration to go on from.
    assert (better.metrics["training_iteration"], worse.metrics["training_iteration"]) in ((2, 2), (2, 3))


@pytest.mark.slow
def test_a_restored_experiment_has_its_trials_and_goes_on(tmp_path):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    flag = tmp_path / "failed"

    def fail_once(*, result, **kwargs):
        if result["training_iteration"] == 2 and not flag.exists():
            flag.touch()
            raise FloatingPointError("once")

    config = small(lr=1e-3).callbacks(on_train_result=fail_once)
    options = run_config(
        tmp_path,
        stop={"training_iteration": 3},
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
    )
    (failed,) = tune.Tuner(PPO, param_space=config, run_config=options).fit()
    assert "FloatingPointError" in str(failed.error)
    tuner = tune.Tuner.restore(str(tmp_path / "run"), PPO, resume_errored=True)
    assert len(tuner.get_results()) == 1
    (done,) = tuner.fit()
    assert done.error is None
    assert done.metrics["training_iteration"] == 3
    assert done.metrics["num_env_steps_sampled_lifetime"] == 3 * 4 * 16
    assert done.config["gamma"] == 0.99
    assert main(["evaluate", done.checkpoint.path, "--episodes", "2"]) == 0
