import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayagi.serving.policy_server import requests
from rayagi.serving.policy_server.requests import PIECE_ROWS, AnswerEncoder, Expected, Piece, RequestError

EXPECTED = Expected(obs_dim=3, max_rows=4)


def parsed(body, body_format, expected=EXPECTED):
    """Rows of all pieces, and whether it was a single observation."""
    pieces = list(expected.pieces(body, body_format))
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(1 <= len(piece.rows) <= PIECE_ROWS for piece in pieces)
    return np.concatenate([piece.rows for piece in pieces]), pieces[0].is_single


def encoded(actions, body_format):
    encoder = AnswerEncoder(body_format)
    encoder.add(actions, Piece(np.zeros((len(actions), 3), np.float32), True, False))
    return encoder.body(7)


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
    obs, single = parsed(body, body_format)
    assert obs.dtype == np.float32
    assert obs.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert not single


def test_a_single_observation_is_a_row_and_marked_as_single():
    obs, single = parsed(b'{"obs": [1, 2, 3]}', "json")
    assert (obs.tolist(), single) == ([[1, 2, 3]], True)
    obs, single = parsed(npy(np.float32([1, 2, 3])), "npy")
    assert (obs.tolist(), single) == ([[1, 2, 3]], True)


@pytest.mark.parametrize(
    ("body", "body_format", "status", "reason"),
    [
        (
            b'{"obs": [1, 2]}',
            "json",
            400,
            r"obs has a list of 2 in .*; expected the shape \(3,\); expected float32 observations of shape \(3,\) or",
        ),
        (b'{"obs": []}', "json", 400, "obs has a list of 0 in dimension 0"),
        (b'{"obs": [[[1, 2, 3]]]}', "json", 400, r"obs\[0\] has a list of 1 in dimension 0"),
        (b'{"obs": 1}', "json", 400, "obs has a value of the type float in dimension 0"),
        (b'{"obs": [1, true, 0.5]}', "json", 400, "obs holds a value of the type bool; expected numbers"),
        (b'{"obs": [[1, 2, 3], [1.5, false, 3]]}', "json", 400, r"obs\[1\] holds a value of the type bool"),
        (b'{"obs": [1, "2", 3]}', "json", 400, "a value of the type str"),
        (b'{"obs": [1, 2, 3], "obs": [4, 5, 6]}', "json", 400, "the key 'obs' twice"),
        (b'[["obs", [1, 2, 3]]]', "json", 400, "the one key 'obs'"),
        (b'{"obs": [1, 2, %d]}' % 10**400, "json", 400, "not finite in float32"),
        (b'{"obs": [[1, 2, 3], [1]]}', "json", 400, r"obs\[1\] has a list of 1 in dimension 0"),
        (b'{"obs": [1, NaN, 3]}', "json", 400, "a number that is not finite in float32"),
        (b'{"obs": [1, 2, 1e200]}', "json", 400, "a number that is not finite in float32"),
        (b'{"obs": [[1, 2, 1e200]]}', "json", 400, "row 0, number 2 is not finite in float32"),
        (b'{"obs": [true, false, true]}', "json", 400, "a value of the type bool"),
        (b'{"obs": [1, null, 3]}', "json", 400, "a value of the type NoneType"),
        (b'{"obs": "abc"}', "json", 400, "a value of the type str in dimension 0"),
        (b'{"observation": [1, 2, 3]}', "json", 400, "the one key 'obs'"),
        (b"[1, 2, 3]", "json", 400, "the one key 'obs'"),
        (b"\xff\xfe", "json", 400, "is not JSON"),
        (b"[" * 30_000, "json", 400, "nested too deeply|is not JSON"),
        (b"[" * 100_000, "json", 400, 'the beginning {"obs": \\[ is missing'),
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
        (npy_header("{'descr': '<f4', 'shape': (1, 3L, \n"), "npy", 400, "is no .npy file"),
        (
            npy_header("{'descr': ('<f4',), 'fortran_order': False, 'shape': (3,)}\n"),
            "npy",
            400,
            "is no .npy file",
        ),
        *(
            (
                npy_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n")
                + bytes(num_bytes),
                "npy",
                400,
                "got observations of shape",
            )
            for shape, num_bytes in (((-1, -3), 12), ((0, 2**80), 0), ((1,) * 99, 4), ((True, 3), 12))
        ),
    ],
)
def test_errors_state_what_was_received_and_expected(body, body_format, status, reason):
    with pytest.raises(RequestError, match=reason) as error:
        parsed(body, body_format)
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
        obs, _ = parsed(body, body_format)
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


def test_whole_numbers_of_any_size_are_numbers():
    assert parsed(b'{"obs": [1, 2, 99999999999999999999999]}', "json")[0].tolist() == [
        [1, 2, np.float32(1e23)]
    ]


MANY = Expected(obs_dim=2, max_rows=10_000)


