"""Parameter store between processes: readers get whole versions only, however the owner ends."""

import os
import signal
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.errors import (
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    SchemaError,
)
from collectives.experience.parameters import ParameterStore
from collectives.experience.schema import ExperienceSchema, Field
from tests.unit.forkserver import context

LIMIT_S = 60.0


def tensors(value=0.0, size=1000):
    """Every element is the version."""
    return {"weights": torch.full((size,), float(value)), "count": torch.full((), int(value))}


class Owner:
    """A process that hosts a parameter store and runs ``work(parameter_store, pipe)``."""

    def __init__(self, work, *args):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_own, args=(work, theirs, args))
        self.process.start()
        theirs.close()

    def receive(self):
        assert self.pipe.poll(LIMIT_S), "the owner says nothing"
        return self.pipe.recv()

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(LIMIT_S)

    def __enter__(self):
        self.endpoint = self.receive()
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.join(LIMIT_S)
        self.pipe.close()


def _own(work, pipe, args):
    torch.set_num_threads(1)
    work(pipe, *args)


def publish_received(pipe):
    """Publish each number that comes; None: close; an exhausted pipe ends the process."""
    parameter_store = ParameterStore.host(tensors())
    pipe.send(parameter_store.endpoint)
    while (version := pipe.recv()) is not None:
        parameter_store.publish(tensors(version), version)
        pipe.send(version)
    parameter_store.close()
    pipe.send("closed")
    pipe.recv()


def publish_without_end(pipe, size):
    parameter_store = ParameterStore.host(tensors(size=size))
    parameter_store.publish(tensors(0, size), 0)
    pipe.send(parameter_store.endpoint)
    version = 0
    while True:
        version += 1
        parameter_store.publish(tensors(version, size), version)


