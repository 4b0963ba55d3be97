"""Denormals are flushed while a policy computes or learns; simulators and callers keep their own mode."""

import ctypes
import shutil
import subprocess
import threading
from dataclasses import dataclass, replace

import pytest
import torch

from actors.policy_tensors import PolicyTensors
from actors.protocols import ActionSpec, EnvInfo
from actors.roles import Agent
from actors.rollout import Rollout
from collectives.compiler import load
from collectives.solo import SoloCommunicator
from rayagi.algorithms import gradient_updater
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.ppo.learner import PPOLearner, PPOUpdater
from rayagi.algorithms.rollout_learner import OnPolicyBatch
from rayagi.config.spec import NetworkSpec
from rayagi.envs import make_env_factory
from rayagi.envs.fused import Box, Simulator
from rayagi.envs.fused.backends import EnvConfig
from rayagi.envs.fused.c.backend import CBackend
from rayagi.envs.fused.vec_env import FusedRollout
from rayagi.models.networks import ActorCritic
from rayagi.models.policy import NetworkPolicy
from rayagi.native import learning
from rayagi.native.acting import compiled_acting
from rayagi.native.binding import numbers, shared
from rayagi.native.denormals import flushed_denormals, flushes_denormals
from rayagi.native.learning import ThreadPool

HOST = torch.device("cpu")
SMALL = 1e-20
"""A float32 whose square is a denormal."""


@pytest.fixture(params=[False, True], ids=["exact_caller", "flushing_caller"])
def caller_flushes(request):
    """Set this thread's mode, and check that the test leaves it unchanged."""
    keep_denormals()
    torch.set_flush_denormal(request.param)
    assert flushes_denormals() == request.param
    yield request.param
    found = flushes_denormals()
    keep_denormals()
    assert found == request.param


MOST_THREADS = 4


def keep_denormals():
    """Do not flush denormals in this thread and in any torch worker that it may have."""
    torch.set_flush_denormal(False)
    before = torch.get_num_threads()
    torch.set_num_threads(MOST_THREADS)
    with flushed_denormals():  # afterwards torch's workers have this thread's mode
        pass
    torch.set_num_threads(before)


@pytest.fixture
def two_torch_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


INFO = EnvInfo(
    env_id="Some",
    engine="none",
    obs_dim=2,
    action=ActionSpec(kind="continuous", dim=2),
    max_episode_steps=None,
)


def policy_of():
    """One linear layer: each output is an observation times SMALL, the value is SMALL times their sum."""
    model = ActorCritic(INFO, NetworkSpec(hidden=(), initial_log_std=0.0))
    with torch.no_grad():
        model.policy[0].weight.copy_(SMALL * torch.eye(2))
        model.value[0].weight.fill_(SMALL)
    return NetworkPolicy(model, INFO, None, HOST)


def small(*shape):
    return torch.full(shape, SMALL)


def is_zero(tensor):
    """Compares bits: a comparison of floats in a flushing thread would treat denormals as zeros."""
    return not (tensor.view(torch.int32) & 0x7FFFFFFF).any()


def test_these_numbers_make_denormals():
    outputs = policy_of().model.policy(small(1, 2))
    assert 0 < float(outputs.detach().abs().min()) < 2.0**-126


def test_acting(caller_flushes):
    policy, obs, noise = policy_of(), small(40, 2), torch.zeros(1, 40, 2)
    rollout = Rollout.allocate(1, 40, INFO, HOST)
    acting = compiled_acting(policy.tensors(), rollout, noise)
    assert acting is not None, "no compiler"
    obs[0, 0] = 1e-40  # values that are only copied keep their bits
    acting(0, obs)
    assert torch.equal(rollout.raw_obs[0].view(torch.int32), obs.view(torch.int32))
    assert is_zero(rollout.outputs)
    assert is_zero(rollout.actions)


def test_acting_by_torch(caller_flushes, two_torch_threads):
    policy = policy_of()
    torch.ones(1 << 17).mul_(2.0)  # torch has created its worker, with its own mode
    _, outputs, _ = Agent(policy).act(small(1 << 16, 2), torch.zeros(1 << 16, 2))
    assert is_zero(outputs)


def learner_of():
    return PPOUpdater(policy_of().model, PPOSpec(value_coef=0.5), SoloCommunicator())


def batch_of(learner, size=64):
    """The gradient of a mean is 1e-20, so a weight's is a denormal. The same holds for the value."""
    obs, zeros = small(size, 2), torch.zeros(size)
    actions = small(size, 2)
    log_probs = learner.model.head.log_prob(torch.zeros(size, 2), actions).detach()
    return OnPolicyBatch(
        obs=obs,
        actions=actions,
        log_probs=log_probs,
        values=zeros,
        advantages=torch.ones(size),
        targets=small(size),
    )


