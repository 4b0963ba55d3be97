"""Quaternions over tensors, in MuJoCo's order (w, x, y, z). Batches come first: (..., 4) and (..., 3)."""

from __future__ import annotations

import torch
from torch import Tensor


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Hamilton product a b: rotation b, then a."""
    # Components first, the batch contiguous in memory, as in ``matrix``.
    aw, ax, ay, az = a.movedim(-1, 0).contiguous()
    bw, bx, by, bz = b.movedim(-1, 0).contiguous()
    return torch.stack(
        (
            aw * bw - ax * bx - ay * by - az * bz,
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
        ),
        0,
    ).movedim(0, -1)


def conjugate(q: Tensor) -> Tensor:
    """The inverse of a unit quaternion."""
    return torch.cat((q[..., :1], -q[..., 1:]), -1)


def rotate(q: Tensor, v: Tensor) -> Tensor:
    """Rotate v by q: from the body's frame to the world's. With q = (w, u): v + w t + u x t, t = 2 u x v."""
    w, u = q[..., :1], q[..., 1:]
    t = 2.0 * torch.linalg.cross(u, v, dim=-1)
    return v + w * t + torch.linalg.cross(u, t, dim=-1)


def rotate_back(q: Tensor, v: Tensor) -> Tensor:
    """Rotate v by the inverse of q: from the world's frame to the body's."""
    return rotate(conjugate(q), v)


def matrix(q: Tensor) -> Tensor:
    """Rotation matrix, (..., 3, 3): its columns are the body's axes in the world's frame."""
    parts = q.movedim(-1, 0).contiguous()  # batch contiguous in memory: three times as fast for thousands
    # All products 2 q_i q_j at once.
    products = (2.0 * parts).unsqueeze(1) * parts.unsqueeze(0)
    _, wx, wy, wz, _, xx, xy, xz, _, _, yy, yz, _, _, _, zz = products.flatten(0, 1).unbind(0)
    entries = (
        *(1.0 - (yy + zz), xy - wz, xz + wy),
        *(xy + wz, 1.0 - (xx + zz), yz - wx),
        *(xz - wy, yz + wx, 1.0 - (xx + yy)),
    )
    return torch.stack(entries, 0).movedim(0, -1).unflatten(-1, (3, 3))


def angle_between(a: Tensor, b: Tensor) -> Tensor:
    """Angle of the rotation from unit quaternion a to b, (...), rad in [0, pi].

    4 atan2(min, max) of the chords |a - b| and |a + b|: a and -a are the same rotation. Accurate near 0, unlike arccos.
    """
    near, far = torch.linalg.vector_norm(a - b, dim=-1), torch.linalg.vector_norm(a + b, dim=-1)
    return 4.0 * torch.atan2(torch.minimum(near, far), torch.maximum(near, far))


def from_axis_angle(axis: Tensor, angle: Tensor) -> Tensor:
    """The rotation by ``angle`` (...) around the unit vector ``axis`` (..., 3): (cos(angle / 2), sin(angle / 2) axis)."""
    half = 0.5 * angle.unsqueeze(-1)
    return torch.cat((torch.cos(half), torch.sin(half) * axis), -1)
