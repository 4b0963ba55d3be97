"""rayagi.PPO inside tune.Tuner."""

import logging
from pathlib import Path

import pytest
import ray
from ray import tune
from ray.rllib.algorithms.algorithm import Algorithm

from rayagi import PPO, PPOConfig

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


@pytest.mark.parametrize("rates", [[1e-3], pytest.param([1e-4, 1e-3], marks=pytest.mark.slow)])
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
