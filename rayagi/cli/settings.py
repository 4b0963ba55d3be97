"""Converts command-line options to a RunSpec and the limits of a run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from actors.protocols import StateDict
from placement.inventory import cluster_machine, local_machine
from placement.partitioner import recover_this_host
from placement.types import Machine
from rayagi.cli.failures import UsageError
from rayagi.cli.output import complain
from rayagi.config.action_range import warn_of_action_range
from rayagi.config.convert import with_settings
from rayagi.config.files import load_config_file
from rayagi.config.presets import preset
from rayagi.config.rules import checked, refuse_unfit_env
from rayagi.config.spec import RunSpec
from rayagi.config.yaml_text import parse_yaml
from rayagi.run.folder import open_run
from rayagi.run.limits import DEFAULT_TIME_S, Limits

_FIXED_ON_RESUME = (
    "config", "algorithm", "dataset", "obs_keys", "init", "template", "gmis", "num_envs", "backend", "seed", "set", "name",
    "out",
)  # fmt: skip


def spec_from(arguments: argparse.Namespace) -> RunSpec:
    """Combine preset, config file, options and ``--set``, in this order; validate, and check that the task exists.

    Raises:
        UsageError, ConfigError, UnknownEnvironmentError: the settings are invalid.
    """
    if arguments.task is None and arguments.config is None:
        raise UsageError("which task? e.g. rayagi train Ant-v5; `rayagi envs` lists all")
    if arguments.config is not None:
        spec = load_config_file(
            arguments.config,
            arguments.task,
            arguments.algorithm,
            trust_modules=arguments.trust_modules,
        )
    else:
        spec = preset(arguments.task, arguments.algorithm or "ppo")
    init = getattr(arguments, "init", None)
    if init is not None:  # a run that begins with the networks of another one has networks of their sizes
        network = open_run(init).read_spec(trust_modules=arguments.trust_modules).network
        sizes = replace(spec.network, hidden=network.hidden, activation=network.activation)
        spec = replace(spec, network=sizes)
    gmi = {
        "template": arguments.template,
        "num_gmis": arguments.gmis,
        "num_envs": arguments.num_envs,
        "backend": arguments.backend,
    }
    spec = spec.with_gmi(**{name: value for name, value in gmi.items() if value is not None})
    if arguments.dataset is not None:
        spec = replace(spec, data=replace(spec.data, path=_located(arguments.dataset)))
    if arguments.obs_keys is not None:
        spec = replace(spec, data=replace(spec.data, obs_keys=arguments.obs_keys))
    if arguments.seed is not None:
        spec = replace(spec, seed=arguments.seed)
    spec = _with_training_options(with_settings(spec, arguments.set), arguments)
    # Before the rules, so that a wrong name gives only that error.
    info = spec.env.info()
    refuse_unfit_env(spec, info)
    spec = checked(spec)
    if init is None:
        warn_of_action_range(spec, info, complain)
    if spec.data.path is not None:
        # Imported here: it loads torch, which takes seconds.
        from rayagi.algorithms.offline_data import refuse_unfit_dataset

        refuse_unfit_dataset(spec.data.path, spec, info)
    return spec


def _located(dataset: str) -> str:
    # Imported here: it loads torch, which takes seconds.
    from rayagi.replay.loading import located

    return str(located(dataset))


def initial_state_from(run: Path, spec: RunSpec, *, trust_modules: bool) -> StateDict:
    """The state of a new run that begins with the networks of another one.

    Raises:
        ConfigError: those networks do not fit.
        RunError: that run cannot be read.
    """
    # Imported here: torch takes seconds.
    from rayagi.algorithms.initial_state import initial_state
    from rayagi.serving.source import saved_policy

    saved = saved_policy(run, "best", trust_modules=trust_modules)
    info = spec.env.info()
    return initial_state(str(run), saved.policy, saved.spec, saved.shared, spec, info)


def gives_num_envs(arguments: argparse.Namespace) -> bool:
    """Whether an option or the settings file gives the number of environments; a Python file always does."""
    if arguments.num_envs is not None or any(text.startswith("gmi.num_envs") for text in arguments.set or ()):
        return True
    file = arguments.config
    if file is None or file.suffix == ".py":
        return file is not None
    stored = parse_yaml(file.read_text(encoding="utf-8")) or {}
    return "num_envs" in stored.get("gmi", {})


def refuse_unmeasured(spec: RunSpec, what: str) -> None:
    """For commands that measure only ppo on dp_only.

    Raises:
        UsageError: another algorithm or template was requested.
    """
    if (spec.algorithm, spec.gmi.template) != ("ppo", "dp_only"):
        raise UsageError(
            f"{what} with algorithm ppo on template dp_only: leave other ones out (here {spec.algorithm} on "
            f"{spec.gmi.template})"
        )


def resumed_spec(spec: RunSpec, arguments: argparse.Namespace) -> RunSpec:
    """The spec of a resumed run. Only options that do not affect learning may change.

    Raises:
        UsageError: a resumed run cannot change this option.
    """
    named = [name for name in _FIXED_ON_RESUME if getattr(arguments, name) not in (None, [])]
    given = [f"--{name.replace('_', '-')}" for name in named]
    if given:
        raise UsageError(
            f"{', '.join(given)} cannot change on --resume: the run keeps its config.yaml. "
            "Start a new run for other settings: "
            f"rayagi train {spec.env.id} --config {quote(str(arguments.resume))}/config.yaml {given[0]} ..."
        )
    if arguments.task is not None and arguments.task != spec.env.id:
        raise UsageError(f"{arguments.resume} is a run of {spec.env.id}, not of {arguments.task}")
    if decays_linearly(spec) and arguments.env_steps not in (None, spec.total_env_steps):
        raise UsageError(
            f"--env-steps {arguments.env_steps} cannot be given on --resume: the learning rate of this run falls to "
            f"zero over {spec.total_env_steps} steps ({spec.algorithm}.lr_schedule = linear), and another number "
            f"would change it. Leave it out, or start a new run: "
            f"rayagi train {spec.env.id} --config {quote(str(arguments.resume))}/config.yaml "
            f"--env-steps {arguments.env_steps}"
        )
    return checked(_with_training_options(spec, arguments))


def limits_from(arguments: argparse.Namespace, spec: RunSpec) -> Limits:
    """Limits of a run: the options, and the spec's total_env_steps if it is set."""
    limits = typed_limits(arguments)
    if spec.total_env_steps is not None:
        limits = replace(limits, env_steps=spec.total_env_steps)
    return Limits(time_s=DEFAULT_TIME_S) if limits.is_empty() else limits


