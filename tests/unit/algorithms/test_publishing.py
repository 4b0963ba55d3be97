"""Parameters from a learner to its collectors, over restarts of the learner."""

from __future__ import annotations

import json

import pytest
import torch

from actors.protocols import ActionSpec, EnvInfo
from actors.rendezvous_actor import RendezvousActor
from collectives.experience.errors import ChannelError, ChannelTimeoutError
from rayagi.algorithms.normalisers import Moments
from rayagi.algorithms.publishing import ParameterPublisher, ParameterSubscriber, parameter_store_key
from rayagi.config.spec import NetworkSpec, RunSpec
from rayagi.models.policy import new_policy

INFO = EnvInfo(
    env_id="Point", engine="fake", obs_dim=3, max_episode_steps=None,
    action=ActionSpec(kind="continuous", dim=2, low=(-1.0,) * 2, high=(1.0,) * 2),
)  # fmt: skip
DEVICE = torch.device("cpu")


def policy(seed):
    return new_policy(RunSpec(network=NetworkSpec(hidden=(8,)), seed=seed), INFO, DEVICE)


def learn(teacher, amount):
    with torch.no_grad():
        for parameter in teacher.model.parameters():
            parameter += amount
    teacher.normaliser.update(Moments.from_batch(torch.full((4, 3), amount) + torch.arange(4).unsqueeze(1)))


def assert_alike(one, other):
    obs = torch.linspace(-2, 2, 15).view(5, 3)
    torch.testing.assert_close(one.observe(obs), other.observe(obs), rtol=0, atol=0)
    torch.testing.assert_close(
        one.outputs(one.observe(obs)), other.outputs(other.observe(obs)), rtol=0, atol=0
    )


def test_a_subscriber_equals_the_newest_published_policy_bitwise():
    directory, teacher, pupil = RendezvousActor(1), policy(1), policy(2)
    publisher, subscriber = (
        ParameterPublisher(teacher, directory, 0),
        ParameterSubscriber(pupil, directory, 0),
    )
    publisher.publish(0)
    assert subscriber.read(1.0) == 0
    assert_alike(teacher, pupil)
    learn(teacher, 0.25)
    publisher.publish(1)
    learn(teacher, 0.5)
    publisher.publish(2)
    assert subscriber.read(1.0) == 2
    assert_alike(teacher, pupil)
    state = subscriber.state_dict()
    assert state["iteration"] == 2
    torch.testing.assert_close(state["learner"]["model"], teacher.model.state_dict(), rtol=0, atol=0)
    publisher.close()
    subscriber.close()


def test_what_a_learner_published_last_stays_until_its_successor_publishes():
    directory, teacher, pupil = RendezvousActor(1), policy(1), policy(2)
    first, subscriber = ParameterPublisher(teacher, directory, 0), ParameterSubscriber(pupil, directory, 0)
    first.publish(7)
    assert subscriber.read(1.0) == 7
    first.close()
    assert subscriber.read(1.0) == 7
    assert_alike(teacher, pupil)
    successor = policy(3)
    second = ParameterPublisher(successor, directory, 0)
    assert subscriber.read(1.0) == 7  # made, and nothing published
    second.publish(5)
    assert subscriber.read(1.0) == 5
    assert_alike(successor, pupil)
    second.close()
    subscriber.close()


def test_an_older_version_opens_a_new_store():
    directory, teacher, pupil = RendezvousActor(1), policy(1), policy(2)
    publisher, subscriber = (
        ParameterPublisher(teacher, directory, 0),
        ParameterSubscriber(pupil, directory, 0),
    )
    publisher.publish(9)
    assert (subscriber.read(1.0), publisher.version) == (9, 9)
    learn(teacher, 1.0)
    publisher.publish(4)
    subscriber.forget()
    assert (subscriber.read(1.0), publisher.version) == (4, 4)
    assert_alike(teacher, pupil)
    publisher.close()
    subscriber.close()


def test_before_the_first_publish_a_subscriber_times_out_and_names_the_learner():
    subscriber = ParameterSubscriber(policy(1), RendezvousActor(1), 3)
    with pytest.raises(ChannelTimeoutError, match="learner 'parameters/3' has not published any"):
        subscriber.read(0.05)
    assert subscriber.state_dict()["iteration"] == 0


def test_a_learner_on_another_host_is_refused():
    directory = RendezvousActor(1)
    directory.announce(parameter_store_key(0), json.dumps(("another-host", "its node", "/proc/1/fd/9")))
    with pytest.raises(ChannelError, match="on another host"):
        ParameterSubscriber(policy(1), directory, 0).read(1.0)
