"""Printed C: the same values as torch, for functions of the dialect that hypothesis makes up and for the simulators."""

import ctypes
import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from collectives.compiler import load
from experiments.fusion import parity
from rayagi.envs.errors import KernelError
from rayagi.envs.fused import Box, Simulator, ops
from rayagi.envs.fused.backends import EnvConfig, StepBatch
from rayagi.envs.fused.c.backend import CBackend
from rayagi.envs.fused.c.source import C, _function
from rayagi.envs.fused.printing import Language
from rayagi.envs.fused.simulators import Acrobot, CartPole, Pendulum, Quadrotor
from rayagi.envs.fused.trace import trace_function
from rayagi.native.binding import numbers, pointer

NAMES = ("a", "b", "c")


def in_c(function, inputs):
    """Values of a traced function in compiled C: (outputs, lanes) of (inputs, lanes)."""
    lanes = inputs.shape[1]
    printed = _function("wanted", function, torch.float32).removeprefix("static ")
    library = load("\n".join([f"#define L {lanes}", numbers(torch.float32), printed]))
    out = torch.empty((len(function.outputs), lanes))
    library.wanted.argtypes = (ctypes.c_void_p,) * 2
    library.wanted(pointer(inputs), pointer(out))
    return out


def of_one(op):
    return lambda reals: lambda *given: op(reals(*given))


def of_two(op):
    return lambda left, right: lambda *given: op(left(*given), right(*given))


def chosen(left, right, a, b):
    def apply(*given):
        # Of Python's truth values ~ is a number: one side is never a constant.
        return ops.where(
            (left(*given) > right(*given)) | ~(a(*given) + given[0] <= 0.5), a(*given), b(*given)
        )

    return apply


UNARY = (ops.sin, ops.cos, ops.tanh, ops.floor, abs, lambda x: -x, lambda x: ops.exp(ops.minimum(x, 5.0)),
         lambda x: ops.log(abs(x) + 0.5), lambda x: ops.sqrt(abs(x)), lambda x: x**3, lambda x: x % 1.7)  # fmt: skip
BINARY = (lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: x / (abs(y) + 0.3),
          ops.minimum, ops.maximum, lambda x, y: ops.clip(x, -1.0, y * y))  # fmt: skip
LEAVES = [*(lambda *given, i=i: given[i] for i in range(3)), lambda *given: 1.25, lambda *given: -0.7]
EXPRESSIONS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.builds(lambda op, x: of_one(op)(x), st.sampled_from(UNARY), inner),
        st.builds(lambda op, x, y: of_two(op)(x, y), st.sampled_from(BINARY), inner, inner),
        st.builds(chosen, inner, inner, inner, inner),
    ),
    max_leaves=12,
)


def columns(expressions, inputs):
    """Values by torch."""
    like = inputs[0]
    return torch.stack(
        [torch.as_tensor(one(*inputs), dtype=like.dtype).expand(like.shape) for one in expressions]
    )


# One program per example: compiling is what takes the time, so none is shrunk.
@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.lists(EXPRESSIONS, min_size=20, max_size=30))
def test_random_functions_have_torch_s_values(expressions):
    inputs = torch.rand((3, 32), generator=torch.Generator().manual_seed(1)) * 6 - 3
    function = trace_function("f", lambda *given: [one(*given) for one in expressions], NAMES)
    found = in_c(function, inputs).double()
    exact = columns(expressions, inputs.double())
    single = columns(expressions, inputs).double()
    moved = [columns(expressions, inputs.double() * (1 + shift)) for shift in (-1e-6, 1e-6)]
    # How far rounding reaches: a step or a pole nearby lets neighbouring inputs differ much.
    sensitivity = torch.stack([(one - exact).abs() for one in (*moved, single)]).amax(0)
    allowed = 1e-5 * exact.abs().clamp(min=1.0) + 10 * sensitivity
    assert ((found - exact).abs() <= allowed).all()


FUNCTIONS = {
    "sin": (-100.0, 100.0), "cos": (-100.0, 100.0), "tanh": (-12.0, 12.0), "exp": (-20.0, 3.0), "log": (1e-6, 50.0),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_accurate_to_float32(name):
    low, high = FUNCTIONS[name]
    x = torch.linspace(low, high, 20_000).unsqueeze(0)
    wanted = getattr(torch, name)(x.double())
    found = in_c(trace_function(name, lambda v: [getattr(ops, name)(v)], ("v",)), x).double()
    assert float(((found - wanted).abs() / wanted.abs().clamp(min=1.0)).max()) < 1.5e-7


def test_logarithms_of_denormals():
    # log 2^-149 = -149 log 2 = -103.2789
    x = torch.tensor([[2.0**-126, 2.0**-127, 1e-39, 2.0**-149]])
    found = in_c(trace_function("log", lambda v: [ops.log(v)], ("v",)), x)
    torch.testing.assert_close(found, x.double().log().float(), rtol=1.5e-7, atol=0.0)
    assert float(found[0, 3]) == pytest.approx(-103.2789)


def test_functions_at_the_ends_of_the_numbers():
    inf, nan = math.inf, math.nan
    x = torch.tensor([[0.0, inf, -inf, nan, -1.0, 100.0, -200.0]])
    function = trace_function(
        "f", lambda v: [ops.exp(v), ops.log(v), ops.tanh(v), ops.sqrt(v), ops.clip(v, -1.0, 1.0)], ("v",)
    )
    found = in_c(function, x)
    wanted = torch.stack([x[0].exp(), x[0].log(), x[0].tanh(), x[0].sqrt(), x[0].clamp(-1.0, 1.0)])
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-6, atol=1e-7)


