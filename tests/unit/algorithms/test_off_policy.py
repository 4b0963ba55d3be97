"""What off-policy learners share."""

from types import SimpleNamespace

import pytest
import torch

from rayagi.algorithms.off_policy import OffPolicyLearner


@pytest.mark.parametrize(("rank", "num_envs", "rows", "weight"), [(0, 6, 6, 1.2), (1, 3, 4, 0.8)])
def test_trainers_divide_a_batch_by_their_environments_and_weigh_their_means_by_its_rows(
    rank, num_envs, rows, weight
):
    """10 rows for 6 and 3 environments: 6 and 4. A mean over all ranks counts a rank's mean rows / (10 / 2) times."""
    group = SimpleNamespace(all_gather=lambda tensor: torch.tensor([[6], [3]]), rank=rank, world_size=2)
    learner = SimpleNamespace(communicator=group, num_envs=num_envs, spec=SimpleNamespace(batch_size=10))
    assert OffPolicyLearner._share_of_batch(learner) == (rows, pytest.approx(weight))
