"""Dict and tuple observations at the policy server: flattened as Gymnasium does, and refused where they differ."""

import json
import re
import warnings
from dataclasses import asdict

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from rayagi.envs.gymnasium_adapter import observation_leaves
from rayagi.serving.client import PolicyClient, PolicyRefusedError
from rayagi.serving.policy_server.obs_leaves import flat_rows
from tests.unit.serving.test_client import INFO, requested, response, service

DICT = spaces.Dict(
    {
        "goal": spaces.Discrete(3, start=2),
        "arm": spaces.Tuple((spaces.Box(-1, 1, (2, 3), np.float32), spaces.MultiBinary((2, 2)))),
        "camera": spaces.Box(0, 255, (4, 5, 1), np.uint8),
        "modes": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    }
)
TUPLE = spaces.Tuple((spaces.Discrete(3), spaces.Dict({"x": spaces.Box(-1, 1, (), np.float64)})))
IMAGE = spaces.Box(0, 255, (2, 3, 4), np.uint8)
CHOICE = spaces.Discrete(4, start=-1)
CHOICES = spaces.MultiDiscrete([2, 3, 4], start=[0, 5, -2])
BITS = spaces.MultiBinary((2, 2))
NUMBER = spaces.Box(-1, 1, (), np.float64)
PAIR = spaces.Dict({"goal": spaces.Discrete(3, start=2), "pos": spaces.Box(-1, 1, (2,), np.float32)})


def leaves_of(space):
    """As a client reads them."""
    return json.loads(json.dumps([asdict(leaf) for leaf in observation_leaves(space)]))


@pytest.mark.parametrize("space", [DICT, TUPLE, PAIR, CHOICE, CHOICES, BITS, NUMBER])
def test_rows_are_those_of_gymnasium(space):
    space.seed(1)
    leaves = leaves_of(space)
    for _ in range(5):
        obs = space.sample()
        rows, is_single = flat_rows(obs, leaves)
        assert is_single
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows[0], spaces.flatten(space, obs).astype(np.float32))


@pytest.mark.parametrize("space", [DICT, TUPLE, CHOICES, BITS])
def test_several_rows_are_those_of_a_vector_environment(space):
    batch = batch_space(space, 3)
    batch.seed(1)
    obs = batch.sample()
    rows, is_single = flat_rows(obs, leaves_of(space))
    assert not is_single
    for row, single in zip(rows, gymnasium.vector.utils.iterate(batch, obs), strict=True):
        np.testing.assert_array_equal(row, spaces.flatten(space, single).astype(np.float32))


@pytest.mark.parametrize(
    ("obs", "reason"),
    [
        ({"pos": [0, 0]}, r"obs is a dict with the keys pos; expected a dict with the keys goal, pos"),
        ((2, [0, 0]), r"obs is a tuple of 2; expected a dict with the keys goal, pos"),
        (
            {"goal": 2, "pos": [0, 0, 0]},
            r"obs\['pos'\] has the shape \(3,\); expected \(2,\), or in every array the same number of rows before it",
        ),
        ({"goal": [2, 3], "pos": [0, 0]}, r"obs\['pos'\] has the shape \(2,\)"),
        ({"goal": [2, 3], "pos": [[0, 0]]}, r"obs\['pos'\] has the shape \(1, 2\)"),
        (
            {"goal": [], "pos": np.zeros((0, 2))},
            r"obs\['goal'\] has the shape \(0,\); expected \(\), or in every",
        ),
        ({"goal": 5, "pos": [0, 0]}, r"obs\['goal'\] holds \[5\]; expected whole numbers from 2 to 4"),
        ({"goal": 2, "pos": ["a", "b"]}, r"obs\['pos'\] holds <U1; expected numbers"),
    ],
)
def test_what_differs_is_refused_with_one_sentence(obs, reason):
    with pytest.raises(ValueError, match=reason):
        flat_rows(obs, leaves_of(PAIR))


def test_members_that_are_no_arrays_and_other_spaces_have_no_leaves():
    for space in (
        spaces.Dict({"text": spaces.Text(5)}),
        spaces.Text(5),
        spaces.Box(-1, 1, (2,)),
        spaces.MultiBinary(3),
    ):
        assert observation_leaves(space) == ()


def test_an_image_is_one_array():
    leaves = leaves_of(IMAGE)
    image = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    np.testing.assert_array_equal(flat_rows(image, leaves)[0], [np.arange(24)])
    rows, is_single = flat_rows(image[None].repeat(3, 0), leaves)
    assert rows.shape == (3, 24)
    assert not is_single


def answers(leaves, bodies):
    """Answers of a server with these leaves: /info, then the observations themselves as actions."""

    def answer(connection, number):
        requested(connection)
        info = {**json.loads(INFO), "obs_leaves": leaves}
        connection.sendall(response(200, json.dumps(info).encode()))
        head, _, body = requested(connection).partition(b"\r\n\r\n")
        if not head:  # the client has left
            return
        size = int(re.search(rb"Content-Length: (\d+)", head)[1])
        while len(body) < size:
            body += connection.recv(size)
        bodies.append(body)
        connection.sendall(response(200, body))

    return answer


