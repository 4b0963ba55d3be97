"""The policy of a policy server, replaced atomically by newer checkpoints."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.protocols import ActionSpec
from rayagi.run.checkpoints import CheckpointStore
from rayagi.serving.policy_server.requests import Expected
from rayagi.serving.source import SavedPolicy, saved_policy


class GreedyPolicy:
    """Computes the mode of one checkpoint's policy, clipped to the action range."""

    def __init__(self, saved: SavedPolicy) -> None:
        self.saved, self.version = saved, saved.version
        action = saved.info.action
        self._range = None if action.is_discrete else _float32_range(action)

    def actions(self, obs: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Actions for raw observations (rows, obs_dim): (rows, dim) or (rows,).

        A recurrent policy's with the episodes' states (rows, state_dim), and the next states; else None of both.
        """
        policy = self.saved.policy
        observed = policy.observe(obs)
        if states is None:
            outputs = policy.outputs(observed)
        else:
            outputs, states = policy.step(observed, states)
        actions = policy.environment_actions(policy.mode(outputs))
        return (actions if self._range is None else actions.clamp(*self._range)), states

    @torch.inference_mode()
    def act(self, obs: NDArray[np.float32]) -> NDArray[Any]:
        """Actions for observations (rows, obs_dim), (rows, dim) or (rows,).

        A recurrent policy takes rows of an observation and the episode's state, (rows, obs_dim + state_dim), and returns
        records with the fields ``actions`` and ``states``: the client keeps the states between its requests.
        """
        rows, state_dim = torch.from_numpy(obs), self.saved.policy.state_dim
        if not state_dim:
            return self.actions(rows, None)[0].numpy()
        found, states = self.actions(*rows.split((self.saved.info.obs_dim, state_dim), -1))
        assert states is not None
        actions = found.numpy()
        fields = [("actions", actions.dtype, actions.shape[1:]), ("states", np.float32, (state_dim,))]
        answers = np.empty(len(rows), dtype=fields)
        answers["actions"], answers["states"] = actions, states.numpy()
        return answers


def policy_info(saved: SavedPolicy) -> dict[str, Any]:
    """What clients of a policy need to know, as of /info: task, sizes, range, checkpoint."""
    info, action = saved.info, saved.info.action
    return {
        "task": info.env_id,
        "obs_dim": info.obs_dim,
        "obs_leaves": [asdict(leaf) for leaf in info.obs_leaves],
        "state_dim": saved.policy.state_dim,
        "action": {
            "kind": action.kind,
            "dim": action.dim,
            "num_choices": action.num_choices,
            "choices": list(action.choices),
            "starts": list(action.starts or (0,) * action.dim) if action.is_discrete else [],
            "low": [_finite_or_none(bound) for bound in action.low],
            "high": [_finite_or_none(bound) for bound in action.high],
        },
        "checkpoint": saved.checkpoint,
        "policy_version": saved.version,
    }


class ServedPolicy:
    """The policy that answers requests from now on."""

    def __init__(self, run: Path, which: str, *, trust_modules: bool = False) -> None:
        """Load the policy.

        Raises:
            RunError, ConfigError, EnvError: as ``saved_policy``.
        """
        self._run, self._which, self._trust_modules = run, which, trust_modules
        self.current = GreedyPolicy(self._load(which))

    @property
    def saved(self) -> SavedPolicy:
        """The current checkpoint."""
        return self.current.saved

    def expected(self, max_rows: int) -> Expected:
        """Shape and size limits of a request."""
        return Expected(
            obs_dim=self.saved.info.obs_dim,
            state_dim=self.saved.policy.state_dim,
            leaves=tuple(asdict(leaf) for leaf in self.saved.info.obs_leaves),
            max_rows=max_rows,
        )

    def info(self) -> dict[str, Any]:
        """Content of /info."""
        return policy_info(self.saved)

    def newest(self) -> str | None:
        """Name of the checkpoint that ``read`` loads; None: the run names none. Cheap: opens no checkpoint."""
        store = CheckpointStore(self._run / "checkpoints")
        if self._which in ("best", "last"):
            pointer = store.pointer(self._which)
            return None if pointer is None else str(pointer["checkpoint"])
        return self._which

    def written(self, checkpoint: str) -> int:
        """Time at which a checkpoint's files were last written, in ns; it changes when a damaged one is written anew.

        Raises:
            OSError: the checkpoint is not there.
        """
        files = (self._run / "checkpoints" / checkpoint).iterdir()
        return max((file.stat().st_mtime_ns for file in files), default=0)

    def read(self) -> SavedPolicy:
        """Load the newest checkpoint, and no other one in its place. Slow; may run in another thread beside ``act``.

        Raises:
            RunError, ConfigError, EnvError: as ``saved_policy``; the current policy stays.
            ValueError: it is damaged.
        """
        saved = self._load(self.newest() or self._which)
        if saved.damaged:
            raise ValueError("; ".join(saved.damaged))
        return saved

    def _load(self, which: str) -> SavedPolicy:
        return saved_policy(self._run, which, trust_modules=self._trust_modules)

    def exchange(self, saved: SavedPolicy) -> None:
        """Use another policy from now on.

        Raises:
            ValueError: its observations, actions or states differ from those in /info.
        """
        own, new = self.saved.info, saved.info
        states = self.saved.policy.state_dim, saved.policy.state_dim
        if states[0] != states[1]:
            raise ValueError(
                f"{saved.checkpoint} has a recurrent state of {states[1]} numbers; clients expect {states[0]}"
            )
        if (own.obs_dim, own.action) != (new.obs_dim, new.action):
            raise ValueError(
                f"{saved.checkpoint} has {new.obs_dim} observations and {new.action.dim} actions; clients expect "
                f"{own.obs_dim} and {own.action.dim}"
            )
        if own.obs_leaves != new.obs_leaves:
            raise ValueError(
                f"{saved.checkpoint} has observations of other arrays; clients expect the obs_leaves of /info"
            )
        self.current = GreedyPolicy(saved)


def _float32_range(action: ActionSpec) -> tuple[Tensor, Tensor]:
    """The least and the greatest actions in float32 that are within the range, (dim,) each."""
    # The nearest float32 of a float64 may be outside of the range: that of 0.1 is 0.100000001.
    low, high = (torch.tensor(bound, dtype=torch.float64) for bound in (action.low, action.high))
    least, greatest, infinity = low.float(), high.float(), torch.tensor(math.inf)
    return (
        torch.where(least < low, least.nextafter(infinity), least),
        torch.where(greatest > high, greatest.nextafter(-infinity), greatest),
    )


def _finite_or_none(bound: float) -> float | None:
    """A bound for JSON, which has no infinity."""
    return bound if math.isfinite(bound) else None
