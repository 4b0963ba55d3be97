"""The policy of a policy server, replaced atomically by newer checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actors.agent import Agent
from rayagi.run.checkpoints import CheckpointStore
from rayagi.serving.policy_server.requests import Expected
from rayagi.serving.source import SavedPolicy, saved_policy


class ServedPolicy:
    """Computes the policy's mode, clipped to the action range. Replaced as a whole, between two batches."""

    def __init__(self, run: Path, which: str) -> None:
        """Load the policy.

        Raises:
            RunError, ConfigError, EnvError: as ``saved_policy``.
        """
        self._run, self._which = run, which
        self._use(saved_policy(run, which))

    def _use(self, saved: SavedPolicy) -> None:
        self.saved = saved
        self._agent = Agent(saved.policy)
        action = saved.info.action
        self._range = None if action.is_discrete else (torch.tensor(action.low), torch.tensor(action.high))

    def act(self, obs: NDArray[np.float32]) -> tuple[NDArray[Any], int]:
        """Actions for observations (rows, obs_dim), (rows, dim) or (rows,); and the policy's version."""
        actions = self._agent.act_greedily(torch.from_numpy(obs))
        if self._range is not None:
            actions = actions.clamp(*self._range)
        return actions.numpy(), self.saved.version

    def expected(self, max_rows: int) -> Expected:
        """Shape and size limits of a request."""
        return Expected(obs_dim=self.saved.info.obs_dim, max_rows=max_rows)

    def info(self) -> dict[str, Any]:
        """Content of /info: task, sizes, range, checkpoint."""
        info, action = self.saved.info, self.saved.info.action
        return {
            "task": info.env_id,
            "obs_dim": info.obs_dim,
            "action": {
                "kind": action.kind,
                "dim": action.dim,
                "num_choices": action.num_choices,
                "choices": list(action.choices),
                "low": list(action.low),
                "high": list(action.high),
            },
            "checkpoint": self.saved.checkpoint,
            "policy_version": self.saved.version,
        }

    def newest(self) -> str | None:
        """Name of the checkpoint that ``read`` would load; None if there is none. Cheap: opens no checkpoint."""
        store = CheckpointStore(self._run / "checkpoints")
        if self._which in ("best", "last"):
            pointer = store.pointer(self._which)
            return None if pointer is None else str(pointer["checkpoint"])
        return self._which

    def read(self) -> SavedPolicy:
        """Load the current checkpoint. Slow; may run in another thread beside ``act``.

        Raises:
            RunError: as ``saved_policy``; the current policy stays.
        """
        return saved_policy(self._run, self._which)

    def exchange(self, saved: SavedPolicy) -> None:
        """Use another policy from now on.

        Raises:
            ValueError: its observation or action sizes differ from those in /info.
        """
        own, new = self.saved.info, saved.info
        if (own.obs_dim, own.action) != (new.obs_dim, new.action):
            raise ValueError(
                f"{saved.checkpoint} has {new.obs_dim} observations and {new.action.dim} actions; clients expect "
                f"{own.obs_dim} and {own.action.dim}"
            )
        self._use(saved)