def resumed_limits(arguments: argparse.Namespace, spec: RunSpec, stored: Mapping[str, Any]) -> Limits:
    """Limits of a resumed run: the options; without any, its stored limits."""
    limits = typed_limits(arguments)
    if limits.is_empty():
        limits = Limits.from_dict(stored) if stored else limits_from(arguments, spec)
    # With a learning rate of zero nothing more is learned.
    return replace(limits, env_steps=spec.total_env_steps) if decays_linearly(spec) else limits


def decays_linearly(spec: RunSpec) -> bool:
    """Whether the learning rate depends on the number of steps."""
    return spec.learning.lr_schedule == "linear"


def with_num_gmis(spec: RunSpec, num_gmis: int) -> RunSpec:
    """The spec with a run's number of GMIs, if it is unset: the total batch depends on it."""
    if spec.gmi.num_gmis is not None or spec.gmi.gmis_per_gpu is not None:
        return spec
    return spec.with_gmi(num_gmis=num_gmis + len(spec.gmi.left_out))


def typed_limits(arguments: argparse.Namespace) -> Limits:
    """Limits given as options."""
    return Limits(
        time_s=arguments.time,
        env_steps=arguments.env_steps,
        iterations=arguments.iterations,
        stop_return=arguments.stop_return,
    )


def _with_training_options(spec: RunSpec, arguments: argparse.Namespace) -> RunSpec:
    if getattr(arguments, "env_steps", None) is not None:
        spec = replace(spec, total_env_steps=arguments.env_steps)
    if getattr(arguments, "evaluate_every", None) is not None:
        spec = replace(spec, evaluation=replace(spec.evaluation, interval=arguments.evaluate_every))
    if getattr(arguments, "replan", False):
        spec = spec.with_gmi(replan=True)
    return spec


def machine_of_run() -> Machine:
    """What `rayagi train` would run on: the cluster at RAY_ADDRESS, else this machine; as it does, without what killed
    runs left there.

    Raises:
        ClusterUnreachableError: no cluster answers there.
        InventoryError: a node could not be read.
    """
    if os.environ.get("RAY_ADDRESS", "local") in ("", "local"):
        recover_this_host()
        return local_machine()
    # Imported here: without a cluster Ray is not needed.
    from rayagi.coordinator.cluster import START_TIMEOUT_S, connected

    with connected():
        return cluster_machine(START_TIMEOUT_S, recover_this_host)
