"""From a run's specification to its plan."""

from __future__ import annotations

from placement.errors import PlanError
from placement.plan import Plan, make_plan
from placement.types import Machine
from rayagi.config.spec import RunSpec


def plan_of(spec: RunSpec, machine: Machine) -> Plan:
    """The plan of a run on a machine; starts nothing.

    Raises:
        PlanError: the machine cannot hold what ``spec.gmi`` asks for, or a number of it is still to be searched.
    """
    gmi = spec.gmi
    if gmi.wants_search:
        raise PlanError(
            'a number of GMIs or environments that is "auto"',
            "a plan needs numbers",
            "Let rayagi.coordinator.auto.resolved find them, or give them",
        )
    assert gmi.num_gmis != "auto"
    assert gmi.gmis_per_gpu != "auto"
    return make_plan(
        machine,
        backend=gmi.backend,
        template=gmi.template,
        num_gmis=gmi.num_gmis,
        gmis_per_gpu=gmi.gmis_per_gpu,
        num_learners=gmi.num_learners,
        num_envs=gmi.envs,
        threads_per_gmi=gmi.threads_per_gmi,
        sizes=gmi.slices,
    )


def uses_gpus(spec: RunSpec, machine: Machine) -> bool:
    """Whether the run's GMIs are cut from GPUs."""
    return machine.num_gpus > 0 and spec.gmi.backend != "cpu"
