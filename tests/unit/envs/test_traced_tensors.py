"""Torch's operations on traced tensors, compiled, give what torch gives: for random numbers and for those at the edges."""

from __future__ import annotations

import ctypes
import math
from importlib.resources import files

import numpy as np
import pytest
import torch

from collectives.compiler import load
from rayagi.envs.fused.printing import print_function
from rayagi.envs.tasks import compiled as compiled_rules
from rayagi.envs.tasks.compiled import tensors
from rayagi.envs.tasks.compiled.program import C
from rayagi.envs.tasks.compiled.tensors import OPERATIONS, UntraceableError
from rayagi.envs.tasks.compiled.trace import _Tracing
from rayagi.envs.tasks.rotations import angle_between, from_axis_angle, matrix, multiply, rotate_back

inf, nan = float("inf"), float("nan")
EDGES = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1.5, 3.0, 1e-40, -1e30, 1e300, inf, -inf, nan)
PLACES = torch.tensor([3, 0, 2])
MASK = torch.tensor([True, False, True, False])
MATRIX = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


def _changed(x, change):
    """A copy, changed in place."""
    x = x.clone()
    change(x)
    return x


# Of a and b, rows of four numbers: (worlds, 4) float64.
CASES = {
    "a + b": lambda a, b: a + b,
    "1 - a": lambda a, b: 1 - a,
    "a - 1": lambda a, b: a - 1,
    "2.5 * a": lambda a, b: 2.5 * a,
    "a / b": lambda a, b: a / b,
    "1 / a": lambda a, b: 1 / a,
    "a / 3": lambda a, b: a / 3,
    "-a, +a": lambda a, b: torch.stack((-a, +a), -1),
    "add(alpha)": lambda a, b: torch.add(a, b, alpha=2.5),
    "sub(alpha)": lambda a, b: torch.sub(a, b, alpha=0.5),
    "rsub": lambda a, b: torch.rsub(a, 2.0),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b, value=0.5),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "a ** 2": lambda a, b: a**2,
    "a ** 3": lambda a, b: a**3,
    "a ** 4": lambda a, b: a**4,
    "a ** 0.5": lambda a, b: a**0.5,
    "a ** -1": lambda a, b: a**-1,
    "a ** -2": lambda a, b: a**-2,
    "a ** 1.7": lambda a, b: a**1.7,
    "a ** b": lambda a, b: a**b,
    "2 ** a": lambda a, b: 2**a,
    "pow": lambda a, b: torch.pow(a, 2),
    "square": lambda a, b: a.square(),
    "a % 3": lambda a, b: a % 3,
    "a % b": lambda a, b: a % b,
    "remainder": lambda a, b: torch.remainder(a, -1.5),
    "fmod": lambda a, b: torch.fmod(a, b),
    "a // 2": lambda a, b: a // 2,
    "a // b": lambda a, b: a // b,
    "floor_divide": lambda a, b: torch.floor_divide(a, -0.7),
    "div floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "reciprocal": lambda a, b: a.reciprocal(),
    "comparisons": lambda a, b: torch.stack((a < b, a <= b, a > b, a >= b, a == b, a != b), -1),
    "comparisons with numbers": lambda a, b: torch.stack((a < 0, a >= 0.5, a > 1, a >= -1, a == 0, a != 3), -1),
    "torch.gt, eq, ...": lambda a, b: torch.gt(a, b) | torch.eq(a, b) & torch.ne(b, 0.0) | a.lt(b),
    "& | ~ ^": lambda a, b: ((a > 0) & ~(b > 0)) | ((a < 1) ^ (b < 1)),
    "logical": lambda a, b: torch.logical_and(a, b) | torch.logical_xor(a > 0, b > 0) | torch.logical_not(a),
    "logical_or": lambda a, b: torch.logical_or(a > 1, b),
    "truth == truth": lambda a, b: (a > 0) == (b > 0),
    "truth counts": lambda a, b: 2.0 * (a > b) + (a > 0) - 1,
    "isnan": lambda a, b: torch.isnan(a),
    "isinf": lambda a, b: torch.isinf(a),
    "isfinite": lambda a, b: torch.isfinite(a),
    "isclose": lambda a, b: torch.isclose(a, b),
    "sum": lambda a, b: a.sum(-1),
    "sum keepdim": lambda a, b: (a * b).sum(1, keepdim=True),
    "sum of two": lambda a, b: torch.stack((a, b), 1).sum((1, 2)),
    "sum of truths": lambda a, b: (a > 0).sum(-1),
    "sum to a type": lambda a, b: (a > 0).sum(-1, dtype=a.dtype),
    "mean": lambda a, b: a.mean(-1),
    "mean keepdim": lambda a, b: torch.mean(a, dim=1, keepdim=True),
    "prod": lambda a, b: a.prod(-1),
    "amax, amin": lambda a, b: torch.stack((a.amax(-1), b.amin(1)), -1),
    "max values": lambda a, b: a.max(-1).values,
    "max places": lambda a, b: a.max(-1).indices,
    "min": lambda a, b: torch.min(a, dim=-1, keepdim=True)[0],
    "max of two": lambda a, b: torch.max(a, b) + torch.min(a, b),
    "argmax, argmin": lambda a, b: torch.stack((a.argmax(-1), a.argmin(-1)), -1),
    "any, all": lambda a, b: torch.stack(((a > 0).any(-1), (b > -2).all(-1)), -1),
    "any of reals": lambda a, b: a.any(-1, keepdim=True),
    "var": lambda a, b: a.clamp(-5, 5).var(-1),
    "std": lambda a, b: a.clamp(-5, 5).std(-1, unbiased=False),
    "cumsum": lambda a, b: a.cumsum(-1),
    "cumprod": lambda a, b: torch.stack(list(a.unbind(-1)), -1).cumsum(-1),
    "diff": lambda a, b: torch.diff(a, dim=-1),
    "logsumexp": lambda a, b: torch.logsumexp(a.clamp(-9, 9), -1),
    "softmax": lambda a, b: torch.softmax(a.clamp(-9, 9), -1),
    "norm": lambda a, b: a.norm(dim=-1),
    "torch.norm": lambda a, b: torch.norm(a, dim=-1, keepdim=True),
    "linalg.norm": lambda a, b: torch.linalg.norm(a, dim=-1),
    "vector_norm 1": lambda a, b: torch.linalg.vector_norm(a, ord=1, dim=-1),
    "vector_norm inf": lambda a, b: torch.linalg.vector_norm(a, ord=inf, dim=-1),
    "normalize": lambda a, b: torch.nn.functional.normalize(a.clamp(-5, 5), dim=-1),
    "cross": lambda a, b: torch.cross(a[:, :3], b[:, 1:], dim=-1),
    "linalg.cross": lambda a, b: torch.linalg.cross(a[:, 1:], b[:, :3]),
    "dot": lambda a, b: (a * b).sum(-1),
    "vecdot": lambda a, b: torch.linalg.vecdot(a, b),
    "matmul": lambda a, b: a.clamp(-5, 5) @ MATRIX,
    "einsum": lambda a, b: torch.einsum("ni,ij->nj", a.clamp(-5, 5), MATRIX),
    "bmm": lambda a, b: torch.bmm(a.reshape(-1, 2, 2).clamp(-5, 5), b.reshape(-1, 2, 2).clamp(-5, 5)),
    "addmm": lambda a, b: torch.addmm(MATRIX[0], a.clamp(-5, 5), MATRIX),
    "outer": lambda a, b: a.unsqueeze(-1) * b.unsqueeze(1),
    "where": lambda a, b: torch.where(a > b, a, b),
    "where numbers": lambda a, b: torch.where(a > 0, 1.0, -1.0),
    "where number": lambda a, b: torch.where(a > 0, a, 0.0),
    "a.where": lambda a, b: a.where(b > 0, b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 7.0),
    "clamp": lambda a, b: a.clamp(-1, 1),
    "clamp one side": lambda a, b: a.clamp(min=0.5) + a.clamp(max=2) + a.clamp_min(0.0) + a.clamp_max(1.0),
    "clip": lambda a, b: torch.clip(a, -0.5, 0.5),
    "clamp by tensors": lambda a, b: torch.clamp(a, b, b + 1.0),
    "minimum, maximum": lambda a, b: torch.stack((torch.minimum(a, b), torch.maximum(a, b)), -1),
    "fmin, fmax": lambda a, b: torch.fmin(a, b) + torch.fmax(a, b),
    "abs": lambda a, b: torch.stack((a.abs(), torch.abs(b), abs(a)), -1),
    "sign": lambda a, b: torch.sign(a),
    "sgn": lambda a, b: torch.sgn(a),
    "copysign": lambda a, b: torch.copysign(a, b),
    "floor": lambda a, b: a.floor(),
    "ceil, trunc, round": lambda a, b: torch.stack((a.ceil(), a.trunc(), a.round()), -1),
    "frac": lambda a, b: torch.frac(a.clamp(-9, 9)),
    "sqrt": lambda a, b: torch.sqrt(a),
    "rsqrt": lambda a, b: a.rsqrt(),
    "exp": lambda a, b: torch.exp(a),
    "exp2, expm1": lambda a, b: torch.stack((torch.exp2(a), torch.expm1(a)), -1),
    "log": lambda a, b: a.log(),
    "log1p, log2, log10": lambda a, b: torch.stack((torch.log1p(a), torch.log2(a), torch.log10(a)), -1),
    "sin, cos, tan": lambda a, b: torch.stack((a.sin(), a.cos(), a.tan()), -1),
    "asin, acos, atan": lambda a, b: torch.stack((a.asin(), a.acos(), a.atan()), -1),
    "sinh, cosh, tanh": lambda a, b: torch.stack((a.sinh(), a.cosh(), a.tanh()), -1),
    "asinh, acosh, atanh": lambda a, b: torch.stack((a.asinh(), a.acosh(), a.atanh()), -1),
    "atan2": lambda a, b: torch.atan2(a, b),
    "hypot": lambda a, b: torch.hypot(a, b),
    "erf": lambda a, b: torch.erf(a),
    "sigmoid": lambda a, b: torch.sigmoid(a),
    "relu": lambda a, b: torch.relu(a),
    "elu": lambda a, b: torch.nn.functional.elu(a),
    "softplus": lambda a, b: torch.nn.functional.softplus(a.clamp(-30, 30)),
    "smooth_l1_loss": lambda a, b: torch.nn.functional.smooth_l1_loss(a, b, reduction="none"),
    "deg2rad": lambda a, b: torch.deg2rad(a) + torch.rad2deg(b),
    "nan_to_num": lambda a, b: torch.nan_to_num(a, nan=0.0, posinf=9.0, neginf=-9.0),
    "cat": lambda a, b: torch.cat((a, b[:, :1], a > 0), -1),
    "concat, hstack": lambda a, b: torch.concat((a, torch.hstack((a, b))), dim=1),
    "stack": lambda a, b: torch.stack((a[:, 0], b[:, 1]), -1),
    "unbind": lambda a, b: a.unbind(-1)[0] - b.unbind(1)[3],
    "chunk, split": lambda a, b: a.chunk(2, -1)[1] + b.split(2, dim=-1)[0] + a.split([2, 2], -1)[1],
    "tensor_split": lambda a, b: torch.tensor_split(a, 2, dim=-1)[0],
    "a[:, 1:3]": lambda a, b: a[:, 1:3],
    "a[:, -1]": lambda a, b: a[:, -1],
    "a[..., ::2]": lambda a, b: a[..., ::2],
    "a[:, None]": lambda a, b: a[:, None] + b[:, :, None],
    "a[:, [3, 0]]": lambda a, b: a[:, [3, 0]],
    "a[:, places]": lambda a, b: a[:, PLACES],
    "a[:, mask]": lambda a, b: a[:, MASK],
    "index_select": lambda a, b: a.index_select(1, PLACES),
    "take along": lambda a, b: a.narrow(1, 1, 2),
    "select": lambda a, b: a.select(-1, 2),
    "view": lambda a, b: a.view(-1, 2, 2).transpose(1, 2).reshape(len(b), 4),
    "reshape": lambda a, b: a.reshape(len(a), 2, 2)[:, 1],
    "flatten, unflatten": lambda a, b: (a.unflatten(-1, (2, 2)) + 1.0).flatten(1),
    "permute, movedim": lambda a, b: a.view(-1, 2, 2).permute(0, 2, 1).movedim(-1, 1).mT,
    "squeeze": lambda a, b: a[:, :1].squeeze(-1) + b[:, None].squeeze(1)[:, 0],
    "expand": lambda a, b: a.unsqueeze(1).expand(-1, 3, -1) + b.unsqueeze(1).expand_as(b.unsqueeze(1)),
    "broadcast_to": lambda a, b: torch.broadcast_to(a[:, :1], b.shape) + b,
    "repeat, tile": lambda a, b: a.repeat(1, 2) + torch.tile(b, (1, 2)),
    "repeat_interleave": lambda a, b: a[:, :, None].repeat(1, 1, 2).flatten(1),
    "flip, roll": lambda a, b: a.flip(-1) + torch.roll(b, 1, -1),
    "diagonal": lambda a, b: torch.diagonal(a.view(-1, 2, 2), dim1=1, dim2=2),
    "contiguous, clone": lambda a, b: a.T.contiguous().T.clone(),
    "float, double": lambda a, b: a.float().double(),
    "half of float": lambda a, b: (a.float() * 0.1 + b.float()).sqrt(),
    "float with a number": lambda a, b: a.float() < 0.1,
    "to": lambda a, b: (a > 0).to(a.dtype) + (b > 0).to(torch.float64),
    "type_as": lambda a, b: (a > 0).type_as(a) * 3,
    "bool": lambda a, b: a.bool(),
    "long": lambda a, b: a.clamp(-9, 9).nan_to_num().long() + 1,
    "int of truth": lambda a, b: (a > 0).int() + (b > 0).int(),
    "zeros_like, ones_like": lambda a, b: torch.zeros_like(a) + torch.ones_like(b),
    "full_like": lambda a, b: torch.full_like(a, 2.5) + a,
    "new_zeros": lambda a, b: a.new_zeros(a.shape) + a.new_ones((len(a), 4)) + a.new_full((1, 4), 3.0) + a,
    "new_tensor": lambda a, b: a.new_tensor([1.0, 2.0, 3.0, 4.0]) * a,
    "zeros, ones, full": lambda a, b: torch.zeros(4, dtype=a.dtype) + torch.ones(len(a), 1) + torch.full((4,), 2.0) + a,
    "arange, linspace, eye": lambda a, b: a * torch.arange(4) + torch.linspace(0, 1, 4) + a[:, :1] * torch.eye(4)[1],
    "torch.tensor": lambda a, b: a + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64),
    "constants": lambda a, b: a[:, :3] + MATRIX[0] * 2 + MATRIX.T.sum(-1) + torch.pi,
    "x += b": lambda a, b: _changed(a, lambda x: x.add_(b).mul_(2).sub_(1).div_(3)),
    "x **= 2": lambda a, b: _changed(a, lambda x: x.pow_(2)),
    "x.clamp_": lambda a, b: _changed(a, lambda x: x.clamp_(-1, 1)),
    "x[:, 1] = b": lambda a, b: _changed(a, lambda x: x.__setitem__((slice(None), 1), b[:, 0])),
    "x[:, 1:3] = 5": lambda a, b: _changed(a, lambda x: x.__setitem__((slice(None), slice(1, 3)), 5.0)),
    "x[:, places] = b": lambda a, b: _changed(a, lambda x: x.__setitem__((slice(None), PLACES), b[:, :3])),
    "x[:, :2] += b": lambda a, b: _changed(a, lambda x: x[:, :2].add_(b[:, 2:])),
    "views of views": lambda a, b: _changed(a, lambda x: x.view(-1, 2, 2)[:, 1].unbind(-1)[0].copy_(b[:, 0])),
    "x.fill_, zero_": lambda a, b: _changed(a, lambda x: (x[:, 0].fill_(2.0), x[:, 1].zero_())),
    "x.masked_fill_": lambda a, b: _changed(a, lambda x: x.masked_fill_(b > 0, 1.0)),
    "x.abs_, neg_, sqrt_": lambda a, b: _changed(a, lambda x: x.abs_().sqrt_().neg_()),
    "x.exp_": lambda a, b: _changed(a, lambda x: x.exp_().floor_()),
    "zeros, then filled": lambda a, b: _changed(torch.zeros(len(a), 2), lambda x: x[:, 0].copy_(a[:, 0])),
    "empty, then filled": lambda a, b: _changed(torch.empty_like(a), lambda x: x.copy_(b)),
    "float32 filled": lambda a, b: _changed(torch.zeros(len(a), 4), lambda x: x.copy_(b)) * 3,
    "rotations": lambda a, b: rotate_back(a.clamp(-5, 5), b[:, :3].clamp(-5, 5)) + matrix(a.clamp(-5, 5))[:, 1],
    "quaternions": lambda a, b: multiply(a.clamp(-5, 5), b.clamp(-5, 5)) * angle_between(a, b).unsqueeze(-1),
    "from_axis_angle": lambda a, b: from_axis_angle(a[:, :3], b[:, 0].clamp(-5, 5)),
    "squeeze_": lambda a, b: torch.stack([x.squeeze(-1) for x in a.split(1, -1)], -1),
}  # fmt: skip
UNSIGNED = {  # zeros whose sign is another: torch's sums begin with 0, its vector code and C's fmin choose freely
    "sum", "sum keepdim", "sum of two", "mean", "mean keepdim", "cumsum", "cumprod", "dot", "vecdot", "matmul", "einsum",
    "bmm", "addmm", "fmin, fmax", "max values", "min", "amax, amin", "minimum, maximum", "max of two", "clamp",
    "clamp one side", "clip", "clamp by tensors", "relu", "where number", "x.clamp_", "sign", "sgn", "logsumexp",
}  # fmt: skip
# Torch's matrix products may round a product and a sum together, as the processor likes: of 4 terms up to 5 times the
# matrix, what cancels leaves a few 1e-16.
FUSED = {"matmul", "einsum", "bmm", "addmm"}