def gradients_of(learner):
    return {name: parameter.grad for name, parameter in learner.model.named_parameters()}


def test_updates(caller_flushes):
    learner = learner_of()
    assert learner._compiled is not None, "no compiler"
    learner.update(batch_of(learner), torch.arange(64).view(1, 1, 64), 1)
    found = gradients_of(learner)
    assert is_zero(found["policy.0.weight"])
    assert is_zero(found["value.0.weight"])
    assert (found["policy.0.bias"] != 0).all()  # which are normal
    # A bias's gradient is 1e-20, so its second moment is a denormal.
    assert is_zero(learner.optimiser.exp_avg_sq[2:4])


def test_values(caller_flushes):
    assert is_zero(learner_of().values(small(100, 2)))


def test_an_optimizer_step_on_a_torch_gradient(caller_flushes):
    learner = learner_of()
    learner.step(sum(parameter.sum() for parameter in learner.model.parameters()) * SMALL)
    assert is_zero(learner.optimiser.exp_avg_sq)


def test_updates_by_torch(caller_flushes, monkeypatch):
    monkeypatch.setattr(gradient_updater, "library", lambda: None)
    policy = policy_of()
    training = PPOLearner(
        policy=policy,
        spec=PPOSpec(num_epochs=1, num_minibatches=1, normalize_rewards=False, normalize_advantages=False),
        communicator=SoloCommunicator(),
        num_envs=4,
        first_env_index=0,
        total_envs=4,
        seed=0,
        total_env_steps=None,
    )
    rollout = Rollout.allocate(3, 4, INFO, HOST)
    for name in ("raw_obs", "obs", "actions", "rewards", "last_obs"):
        getattr(rollout, name).fill_(SMALL)
    for name in ("outputs", "terminated", "truncated"):
        getattr(rollout, name).zero_()
    assert training.updater._compiled is None
    training.learn(rollout)
    found = gradients_of(training.updater)
    assert is_zero(found["policy.0.weight"])
    assert is_zero(found["value.0.weight"])


_EACH_THREAD_TAKES_ONE = """
typedef struct { float x[8]; int64_t entered, items; } Products;
static void product(void *argument, int64_t item) {
    Products *p = argument;
    __atomic_fetch_add(&p->entered, 1, __ATOMIC_SEQ_CST);
    for (int64_t n = 0; __atomic_load_n(&p->entered, __ATOMIC_SEQ_CST) < p->items && n < 200000; n++) backoff(1 << 20);
    p->x[item] *= p->x[item];
}
void multiply(ThreadPool *t, Products *p) { FLUSH_DENORMALS; parallel_for(t, product, p, p->items); }
"""


class Products(ctypes.Structure):
    _fields_ = (("x", ctypes.c_float * 8), ("entered", ctypes.c_int64), ("items", ctypes.c_int64))


def test_every_thread_of_a_pool():
    library = load("\n".join([numbers(torch.float32), shared("thread_pool.h"), _EACH_THREAD_TAKES_ONE]))
    library.multiply.argtypes, library.multiply.restype = (ctypes.c_void_p, ctypes.c_void_p), None
    library.rayagi_pool_worker.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.rayagi_pool_worker.restype = None
    products, pool = Products((ctypes.c_float * 8)(*[SMALL] * 8), 0, 4), ThreadPool(library, 4)
    with pool.running():
        library.multiply(pool.address, ctypes.addressof(products))
    assert products.entered == 4  # each waited for the others
    assert list(products.x) == [0.0] * 4 + [ctypes.c_float(SMALL).value] * 4
    assert not flushes_denormals()


def test_workers_restore_their_threads_mode():
    library, found = learning.library(), []
    pool = ThreadPool(library, 2)
    pool._struct.shutdown = 1  # the worker returns at once

    def work_once():
        torch.set_flush_denormal(False)
        library.rayagi_pool_worker(pool.address, 1)
        found.append(flushes_denormals())

    thread = threading.Thread(target=work_once)
    thread.start()
    thread.join(20)
    assert found == [False]


def test_physics_keeps_the_callers_mode(caller_flushes):
    """Acting and stepping worlds are one call."""
    env = make_env_factory("Ant-v5")(num_envs=2, first_env_index=0, seed=0, num_threads=1)
    modes = []

    @ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)
    def forward_position(_fields):
        modes.append(flushes_denormals())
        return 0.0

    address = ctypes.cast(forward_position, ctypes.c_void_p).value
    env.formulas = replace(env.formulas, forward_position=address)
    info = env.info
    model = ActorCritic(info, NetworkSpec(hidden=()))
    policy = NetworkPolicy(model, info, None, HOST)
    rollout = Rollout.allocate(3, 2, info, HOST)
    env.reset()
    with torch.no_grad():
        model.policy[0].weight.fill_(1e-42)
    env.collect_rollout(rollout, policy.tensors(), 0, torch.zeros(2, dtype=torch.float64))
    assert set(modes) == {caller_flushes}
    assert is_zero(rollout.outputs)
    env.close()


