"""The GMI class called directly: no Ray, the real CPU backend, real communicators between threads."""

import os
import pickle

import pytest
import torch

import actors.gmi
from actors.errors import ProgramInterruptedError
from actors.gmi import Gmi, GmiIdentity
from actors.protocols import EvaluationResult, IterationResult
from actors.rendezvous_actor import RendezvousActor
from collectives.errors import CommunicatorError
from collectives.experience.errors import ChannelError
from collectives.experience.file_layout import SharedFile
from collectives.transports.shm.memory import MEMORY_LIMIT, Segment
from placement.errors import GpuMemoryError, SliceError
from placement.types import Slice
from rayagi.cli.failures import explain
from tests.threads import in_threads


class Counting:
    """A program that sums its rank over the group, and fails in iteration ``fail_at``."""

    def __init__(self, context, fail_at=None):
        self.context, self.fail_at = context, fail_at
        self.iteration = 0
        self.closed = False

    def iterate(self):
        self.iteration += 1
        if self.iteration == self.fail_at:
            raise FloatingPointError("policy_loss is NaN")
        ranks = torch.tensor([float(self.context.identity.index)])
        self.context.communicator.all_reduce(ranks)
        return IterationResult(iteration=self.iteration, metrics={"env_steps": ranks.item()})

    def evaluate(self, num_episodes, seed):
        return EvaluationResult(
            episode_returns=[float(seed)] * num_episodes, episode_lengths=[1] * num_episodes
        )

    def state_dict(self):
        return {"shared": {"iteration": self.iteration}, "local": {"index": self.context.identity.index}}

    def load_state_dict(self, state):
        self.iteration = state["shared"]["iteration"]

    def close(self):
        self.closed = True


def gmi(index=0, num_gmis=1):
    gmi_slice = Slice(node="here", backend="cpu", num_threads=1)
    identity = GmiIdentity(
        index=index, num_gmis=num_gmis, slice=gmi_slice, roles=("simulator", "trainer"), task="Ant-v5"
    )
    return Gmi(identity, "cpu")


def joined_pair(factory, other_factory=None):
    pair = [gmi(0, 2), gmi(1, 2)]
    meeting = RendezvousActor(2)
    in_threads([lambda member=member: member.join(meeting, timeout_s=20.0) for member in pair])
    pair[0].build(factory)
    pair[1].build(other_factory or factory)
    return pair


def test_building_again_closes_and_replaces_the_first_program():
    made = []

    def factory(context):
        assert all(program.closed for program in made)
        made.append(Counting(context))
        return made[-1]

    alone = gmi()
    alone.build(factory)
    assert [result.iteration for result in alone.iterate(3)] == [1, 2, 3]
    alone.build(factory)
    assert [program.closed for program in made] == [True, False]
    assert [result.iteration for result in alone.iterate(1)] == [1]


def test_a_program_does_not_see_what_an_earlier_one_announced():
    found = []

    def factory(context):
        found.append(context.directory.announced("steps/"))
        context.directory.announce("steps/0", "endpoint")
        assert context.directory.announced("steps/") == {"steps/0": "endpoint"}
        return Counting(context)

    alone = gmi()
    alone.build(factory)
    alone.build(factory)
    assert found == [{}, {}]


def test_a_program_sees_what_others_than_programs_announced():
    """Such as shards of a replay, which live as long as their actors."""
    found = []

    def factory(context):
        found.append(context.directory.announced("replay/t/"))
        return Counting(context)

    alone = gmi()
    alone.directory.announce("replay/t/0", "address")
    alone.build(factory)
    alone.build(factory)
    assert found == [{"replay/t/0": "address"}] * 2


def test_a_gmi_reads_as_its_identity():
    alone = gmi()
    assert repr(alone) == f"GMI 0/1 {alone.identity.slice.label()} simulator+trainer Ant-v5"


def test_shared_memory_of_a_gmi_stays_within_the_limit_of_its_process(monkeypatch):
    monkeypatch.setattr(MEMORY_LIMIT, "max_bytes", MEMORY_LIMIT.max_bytes)
    monkeypatch.setattr(actors.gmi, "memory_bytes", lambda: 2**20)  # as of a container
    Segment.host(2).close()  # two staging buffers of each of two members: 2 MiB
    gmi()
    with pytest.raises(
        CommunicatorError, match="that is more memory than this host, or this process's cgroup, has"
    ):
        Segment.host(2)
    with pytest.raises(ChannelError, match=r"no 2\.0 MiB for it"):
        SharedFile.create("rollouts", 2**21)


