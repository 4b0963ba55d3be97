"""BatchedSim on CPU cores: ``mujoco.batch.Batch`` in float64, with fields shared with torch."""

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

from rayagi.envs.lifetime import ThreadOwner
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
    """Implements rayagi.envs.tasks.vec_env.BatchedSim. Results do not depend on the number of threads.

    Attributes:
        controls: the simulation's own, (N, nu): ``step`` copies its argument here, unless it is this tensor
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        num_worlds: int,
        num_threads: int,
        names: Sequence[str],
        factors: Factors | None = None,
    ) -> None:
        """Worlds in the model's initial pose; ``factors``: of model quantities, per world."""
        route_warnings_to_logging()
        self.num_worlds, self.device, self.dtype = num_worlds, torch.device("cpu"), torch.float64
        self._batch, self._owner = Batch(model, num_worlds, num_threads), ThreadOwner(num_threads)
        vary(self._batch, factors or {})
        self._state = {name: self._batch.bind(name) for name in STATE_FIELDS}
        self.controls = torch.from_numpy(self._state["ctrl"])
        self.fields = {name: _shared(self._batch.bind(name)) for name in ("qpos", "qvel", *names)}
        self._initial_state: NDArray[np.float64] = self._batch.state[0].copy()
        self._warnings: NDArray[Any] = self._batch.warning  # (N, kinds, 2): last info, and count
        self._last_warnings = self._warnings.tobytes()
        self._warned = False
        self._sim_errors = dict.fromkeys(_SIM_ERRORS, 0)

    @property
    def sim_errors(self) -> Mapping[str, int]:
        """Errors counted so far, by kind of MuJoCo's warnings."""
        return self._sim_errors

    def step(self, controls: Tensor, num_substeps: int) -> Tensor | None:
        """Advance every world. Returns which ones had errors, or None; MuJoCo itself resets an unstable world."""
        self._owner.check()
        if controls is not self.controls:
            self.controls.copy_(controls)
        self._batch.step(nstep=num_substeps)
        # Comparing bytes is fastest, which matters with few worlds.
        return None if self._warnings.tobytes() == self._last_warnings else self._count_sim_errors()

    def _count_sim_errors(self) -> Tensor:
        """Count the last step's warnings. Returns which worlds had errors, (N,) bool."""
        before = np.frombuffer(self._last_warnings, self._warnings.dtype).reshape(self._warnings.shape)
        new = self._warnings[:, :, 1] - before[:, :, 1]
        self._last_warnings, self._warned = self._warnings.tobytes(), True
        for error, kinds in _SIM_ERRORS.items():
            self._sim_errors[error] += int((new[:, kinds].sum(axis=1) > 0).sum())
        return torch.from_numpy(new[:, _ERROR_KINDS].sum(axis=1) > 0)

    def restart(self, ids: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Reset some worlds."""
        self.clear(ids)
        self._state["qpos"][ids.numpy()] = qpos.numpy()
        self._state["qvel"][ids.numpy()] = qvel.numpy()
        self.derive(ids)

    def clear(self, ids: Tensor) -> None:
        """First half of ``restart``: reset worlds, before a new state is written into ``fields``."""
        self._owner.check()
        rows = ids.numpy()
        if self._warned:  # MuJoCo's reset also clears its warnings, but takes ten times as long
            self._batch.reset(ids=rows, stage=mujoco.mjtStage.mjSTAGE_NONE)
        else:
            self._batch.state[rows] = self._initial_state

    def derive(self, ids: Tensor) -> None:
        """Second half of ``restart``: compute derived fields."""
        self._owner.check()
        self._batch.forward(ids=ids.numpy())
        self._last_warnings = self._warnings.tobytes()

    def state_dict(self) -> dict[str, Any]:
        """Copies of the state."""
        return {name: np.array(view) for name, view in self._state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        for name, view in self._state.items():
            view[...] = np.asarray(state[name]).reshape(view.shape)

    def close(self) -> None:
        """Release the batch, which ends its threads."""
        self._batch = None


def bytes_per_world(model: mujoco.MjModel, names: Sequence[str]) -> int:
    """Memory per world: state row and bound fields, and as much again for what the task computes from them."""
    data = mujoco.MjData(model)
    row = mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION)
    return 2 * 8 * (row + sum(np.size(getattr(data, name)) for name in names))


def _shared(view: NDArray[np.float64]) -> Tensor:
    """A tensor that shares the batch's memory. Derived fields are read-only, which torch warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(view)
