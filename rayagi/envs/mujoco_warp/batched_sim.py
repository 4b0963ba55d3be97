"""Batched simulation on MuJoCo Warp: float32, on a GPU or a CPU, with fields shared with torch (zero-copy)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from numpy.typing import NDArray
from torch import Tensor

from rayagi.envs.errors import ModelError
from rayagi.envs.mujoco_cpu.physics import STATE_FIELDS
from rayagi.envs.mujoco_warp.capacity import Capacity
from rayagi.envs.tasks.vec_env import SIM_ERRORS
from rayagi.native.warp_streams import current_stream

_LARGEST = 1e10
"""mjMAXVAL: MuJoCo treats a larger state as bad."""
_OVERFLOW = mjw.OverflowType
# Bits of Data.overflow that count as errors. Reaching the solver's iteration limit, which tasks set low, does not.
_CONSTRAINT_BITS = int(_OVERFLOW.NEFC | _OVERFLOW.NJMAX_NNZ)
_CONTACT_BITS = int(
    _OVERFLOW.BROADPHASE
    | _OVERFLOW.NARROWPHASE
    | _OVERFLOW.CCD
    | _OVERFLOW.HFIELD
    | _OVERFLOW.EPA_HORIZON
    | _OVERFLOW.CONTACT_MATCH
    | _OVERFLOW.TACTILE
)


class WarpBatchedSim:
    """Implements rayagi.envs.tasks.masked.MaskedBatchedSim.

    Only ``sim_errors`` and ``state_dict`` synchronise with the device.
    """

    dtype = torch.float32

    def __init__(
        self,
        model: mujoco.MjModel,
        num_worlds: int,
        names: Sequence[str],
        device: torch.device,
        capacity: Capacity,
        varied: Mapping[str, NDArray[np.float64]],
    ) -> None:
        """Allocate worlds in the model's initial pose.

        Args:
            model: equal in all worlds except for ``varied``
            num_worlds: N
            names: MjData fields that are read besides qpos and qvel
            device: a CUDA device or the CPU
            capacity: maximum contacts and constraints
            varied: MjModel fields that differ between worlds, (N, ...)

        Raises:
            ModelError: MuJoCo Warp does not support a part of the model, or lacks a field.
        """
        wp.config.quiet = True
        # Else Warp chooses by the driver's age, and takes no kernels that were compiled beforehand with a newer one.
        wp.config.cuda_output = "cubin"
        wp.init()
        self.num_worlds, self.device = num_worlds, device
        self._graphs: list[Any] = []
        """Warp's handles of captured graphs; they keep kernel modules loaded."""
        known = {field.name for field in fields(mjw.Model)}  # the engine does not read other MjModel fields
        own = {name: values for name, values in varied.items() if name in known}
        with self._here():
            try:
                self._model = mjw.put_model(model, batch_sizes=dict.fromkeys(own, num_worlds))
                self._data = mjw.make_data(
                    model, nworld=num_worlds, nconmax=capacity.contacts, njmax=capacity.constraints
                )
            except (NotImplementedError, ValueError) as error:
                raise ModelError(_name(model), f"mujoco_warp: {error}") from error
            for name, values in own.items():
                target = wp.to_torch(getattr(self._model, name))
                target.copy_(torch.from_numpy(np.asarray(values)).view(target.shape))
        options = self._model.opt
        options.warn_overflow = 0  # counted in sim_errors instead of printed by kernels
        options.graph_conditional = False  # a graph captured by torch cannot contain conditional nodes
        options.run_rne_postconstraint = bool({"cfrc_ext", "cfrc_int", "cacc"} & {*names})
        shapes = mujoco.MjData(model)
        self.fields = {name: self._shared(name, model, shapes) for name in ("qpos", "qvel", *names)}
        self._derives = bool(names)
        self._controls = wp.to_torch(self._data.ctrl)
        self._overflow = wp.to_torch(self._data.overflow)
        self._restarted = wp.zeros(num_worlds, dtype=bool, device=str(device))
        self._mask = wp.to_torch(self._restarted)
        self._sim_errors = torch.zeros(len(SIM_ERRORS), dtype=torch.int64, device=device)

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Context in which Warp launches on torch's device and current stream, captured or not."""
        with ExitStack() as scopes:
            scopes.enter_context(wp.ScopedDevice(str(self.device)))
            if self.device.type == "cuda":
                scopes.enter_context(wp.ScopedStream(current_stream(self.device), sync_enter=False))
            yield

    def _shared(self, name: str, model: mujoco.MjModel, shapes: mujoco.MjData) -> Tensor:
        """A field's memory as a torch tensor of MuJoCo's shape (zero-copy)."""
        if not isinstance(values := getattr(self._data, name, None), wp.array):
            raise ModelError(_name(model), f"mujoco_warp has no field {name}")
        return wp.to_torch(values).view(self.num_worlds, *getattr(shapes, name).shape)

    @property
    def sim_errors(self) -> Mapping[str, int]:
        """Counts by ``SIM_ERRORS``. Synchronises with the device."""
        return dict(zip(SIM_ERRORS, self._sim_errors.tolist(), strict=True))

    def step(self, controls: Tensor, num_substeps: int) -> Tensor:
        """Advance every world. Returns which worlds had a simulation error, (N,) bool."""
        self._controls.copy_(controls)
        with self._here():
            for _ in range(num_substeps):
                self._prepare_constraints()
                mjw.step(self._model, self._data)
        sane = (self.fields["qpos"].abs() < _LARGEST).all(-1) & (self.fields["qvel"].abs() < _LARGEST).all(-1)
        wrong = torch.stack(
            (~sane, (self._overflow & _CONTACT_BITS) != 0, (self._overflow & _CONSTRAINT_BITS) != 0)
        )
        self._overflow.zero_()
        self._sim_errors += wrong.sum(1)
        return wrong.any(0)

    def _prepare_constraints(self) -> None:
        """Update body velocities, from which equality constraints compute their bias.

        Warp 4.0 computes them after the constraints, which so use the velocities of the previous substep or episode
        (BallBalance's pins: an error of 0.3 rad/s in a step).
        """
        if self._model.neq:
            for derive in (mjw.kinematics, mjw.com_pos, mjw.com_vel):
                derive(self._model, self._data)

    def restart(self, ids: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Reset worlds ``ids``."""
        mask = torch.zeros_like(self._mask).index_fill(0, ids, True)
        state = self.fields["qpos"].clone(), self.fields["qvel"].clone()
        self.restart_where(mask, state[0].index_copy(0, ids, qpos), state[1].index_copy(0, ids, qvel))

    def restart_where(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Reset the worlds with ``mask`` set, without synchronisation.

        The forward pass afterwards runs in all worlds. In worlds that were not reset it only changes derived fields, which
        are read after the next step at the earliest; the state that the next step starts from is unchanged.

        Args:
            mask: (N,) bool
            qpos: rows for all worlds, used where the mask is set   (N, nq)
            qvel: likewise                                          (N, nv)
        """
        self._mask.copy_(mask)
        with self._here():
            mjw.reset_data(self._model, self._data, reset=self._restarted)
            for name, values in (("qpos", qpos), ("qvel", qvel)):
                own = self.fields[name]
                own.copy_(torch.where(mask.unsqueeze(-1), values, own))
            if self._derives:
                self._prepare_constraints()
                mjw.forward(self._model, self._data)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Context in which Warp's launches join the CUDA graph that torch captures on its current stream."""
        stream = current_stream(self.device)
        wp.capture_begin(stream=stream, external=True, force_module_load=False)
        try:
            yield
        finally:
            self._graphs.append(wp.capture_end(stream=stream))

    def state_dict(self) -> dict[str, Any]:
        """Copies of the state, in host memory."""
        return {name: wp.to_torch(getattr(self._data, name)).cpu().numpy().copy() for name in STATE_FIELDS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, of either engine."""
        for name in STATE_FIELDS:
            own = wp.to_torch(getattr(self._data, name))
            own.copy_(torch.from_numpy(np.asarray(state[name])).reshape(own.shape))

    def close(self) -> None:
        """Release the device memory."""
        self._data = self._model = None


def _name(model: mujoco.MjModel) -> str:
    """The model's name in its MJCF file."""
    return str(model.names.split(b"\0", 1)[0].decode())
