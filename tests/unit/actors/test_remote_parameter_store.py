"""Parameters of a learner on another host that is gone: the reader keeps those it has until there is another learner."""

from types import SimpleNamespace

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError

from actors.remote_parameter_store import RemoteParameterStore
from collectives.experience.errors import ChannelTimeoutError


@pytest.mark.parametrize(
    "error",
    [ActorDiedError(), ActorUnavailableError("socket closed", None), ActorUnschedulableError("no such node")],
    ids=lambda error: type(error).__name__,
)
def test_a_reader_keeps_the_parameters_of_a_host_that_is_gone(monkeypatch, error):
    def get(ref, timeout):
        raise error

    monkeypatch.setattr(ray, "get", get)
    relay = SimpleNamespace(read_parameters=SimpleNamespace(remote=lambda endpoint, known: "ref"))
    store, tensors = RemoteParameterStore(relay, "store 7"), {"weight": torch.ones(2)}
    assert store.read_newer(tensors, 3) == 3
    assert store.is_finished
    assert tensors["weight"].tolist() == [1.0, 1.0]
    with pytest.raises(ChannelTimeoutError, match="store 7 on another host no longer exists"):
        store.read_newer(tensors, -1)
