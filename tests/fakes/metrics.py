"""Metrics of the catalogue that a synchronous run of PPO on cores has no values of."""

from rayagi.algorithms.registry import DEFINITIONS
from rayagi.monitoring.catalogue import CATALOGUE

OF_OTHERS = {
    "device_bytes",  # without a GPU
    *("faults_contact_overflow", "faults_constraint_overflow"),  # rayagi's own tasks
    *("exchange_s", "wait_s", "train_samples", "stale_samples"),  # roles apart
    *(
        "policy_lag_mean",
        "policy_lag_max",
        "policy_lag_bound",
        "importance_ratio",
        "importance_truncated",
    ),  # IMPALA, A3C
    *(metric.name for name, each in DEFINITIONS.items() if name != "ppo" for metric in each.metrics),
    *(metric.name for metric in CATALOGUE if metric.group == "replay"),
}
