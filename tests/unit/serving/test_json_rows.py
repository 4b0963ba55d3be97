"""JSON requests in the form of a Dict, Tuple or image space: read as Gymnasium flattens, or refused in one sentence."""

import json
import re

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from test_obs_leaves import BITS, CHOICE, CHOICES, DICT, IMAGE, PAIR, TUPLE, leaves_of

from rayagi.serving.policy_server import requests
from rayagi.serving.policy_server.requests import PIECE_ROWS, Expected, RequestError
from tests.documents import ROOT

SPACES = {"dict": DICT, "tuple": TUPLE, "pair": PAIR, "image": IMAGE, "choices": CHOICES, "bits": BITS}


def expected_of(space, max_rows=1000, state_dim=0):
    return Expected(
        obs_dim=spaces.flatdim(space), max_rows=max_rows, leaves=tuple(leaves_of(space)), state_dim=state_dim
    )


def plain(obs):
    """An observation as JSON has it."""
    if isinstance(obs, dict):
        return {key: plain(value) for key, value in obs.items()}
    return [plain(value) for value in obs] if isinstance(obs, tuple) else np.asarray(obs).tolist()


def parsed(obs, expected):
    body = obs if isinstance(obs, bytes) else json.dumps({"obs": obs}).encode()
    pieces = list(expected.pieces(body, "json"))
    assert all(1 <= len(piece.rows) <= PIECE_ROWS for piece in pieces)
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return np.concatenate([piece.rows for piece in pieces]), pieces[0].is_single


def samples(space, count):
    space.seed(1)
    return [space.sample() for _ in range(count)]


@pytest.mark.parametrize("space", [*SPACES.values(), CHOICE])
def test_one_observation_in_its_form_or_flat(space):
    (obs,) = samples(space, 1)
    flat = spaces.flatten(space, obs).astype(np.float32)
    for given_obs in (plain(obs), flat.tolist()):
        rows, is_single = parsed(given_obs, expected_of(space))
        assert is_single
        np.testing.assert_array_equal(rows, [flat])


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("piece_bytes", [64, 32 * 2**10])
def test_observations_in_a_list_whole_or_in_pieces(name, piece_bytes, monkeypatch):
    monkeypatch.setattr(requests, "PIECE_BYTES", piece_bytes)
    space = SPACES[name]
    many = samples(space, 300)
    flat = np.stack([spaces.flatten(space, obs) for obs in many]).astype(np.float32)
    mixed = [
        row.tolist() if place % 2 else plain(obs)
        for place, (obs, row) in enumerate(zip(many, flat, strict=True))
    ]
    for rows_of_json in ([plain(obs) for obs in many], flat.tolist(), mixed):
        for indent in (None, 1):
            body = json.dumps({"obs": rows_of_json}, indent=indent).encode() + b" \n"
            rows, is_single = parsed(body, expected_of(space))
            assert not is_single
            np.testing.assert_array_equal(rows, flat)


def test_a_recurrent_policy_takes_pairs_of_observation_and_state():
    expected = expected_of(PAIR, state_dim=2)
    pair = [{"goal": 3, "pos": [0.5, -0.5]}, [7, 8]]
    rows, is_single = parsed(pair, expected)
    assert is_single
    assert rows.tolist() == [[0, 1, 0, 0.5, -0.5, 7, 8]]
    rows, is_single = parsed([pair, [0, 1, 0, 0.5, -0.5, 7, 8]], expected)
    assert not is_single
    assert rows[0].tolist() == rows[1].tolist()
    with pytest.raises(
        RequestError, match=r"obs\[1\] has a list of 1 in dimension 0; expected the shape \(2,\)"
    ):
        parsed([pair[0], [7]], expected)


def test_the_documented_observations_are_two_rows():
    (command,) = re.findall(r"-d '(.*goal.*)'", (ROOT / "docs/reference/policy-server.md").read_text())
    rows, is_single = parsed(json.loads(command)["obs"], expected_of(PAIR))
    assert not is_single
    assert rows.tolist() == [[1, 0, 0, 0.5, -0.5], [0, 1, 0, 0, 1]]


