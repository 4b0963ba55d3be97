"""What a run's plan was measured at by a search, if it ever was."""

from __future__ import annotations

from pathlib import Path

from placement.plan import Plan
from placement.search import Measured
from rayagi.config.spec import RunSpec
from rayagi.coordinator.search_store import SearchStore
from rayagi.run.prediction import Prediction


def expectation(spec: RunSpec, plan: Plan, folder: Path | None = None) -> Prediction | None:
    """What the plan was measured at on this machine; None where no probe ever ran it.

    What the search confirmed, else what its one trial showed. A probe runs the GMIs of one device: a plan on several is
    that many times as fast, if each has as many GMIs.
    """
    devices = [piece.gpu_uuid for piece in plan.slices]
    num_devices = len(set(devices))
    per_device = plan.num_gmis // num_devices
    if any(devices.count(device) != per_device for device in devices):
        return None
    store = SearchStore(spec, plan.machine, folder)
    confirmed = store.confirmed(per_device, plan.num_envs)
    outcome = confirmed or store.outcome(per_device, plan.num_envs)
    if not isinstance(outcome, Measured):
        return None
    measured = "two measurements" if confirmed else "a short trial"
    return Prediction(
        predicted_steps_per_s=outcome.steps_per_s * plan.num_gmis,
        relative_error=outcome.relative_error,
        source=f"{measured} of {per_device} x {plan.num_envs} environments",
    )