class Dying(torch.Tensor):
    """Kills its process when it is read."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__torch_function__(function, types, args, kwargs or {})


def die_while_publishing(pipe, publications):
    """The first tensor of the last version is copied, the second never is."""
    parameter_store = ParameterStore.host(tensors())
    pipe.send(parameter_store.endpoint)
    for version in range(publications):
        parameter_store.publish(tensors(version), version)
    pipe.send(publications)
    pipe.recv()
    last = tensors(publications)
    parameter_store.publish(
        {"weights": last["weights"], "count": last["count"].as_subclass(Dying)}, publications
    )


def read(parameter_store, size=1000):
    own = tensors(-1, size)
    return parameter_store.read_into(own), own


def test_what_is_published_is_read_whole_with_its_version():
    with Owner(publish_received) as owner:
        parameter_store = ParameterStore.attach(owner.endpoint)
        assert parameter_store.version == -1
        with pytest.raises(ChannelError, match="nothing was published yet"):
            read(parameter_store)
        for version in (0, 1, 2, 3, 10):
            owner.pipe.send(version)
            assert parameter_store.wait(version, LIMIT_S) == version
            assert owner.receive() == version
            found, own = read(parameter_store)
            assert found == version
            assert own["weights"].eq(version).all()
            assert own["count"] == version


def test_wait_times_out_and_names_the_version():
    with Owner(publish_received) as owner:
        parameter_store = ParameterStore.attach(owner.endpoint)
        owner.pipe.send(4)
        assert parameter_store.wait(2, LIMIT_S) == 4  # newer will do
        with pytest.raises(
            ChannelTimeoutError, match=rf"process {owner.process.pid}, is at version 4; version 5"
        ):
            parameter_store.wait(5, 0.1)


def test_an_owner_that_closes_or_dies_ends_the_wait_and_leaves_the_last_version():
    with Owner(publish_received) as owner:
        parameter_store = ParameterStore.attach(owner.endpoint)
        owner.pipe.send(0)
        owner.pipe.send(None)
        assert (owner.receive(), owner.receive()) == (0, "closed")
        with pytest.raises(ChannelClosedError, match=r"has closed it at version 0; version 1 was awaited"):
            parameter_store.wait(1, LIMIT_S)
        owner.kill()
        assert parameter_store.wait(0, LIMIT_S) == 0
        assert read(parameter_store)[0] == 0
    with Owner(publish_received) as owner:
        parameter_store = ParameterStore.attach(owner.endpoint)
        owner.kill()
        with pytest.raises(ChannelClosedError, match=r"has ended at version -1"):
            parameter_store.wait(0, LIMIT_S)
        with pytest.raises(ChannelError, match="cannot open"):
            ParameterStore.attach(owner.endpoint)


@pytest.mark.parametrize("publications", [1, 2, 3, 7])
def test_an_owner_killed_while_it_publishes_leaves_the_version_before(publications):
    with Owner(die_while_publishing, publications) as owner:
        parameter_store = ParameterStore.attach(owner.endpoint)
        assert owner.receive() == publications
        owner.pipe.send("die")
        owner.process.join(LIMIT_S)
        assert owner.process.exitcode == -signal.SIGKILL
        found, own = read(parameter_store)
        assert found == publications - 1
        assert own["weights"].eq(found).all()
        assert own["count"] == found
        with pytest.raises(ChannelClosedError, match=f"at version {found}"):
            parameter_store.wait(publications, LIMIT_S)


def test_readers_never_get_mixed_or_older_versions():
    size = 200_000  # copying takes long enough that publications fall into it
    with Owner(publish_without_end, size) as owner:
        parameter_store = ParameterStore.attach(owner.endpoint)
        own, versions = tensors(-1, size), [-1]
        deadline = time.monotonic() + LIMIT_S
        while len(versions) < 300 or len(set(versions)) <= 10:
            assert time.monotonic() < deadline
            versions.append(parameter_store.read_into(own))
            assert own["weights"][0] == versions[-1]
            assert own["weights"].min() == own["weights"].max()
            assert own["count"] == versions[-1]
        assert versions == sorted(versions)
        owner.kill()  # at any moment: what is published stays whole
        last = parameter_store.read_into(own)
        assert last >= versions[-1]
        assert own["weights"].eq(last).all()


@given(
    st.lists(
        st.tuples(
            st.sampled_from((torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16)),
            st.lists(st.integers(1, 5), max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=30, deadline=None)
def test_any_set_of_tensors_comes_back_as_it_was(kinds):
    generator = torch.Generator().manual_seed(0)
    given_ = {
        f"t{i}": (torch.randn(shape, generator=generator) * 9).to(dtype)
        for i, (dtype, shape) in enumerate(kinds)
    }
    with ParameterStore.host(given_) as parameter_store:
        parameter_store.publish(given_, 0)
        reader = ParameterStore.attach(parameter_store.endpoint)
        own = {name: torch.zeros_like(tensor) for name, tensor in given_.items()}
        assert reader.read_into(own) == 0
        assert all(torch.equal(own[name], given_[name]) for name in given_)
        reader.close()


def test_parameters_that_require_gradients_are_published_and_read_as_they_are():
    weights = torch.nn.Parameter(torch.arange(4.0))
    with ParameterStore.host({"weights": weights}) as parameter_store:
        parameter_store.publish({"weights": weights}, 0)
        own = torch.nn.Parameter(torch.zeros(4))
        assert parameter_store.read_into({"weights": own}) == 0
        assert torch.equal(own, weights)


def test_bad_input_is_refused_with_the_difference():
    with ParameterStore.host(tensors()) as parameter_store:
        parameter_store.publish(tensors(), 3)
        with pytest.raises(ValueError, match="version 3 is published after version 3"):
            parameter_store.publish(tensors(), 3)
        with pytest.raises(SchemaError, match=r"fields \['weights'\] were given where"):
            parameter_store.publish({"weights": torch.zeros(1000)}, 4)
        with pytest.raises(SchemaError, match=r"weights is .*\[1, 999\]"):
            parameter_store.read_into(tensors(size=999))
        reader = ParameterStore.attach(parameter_store.endpoint)
        with pytest.raises(ChannelError, match="only its owner"):
            reader.publish(tensors(), 4)
        reader.close()
        with pytest.raises(ChannelClosedError):
            reader.read_into(tensors())
        assert parameter_store.wait(3, 0.0) == 3  # a reader that closes closes nothing for others
    with pytest.raises(ChannelClosedError, match="this parameter store is closed"):
        parameter_store.publish(tensors(), 4)
    with pytest.raises(SchemaError, match="a type that channels do not support"):
        ParameterStore.host({"complex": torch.zeros(2, dtype=torch.complex64)})
    consumer_endpoint = ConsumerEndpoint(ExperienceSchema("obs", (Field(name="obs"),)))
    with pytest.raises(ChannelError, match="is not a channel of this version"):
        ParameterStore.attach(consumer_endpoint.endpoint)
    consumer_endpoint.close()
