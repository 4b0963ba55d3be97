"""The shipped models' solver settings: one step beside that of a solver which goes on until it has converged."""

from __future__ import annotations

import pytest

from experiments.tasks.residuals import Residual, Solver, measure

# Random play of 12 worlds until the robots lie on the floor, and a fifth of a second more.
WORLDS, STEPS = 12, 60
LARGEST = 2e-3
"""m/s, rad/s. The largest over 12,800 world-steps of each task was 9e-4 (experiments/tasks/README.md)."""


def residual(env_id: str, solver: Solver) -> Residual:
    return measure(env_id, "mujoco_cpu", {"case": solver}, num_envs=WORLDS, num_steps=STEPS)["case"]


@pytest.mark.parametrize(
    "env_id", [f"rayagi/{name}-v0" for name in ("Ant", "Anymal", "BallBalance", "Humanoid", "ShadowHand")]
)
def test_a_step_of_the_shipped_model_is_that_of_a_converged_solver(env_id):
    found = residual(env_id, Solver())
    assert found.steps > 500
    assert found.largest < LARGEST


def test_the_measure_sees_a_solver_that_stops_early():
    assert residual("rayagi/Anymal-v0", Solver(iterations=4)).largest > 1.0
