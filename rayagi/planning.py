"""Planning: builds the placement plan of a run's spec."""

from __future__ import annotations

from placement.backend_choice import UnusedGpu, without_gpus
from placement.errors import PlanError
from placement.plan import PlacementPlan, make_plan
from placement.types import Machine
from rayagi.config.spec import GmiSpec, RunSpec


def plan_of(spec: RunSpec, machine: Machine) -> PlacementPlan:
    """The plan of a run on a machine; starts nothing.

    Raises:
        PlanError: the machine cannot hold ``spec.gmi``, or one of its numbers is still "auto".
    """
    gmi = spec.gmi
    if not gmi.is_resolved:
        raise PlanError(
            'a template, size, or number of GMIs or environments that is "auto"',
            "a plan needs values",
            "Resolve them with rayagi.coordinator.auto.resolve_auto, or give values",
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
        sizes=gmi.sizes,
        left_out=gmi.left_out,
    )


def serving_plan_of(
    gmi: GmiSpec, template: str, machine: Machine, *, num_agents: int | None = None
) -> PlacementPlan:
    """The plan of GMIs that act without training.

    Args:
        gmi: backend and numbers of GMIs; its training template is ignored
        template: dp_only, dp_mp or mp_dp (GMI-DRL §3.1.1, Figure 5)
        machine: inventory of the nodes
        num_agents: number of agent GMIs of mp_dp; None: 1

    Raises:
        PlanError: the machine cannot hold it.
    """
    assert gmi.num_gmis != "auto"
    return make_plan(
        machine,
        backend=gmi.backend,
        template=template,
        serving=True,
        num_gmis=gmi.num_gmis,
        num_agents=num_agents,
        num_envs=gmi.envs,
        threads_per_gmi=gmi.threads_per_gmi,
    )


def usable_machine(spec: RunSpec, machine: Machine) -> tuple[Machine, tuple[UnusedGpu, ...]]:
    """The machine without the GPUs that a plan with one GMI per GPU leaves out, and those GPUs.

    Raises:
        PlanError: no such plan is possible.
    """
    if not uses_gpus(spec, machine):
        return machine, ()
    one_each = spec.with_gmi(num_gmis=None, gmis_per_gpu=1, num_envs=1, left_out=())
    unused = plan_of(one_each, machine).unused
    return without_gpus(machine, unused), unused


def uses_gpus(spec: RunSpec, machine: Machine) -> bool:
    """Whether the run's GMIs are slices of GPUs."""
    return machine.num_gpus > 0 and spec.gmi.backend != "cpu"
