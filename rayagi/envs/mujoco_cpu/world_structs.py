"""Structs and constants that worlds.h and world_rollout.h share with Python."""

from __future__ import annotations

import ctypes

from collectives.mirrors import Mirrors

NONE_LEFT, ENOUGH, WARNED, FAILED = range(4)
"""What rayagi_step_worlds returns."""
ENDED, UNFIT, PEER_WAITING = FAILED + 1, FAILED + 2, FAILED + 3
"""What rayagi_run_rollout returns beside rayagi_step_worlds's."""
FUNCTIONS = {
    "load": "mj_setState",
    "step": "mj_step",
    "forces": "mj_rnePostConstraint",
    "save": "mj_getState",
}
"""MuJoCo's, by what worlds.h calls them."""
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
        ("stopped", _I64),
    )


class ThreadStateStruct(ctypes.Structure):
    """ThreadState of world_rollout.h."""

    unstable: int
    own: int
    others: int
    num_others: int

    _fields_ = (
        ("scratch", _ADDRESS),
        ("stage", ctypes.c_int),
        *((name, _I64) for name in ("t", "group", "world", "end")),
        ("before", ctypes.c_double),
        ("unstable", _I64),
        *((name, _ADDRESS) for name in ("own", "others")),
        ("num_others", _I64),
    )


MIRRORS: Mirrors = {
    "WorldBatch": WorldBatchStruct,
    "Simulation": SimulationStruct,
    "Rows": RowsStruct,
    "Rollout": RolloutStruct,
    "ThreadState": ThreadStateStruct,
    "NONE_LEFT": NONE_LEFT,
    "ENOUGH": ENOUGH,
    "WARNED": WARNED,
    "FAILED": FAILED,
    "ENDED": ENDED,
    "UNFIT": UNFIT,
    "PEER_WAITING": PEER_WAITING,
}
