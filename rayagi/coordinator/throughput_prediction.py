"""Throughput prediction of a plan, from the cached measurements of a search."""

from __future__ import annotations

from statistics import fmean

from placement.errors import counted
from placement.plan import PlacementPlan
from placement.search import TrialMeasurement
from placement.validation import half_width
from rayagi.config.spec import RunSpec
from rayagi.coordinator.search_store import SearchStore
from rayagi.run.prediction import Prediction


def predict_throughput(spec: RunSpec, plan: PlacementPlan) -> Prediction | None:
    """Predict the plan's throughput; None if it was never measured on this machine.

    The mean of its validation rounds with their prediction interval, else the result of its single trial. A probe measures
    one device. A plan on n devices with equal numbers of GMIs is predicted n times as fast. Plans without some of their GMIs
    are not measured.
    """
    if plan.left_out or not plan.hosting("simulator"):
        return None
    devices = [gmi_slice.gpu_uuid for gmi_slice in plan.slices]
    num_devices = len(set(devices))
    per_device = plan.num_gmis // num_devices
    if any(devices.count(device) != per_device for device in devices):
        return None
    store = SearchStore(spec, plan.machine)
    candidate = f"{per_device} x {counted(plan.num_envs, 'environment')}"
    rounds = store.rounds(per_device, plan.num_envs)
    trial = store.outcome(per_device, plan.num_envs)
    measured = rounds or ((trial,) if isinstance(trial, TrialMeasurement) else ())
    if not measured:
        return None
    speeds = [outcome.steps_per_s for outcome in measured]
    steps = plan.num_envs * spec.learning.rollout_length
    return Prediction(
        predicted_steps_per_s=fmean(speeds) * plan.num_gmis,
        own_work_steps_per_s=fmean(_own_work_steps_per_s(outcome, steps) for outcome in measured),
        half_width=half_width(speeds) if rounds else None,
        source=f"{counted(len(rounds), 'measurement')} of {candidate}"
        if rounds
        else f"a short trial of {candidate}",
    )


def _own_work_steps_per_s(outcome: TrialMeasurement, steps: int) -> float:
    """Speed of a GMI without its waiting, as the health monitor measures it; ``steps``: of its iteration.

    steps / (steps / steps_per_s - sync_s)
    """
    return steps / (steps / outcome.steps_per_s - outcome.phases_s.get("sync_s", 0.0))
