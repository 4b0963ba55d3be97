"""Every benchmark variant, with the paper's knobs, agrees with the simulator's functions on torch tensors."""

import shutil
import subprocess
from importlib.util import find_spec

import pytest
import torch

from experiments.fusion.variants import catalogue
from experiments.fusion.variants.catalogue import variant
from experiments.fusion.variants.cuda_source import cuda_source
from experiments.fusion.variants.variant import BenchmarkConfig, BenchmarkState, random_actions
from rayagi.envs.errors import KernelError
from rayagi.envs.fused.backends import StepBatch
from rayagi.envs.fused.draws import seed_word
from rayagi.envs.fused.reference import TorchBackend
from rayagi.envs.fused.simulators import Acrobot, CartPole, Pendulum, Quadrotor

SIMULATORS = [CartPole(), Pendulum(), Acrobot(), Quadrotor()]


def needs(name):
    """A variant whose package is an extra."""
    package = {"xla": "jax"}.get(name, name)
    optional = name in ("xla", "warp", "envpool")
    return pytest.param(
        name, marks=pytest.mark.skipif(optional and find_spec(package) is None, reason=f"no {package}")
    )


def work_of(simulator, **changes):
    return BenchmarkConfig(
        **{"simulator": simulator, "num_envs": 70, "steps_per_call": 20, "seed": 5, **changes}
    )


def stepped(name, work, *, calls=1, start=None):
    """State of a variant's environments after some calls with the same actions."""
    stepper = variant(name).make(work)
    if start is not None:
        stepper.put(start)
    prepared = stepper.prepare(random_actions(work))
    for _ in range(calls):
        stepper.step(prepared)
    stepper.wait()
    return stepper.get()


def middle(simulator, *, real=torch.float32, **changes):
    """A configuration and a start in the middle of episodes, a seventh of which reach their time limit after 5 steps."""
    work = work_of(simulator, real=real, **changes)
    start = BenchmarkState.allocate(work)
    start.copy_(stepped("torch", work_of(simulator, **{**changes, "steps_per_call": 33})))
    start.env_state.elapsed[::7] = simulator.max_episode_steps - 5
    return work, start


def scale(reals):
    """A field's largest value anywhere, or 1."""
    return reals.abs().amax(-1, keepdim=True).clamp(min=1.0)


def agree(found, wanted, tolerance):
    """Episodes are the same, reals within ``tolerance`` of their field's scale."""
    assert torch.equal(found.env_state.elapsed, wanted.env_state.elapsed)
    assert torch.equal(found.env_state.episode, wanted.env_state.episode)
    assert torch.equal(found.totals.ended, wanted.totals.ended)
    for one, other in (
        (found.env_state.state, wanted.env_state.state),
        (found.copies, wanted.copies),
        (found.totals.rewards, wanted.totals.rewards),
    ):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert ((one - other).abs() <= tolerance * scale(other)).all()


@pytest.mark.parametrize("simulator", SIMULATORS, ids=lambda s: s.name)
def test_torch_with_knobs_at_one_is_the_reference(simulator):
    work = work_of(simulator)
    backend, actions = TorchBackend(work.env_config), random_actions(work)
    backend.start()
    out = StepBatch.allocate(20, 70, len(backend.observe()))
    backend.run(actions.movedim(1, -1) if actions.ndim == 3 else actions.to(torch.int64), out)
    found = stepped("torch", work)
    assert torch.equal(found.env_state.state, backend.env_state.state)
    assert torch.equal(found.env_state.episode, backend.env_state.episode)
    assert torch.equal(found.totals.ended, (out.terminated | out.truncated).sum(0, dtype=torch.int32))
    torch.testing.assert_close(found.totals.rewards, out.rewards.sum(0), rtol=1e-6, atol=1e-6)


FORMS = pytest.mark.parametrize("name", [needs("c"), needs("warp"), needs("xla")])


@FORMS
@pytest.mark.parametrize("simulator", SIMULATORS, ids=lambda s: s.name)
def test_twenty_steps_in_float64_are_the_reference_s(name, simulator):
    """The printed program is the function: 1e-9 where the goal is 1e-6, since rounding leaves 1e-13."""
    work, start = middle(simulator, real=torch.float64)
    wanted = stepped("torch", work, start=start)
    assert (wanted.totals.ended > 0).sum() >= 10
    agree(stepped(name, work, start=start), wanted, 1e-9)


