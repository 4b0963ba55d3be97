"""Packs a policy's weights in the order in which policy.h reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from actors.policy_tensors import ActivationName, PolicyTensors
from collectives.mirrors import Mirrors
from rayagi.native.binding import pointer

ACTIVATIONS: Mapping[ActivationName, int] = {"tanh": 0, "elu": 1, "relu": 2, "silu": 3}


class _Policy(ctypes.Structure):
    """Policy of policy.h."""

    _fields_ = (
        ("layers", ctypes.c_int64),
        ("sizes", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("activation", ctypes.c_int64),
        ("normalise", ctypes.c_int64),
        ("shift", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("clip", ctypes.c_double),
        ("std", ctypes.c_void_p),
    )


MIRRORS: Mirrors = {"Policy": _Policy, **{name.upper(): value for name, value in ACTIVATIONS.items()}}


class PackedPolicy:
    """A packed copy of a policy's weights. Normalisation and std are not copied.

    Attributes:
        address: of a policy.h Policy; valid while this object lives
        widest: units of the widest layer, inputs and padding included
    """

    def __init__(self, policy: PolicyTensors, rows: int) -> None:
        """``rows``: ROWS of policy.h in the compiled program (rayagi_rows)."""
        sizes = torch.tensor([policy.weights[0].shape[1], *(len(bias) for bias in policy.biases)])
        # Rows are padded to whole blocks: (out, in) -> (ceil(out / rows), in, rows).
        padded = [pad(weight.detach(), (0, 0, 0, -len(weight) % rows)) for weight in policy.weights]
        blocks = [weight.view(-1, rows, weight.shape[1]).transpose(1, 2) for weight in padded]
        weights = torch.cat([block.flatten() for block in blocks])
        biases = torch.cat([pad(bias.detach(), (0, -len(bias) % rows)) for bias in policy.biases])
        vectors = (policy.shift, policy.scale, policy.std)
        plain = [None if vector is None else vector.detach().contiguous() for vector in vectors]
        shift, scale, std = plain
        self._pointers = _Policy(
            len(policy.weights),
            pointer(sizes),
            pointer(weights),
            pointer(biases),
            ACTIVATIONS[policy.activation],
            scale is not None,
            None if shift is None else pointer(shift),
            None if scale is None else pointer(scale),
            policy.clip,
            None if std is None else pointer(std),
        )
        self._kept = [sizes, weights, biases, *plain]
        self.address = ctypes.addressof(self._pointers)
        self.widest = max(-(-size // rows) * rows for size in sizes.tolist())
