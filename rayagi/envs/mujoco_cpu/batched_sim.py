"""Worlds of tasks written over tensors, on ``mujoco.batch.Batch``: float64, its own threads, fields shared with torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from numpy.typing import NDArray
from torch import Tensor

from rayagi.envs.mujoco_cpu.physics import STATE_FIELDS, route_warnings_to_logging
from rayagi.envs.tasks.randomisation import Factors, vary

_WARNINGS = mujoco.mjtWarning
_SIM_ERRORS = {
    "unstable": [
        int(kind)
        for kind in (
            _WARNINGS.mjWARN_INERTIA,
            _WARNINGS.mjWARN_BADQPOS,
            _WARNINGS.mjWARN_BADQVEL,
            _WARNINGS.mjWARN_BADQACC,
            _WARNINGS.mjWARN_BADCTRL,
        )
    ],
    "contact overflow": [int(_WARNINGS.mjWARN_CONTACTFULL)],
    "constraint overflow": [int(_WARNINGS.mjWARN_CNSTRFULL)],
}
_ERROR_KINDS = [kind for kinds in _SIM_ERRORS.values() for kind in kinds]


class CpuBatchedSim:
    """Implements rayagi.envs.tasks.batched_sim.BatchedSim. Results do not depend on the number of threads.

    Attributes:
        controls: what ``step`` copies its own to, (N, nu); who writes them here gives these
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        num_worlds: int,
        num_threads: int,
        names: Sequence[str],
        factors: Factors | None = None,
    ) -> None:
        """Worlds in the model's own pose; ``factors`` of quantities of the model that differ between them."""
        route_warnings_to_logging()
        self.num_worlds, self.device, self.dtype = num_worlds, torch.device("cpu"), torch.float64
        self._batch = Batch(model, num_worlds, num_threads)
        vary(self._batch, factors or {})
        self._state = {name: self._batch.bind(name) for name in STATE_FIELDS}
        self.controls = torch.from_numpy(self._state["ctrl"])
        self.fields = {name: _shared(self._batch.bind(name)) for name in ("qpos", "qvel", *names)}
        self._beginning: NDArray[np.float64] = self._batch.state[0].copy()
        self._warnings: NDArray[Any] = self._batch.warning  # (N, kinds, 2): what came last, and how often
        self._seen = self._warnings.tobytes()
        self._warned = False
        self._sim_errors = dict.fromkeys(_SIM_ERRORS, 0)

    @property
    def sim_errors(self) -> Mapping[str, int]:
        """By MuJoCo's warnings."""
        return self._sim_errors

    def step(self, controls: Tensor, num_substeps: int) -> Tensor | None:
        """Advance every world; MuJoCo itself resets one that became unstable, and it is told here."""
        if controls is not self.controls:
            self.controls.copy_(controls)
        self._batch.step(nstep=num_substeps)
        # Bytes are the fastest to compare, which matters with few worlds.
        return None if self._warnings.tobytes() == self._seen else self._count_sim_errors()

    def _count_sim_errors(self) -> Tensor:
        """Count what MuJoCo warned of in the last step; which worlds it was, (N,) bool."""
        before = np.frombuffer(self._seen, self._warnings.dtype).reshape(self._warnings.shape)
        new = self._warnings[:, :, 1] - before[:, :, 1]
        self._seen, self._warned = self._warnings.tobytes(), True
        for fault, kinds in _SIM_ERRORS.items():
            self._sim_errors[fault] += int((new[:, kinds].sum(axis=1) > 0).sum())
        return torch.from_numpy(new[:, _ERROR_KINDS].sum(axis=1) > 0)

    def restart(self, ids: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Reset some worlds."""
        self.clear(ids)
        self._state["qpos"][ids.numpy()] = qpos.numpy()
        self._state["qvel"][ids.numpy()] = qvel.numpy()
        self.derive(ids)

    def clear(self, ids: Tensor) -> None:
        """The first half of ``restart``: worlds as they are before a state is written into ``fields``."""
        rows = ids.numpy()
        if self._warned:  # MuJoCo's own reset also takes back its warnings, and ten times as long
            self._batch.reset(ids=rows, stage=mujoco.mjtStage.mjSTAGE_NONE)
        else:
            self._batch.state[rows] = self._beginning

    def derive(self, ids: Tensor) -> None:
        """The second half: what follows from the state."""
        self._batch.forward(ids=ids.numpy())
        self._seen = self._warnings.tobytes()

    def state_dict(self) -> dict[str, Any]:
        """Copies of the state."""
        return {name: np.array(view) for name, view in self._state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        for name, view in self._state.items():
            view[...] = np.asarray(state[name]).reshape(view.shape)

    def close(self) -> None:
        """Let go of the batch, whose threads end with it."""
        self._batch = None


def bytes_per_world(model: mujoco.MjModel, names: Sequence[str]) -> int:
    """Of the state's row and the bound fields, and as much again for what the task computes from them."""
    data = mujoco.MjData(model)
    row = mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION)
    return 2 * 8 * (row + sum(np.size(getattr(data, name)) for name in names))


def _shared(view: NDArray[np.float64]) -> Tensor:
    """A tensor over the batch's own memory. Outputs are read-only there, of which torch warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(view)