@FORMS
@pytest.mark.parametrize("simulator", SIMULATORS, ids=lambda s: s.name)
def test_each_of_twenty_steps_in_float32(name, simulator):
    """Each step from the reference's state: within 1e-6 of a field's scale. All 20 independently: distance to the exact
    trajectory at most 1e-6 plus twice the reference's."""
    work, start = middle(simulator)
    actions, single = random_actions(work), work_of(simulator, steps_per_call=1)
    reference, backend = (variant(one).make(single) for one in ("torch", name))
    reference.put(start)
    for action in actions:
        backend.put(reference.get())
        for one in (reference, backend):
            one.step(one.prepare(action.unsqueeze(0)))
        agree(backend.get(), reference.get(), 1e-6)
    exactly, first = middle(simulator, real=torch.float64)
    exact = stepped("torch", exactly, start=first).env_state.state
    free = stepped(name, work, start=start).env_state
    assert torch.equal(free.episode, reference.get().env_state.episode)
    reached = ((reference.get().env_state.state - exact).abs() / scale(exact)).max()
    assert ((free.state - exact).abs() / scale(exact)).max() <= 1e-6 + 2 * reached


@pytest.mark.slow
@pytest.mark.parametrize("simulator", SIMULATORS, ids=lambda s: s.name)
def test_the_compiled_step(simulator):
    for real, steps, tolerance in ((torch.float64, 20, 1e-9), (torch.float32, 1, 1e-6)):
        work, start = middle(simulator, real=real, steps_per_call=steps)
        agree(stepped("torch.compile", work, start=start), stepped("torch", work, start=start), tolerance)


@FORMS
def test_knobs(name):
    """C = 3 iterations of the dynamics a step, S = 4 copies of the state."""
    for real, steps, tolerance in ((torch.float64, 20, 1e-9), (torch.float32, 1, 1e-6)):
        knobs = {"steps_per_call": steps, "compute": 3, "copies": 4, "num_threads": 2}
        work, start = middle(CartPole(), real=real, **knobs)
        wanted = stepped("torch", work, start=start)
        assert steps == 1 or wanted.totals.ended.sum() > 50
        agree(stepped(name, work, start=start), wanted, tolerance)


