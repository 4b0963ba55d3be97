"""``rayagi plan``: show how a machine would be partitioned, without starting anything."""

from __future__ import annotations

import argparse

from placement.errors import counted
from placement.inventory import load_machine
from rayagi.cli.failures import UsageError
from rayagi.cli.output import complain, say
from rayagi.cli.settings import gives_num_envs, machine_of_run, spec_from
from rayagi.coordinator import cluster_forecast, template_choice
from rayagi.coordinator.auto import resolve_auto
from rayagi.coordinator.default_layout import with_default_layout
from rayagi.coordinator.memory_need import reject_insufficient_memory
from rayagi.coordinator.model_validation import load, ranks, validation_text
from rayagi.planning import plan_of, uses_gpus
from rayagi.run.quantities import bytes_text


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; returns the exit code."""
    _refuse_without_nodes(arguments)
    if arguments.nodes is not None or arguments.explain:
        return _from_unit_costs(arguments)
    machine = machine_of_run() if arguments.machine is None else load_machine(arguments.machine)
    spec = spec_from(arguments)
    if not spec.gmi.is_resolved:
        spec = resolve_auto(spec, machine, log=say, measuring="nothing")
    spec = with_default_layout(spec, machine, log=say, keep_envs=gives_num_envs(arguments))

    plan = plan_of(spec, machine)
    reject_insufficient_memory(spec, plan)
    print(plan.table())
    return 0


def _refuse_without_nodes(arguments: argparse.Namespace) -> None:
    """Raise UsageError for options of a forecast that is not asked for."""
    given = {
        "--gpu": arguments.gpu,
        "--gpus-per-node": arguments.gpus_per_node,
        "--cores-per-node": arguments.cores_per_node,
    }
    alone = [option for option, value in given.items() if value is not None]
    if alone and arguments.nodes is None:
        raise UsageError(
            f"{alone[0]} needs --nodes N, a cluster to forecast; --machine FILE plans for another machine"
        )


def _from_unit_costs(arguments: argparse.Namespace) -> int:
    """Compare templates, or forecast a cluster, from a short cached profile."""
    # Imported here: planning without measurements needs neither torch nor Ray.
    from rayagi.coordinator.profiling import cached_unit_costs

    spec, machine = spec_from(arguments), machine_of_run()
    if arguments.machine is not None:
        raise UsageError(
            "--machine FILE cannot be profiled: unit costs are measured on the machine this runs on"
        )
    if arguments.explain and (spec.gmi.slices == "auto" or spec.gmi.wants_search):
        raise UsageError(
            '--explain compares templates: give numbers of GMIs and environments, and sizes, instead of "auto"'
        )
    on_gpu = uses_gpus(spec, machine)
    cluster = cluster_forecast.cluster_of(
        arguments.nodes or 1, arguments.gpus_per_node or 8, arguments.gpu or "H100", arguments.cores_per_node
    )
    if arguments.nodes is not None and not on_gpu:
        cluster_forecast.refuse_gpu_engine(spec.env.id, spec.env.factory().engine)
    costs = cached_unit_costs(spec, machine, log=complain)
    say(
        f"Measured here, {counted(costs.num_steps, 'step')} of "
        f"{spec.env.id} with {costs.num_envs[0]} and {costs.num_envs[1]} "
        f"environments: a message takes {1e6 * costs.message_s:.0f} us, copies {costs.bandwidth / 1e9:.1f} GB/s, a "
        f"reduction {1e3 * costs.reduce_s:.2f} ms, model {bytes_text(costs.model_bytes)}."
    )
    if arguments.explain:
        validation = load()
        found = template_choice.predictions(costs, template_choice.training_plans(spec, machine))
        ranked = ranks(validation, machine, spec.algorithm, on_gpu=on_gpu)
        say("\n" + template_choice.table(found, ranked=ranked))
        say(template_choice.choose(found, spec, machine, validation)[1])
        say(
            "Any of them can be used: rayagi train --template NAME; --template auto measures the best ones first."
        )
    if arguments.nodes is not None:
        sms = machine.nodes[0].usable_gpus[0].sm_count if on_gpu else None
        found_sizes = cluster_forecast.forecasts(costs, cluster, costs.num_envs[0], measured_sms=sms)
        say(
            f"\nNominal: {cluster.gpus_per_node} x {cluster.gpu.name} and "
            f"{counted(cluster.cores_per_node, 'core')} a node, links "
            f"{cluster.gpu.link_bytes_per_s / 1e9:.0f} GB/s, network {cluster.gpu.network_bytes_per_s / 1e9:.0f} GB/s. "
            f"{counted(costs.num_envs[0], 'environment')} in each GMI."
        )
        if sms is None:
            say("No GPU was measured: from networks as slow as on these cores to networks that cost nothing.")
        say(cluster_forecast.table(found_sizes))
        say(validation_text(load(), machine, spec.algorithm, on_gpu=True))
    return 0
