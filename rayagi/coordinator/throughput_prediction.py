"""Throughput prediction of a plan, from the cached measurements of a search."""

from __future__ import annotations

from pathlib import Path

from placement.plan import PlacementPlan
from placement.search import TrialMeasurement
from placement.validation import half_width
from rayagi.config.spec import RunSpec
from rayagi.coordinator.search_store import SearchStore
from rayagi.run.prediction import Prediction


def predict_throughput(spec: RunSpec, plan: PlacementPlan, folder: Path | None = None) -> Prediction | None:
    """Predict the plan's throughput; None if it was never measured on this machine.

    The mean of its validation rounds with their prediction interval, else the result of its single trial. A probe measures
    one device. A plan on n devices with equal numbers of GMIs is predicted n times as fast.
    """
    devices = [gmi_slice.gpu_uuid for gmi_slice in plan.slices]
    num_devices = len(set(devices))
    per_device = plan.num_gmis // num_devices
    if any(devices.count(device) != per_device for device in devices):
        return None
    store = SearchStore(spec, plan.machine, folder)
    candidate = f"{per_device} x {plan.num_envs} environments"
    speeds = [outcome.steps_per_s for outcome in store.rounds(per_device, plan.num_envs)]
    if speeds:
        return Prediction(
            predicted_steps_per_s=sum(speeds) / len(speeds) * plan.num_gmis,
            half_width=half_width(speeds),
            source=f"{len(speeds)} measurements of {candidate}",
        )
    trial = store.outcome(per_device, plan.num_envs)
    if not isinstance(trial, TrialMeasurement):
        return None
    return Prediction(
        predicted_steps_per_s=trial.steps_per_s * plan.num_gmis, source=f"a short trial of {candidate}"
    )
