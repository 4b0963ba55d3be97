import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayagi.serving.policy_server.requests import Expected, RequestError, encoded

EXPECTED = Expected(obs_dim=3, max_rows=4)


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npy_header(text):
    content = text.encode()
    return b"\x93NUMPY\x01\x00" + len(content).to_bytes(2, "little") + content


@pytest.mark.parametrize(
    ("body", "body_format"),
    [
        (b'{"obs": [[1, 2, 3], [4, 5, 6.0]]}', "json"),
        (npy(np.array([[1, 2, 3], [4, 5, 6]])), "npy"),
        (npy(np.asfortranarray([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])), "npy"),
        (np.array([1, 2, 3, 4, 5, 6], dtype="<f4").tobytes(), "raw"),
    ],
)
def test_observations_come_in_three_formats(body, body_format):
    obs, single = EXPECTED.parsed(body, body_format)
    assert obs.dtype == np.float32
    assert obs.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert not single


def test_a_single_observation_is_a_row_and_marked_as_single():
    obs, single = EXPECTED.parsed(b'{"obs": [1, 2, 3]}', "json")
    assert (obs.tolist(), single) == ([[1, 2, 3]], True)
    obs, single = EXPECTED.parsed(npy(np.float32([1, 2, 3])), "npy")
    assert (obs.tolist(), single) == ([[1, 2, 3]], True)


@pytest.mark.parametrize(
    ("body", "body_format", "status", "reason"),
    [
        (
            b'{"obs": [1, 2]}',
            "json",
            400,
            r"got observations of shape \(2,\); expected float32 observations of shape \(3,\) or",
        ),
        (b'{"obs": []}', "json", 400, r"got observations of shape \(0,\)"),
        (b'{"obs": [[[1, 2, 3]]]}', "json", 400, r"got observations of shape \(1, 1, 3\)"),
        (b'{"obs": [[1, 2, 3], [1]]}', "json", 400, "rows of different lengths; expected JSON like"),
        (b'{"obs": [1, NaN, 3]}', "json", 400, "row 0, number 1 is not finite"),
        (b'{"obs": [1, 2, 1e200]}', "json", 400, "row 0, number 2 is not finite in float32"),
        (b'{"obs": [true, false, true]}', "json", 400, "values that are not numbers"),
        (b'{"obs": [1, null, 3]}', "json", 400, "values that are not numbers"),
        (b'{"obs": "abc"}', "json", 400, "values that are not numbers"),
        (b'{"obs": [1, 2, 99999999999999999999999]}', "json", 400, "values that are not numbers"),
        (b'{"observation": [1, 2, 3]}', "json", 400, "the one key 'obs'"),
        (b"[1, 2, 3]", "json", 400, "the one key 'obs'"),
        (b"\xff\xfe", "json", 400, "is not JSON"),
        (b"[" * 100_000, "json", 400, "is not JSON"),
        (json.dumps({"obs": [[0, 0, 0]] * 5}).encode(), "json", 413, "got 5 rows; .* at most 4 rows"),
        (b"", "raw", 400, "got 0 bytes; expected little-endian float32, 12 bytes for each"),
        (b"x" * 13, "raw", 400, "got 13 bytes"),
        (np.float32([1, np.inf, 0]).tobytes(), "raw", 400, "not finite"),
        (b"no file", "npy", 400, "is no .npy file"),
        (npy(np.array(["a", "b", "c"])), "npy", 400, "the .npy file holds <U1"),
        (npy(np.zeros(3))[:-1], "npy", 400, "holds 23 bytes, and its header says"),
        (
            npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 3)}\n"),
            "npy",
            400,
            "holds 0 bytes, and its header says",
        ),
        (npy_header("{'descr': '|O', 'fortran_order': False, 'shape': (3,)}\n"), "npy", 400, "holds object"),
        (npy_header("__import__('os')\n"), "npy", 400, "is no .npy file"),
    ],
)
def test_errors_state_what_was_received_and_expected(body, body_format, status, reason):
    with pytest.raises(RequestError, match=reason) as error:
        EXPECTED.parsed(body, body_format)
    assert error.value.status == status


@settings(max_examples=150, deadline=None)
@given(
    body=st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=100).map(lambda tail: npy(np.zeros(3, np.float32))[:80] + tail),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=3)),
            lambda inner: st.lists(inner, max_size=4),
        ).map(lambda value: json.dumps({"obs": value}).encode()),
    ),
    body_format=st.sampled_from(["json", "npy", "raw"]),
)
def test_any_body_is_answered_or_rejected(body, body_format):
    refusal = obs = None
    try:
        obs, _ = EXPECTED.parsed(body, body_format)
    except RequestError as error:
        refusal = error
    if obs is None:
        assert refusal.status in (400, 413)
        assert "expected" in refusal.reason
    else:
        assert obs.shape[1:] == (3,)
        assert 1 <= len(obs) <= 4
        assert np.isfinite(obs).all()


def test_actions_go_back_as_they_are():
    actions = np.float32([[1.5, -2.0]])
    assert np.load(io.BytesIO(encoded(actions, "npy"))).tolist() == [[1.5, -2.0]]
    assert np.frombuffer(encoded(actions, "raw"), "<f4").tolist() == [1.5, -2.0]
    assert np.frombuffer(encoded(np.array([2, 0]), "raw"), "<i8").tolist() == [2, 0]
