"""From a run's specification to its plan."""

from __future__ import annotations

from placement.plan import Plan, make_plan
from placement.types import Machine
from rayagi.config.spec import RunSpec


def plan_of(spec: RunSpec, machine: Machine) -> Plan:
    """The plan of a run on a machine; starts nothing.

    Raises:
        PlanError: the machine cannot hold what ``spec.gmi`` asks for.
    """
    gmi = spec.gmi
    return make_plan(
        machine,
        backend=gmi.backend,
        template=gmi.template,
        num_gmis=gmi.num_gmis,
        gmis_per_gpu=gmi.gmis_per_gpu,
        num_envs=gmi.num_envs,
        threads_per_gmi=gmi.threads_per_gmi,
        sizes=gmi.slices,
    )