def test_minimum_and_maximum_propagate_nan():
    inf, nan = math.inf, math.nan
    x = torch.tensor([[nan, 1.0, nan, inf, nan, -inf, 2.0, 0.0], [1.0, nan, nan, nan, -inf, 2.0, 1.0, 0.0]])
    function = trace_function(
        "f",
        lambda a, b: [ops.minimum(a, b), ops.maximum(a, b), ops.minimum(1.0, b), ops.clip(0.5, a, b)],
        ("a", "b"),
    )
    least = [nan, nan, nan, nan, nan, -inf, 1.0, 0.0]
    most = [nan, nan, nan, nan, nan, 2.0, 2.0, 0.0]
    below_1 = [1.0, nan, nan, nan, -inf, 1.0, 1.0, 0.0]
    clipped = [nan, nan, nan, nan, nan, 0.5, 1.0, 0.0]
    wanted = torch.tensor([least, most, below_1, clipped])
    torch.testing.assert_close(in_c(function, x), wanted, equal_nan=True, rtol=0, atol=0)


class Still(Simulator):
    """Draws nothing, has a constant reward, observes more than its state."""

    state = ("x", "y", "z")
    actions = Box((-1.0, 0.0, -2.0), (1.0, 0.5, 2.0))
    num_draws = 0

    def start(self, draws):
        return 0.0, 1.0, -1.0

    def step(self, s, action):
        return (s.x + action[0], s.y * 0.5 + action[1], action[2]), -1.0, False

    def observe(self, s):
        return s.z, s.x, 7.0, s.x * s.y


@pytest.mark.parametrize(
    "simulator", [CartPole(), Pendulum(), Acrobot(), Quadrotor(), Still()], ids=lambda one: one.name
)
def test_the_c_backend_agrees_with_the_reference(simulator):
    """20 steps in float64, and each of 20 in float32."""
    found = parity.check_steps(simulator, num_envs=130)
    assert found.exact < 1e-11
    assert found.single < 1e-6
    assert found.split == 0


def test_the_parity_check_detects_a_wrong_backend():
    def heavier(env_config):
        return CBackend(
            EnvConfig(
                CartPole(pole_mass=0.11), *(getattr(env_config, name) for name in EnvConfig.__slots__[1:])
            )
        )

    with pytest.raises(parity.ParityError, match=r"^CartPole: (obs|final_obs|environment \d+ ends at step)"):
        parity.check_steps(CartPole(), heavier)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_k_steps_in_one_call_are_k_calls(num_threads):
    actions = torch.stack(
        [parity.random_actions(EnvConfig(CartPole(), 1000), 1, 0, step) for step in range(40)]
    )
    together, apart = (
        CBackend(EnvConfig(CartPole(), 1000, max_episode_steps=25), threads) for threads in (num_threads, 1)
    )
    for backend in (together, apart):
        backend.start()
    wanted, found = StepBatch.allocate(40, 1000, 4), StepBatch.allocate(40, 1000, 4)
    together.run(actions, found)
    one = StepBatch.allocate(1, 1000, 4)
    for t in range(40):
        apart.run(actions[t : t + 1], one)
        for name in StepBatch.__slots__:
            getattr(wanted, name)[t] = getattr(one, name)[0]
    for name in ("obs", "rewards", "terminated", "truncated"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert found.truncated.any()
    assert found.terminated.any()


def test_actions_of_another_shape_are_refused():
    backend = CBackend(EnvConfig(CartPole(), 4))
    with pytest.raises(
        ValueError, match=r"actions are \(1, 3\) torch.int64; CartPole takes \(1, 4\) torch.int64"
    ):
        backend.run(torch.zeros((1, 3), dtype=torch.int64), StepBatch.allocate(1, 4, 4))


def test_a_missing_compiler_is_named_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        KernelError, match=r"^CartPole in C: no C compiler .looked for no-such-compiler.*fused_torch"
    ):
        CBackend(EnvConfig(CartPole(), num_envs=1))


def test_a_language_without_an_operation_is_refused():
    operations = {name: text for name, text in C.operations.items() if name != "tanh"}
    with pytest.raises(ValueError, match="Halfway has no tanh"):
        Language(
            name="Halfway", operations=operations, declare={}, infinity="", not_a_number="", truths=("0", "1")
        )
