"""A Tune trial whose node is lost goes on from its checkpoint on another one."""

import logging
import signal
import sys
import threading
from pathlib import Path

import pytest
import ray
from ray import cloudpickle, tune
from ray.cluster_utils import Cluster

from rayagi import PPO, PPOConfig
from tests.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def nodes():
    """Two nodes with a CPU each, beside a head without any."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        found = [cluster.add_node(num_cpus=1) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        cluster.wait_for_nodes(timeout=60)
        yield found
    finally:
        ray.shutdown()
        cluster.shutdown()


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_trial_whose_node_is_lost_goes_on_from_its_checkpoint_on_another(nodes, tmp_path):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    stays, iterations = tmp_path / "stays", []

    def stay_once(*, result, **given):
        iteration = result["training_iteration"]
        if iteration == 8 and not stays.exists():
            stays.write_text(str(result["pid"]))
            signal.pause()  # until its node is lost

    class Iterations(tune.Callback):
        def on_trial_result(self, iteration, trials, trial, result, **info):
            iterations.append(result["training_iteration"])

    def lose_node():
        pid = until(lambda: stays.exists() and stays.read_text(), limit_s=120.0)
        raylet = parent_of(pid)
        node = next(node for node in nodes if node.all_processes["raylet"][0].process.pid == raylet)
        node.kill_all_processes(check_alive=False, allow_graceful=False)

    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .gmi(num_gmis=1, num_envs=4, threads_per_gmi=1)
        .training(rollout_length=16, num_minibatches=4, lr_schedule="constant")
        .rl_module(model_config={"fcnet_hiddens": [16, 16]})
        .callbacks(on_train_result=stay_once)
    )
    losing = threading.Thread(target=lose_node)
    losing.start()
    (done,) = tune.Tuner(
        PPO,
        param_space=config,
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            name="run",
            stop={"training_iteration": 10},
            verbose=0,
            callbacks=[Iterations()],
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=3),
        ),
    ).fit()
    losing.join()
    assert done.error is None
    assert iterations == [1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10]
    assert done.metrics["num_env_steps_sampled_lifetime"] == 10 * 4 * 16
