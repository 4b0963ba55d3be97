"""Iterations of GMIs under RLlib's keys, through RLlib's own logger."""

import math

from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from actors.protocols import EvaluationResult, IterationResult
from rayagi.config.spec import RunSpec
from rayagi.monitoring.catalogue import DERIVED
from rayagi.rllib_results import ResultLog, evaluation_results
from rayagi.run.csv_log import read_rows
from rayagi.run.measures import position_of


def log_of(num_episodes):
    return ResultLog(RunSpec(), num_episodes, num_envs=8, num_parameters=77)


def reduced(log, logger, metrics, returns=()):
    log.log(logger, IterationResult(0, metrics, list(returns), [9] * len(returns)), 0.5)
    return logger.reduce()


def test_a_gauge_that_an_iteration_does_not_report_holds_and_counters_do_not():
    log, logger = log_of(100), MetricsLogger(root=True)
    both = {"env_steps": 64.0, "episodes": 1.0, "simulate_s": 0.5, "value_loss": 2.0}
    first = reduced(log, logger, both, [3.0])
    # a learner only: its samples were collected before
    second = reduced(log, logger, {"env_steps": 0.0, "train_samples": 32.0, "value_loss": 1.0})
    assert (first["rayagi"]["simulate_s"], second["rayagi"]["simulate_s"]) == (0.5, 0.5)
    assert (first["rayagi"]["value_loss"], second["rayagi"]["value_loss"]) == (2.0, 1.0)
    assert second["learners"]["default_policy"]["value_loss"] == 1.0
    assert second["rayagi"]["env_steps"] == 0
    assert second["env_runners"]["num_env_steps_sampled_lifetime"] == 64
    assert second["env_runners"]["episode_return_mean"] == 3.0
    assert second["learners"]["__all_modules__"]["num_env_steps_trained_lifetime"] == 64 + 32


def test_counters_of_several_iterations_in_one_result_add_up():
    """RLlib combines them where a user asks for a shortest time of a result."""
    log, logger = log_of(100), MetricsLogger(root=True)
    for loss in (2.0, 1.0):
        log.log(
            logger,
            IterationResult(0, {"env_steps": 64.0, "episodes": 1.0, "value_loss": loss}, [3.0], [9]),
            0.5,
        )
    found = logger.reduce()
    assert (found["rayagi"]["env_steps"], found["rayagi"]["episodes"], found["rayagi"]["value_loss"]) == (
        128,
        2,
        1,
    )
    assert found["env_runners"]["num_env_steps_sampled"] == 128


def test_statistics_of_episodes_are_nan_before_the_first_one_has_ended():
    """As Tune needs them: a metric that a result lacks is an error there."""
    log, logger = log_of(100), MetricsLogger(root=True)
    metrics = {"env_steps": 64.0, "episodes": 0.0}
    found = reduced(log, logger, metrics)["env_runners"]
    names = [f"episode_{what}_{which}" for what in ("return", "len") for which in ("mean", "min", "max")]
    for results in (found, evaluation_results(EvaluationResult([], []))["env_runners"]):
        assert all(math.isnan(results[name]) for name in names)
        assert results["num_episodes"] == 0
    assert reduced(log, logger, metrics, [3.0])["env_runners"]["episode_return_mean"] == 3.0


def test_statistics_of_episodes_have_rllib_s_names():
    found = evaluation_results(EvaluationResult([4.0, 6.0, 11.0], [10, 20, 60]))["env_runners"]
    assert found == {
        "episode_return_mean": 7.0,
        "episode_return_min": 4.0,
        "episode_return_max": 11.0,
        "episode_len_mean": 30.0,
        "episode_len_min": 10,
        "episode_len_max": 60,
        "agent_episode_returns_mean": {"default_agent": 7.0},
        "module_episode_returns_mean": {"default_policy": 7.0},
        "num_episodes": 3,
        "num_env_steps_sampled": 90,
    }


