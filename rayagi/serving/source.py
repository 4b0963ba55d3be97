"""Loads the policy of a run folder from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.protocols import EnvInfo
from rayagi.config.spec import RunSpec
from rayagi.models.policy import NetworkPolicy, load_policy
from rayagi.run.errors import CheckpointError, RunError
from rayagi.run.folder import open_run
from rayagi.run.measures import first_non_finite
from rayagi.run.trained_env import refuse_changed_env


class PolicyMismatchError(RunError):
    """A checkpoint's networks differ from those of the run's task and settings."""

    def __init__(self, run: str, checkpoint: str, task: str, difference: str) -> None:
        super().__init__(run, checkpoint, task, difference)
        self.run, self.checkpoint, self.task, self.difference = run, checkpoint, task, difference

    def __str__(self) -> str:
        return (
            f"{self.run}: {self.checkpoint} does not fit {self.task} with the networks of its config.yaml "
            f"({self.difference}); it belongs to another run, or the settings were changed"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPolicy:
    """A checkpoint's policy with its run, task and counters."""

    policy: NetworkPolicy
    spec: RunSpec
    info: EnvInfo
    checkpoint: str
    version: int
    """Number of updates of the policy."""
    env_steps: int
    shared: Mapping[str, Any]
    """The checkpoint's shared state."""
    damaged: tuple[str, ...]
    """Damaged checkpoints that were skipped, with the reason."""


def saved_policy(run: Path, which: str, *, trust_modules: bool = False) -> SavedPolicy:
    """Load a policy.

    Args:
        run: folder, or one of its checkpoints
        which: ``best``, ``last`` or a checkpoint's name, if ``run`` is a folder
        trust_modules: whether the run may name code outside of the working project (rayagi.config.trusted_modules)

    Raises:
        RunFolderError, RunVersionError, ConfigError, EnvError: the folder, its settings or its task cannot be used here.
        NoCheckpointError: there is no intact checkpoint of that name.
        EnvironmentChangedError: the task has other sizes or actions than when the run began.
        PolicyMismatchError: it belongs to another task, or to other networks.
        CheckpointError: a number of its policy is NaN or infinite, so that its actions would mean nothing.
    """
    if run.absolute().parent.name == "checkpoints" and (run / "manifest.json").exists():
        run, which = run.absolute().parents[1], run.name
    folder = open_run(run)
    spec = folder.read_spec(trust_modules=trust_modules)
    checkpoint = folder.checkpoints.load(which, with_local=False)
    info = spec.env.info()
    refuse_changed_env(str(run), folder.record.environment, info)
    shared = checkpoint.state["shared"]
    try:
        policy = load_policy(shared, spec, info)
    except (RuntimeError, KeyError) as error:
        difference = str(error).strip().splitlines()[-1].strip()
        raise PolicyMismatchError(str(run), checkpoint.name, spec.env.id, difference) from error
    bad = first_non_finite({"model": policy.model.state_dict(), "normaliser": shared.get("obs_normaliser")})
    if bad is not None:
        reason = f"{bad[0]} has {bad[1]}, of which no action comes; choose another one with --checkpoint"
        raise CheckpointError(f"{run}/checkpoints/{checkpoint.name}", reason)
    return SavedPolicy(
        policy=policy,
        spec=spec,
        info=info,
        checkpoint=checkpoint.name,
        version=int(checkpoint.counters["iteration"]),
        env_steps=int(checkpoint.counters["env_steps"]),
        shared=shared,
        damaged=checkpoint.damaged,
    )