_MODE_PROGRAM = """
#include <stdio.h>
__attribute__((noinline)) static float product(const volatile float *x, int early) {
    FLUSH_DENORMALS;
    if (early) return x[0] * x[1];
    return x[0] * x[1] + x[2];
}
int main(void) {
    const volatile float x[] = {1e-20f, 1e-20f, 1e-40f}; /* x[0] x[1] and x[2] are denormals */
    const float early = product(x, 1), late = product(x, 0);
    printf("%d %d %d\\n", early == 0.0f, late == 0.0f, x[0] * x[1] > 0.0f);
}
"""


@pytest.mark.parametrize(
    ("compiler", "emulator"),
    [
        pytest.param(["cc"], [], id="here"),
        pytest.param(
            ["aarch64-linux-gnu-gcc", "-static"],
            ["qemu-aarch64"],
            id="aarch64",
            marks=pytest.mark.skipif(
                not (shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64")),
                reason="NOT TESTED FOR AARCH64: apt-get install gcc-aarch64-linux-gnu qemu-user",
            ),
        ),
    ],
)
def test_the_processors_modes(compiler, emulator, tmp_path):
    program = tmp_path / "program.c"
    program.write_text("\n".join([numbers(torch.float32), _MODE_PROGRAM]))
    binary = str(tmp_path / "program")
    subprocess.run([*compiler, "-O3", str(program), "-o", binary, "-lm"], check=True, timeout=60)
    done = subprocess.run([*emulator, binary], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["1", "1", "1"]  # flushed inside, at either return; not outside


@dataclass(frozen=True)
class Fading(Simulator):
    """A state that halves in each step."""

    state = ("x",)
    actions = Box((-1.0,), (1.0,))
    num_draws = 1

    def start(self, draws):
        return (draws[0] * 0.0 + 2.0**-126,)

    def step(self, s, action):
        return (0.5 * s.x,), 0.0, False

    def observe(self, s):
        return (s.x,)


def test_a_fused_rollout_keeps_the_simulators_numbers(caller_flushes):
    backend, info = (
        CBackend(EnvConfig(Fading(), 3)),
        replace(INFO, obs_dim=1, action=ActionSpec(kind="continuous", dim=1)),
    )
    backend.start()
    policy = PolicyTensors((torch.ones(1, 1),), (torch.zeros(1),), "elu", None, None, 0.0, torch.ones(1))
    rollout = Rollout.allocate(4, 3, info, HOST)
    FusedRollout(backend).collect_rollout(rollout, policy, 0, torch.zeros(3, dtype=torch.float64))
    kept = [2.0**-126, 2.0**-127, 2.0**-128, 2.0**-129]
    expected = [2.0**-126, 0.0, 0.0, 0.0] if caller_flushes else kept
    bits = torch.tensor(expected, dtype=torch.float64).float().view(torch.int32)  # of this thread's mode
    assert torch.equal(rollout.raw_obs[:, :, 0].view(torch.int32), bits.unsqueeze(1).expand(4, 3))
    assert (rollout.outputs[0] == 2.0**-126).all()
    assert is_zero(rollout.outputs[1:])


@pytest.mark.parametrize("threads", [1, 2, MOST_THREADS])
def test_torch_in_all_of_its_threads(threads):
    keep_denormals()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, one = torch.full((1 << 18,), 1e-40), torch.ones(1 << 18)
        assert (x * one).view(torch.int32).all()
        with flushed_denormals(), flushed_denormals():
            inside = x * one
        assert is_zero(inside)
        assert (x * one).view(torch.int32).all()  # and no longer
    finally:
        torch.set_num_threads(before)


def test_workers_that_torch_no_longer_uses(two_torch_threads):
    keep_denormals()
    x, one = torch.full((1 << 18,), 1e-40), torch.ones(1 << 18)
    with flushed_denormals():
        assert is_zero(x * one)
        torch.set_num_threads(1)
    torch.set_num_threads(2)
    assert (x * one).view(torch.int32).all()


def test_torch_in_a_thread_that_creates_workers_in_the_block(two_torch_threads):
    found = []

    def work():
        x, one = torch.full((1 << 18,), 1e-40), torch.ones(1 << 18)
        with flushed_denormals():
            found.append(x * one)
        found.append(x * one)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    inside, outside = found
    assert is_zero(inside)
    assert outside.view(torch.int32).all()


def test_torch_after_an_error():
    with pytest.raises(ZeroDivisionError), flushed_denormals():
        _ = 1 / 0
    assert not flushes_denormals()