@FORMS
def test_seeds_reproduce(name):
    one, again, other = (
        stepped(name, work_of(CartPole(), steps_per_call=60, seed=seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(one.env_state.state, again.env_state.state)
    assert torch.equal(one.env_state.episode, again.env_state.episode)
    assert not torch.equal(one.env_state.state, other.env_state.state)


@pytest.mark.parametrize("simulator", SIMULATORS, ids=lambda s: s.name)
def test_two_threads_give_the_same_bits(simulator):
    one, two = (
        stepped("c", work_of(simulator, num_envs=1100, steps_per_call=60, num_threads=threads))
        for threads in (1, 2)
    )
    assert torch.equal(one.env_state.state, two.env_state.state)
    assert torch.equal(one.totals.rewards, two.totals.rewards)


def test_compute_iterates_the_dynamics_and_copies_track_the_state():
    work = work_of(CartPole(), steps_per_call=1, compute=3, copies=3)
    start = BenchmarkState.first(work)
    start.copies[0] = 1.0
    once = work_of(CartPole(), steps_per_call=1)
    thrice = start
    for _ in range(3):
        thrice = stepped(
            "torch", once, start=BenchmarkState(thrice.env_state, torch.zeros(0, 4, 70), start.totals)
        )
    found = stepped("torch", work, start=start)
    assert (found.totals.ended == 0).all()
    assert torch.equal(found.env_state.state, thrice.env_state.state)
    assert torch.equal(found.env_state.elapsed, torch.ones(70, dtype=torch.int32))
    moved = found.env_state.state - start.env_state.state
    torch.testing.assert_close(found.copies, torch.stack([1 + moved, moved]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["torch", needs("c"), needs("warp"), needs("xla")])
def test_a_fused_call_is_as_many_calls_of_one_step(name):
    fused = stepped(name, work_of(CartPole(), steps_per_call=40))
    single = work_of(CartPole(), steps_per_call=1)
    stepper, ended = variant(name).make(single), torch.zeros(70, dtype=torch.int32)
    for action in random_actions(work_of(CartPole(), steps_per_call=40)):
        stepper.step(stepper.prepare(action.unsqueeze(0)))
        ended += stepper.get().totals.ended
    agree(stepper.get().__class__(stepper.get().env_state, fused.copies, fused.totals), fused, 1e-6)
    assert torch.equal(ended, fused.totals.ended)


@pytest.mark.parametrize("name", ["gymnasium", "gymnasium-vector"])
def test_gymnasium_has_the_same_dynamics(name):
    """Until an episode ends: its random numbers are its own. It computes in float64."""
    work = work_of(CartPole(), steps_per_call=5)
    start = BenchmarkState.first(work)
    start.env_state.elapsed.fill_(9)
    found, wanted = stepped(name, work, start=start), stepped("torch", work, start=start)
    assert (wanted.totals.ended == 0).all()
    assert (found.totals.ended == 0).all()
    torch.testing.assert_close(found.env_state.state, wanted.env_state.state, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.env_state.elapsed, wanted.env_state.elapsed)
    assert torch.equal(found.totals.rewards, wanted.totals.rewards)


@pytest.mark.parametrize("simulator", [Pendulum(), Acrobot()], ids=lambda s: s.name)
def test_gymnasium_s_loop_has_the_same_dynamics(simulator):
    work = work_of(simulator, num_envs=7)
    start = BenchmarkState.first(work)
    found, wanted = stepped("gymnasium", work, start=start), stepped("torch", work, start=start)
    torch.testing.assert_close(found.env_state.state, wanted.env_state.state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.totals.rewards, wanted.totals.rewards, rtol=1e-4, atol=1e-4)


def test_gymnasium_s_episodes_end_and_begin():
    work = work_of(CartPole(), num_envs=5, steps_per_call=100)
    for name in ("gymnasium", "gymnasium-vector"):
        found = stepped(name, work)
        assert (found.totals.ended >= 1).all()
        assert (found.env_state.state[2].abs() < 0.5).all()


@pytest.mark.skipif(find_spec("envpool") is None, reason="no envpool")
def test_envpool_has_the_same_dynamics():
    """EnvPool's state cannot be set, so torch's environments start from EnvPool's."""
    work = work_of(CartPole(), steps_per_call=5)
    stepper = variant("envpool").make(work)
    start = BenchmarkState.first(work)
    start.env_state.state.copy_(torch.from_numpy(stepper.obs).t())
    stepper.step(stepper.prepare(random_actions(work)))
    wanted = stepped("torch", work, start=start)
    assert (wanted.totals.ended == 0).all()
    torch.testing.assert_close(
        torch.from_numpy(stepper.obs).t(), wanted.env_state.state, rtol=1e-6, atol=1e-6
    )
    assert torch.equal(stepper.get().totals.rewards, wanted.totals.rewards)


def counts_of(name, steps):
    return variant(name).make(work_of(CartPole(), steps_per_call=steps)).counts()


def test_torch_calls_and_kernels_grow_with_the_steps():
    few, many = counts_of("torch", 2), counts_of("torch", 6)
    assert many.api_calls > 2 * few.api_calls
    assert many.launches > 2 * few.launches


@pytest.mark.skipif(find_spec("jax") is None, reason="no jax")
def test_xla_is_one_call_whose_kernels_grow_with_the_steps():
    one, other = counts_of("xla", 10), counts_of("xla", 110)
    assert one.api_calls == other.api_calls == 1
    per_step, rest = divmod(other.launches - one.launches, 100)
    assert rest == 0
    assert per_step >= 1


@pytest.mark.parametrize("name", [needs("c"), needs("warp")])
def test_a_kernel_with_all_steps_is_one_launch(name):
    counts = counts_of(name, 50)
    assert (counts.api_calls, counts.launches) == (1, 1)


PROGRAM = """\
HloModule jit_f, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %m = f32[4]{0} multiply(%p, %p)
}

%body (t: (s32[], f32[4], /*index=2*/s32[])) -> (s32[], f32[4], /*index=2*/s32[]) {
  %t = (s32[], f32[4]{0}, /*index=2*/s32[]) parameter(0)
  %g = f32[4]{0} get-tuple-element(%t), index=1
  %f = f32[4]{0} fusion(%g), kind=kLoop, calls=%fused
  %c = (f32[4]{0}, s32[]) call(%f), to_apply=%inner
  ROOT %r = (s32[], f32[4]{0}, /*index=2*/s32[]) tuple(%g, %f, %g)
}

%inner (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %d = f32[4]{0} dot(%q, %q), lhs_contracting_dims={0}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %k = f32[4]{0} copy(%x)
  %w = (s32[], f32[4]{0}, /*index=2*/s32[]) while(%k), condition=%cond, body=%body, backend_config={TRIPS}
  ROOT %y = f32[4]{0} get-tuple-element(%w), index=1
}
"""


@pytest.mark.skipif(find_spec("jax") is None, reason="no jax")
def test_kernels_of_an_xla_program():
    """A copy, and in each of 7 turns a fusion and what a call calls: 1 + 7 * 2."""
    from experiments.fusion.variants.jax_variant import launches

    assert launches(PROGRAM.replace("{TRIPS}", '{"known_trip_count":{"n":"7"}}')) == 15
    with pytest.raises(ValueError, match=r"reports no trip count of this loop: %w"):
        launches(PROGRAM.replace("{TRIPS}", "{}"))


HOST = """
#include <math.h>
#define __global__
#define __device__ static
struct float4 { float x, y, z, w; };
struct int3 { int x, y, z; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static int3 blockIdx, blockDim, threadIdx;
"""
LAUNCH = """
extern "C" void launch(int blocks, int threads, int n, int k, int c, int f, unsigned w, const void *a, real *s, int *e,
                       int *p, real *copies, real *r, int *d) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            simulate(n, k, c, f, w, (ACTION *)a, s, e, p, copies, r, d);
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("simulator", "compute"), [(CartPole(), 3), (Quadrotor(), 1)], ids=["CartPole", "Quadrotor"]
)
def test_the_cuda_kernel_run_on_the_host(tmp_path, simulator, compute):
    """Its statements are C++ but for a few words of CUDA's: what a GPU would compute, thread after thread."""
    import ctypes

    work = work_of(simulator, compute=compute, copies=3, real=torch.float64)
    action = "const unsigned char" if simulator.name == "CartPole" else "const double"
    program = HOST + cuda_source(work) + LAUNCH.replace("ACTION", action)
    (tmp_path / "kernel.cpp").write_text(program)
    command = ["c++", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    now, actions = BenchmarkState.first(work), random_actions(work).contiguous()
    sizes = (3, 32, work.num_envs, work.steps_per_call, work.copies - 1, compute, seed_word(work.seed))
    env_state, totals = now.env_state, now.totals
    tensors = (
        actions,
        env_state.state,
        env_state.elapsed,
        env_state.episode,
        now.copies,
        totals.rewards,
        totals.ended,
    )
    arguments = [ctypes.c_uint32(size) for size in sizes] + [
        ctypes.c_void_p(one.data_ptr()) for one in tensors
    ]
    ctypes.CDLL(str(tmp_path / "kernel.so")).launch(*arguments)
    agree(now, stepped("torch", work), 1e-9)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_cuda_kernel_compiles_and_keeps_the_state_in_registers(tmp_path):
    (tmp_path / "kernel.cu").write_text(cuda_source(work_of(CartPole())))
    command = ["nvcc", "-ptx", "-arch=sm_80", "kernel.cu", "-o", "kernel.ptx"]
    subprocess.run(command, cwd=tmp_path, check=True)
    ptx = (tmp_path / "kernel.ptx").read_text()
    assert ".visible .entry simulate(" in ptx
    # What is loaded before the first action is all that is loaded of the state; nothing is stored while steps go on.
    before, steps = ptx.split("ld.global.u8", 1)
    assert before.count("ld.global.f32") == 4
    assert "st.global" not in before
    assert steps.index("st.global") > steps.rindex(
        "ld.global.nc"
    )  # the table of large angles of sinf, within the loop


def test_unsupported_configurations_are_errors(monkeypatch):
    with pytest.raises(ValueError, match="num_envs is 0; it must be at least 1"):
        work_of(CartPole(), num_envs=0)
    with pytest.raises(KernelError, match="vulkan: no such variant; there are gymnasium, "):
        variant("vulkan")
    with pytest.raises(KernelError, match="Quadrotor in gymnasium: Gymnasium has no Quadrotor"):
        variant("gymnasium").make(work_of(Quadrotor()))
    with pytest.raises(KernelError, match="no vector environment of Pendulum-v1"):
        variant("gymnasium-vector").make(work_of(Pendulum()))
    with pytest.raises(KernelError, match="knobs of rayagi's own simulators"):
        variant("gymnasium").make(work_of(CartPole(), copies=2))
    with pytest.raises(KernelError, match="would unroll 100 iterations; at most 16"):
        variant("torch.compile").make(work_of(CartPole(), compute=100))
    monkeypatch.setattr(catalogue, "not_installed", lambda package, extra: f"{package} is missing: {extra}")
    with pytest.raises(KernelError, match="xla: jax is missing: jax"):
        variant("xla")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_cuda_variant_is_an_error():
    with pytest.raises(KernelError, match="CartPole in CUDA: there is no CUDA device"):
        variant("cuda").make(work_of(CartPole()))
