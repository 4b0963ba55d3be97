"""``rayagi plan``: show how a machine would be partitioned, without starting anything."""

from __future__ import annotations

import argparse

from placement.inventory import load_machine
from placement.types import Machine
from rayagi.cli.failures import UsageError
from rayagi.cli.output import complain, say
from rayagi.cli.settings import machine_of_run, refuse_unmeasured, spec_from
from rayagi.planning import plan_of, uses_gpus
from rayagi.run.quantities import bytes_text


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; returns the exit code."""
    if arguments.nodes is not None or arguments.explain:
        return _from_unit_costs(arguments)
    machine = _machine(arguments)
    spec = spec_from(arguments)
    if spec.gmi.wants_search:
        # Imported here and below: planning without measurements needs neither torch nor Ray.
        from rayagi.coordinator.auto import resolve_auto

        spec = resolve_auto(spec, machine, may_search=False)
    from rayagi.coordinator.memory_need import reject_insufficient_memory

    plan = plan_of(spec, machine)
    reject_insufficient_memory(spec, plan)
    print(plan.table())
    return 0


def _from_unit_costs(arguments: argparse.Namespace) -> int:
    """Compare templates, or forecast a cluster, from a short cached profile."""
    from placement.templates import choose, explain
    from rayagi.coordinator.cluster_forecast import best_forecast, cluster_of, sizes_up_to, table
    from rayagi.coordinator.profiling import cached_unit_costs

    spec, machine = spec_from(arguments), machine_of_run()
    if arguments.machine is not None:
        raise UsageError(
            "--machine FILE cannot be profiled: unit costs are measured on the machine this runs on"
        )
    refuse_unmeasured(spec, "unit costs are measured")
    cluster = cluster_of(
        arguments.nodes or 1, arguments.gpus_per_node, arguments.gpu, arguments.cores_per_node
    )
    costs = cached_unit_costs(spec, machine, log=complain)
    say(
        f"Measured here, {costs.num_steps} steps of {costs.num_envs} environments of {spec.env.id}: simulate "
        f"{1e3 * costs.simulate_s:.0f} ms, act {1e3 * costs.act_s:.1f} ms, train {1e3 * costs.train_s:.0f} ms, copies "
        f"{costs.bandwidth / 1e9:.1f} GB/s, model {bytes_text(costs.model_bytes)}."
    )
    if arguments.explain:
        say("\n" + explain(choose(costs, num_gmis=max(2, machine.num_cores)), costs))
        say("Any of them can be used: rayagi train --template NAME.")
    if arguments.nodes is not None:
        updates = spec.learning.num_epochs * spec.learning.num_minibatches
        sms = machine.nodes[0].usable_gpus[0].sm_count if uses_gpus(spec, machine) else None
        found = [
            best_forecast(costs, each, updates=updates, measured_sms=sms) for each in sizes_up_to(cluster)
        ]
        say(
            f"\nNominal: {cluster.gpus_per_node} x {cluster.gpu.name} and {cluster.cores_per_node} cores a node, links "
            f"{cluster.gpu.link_bytes_per_s / 1e9:.0f} GB/s, network {cluster.gpu.network_bytes_per_s / 1e9:.0f} GB/s."
        )
        if sms is None:
            say("No GPU was measured: from networks as slow as on these cores to networks that cost nothing.")
        say(table(found))
    return 0


def _machine(arguments: argparse.Namespace) -> Machine:
    """The machine to plan for: a recorded one, else that of `rayagi train`."""
    if arguments.machine is not None:
        return load_machine(arguments.machine)
    return machine_of_run()
