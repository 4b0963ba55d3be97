"""Stages by sampled stacks, and by a profile."""

import pytest

from experiments.profiler.sampling import recorded, sampled
from rayagi.profiler.layout import Category as C
from tests.unit.profiler.traces import process, profile, write

LEARN = "main (x.py:1);learn (stable_baselines3/common/on_policy_algorithm.py:300)"
STEP = "step (stable_baselines3/common/vec_env/base_vec_env.py:214)"


def test_a_sample_belongs_to_the_stage_in_its_stack():
    stacks = "\n".join(
        (
            "main (x.py:1);import torch 7",  # outside of the loop
            f"{LEARN};train (stable_baselines3/ppo/ppo.py:184);forward (torch/nn.py:1) 5",
            f"{LEARN};collect (y.py:1);{STEP};step (mujoco.py:9) 3",
            f"{LEARN};collect (y.py:1);forward (stable_baselines3/common/policies.py:636) 1",
            f"{LEARN};collect (y.py:1) 1",
        )
    )
    assert sampled(stacks) == {"backpropagation": 0.5, "simulation": 0.3, "inference": 0.1, "other": 0.1}


def test_a_program_without_the_loop_is_no_result():
    with pytest.raises(ValueError, match="no sample is within"):
        sampled("main (x.py:1) 7")


def test_a_profile_has_the_shares_of_its_iterations(tmp_path):
    events = [
        (C.THREAD, 0, 200, "main", 0),
        (C.ITERATION, 100, 200, "iteration", 0, 0),
        (C.OPERATION, 110, 170, "simulation", 1),
        (C.OPERATION, 170, 195, "save", 1),
    ]
    folder = write(tmp_path / "p", profile(process([events])))
    assert recorded(folder) == {"simulation": 0.6, "other": 0.4}