def test_a_client_sends_an_observation_as_the_environment_gives_it():
    bodies: list[bytes] = []
    obs = {"goal": 4, "pos": np.array([0.5, -0.5], np.float32)}
    with service(answers(leaves_of(PAIR), bodies)) as address, PolicyClient(address, timeout_s=60) as client:
        np.testing.assert_array_equal(client.act(obs), [0, 0, 1, 0.5, -0.5])
    assert len(bodies) == 1


@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 2, 3, 4), (24,), (5, 24)])
def test_a_client_sends_images_in_their_shape_or_flat(shape):
    image = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    with (
        service(answers(leaves_of(IMAGE), [])) as address,
        PolicyClient(address, timeout_s=60) as client,
    ):
        np.testing.assert_array_equal(client.act(image).ravel(), image.ravel())


@pytest.mark.parametrize(
    ("leaves", "reason"),
    [
        (leaves_of(PAIR), "expected a dict with the keys goal, pos"),
        ([], "obs is a dict; this policy's observations are vectors"),
    ],
)
def test_a_client_names_what_is_wrong_before_it_asks_for_actions(leaves, reason):
    bodies: list[bytes] = []
    with (
        service(answers(leaves, bodies)) as address,
        PolicyClient(address, timeout_s=60) as client,
        pytest.raises(PolicyRefusedError, match=reason),
    ):
        client.act({"pos": [0, 0]})
    assert bodies == []


@pytest.mark.parametrize(
    ("space", "obs", "flat"),
    [
        (CHOICE, 1, [0, 0, 1, 0]),
        (CHOICE, np.int64(-1), [1, 0, 0, 0]),
        (CHOICE, (0, 0, 1, 0), [0, 0, 1, 0]),  # vectors, though four choices would have their shape
        (CHOICE, [0, 1, 0, 0], [0, 1, 0, 0]),
        (CHOICE, [[0, 1, 0, 0], [1, 0, 0, 0]], [[0, 1, 0, 0], [1, 0, 0, 0]]),
        (CHOICES, np.array([1, 6, -2]), [0, 1, 0, 1, 0, 1, 0, 0, 0]),
        (CHOICES, (1, 6, -2), [0, 1, 0, 1, 0, 1, 0, 0, 0]),
        (CHOICES, [[1, 6, -2], [0, 5, 1]], [[0, 1, 0, 1, 0, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0, 0, 1]]),
        (CHOICES, [0, 1, 0, 1, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 1, 0, 0, 0]),
        (BITS, np.array([[0, 1], [1, 1]], np.int8), [0, 1, 1, 1]),
        (BITS, np.array([[[0, 1], [1, 1]]], np.int8), [[0, 1, 1, 1]]),
        (NUMBER, 0.5, [0.5]),
    ],
)
def test_a_client_sends_choices_and_arrays_as_the_environment_gives_them_or_flat(space, obs, flat):
    with (
        service(answers(leaves_of(space), [])) as address,
        PolicyClient(address, timeout_s=60) as client,
    ):
        assert client.act(obs).tolist() == flat


@pytest.mark.parametrize(
    ("obs", "reason"),
    [
        (3, r"obs holds \[3\]; expected whole numbers from -1 to 2"),
        (0.5, r"obs holds \[0\.5\]; expected whole numbers"),
        (np.zeros((1, 1, 1)), r"obs has the shape \(1, 1, 1\); expected \(\)"),
        ({}, "obs holds object; expected numbers"),
    ],
)
def test_a_client_refuses_what_is_no_choice(obs, reason):
    with (
        service(answers(leaves_of(CHOICE), [])) as address,
        PolicyClient(address, timeout_s=60) as client,
        pytest.raises(PolicyRefusedError, match=reason),
    ):
        client.act(obs)


@pytest.mark.parametrize(
    "obs",
    [
        ["0", "1"],
        np.array(["0", "1"]),
        [1j, 0],
        np.array([1j, 0]),
        [None, 0],
        [[1, 2], [3]],
        [np.zeros((2, 3)), np.zeros((2, 4))],
        [10**400, 0],
        b"ab",
        object(),
    ],
)
def test_a_client_refuses_what_is_no_array_of_numbers(obs):
    with (
        service(answers([], [])) as address,
        PolicyClient(address, timeout_s=60) as client,
        pytest.raises(
            PolicyRefusedError,
            match=r"^observations (hold|are no array) .*; expected numbers of shape \(obs_dim,\) or",
        ),
    ):
        client.act(obs)


def test_a_client_sends_numbers_beyond_float32_as_infinity_for_the_server_to_refuse():
    with (
        warnings.catch_warnings(),
        service(answers([], [])) as address,
        PolicyClient(address, timeout_s=60) as client,
    ):
        warnings.simplefilter("error")
        assert client.act([1e39, 1]).tolist() == [np.inf, 1]