def test_a_list_of_numbers_is_never_several_choices():
    expected = expected_of(CHOICE)
    assert parsed([0, 0, 1, 0], expected)[0].tolist() == [[0, 0, 1, 0]]
    for obs, reason in (
        ([1, 2], "obs holds a list of 2; expected numbers of the shape"),
        (5, r"obs holds \[5.0\]; expected whole numbers from -1 to 2"),
        (0.5, r"obs holds \[0.5\]; expected whole numbers"),
        (True, "obs holds a value of the type bool"),
        ([2] * 100_000, "obs is a list of numbers; expected JSON like .* or 4 numbers, or a list of these"),
    ):
        with pytest.raises(RequestError, match=reason):
            parsed(obs, expected)
    rows, is_single = parsed([2, [7, 8]], expected_of(CHOICE, state_dim=2))
    assert (rows.tolist(), is_single) == ([[0, 0, 0, 1, 7, 8]], True)


@pytest.mark.parametrize(
    ("obs", "reason"),
    [
        ({"pos": [0, 0]}, r"obs is a dict with the keys pos; expected a dict with the keys goal, pos"),
        (
            {"goal": 2, "pos": [0, 0], "x": 1},
            r"obs is a dict with the keys goal, pos, x; expected a dict with",
        ),
        ([{"goal": 2, "pos": [0, 0]}, {"goal": 2}], r"obs\[1\] is a dict with the keys goal; expected"),
        (
            {"goal": 2, "pos": [0, 0, 0]},
            r"obs\['pos'\] has a list of 3 in dimension 0; expected the shape \(2,\)",
        ),
        (
            {"goal": 2, "pos": 1},
            r"obs\['pos'\] has a value of the type float in dimension 0; expected the shape",
        ),
        (
            {"goal": 2, "pos": [[0], 0]},
            r"obs\['pos'\] holds a list of 1; expected numbers of the shape \(2,\)",
        ),
        ({"goal": 2, "pos": [0, "a"]}, r"obs\['pos'\] holds a value of the type str; expected numbers"),
        ({"goal": 2, "pos": [0, True]}, r"obs\['pos'\] holds a value of the type bool; expected numbers"),
        ({"goal": 2, "pos": [0, None]}, r"obs\['pos'\] holds a value of the type NoneType; expected numbers"),
        (
            {"goal": 2, "pos": [0, float("nan")]},
            r"obs\['pos'\] holds a number that is not finite in float32; expected",
        ),
        (
            {"goal": 2, "pos": [0, 10**400]},
            r"obs\['pos'\] holds a number that is not finite in float32; expected",
        ),
        (
            {"goal": 2, "pos": [0, 1e200]},
            r"obs\['pos'\] holds a number that is not finite in float32; expected",
        ),
        ({"goal": 5, "pos": [0, 0]}, r"obs\['goal'\] holds \[5.0\]; expected whole numbers from 2 to 4"),
        ({"goal": 2.5, "pos": [0, 0]}, r"obs\['goal'\] holds \[2.5\]; expected whole numbers from 2 to 4"),
        (
            {"goal": float("nan"), "pos": [0, 0]},
            r"obs\['goal'\] holds \[nan\]; expected whole numbers from 2 to 4",
        ),
        ([1, 2, 3], r"obs is a list of 3; expected a dict with the keys goal, pos"),
        ([[1, 2, 3]], r"obs\[0\] is a list of 3; expected a dict with the keys goal, pos"),
        ([], r"obs is a list of 0; expected a dict with the keys goal, pos"),
        (7, r"obs is a value of the type float; expected a dict with the keys goal, pos"),
        (
            {str(key): key for key in range(1_000)},
            r"obs is a dict with the keys 0, 1, .{,250} \.\.\.; expected",
        ),
        (b'{"obs": {"goal": 2, "goal": 3, "pos": [0, 0]}}', "an object with the key 'goal' twice; expected"),
        (b'{"obs": 1, "obs": 2}', "an object with the key 'obs' twice; expected"),
        (
            b'{"obs": {"goal": 2, "pos": [0, %s]}}' % (b"1" * 5000),
            r"obs\['pos'\] holds a number that is not finite",
        ),
        (b'{"obs": ' + b"[" * 20_000, "the body is nested too deeply; expected JSON"),
        (b'{"obs": ' + b'{"a":' * 5_000, "nested too deeply|is not JSON"),  # Python 3.13 goes deeper
        (b'{"obs": ' + b"[" * 500 + b"]" * 500 + b"}", r"obs\[0\] is a list of 1; expected a dict"),
        (b'{"obs": [' + b"[" * 200_000, "is nested too deeply"),
        (b'{"obs": {' + b'"a": 1, ' * 20_000, "is not JSON"),
        (b'{"obs": [' + b"7, " * 20_000 + b"7]}", r"obs\[0\] is a value of the type float; expected a dict"),
        (b'{"obs": [' + b" " * 200_000, "is not JSON"),
        (b'{"obs": [' + b'{"goal": 2, "pos": [0, 0]}, ' * 5_000 + b"]}", "is not JSON"),
        (b'{"obs": [' + b'{"goal": 2, "pos": [0, 0]} ' * 5_000 + b"]}", "a comma or the end is missing"),
        (b'{"obs": ["' + b"\xff" * 100_000 + b'"]}', "is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b'{"obs": {"goal": 2, "pos": [0, 0]}, "more": 1}', "is not an object with the one key 'obs'"),
    ],
)
def test_what_differs_is_refused_with_one_sentence(obs, reason):
    with pytest.raises(RequestError, match=reason) as error:
        parsed(obs, expected_of(PAIR, max_rows=100_000))
    assert error.value.status == 400
    assert len(error.value.reason) < 600
    assert "\n" not in error.value.reason


def test_parts_of_tuples_and_images_are_named():
    with pytest.raises(
        RequestError, match=r"obs\[1\] is a dict with the keys y; expected a dict with the keys x"
    ):
        parsed([0, {"y": 1}], expected_of(TUPLE))
    with pytest.raises(
        RequestError, match=r"obs\[1\]\[0\] holds \[3.0\]; expected whole numbers from 0 to 2"
    ):
        parsed([[0, {"x": 1}], [3, {"x": 1}]], expected_of(TUPLE))
    image = np.zeros((2, 3, 4)).tolist()
    image[1][2] = [0, 0, 0]
    with pytest.raises(
        RequestError, match=r"obs has a list of 3 in dimension 2; expected the shape \(2, 3, 4\)"
    ):
        parsed(image, expected_of(IMAGE))


@pytest.mark.parametrize("count", [256, 12_800])
def test_no_more_observations_than_a_piece_has_are_parsed_at_once(count):
    body = json.dumps({"obs": [{"goal": 2, "pos": [0, 0]}] * (count - 1) + [{}]}).encode()
    pieces = expected_of(PAIR, max_rows=count).pieces(body, "json")
    assert [len(next(pieces).rows) for _ in range(count // PIECE_ROWS - 1)] == [PIECE_ROWS] * (
        count // PIECE_ROWS - 1
    )


def test_too_many_observations_are_refused_whole_or_in_pieces():
    obs = {"goal": 2, "pos": [0, 0]}
    for count in (9, 90_000):
        with pytest.raises(RequestError, match=r"rows; .* at most 8 rows") as error:
            parsed([obs] * count, expected_of(PAIR, max_rows=8))
        assert error.value.status == 413


@settings(max_examples=150, deadline=None)
@given(
    obs=st.recursive(
        st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=3)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.sampled_from(["goal", "pos", "x", "\ud800"]), inner, max_size=3),
        ),
    ),
    name=st.sampled_from([*SPACES]),
)
def test_any_json_is_answered_or_refused(obs, name):
    refusal = rows = None
    try:
        rows, _ = parsed(obs, expected_of(SPACES[name]))
    except RequestError as error:
        refusal = error
    if rows is None:
        assert "expected" in refusal.reason
        assert json.dumps({"error": refusal.reason}).isascii()
    else:
        assert rows.shape[1] == spaces.flatdim(SPACES[name])
        assert np.isfinite(rows).all()
