"""ctypes mirrors of the structs and constants of worlds.h and world_rollout.h."""

from __future__ import annotations

import ctypes

from collectives.mirrors import Mirrors

NONE_LEFT, LIMIT_REACHED, WARNED, FAILED = range(4)
"""Return values of rayagi_step_worlds."""
EPISODE_ENDED, ACTION_NOT_FINITE = FAILED + 1, FAILED + 2
"""Further return values of rayagi_run_rollout."""
FUNCTIONS = {
    "load": "mj_setState",
    "step": "mj_step",
    "forces": "mj_rnePostConstraint",
    "save": "mj_getState",
}
"""MuJoCo's functions by their names in worlds.h."""
_I64, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


class WorldBatchStruct(ctypes.Structure):
    """WorldBatch of worlds.h."""

    _fields_ = (
        *((name, _ADDRESS) for name in (*FUNCTIONS, "model")),
        *((name, _I64) for name in ("parts", "num_worlds", "width")),
        ("rows", _ADDRESS),
        ("num_fields", _I64),
        ("fields", _ADDRESS),
        ("sizes", _ADDRESS),
        ("next", _I64),
    )


class SimulationStruct(ctypes.Structure):
    """Simulation of worlds.h."""

    _fields_ = (
        ("data", _ADDRESS),
        ("fields", _ADDRESS),
        ("warnings", _ADDRESS),
        ("kinds", _I64),
        ("stride", _I64),
        ("world", _I64),
        ("message", ctypes.c_char * 256),
    )


class RowsStruct(ctypes.Structure):
    """Rows of world_rollout.h."""

    _fields_ = (("start", _ADDRESS), ("stride", _I64))


class RolloutStruct(ctypes.Structure):
    """Rollout of world_rollout.h."""

    _fields_ = (
        ("worlds", _ADDRESS),
        ("substeps", _I64),
        *(
            (name, _ADDRESS)
            for name in ("act", "policy", "acting", "forward_position", "compute_reward_done", "observe")
        ),
        ("num_fields", _I64),
        ("fields", _ADDRESS),
        ("dt", ctypes.c_double),
        ("limit", _I64),
        ("elapsed", _ADDRESS),
        ("num_actions", _I64),
        *((name, _ADDRESS) for name in ("low", "high")),
        *((name, _I64) for name in ("controls", "num_steps", "obs_dim")),
        *((name, _ADDRESS) for name in ("obs", "actions", "rewards", "terminated", "truncated", "final_obs")),
        ("group", _I64),
        ("done", _ADDRESS),
        ("next", _I64),
        ("cancelled", _I64),
    )


class ThreadStateStruct(ctypes.Structure):
    """ThreadState of world_rollout.h."""

    unstable: int

    _fields_ = (
        ("scratch", _ADDRESS),
        ("stage", ctypes.c_int),
        *((name, _I64) for name in ("t", "group", "world", "end")),
        ("start_position", ctypes.c_double),
        ("unstable", _I64),
        ("acting", _ADDRESS),
        ("acted", _I64),
    )


MIRRORS: Mirrors = {
    "WorldBatch": WorldBatchStruct,
    "Simulation": SimulationStruct,
    "Rows": RowsStruct,
    "Rollout": RolloutStruct,
    "ThreadState": ThreadStateStruct,
    "NONE_LEFT": NONE_LEFT,
    "LIMIT_REACHED": LIMIT_REACHED,
    "WARNED": WARNED,
    "FAILED": FAILED,
    "EPISODE_ENDED": EPISODE_ENDED,
    "ACTION_NOT_FINITE": ACTION_NOT_FINITE,
}