@pytest.fixture
def short_pieces(monkeypatch):
    """Pieces of 4096 + 64 bytes, the least for rows of two numbers."""
    monkeypatch.setattr(requests, "PIECE_BYTES", 64)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(300, 2000),
    indent=st.sampled_from([None, 1]),
    blanks=st.text(" \t\r\n", max_size=3),
    end=st.text(" \t\r\n", max_size=5000),
    seed=st.integers(0, 2**32 - 1),
)
def test_long_json_is_what_a_whole_parse_reads(count, indent, blanks, end, seed):
    obs = np.random.default_rng(seed).standard_normal((count, 2))
    text = json.dumps({"obs": obs.tolist()}, indent=indent, separators=(f"{blanks},", f":{blanks}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "PIECE_BYTES", 64)
        pieces = [
            len(piece.rows) for piece in MANY.pieces(bytearray(f"{blanks}{text}{end}".encode()), "json")
        ]
        rows, single = parsed(bytearray(f"{blanks}{text}{end}".encode()), "json", MANY)
    assert max(pieces) < count
    assert not single
    assert (rows == obs.astype(np.float32)).all()


@pytest.mark.parametrize(("obs_dim", "rows"), [(2, 128), (105, 78), (28224, 1)])
def test_a_piece_has_at_most_128_rows_and_32_kib(obs_dim, rows):
    expected = Expected(obs_dim=obs_dim, max_rows=300)
    body = np.zeros((300, obs_dim), "<f4").tobytes()
    assert {len(piece.rows) for piece in expected.pieces(body, "raw")} - {300 % rows} == {rows}


LONG = json.dumps({"obs": [[0.25, 1.0]] * 1000}).encode()


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (LONG[:-1], "is not JSON"),
        (LONG[:-2], "is not JSON"),
        (LONG + b"x", "is not JSON"),
        (LONG + b"]", "is not JSON"),
        (LONG[:-2] + b",]}", "is not JSON"),
        (LONG[:-2] + b', "more": 1}', "is not JSON"),
        (LONG[:-1] + b', "obs": [[1, 2]]}', "a comma or the end is missing"),
        (LONG.replace(b"], [", b"]; [", 500).replace(b"]; [", b"], [", 499), "is not JSON"),
        (LONG.replace(b"], [", b"] [", 500), "is not JSON"),
        (LONG.replace(b"], [", b"],, ["), "is not JSON"),
        (LONG.replace(b"0.25", b'"]"'), "a value of the type str"),
        (LONG.replace(b"0.25", b"true"), "a value of the type bool"),
        (LONG[:-20] + b"[0.25, true], [0.25, 1.0]]}", "is not JSON"),
        (LONG.replace(b"[0.25, 1.0]]}", b"[0.25, NaN]]}"), "row 999, number 1 is not finite"),
        (LONG.replace(b"[0.25, 1.0]]}", b"[0.25]]}"), r"obs\[999\] has a list of 1 in dimension 0"),
        (LONG.replace(b'{"obs": [', b'{"obs": [[1, 2]], "obs": ['), "a comma or the end is missing"),
        (LONG[len(b'{"obs": ') : -1], 'the beginning {"obs": \\[ is missing'),
        (b'{"obs": [' + b"1, " * 5000 + b"1]}", r"obs\[0\] has a value of the type float in dimension 0"),
        (b'{"obs": [[' + b"1, " * 5000 + b"1]]}", "for an observation"),
        (b" " * 100_000 + LONG, "the beginning .* is missing"),
        (LONG + b" " * 100_000, "for an observation"),
        (LONG.replace(b"], [", b"]" + b" " * 100_000 + b", [", 1), "for an observation"),
        (b'{"obs": [' * 2000, "is not JSON"),
    ],
)
def test_long_json_is_rejected_in_any_piece(body, reason):
    with pytest.raises(RequestError, match=reason):
        parsed(body, "json", MANY)


@pytest.mark.usefixtures("short_pieces")
def test_rows_beyond_the_maximum_end_the_parse_of_long_json():
    expected, pieces = Expected(obs_dim=2, max_rows=500), []
    with pytest.raises(RequestError, match=r"got at least .* rows; .* at most 500 rows") as error:
        pieces.extend(piece.is_last for piece in expected.pieces(LONG, "json"))
    assert error.value.status == 413


def test_json_answers_of_pieces_are_one_answer():
    records = np.zeros(3, [("actions", "<i8"), ("states", "<f4", (2,))])
    records["actions"], records["states"] = [4, 5, 6], [[1, 2], [3, 4], [5, 6]]
    encoder = AnswerEncoder("json")
    for part in (records[:2], records[2:]):
        encoder.add(part, Piece(np.zeros((len(part), 3), np.float32), len(part) == 1, False))
    assert json.loads(encoder.body(7)) == {
        "actions": [4, 5, 6],
        "states": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
        "policy_version": 7,
    }
    single = AnswerEncoder("json")
    single.add(records[:1], Piece(np.zeros((1, 3), np.float32), True, True))
    assert json.loads(single.body(7)) == {"actions": 4, "states": [1.0, 2.0], "policy_version": 7}