def test_what_rllib_s_learners_and_timers_report_has_their_names_too():
    values = {"policy_loss": -0.5, "value_loss": 2.0, "entropy": 3.0, "approx_kl": 0.01, "grad_norm": 4.0}
    times = {"simulate_s": 0.25, "act_s": 0.5, "update_s": 0.125, "sync_s": 0.0}
    metrics = {"env_steps": 64.0, "learning_rate": 1e-3, "explained_variance": 0.5, **values, **times}
    found = reduced(log_of(100), MetricsLogger(root=True), metrics, [3.0])
    learner = found["learners"]["default_policy"]
    learning = RunSpec().learning
    wanted = {
        "policy_loss": -0.5,
        "vf_loss": 2.0,
        "entropy": 3.0,
        "total_loss": -0.5 + 2.0 * learning.value_coef - 3.0 * learning.entropy_coef,
        "vf_explained_var": 0.5,
        "mean_kl_loss": 0.01,
        "curr_kl_coeff": 0.0,
        "default_optimizer_learning_rate": 1e-3,
        "gradients_default_optimizer_global_norm": 4.0,
        "num_trainable_parameters": 77,
    }
    assert {name: learner[name] for name in wanted} == wanted
    timers = {"env_runner_sampling_timer": 0.75, "learner_update_timer": 0.125, "synch_weights": 0.0}
    assert {name: found["timers"][name] for name in timers} == timers
    # 9 steps an episode; 64 steps of 8 environments in half a second are 1/16 s each.
    assert found["env_runners"]["episode_duration_sec_mean"] == 9 / 16
    assert found["env_runners"]["agent_episode_returns_mean"] == {"default_agent": 3.0}


def test_the_rows_of_a_run_are_those_of_progress_csv_and_survive_a_checkpoint(tmp_path):
    log, logger = log_of(100), MetricsLogger(root=True)
    reduced(log, logger, {"env_steps": 64.0, "value_loss": 2.0}, [3.0])
    log.evaluated(EvaluationResult([4.0, 6.0], [9, 9]), 2.0)
    again = log_of(100)
    again.load_state_dict(log.state_dict())
    again.log(logger, IterationResult(1, {"env_steps": 64.0}, reward_terms={"up": [6.0]}), 0.5)
    for name, text in again.tables().items():
        (tmp_path / name).write_text(text)
    first, second = read_rows(tmp_path / "progress.csv")
    assert (first["iteration"], first["value_loss"], first["env_steps_total"]) == (1, 2.0, 64)
    assert (second["iteration"], second["reward_up"], second["env_steps_total"]) == (2, 6.0, 128)
    assert "reward_up" not in first
    (row,) = read_rows(tmp_path / "evaluations.csv")
    assert (row["iteration"], row["evaluation_return_mean"], row["evaluation_return_std"]) == (1, 5.0, 1.0)
    assert position_of(again.counters()).env_steps == 128


def test_reward_terms_are_means_over_the_last_episodes_and_survive_a_checkpoint():
    log, logger = log_of(3), MetricsLogger(root=True)
    log.log(logger, IterationResult(0, {"env_steps": 8.0}, reward_terms={"up": [9.0, 1.0, 2.0]}), 0.5)
    again = log_of(3)
    again.load_state_dict(log.state_dict())
    again.log(logger, IterationResult(1, {"env_steps": 8.0}, reward_terms={"up": [6.0]}), 0.5)
    assert logger.reduce()["rayagi"]["reward_up"] == 3.0


def test_derived_metrics_add_up_over_the_run_and_over_a_checkpoint():
    log, logger = log_of(100), MetricsLogger(root=True)
    reduced(log, logger, {"env_steps": 64.0}, [3.0])
    log.evaluated(EvaluationResult([4.0, 6.0], [9, 9]), 2.0)
    again = log_of(100)
    again.load_state_dict(log.state_dict())
    found = reduced(again, logger, {"env_steps": 64.0, "train_samples": 32.0}, [5.0, 7.0])["rayagi"]
    wanted = {
        "env_steps_total": 128.0,
        "train_s": 0.5 + 2.0 + 0.5,
        "episodes_total": 3.0,
        "steps_per_second": 128.0,  # 64 in half a second
        "samples_per_second": 64.0,
        "episode_return_mean": 5.0,
        "episode_length_mean": 9.0,
        "evaluation_return_mean": 5.0,
    }
    assert {name: found[name] for name in wanted} == wanted
    assert set(wanted) == {metric.name for metric in DERIVED}
