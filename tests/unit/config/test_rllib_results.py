"""Iterations of GMIs under RLlib's keys, through RLlib's own logger."""

from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from actors.protocols import EvaluationResult, IterationResult
from rayagi.monitoring.catalogue import DERIVED
from rayagi.rllib_results import ResultLog, evaluation_results


def reduced(log, logger, metrics, returns=()):
    log.log(logger, IterationResult(0, metrics, list(returns), [9] * len(returns)), 0.5)
    return logger.reduce()


def test_a_gauge_that_an_iteration_does_not_report_holds_and_counters_do_not():
    log, logger = ResultLog(100), MetricsLogger(root=True)
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


def test_statistics_of_episodes_have_rllib_s_names():
    found = evaluation_results(EvaluationResult([4.0, 6.0, 11.0], [10, 20, 60]))["env_runners"]
    assert found == {
        "episode_return_mean": 7.0,
        "episode_return_min": 4.0,
        "episode_return_max": 11.0,
        "episode_len_mean": 30.0,
        "num_episodes": 3,
        "num_env_steps_sampled": 90,
    }


def test_without_episodes_there_are_no_statistics_of_them():
    assert evaluation_results(EvaluationResult([], []))["env_runners"] == {
        "num_episodes": 0,
        "num_env_steps_sampled": 0,
    }


def test_reward_terms_are_means_over_the_last_episodes_and_survive_a_checkpoint():
    log, logger = ResultLog(3), MetricsLogger(root=True)
    log.log(logger, IterationResult(0, {"env_steps": 8.0}, reward_terms={"up": [9.0, 1.0, 2.0]}), 0.5)
    again = ResultLog(3)
    again.load_state_dict(log.state_dict())
    again.log(logger, IterationResult(1, {"env_steps": 8.0}, reward_terms={"up": [6.0]}), 0.5)
    assert logger.reduce()["rayagi"]["reward_up"] == 3.0


def test_derived_metrics_add_up_over_the_run_and_over_a_checkpoint():
    log, logger = ResultLog(100), MetricsLogger(root=True)
    reduced(log, logger, {"env_steps": 64.0}, [3.0])
    log.evaluated(EvaluationResult([4.0, 6.0], [9, 9]), 2.0)
    again = ResultLog(100)
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