def test_a_gmi_that_entered_its_slice_reports_its_placement():
    threads = torch.get_num_threads()
    try:
        entering = gmi()
        worker = entering.enter(entering.identity.slice)
    finally:
        torch.set_num_threads(threads)
    assert worker.pid == os.getpid()
    assert worker.num_threads == 1
    assert worker.cores == tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_program_on_a_missing_gpu_fails_with_one_message():
    gmi_slice = Slice(node="here", backend="mps", gpu_uuid="GPU-1", gpu_fraction=0.5)
    identity = GmiIdentity(index=0, num_gmis=1, slice=gmi_slice, roles=("trainer",), task="Ant-v5")
    with pytest.raises(SliceError, match=r"Wanted 0.5 of a GPU; there is no CUDA device in process"):
        Gmi(identity, "mps").build(lambda context: torch.zeros(1, device=context.device))


def on_a_gpu(build):
    """The error with which a GMI's program on a GPU is not built."""
    gmi_slice = Slice(node="here", backend="direct", gpu_uuid="GPU-1", gpu_fraction=1.0)
    identity = GmiIdentity(index=0, num_gmis=1, slice=gmi_slice, roles=("trainer",), task="Ant-v5")
    with pytest.raises(SliceError) as caught:
        Gmi(identity, "direct").build(build)
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("cuda", "reason", "hint"),
    [
        (None, AssertionError("Torch not compiled with CUDA enabled"), "Install a CUDA build of torch, or"),
        (
            "13.0",
            RuntimeError(
                "The NVIDIA driver on your system is too old (found version 12020).\nPlease update your GPU driver."
            ),
            "Update NVIDIA's driver, or install a torch",
        ),
        (
            "13.0",
            RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"),
            "Repair it until",
        ),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_says_why_and_what_to_do(monkeypatch, cuda, reason, hint):
    def init():
        raise reason

    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.cuda.init", init)
    message = on_a_gpu(lambda context: torch.zeros(1, device=context.device))
    assert " ".join(str(reason).split()).rstrip(".") in message
    assert hint in message
    assert message.endswith("or use backend='cpu'.")


@pytest.mark.parametrize(
    ("error", "texts"),
    [
        (
            "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might ...",
            (
                "Quadro P400 of compute capability 6.1",
                "kernels for sm_75 sm_90 only",
                "leave it out by CUDA_VISIBLE",
            ),
        ),
        (
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            ("admits no further process", "`nvidia-smi` shows who uses it"),
        ),
    ],
)
def test_a_gpu_that_this_torch_or_another_process_makes_useless_is_named(monkeypatch, error, texts):
    """torch.AcceleratorError is a RuntimeError, raised by the first kernel."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Quadro P400")
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_75", "sm_90"])

    def build(context):
        raise torch.AcceleratorError(error)

    message = on_a_gpu(build)
    assert all(text in message for text in texts)


TOO_LITTLE = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 7.61 GiB of which 6.53 GiB is free. "
    "Including non-PyTorch memory, this process has 600.00 MiB memory in use. See documentation."
)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (torch.OutOfMemoryError(TOO_LITTLE), "of which 6.53 GiB is free."),
        (
            RuntimeError("Failed to allocate 8589934592 bytes on device 'cuda:0'"),
            "8589934592 bytes on device 'cuda:0'.",
        ),
        (
            torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might"),
            "CUDA error: out of memory",
        ),
    ],
)
def test_too_little_memory_of_a_gpu_is_one_sentence_with_what_to_do(monkeypatch, error, problem):
    """Of torch, of Warp, and of a context that does not fit beside what other processes have."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    gmi_slice = Slice(node="here", backend="direct", gpu_uuid="GPU-1", gpu_fraction=1.0)
    identity = GmiIdentity(index=0, num_gmis=1, slice=gmi_slice, roles=("trainer",), task="Ant-v5")

    def build(context):
        raise error

    with pytest.raises(GpuMemoryError) as caught:
        Gmi(identity, "direct").build(build)
    assert str(caught.value).startswith("direct[GPU-1 x1.00] has too little memory: ")
    assert problem in str(caught.value)
    assert "fewer environments (--num-envs)" in str(caught.value)
    assert "See documentation" not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    with pytest.raises(type(error)):  # on cores the same text means something else
        gmi().build(build)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_gmis_that_join_on_a_missing_gpu_fail_with_the_same_message():
    gmi_slice = Slice(node="here", backend="mps", gpu_uuid="GPU-1", gpu_fraction=0.5)
    meeting = RendezvousActor(2)
    pair = [
        Gmi(GmiIdentity(index=index, num_gmis=2, slice=gmi_slice, roles=("trainer",), task="Ant-v5"), "mps")
        for index in range(2)
    ]
    errors = in_threads([lambda member=member: member.join(meeting, timeout_s=20.0) for member in pair])
    for error in errors:
        assert isinstance(error, SliceError), error
        assert "Wanted 0.5 of a GPU; there is no CUDA device in process" in str(error)


def test_a_gmi_alone_iterates_evaluates_and_keeps_its_state():
    with gmi() as alone:
        alone.build(Counting)
        assert [result.iteration for result in alone.iterate(3)] == [1, 2, 3]
        assert alone.evaluate(2, seed=5).episode_returns == [5.0, 5.0]
        assert alone.state_dict() == {"shared": {"iteration": 3}, "local": {"index": 0}}
        assert alone.state_dict(shared=False) == {"local": {"index": 0}}
        alone.load_state_dict({"shared": {"iteration": 10}})
        assert alone.iterate(1)[0].iteration == 11


def test_two_gmis_reduce_with_each_other():
    pair = joined_pair(Counting)
    answers = in_threads([lambda member=member: member.iterate(2) for member in pair])
    assert [[result.metrics["env_steps"] for result in results] for results in answers] == [[1.0, 1.0]] * 2


def test_when_one_program_raises_the_other_gmi_does_not_wait_for_the_limit():
    pair = joined_pair(Counting, lambda context: Counting(context, fail_at=2))
    answers = in_threads([lambda member=member: member.iterate(3) for member in pair])
    assert isinstance(answers[1], FloatingPointError)
    assert isinstance(answers[0], CommunicatorError)
    assert answers[0].waited_s < 15


def test_building_before_joining_others_is_an_error():
    with pytest.raises(RuntimeError, match=r"GMI 1/2 .* must join"):
        gmi(1, 2).build(Counting)


def test_asking_before_building_or_after_closing_is_an_error():
    alone = gmi()
    with pytest.raises(RuntimeError, match="has no program"):
        alone.iterate(1)
    alone.build(Counting)
    alone.close()
    alone.close()
    with pytest.raises(RuntimeError, match="is closed"):
        alone.state_dict()


def test_closing_closes_the_program():
    built = []

    def factory(context):
        built.append(Counting(context))
        return built[0]

    with gmi() as alone:
        alone.build(factory)
    assert built[0].closed


def test_an_error_that_is_its_own_cause_is_raised_as_any_other():
    class OwnCause(Counting):
        def iterate(self):
            try:
                super().iterate()
            except FloatingPointError as error:
                raise error from error

    alone = gmi()
    alone.build(lambda context: OwnCause(context, fail_at=1))
    with pytest.raises(FloatingPointError, match="policy_loss is NaN"):
        alone.iterate(1)


def test_a_keyboard_interrupt_of_a_program_is_an_error_that_says_where():
    """Ray would report that the call was cancelled."""

    class Interrupted(Counting):
        def iterate(self):
            raise KeyboardInterrupt

    own = gmi()
    own.build(Interrupted)
    line = Interrupted.iterate.__code__.co_firstlineno + 1
    with pytest.raises(ProgramInterruptedError) as caught:
        own.iterate(1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == (
        f"GMI 0/1 cpu[1 thread] simulator+trainer Ant-v5: KeyboardInterrupt at {__file__}:{line} in iterate: this code "
        "raised it, or somebody sent SIGINT to the GMI's process"
    )
    assert explain(again).exit_code == 1