def rows():
    """Every pair of edge values, and random numbers, as rows of a and b, (rows, 4)."""
    generator = np.random.default_rng(3)
    pairs = np.array([(x, y) for x in EDGES for y in EDGES])
    a, b = (generator.permutation(pairs)[:, k] for k in (0, 0))
    pairs = np.concatenate((pairs, np.stack((a, b), 1)))
    random = generator.normal(size=(400, 2)) * np.exp(generator.normal(size=(400, 2)) * 2)
    numbers = np.concatenate((pairs, random))
    numbers = numbers[: len(numbers) // 4 * 4]
    return (torch.from_numpy(numbers[:, k].reshape(-1, 4).copy()) for k in (0, 1))


class _Task:
    """What tracing asks of a task here."""

    task = None


@pytest.fixture(scope="module")
def compiled():
    """Every case as a function of a row of a and a row of b: one library for all."""
    traced, texts = {}, []
    inputs = {f"{name}[{k}]": f"{name}[{k}]" for name in "ab" for k in range(4)}
    for number, (name, case) in enumerate(CASES.items()):
        tracing = _Tracing(_Task(), 2)
        a, b = tracing.inputs("a", (4,)), tracing.inputs("b", (4,))
        result = tracing.call(lambda pair, case=case: case(*pair), (a, b))
        assigned = tracing.assignments({"out": result}, {})
        body = print_function(assigned.function, C, inputs)
        stores = [f"out[{k}] = {value};" for k, value in enumerate(body.outputs)]
        texts.append(
            f"void case_{number}(const double *a, const double *b, double *out) {{\n"
            + "\n".join((*body.lines, *stores))
            + "\n}"
        )
        traced[name] = number, tuple(result.shape[1:]), result.dtype
    shared = "#define ROWS\n" + files(compiled_rules).joinpath("worlds.h").read_text()
    return load("\n".join((shared, *texts)), ("-ffp-contract=off",)), traced


@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_that_of_torch(compiled, name):
    library, traced = compiled
    number, shape, dtype = traced[name]
    a, b = rows()
    if name in ("fmod", "a % b"):  # beyond that torch's own is NaN
        b = torch.where((a / b).abs() > 1e300, 1.0, b)
    want = CASES[name](a, b)
    assert (tuple(want.shape), want.dtype) == ((len(a), *shape), dtype)
    got = np.zeros((len(a), *shape))
    function = getattr(library, f"case_{number}")
    function.argtypes = (ctypes.c_void_p,) * 3
    out = np.zeros(max(1, math.prod(shape)))
    for row in range(len(a)):
        function(a[row].data_ptr(), b[row].data_ptr(), out.ctypes.data)
        got[row] = out.reshape(shape)
    expected = want.double().numpy()
    single = dtype == torch.float32
    least = 1e-14 if name in FUSED else 1e-45 if single else 1e-300
    np.testing.assert_allclose(got, expected, rtol=3e-7 if single else 1e-12, atol=least)
    if name not in UNSIGNED and not single:
        finite = ~np.isnan(expected)  # NaN's sign means nothing
        np.testing.assert_array_equal(np.signbit(got)[finite], np.signbit(expected)[finite])


@pytest.mark.parametrize("name", CASES)
def test_an_operation_of_constants_is_folded(name, monkeypatch):
    """What task functions compute from constants alone, and from parts of a tensor that are constants."""
    a, b = rows()
    a, b = a[-6:], b[-6:]
    tracing = _Tracing(_Task(), len(a))
    known = [tracing.mode.constant(one) for one in (a, b)]
    want = CASES[name](a, b)
    # By torch; and by numpy, value by value, as where a tensor also holds what is not known.
    for is_constant in (tensors._is_constant, lambda tensor: not tensor.is_floating_point()):
        monkeypatch.setattr(tensors, "_is_constant", is_constant)
        result = tracing.call(lambda pair: CASES[name](*pair), known)
        got = np.array([value.node.value for value in result.exprs.flat], dtype=float).reshape(want.shape)
        np.testing.assert_allclose(
            got, want.double().numpy(), rtol=1e-6 if want.dtype == torch.float32 else 1e-12
        )


def test_enough_of_torch_is_covered():
    assert len(CASES) >= 60


UNTRACEABLE = {
    "a value that Python asks for": [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * float(x[0, 0]),
        lambda x: x[: int(x[0, 0])],
        lambda x: x if bool((x > 0).any()) else -x,
        lambda x: min(x[0, 0], x[0, 1]),
        lambda x: x * x.max().item(),
        lambda x: x * (1 if x[0, 0] else 2),
    ],
    "an index that depends on values": [lambda x: x[x > 0], lambda x: x[:, x[0].argmax(0, keepdim=True)]],
    "torch's sort": [lambda x: x.sort(-1).values, lambda x: torch.argsort(x, -1)],
    "torch's (topk|nonzero|masked_select|unique|_unique2|linalg_inv_ex|bincount)": [
        lambda x: x.topk(2).values,
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.linalg.inv(x.view(-1, 2, 2)),
    ],
    "random numbers": [lambda x: x + torch.rand(4), lambda x: torch.randn_like(x), lambda x: torch.dropout(x, 0.5, True)],
    "a tensor of torch.(float16|bfloat16|uint8)": [lambda x: x.half(), lambda x: x.bfloat16(), lambda x: (x > 0).byte()],
    "torch's (mul|pow|remainder|bitwise_and) of torch.int64": [
        lambda x: x.long() * 3,
        lambda x: x.long() % 2,
        lambda x: x.long() & 1,
        lambda x: x.long() ** 2,
    ],
    "not the function's own": [lambda x: x.add_(1.0), lambda x: x[:, 0].fill_(0.0), lambda x: MATRIX.mul_(x.sum())],
    "numpy": [lambda x: np.sin(x), lambda x: x.numpy()],
}  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "function"), [(reason, one) for reason, all_ in UNTRACEABLE.items() for one in all_]
)
def test_what_cannot_be_traced_is_named_with_its_line(reason, function):
    tracing, before = _Tracing(_Task(), 2), MATRIX.clone()
    with pytest.raises(
        UntraceableError, match=rf"(?s)^{__file__}:{function.__code__.co_firstlineno}: .*{reason}"
    ):
        tracing.call(function, tracing.inputs("x", (4,)))
    assert torch.equal(MATRIX, before)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x - x.mean(0), "of other worlds"),
        (lambda x: x / x.max(), "of other worlds"),
        (lambda x: x.flip(0), "of other worlds"),
        (lambda x: x + torch.arange(len(x)).unsqueeze(-1), "a world's index"),
    ],
)
def test_results_that_depend_on_other_worlds_are_refused(function, reason):
    tracing = _Tracing(_Task(), 3)
    result = tracing.call(function, tracing.inputs("x", (4,)))
    with pytest.raises(UntraceableError, match=reason):
        tracing.assignments({"out": result}, {})


def test_the_table_has_no_operation_that_torch_lacks():
    assert [name for name in OPERATIONS if not hasattr(torch.ops.aten, name)] == []
