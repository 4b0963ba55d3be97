"""JSON requests, parsed in pieces of bounded work."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.errors import counted
from rayagi.serving.policy_server.obs_leaves import Leaf, flat_row, list_levels, vector_leaf

_HEAD = re.compile(r'[ \t\n\r]*\{[ \t\n\r]*"obs"[ \t\n\r]*:[ \t\n\r]*\[[ \t\n\r]*')
_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_END = re.compile(r"[ \t\n\r]*\][ \t\n\r]*\}[ \t\n\r]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonRows:
    """Reads ``{"obs": ...}``: an observation as the leaves describe it, a list of ``row_dim`` numbers, or a list of such."""

    leaves: Sequence[Leaf]
    row_dim: int
    piece_bytes: int
    """Most text that is parsed at once."""
    piece_rows: int
    """Most rows of a piece."""

    def pieces(self, body: bytes | bytearray) -> Iterator[tuple[NDArray[Any], bool]]:
        """Rows (rows, row_dim), or one observation (row_dim,), each with whether they are the last.

        Raises:
            ValueError: the body is not as expected; pieces before the fault have been returned already.
        """
        if len(body) > self.piece_bytes:
            yield from self._long(body)
            return
        try:
            given = _DECODER.decode(_text(body))
        except RecursionError:
            raise ValueError(f"the body is nested too deeply; {self._expected()}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"the body is not JSON ({error}); {self._expected()}") from None
        if not isinstance(given, dict) or [*given] != ["obs"]:
            raise ValueError(f"the body is not an object with the one key 'obs'; {self._expected()}")
        obs = given["obs"]
        if not self._is_list_of_rows(obs):
            yield self._row(obs, "obs"), True
            return
        for begin in range(0, len(obs), self.piece_rows):
            rows = obs[begin : begin + self.piece_rows]
            yield self._rows(rows, begin), begin + len(rows) == len(obs)

    def _long(self, body: bytes | bytearray) -> Iterator[tuple[NDArray[Any], bool]]:
        """A list of observations, each parsed alone: a window of the body holds one or more."""
        before, begin, num_rows, is_last = _HEAD, 0, 0, False
        while not is_last:
            rest = len(body) - begin
            ends = rest <= 2 * self.piece_bytes
            window = _text(body[begin:] if ends else body[begin : begin + self.piece_bytes])
            rows, position, reason = _parsed_rows(window, before, self.piece_rows)
            is_last = ends and _END.fullmatch(window, position) is not None
            if not rows or (ends and not is_last and len(rows) < self.piece_rows):
                raise ValueError(
                    f"after byte {begin + len(_bytes(window[:position]))} the body is not JSON ({reason}), or has more "
                    f"than {self.piece_bytes} bytes for an observation; {self._expected()}"
                )
            yield self._rows(rows, num_rows), is_last
            before, num_rows = _COMMA, num_rows + len(rows)
            begin += len(_bytes(window[:position]))

    def _is_list_of_rows(self, obs: Any) -> bool:
        if not isinstance(obs, list) or not obs or self._is_vector(obs):
            return False
        if self._is_vector(obs[0]):
            return True
        if {*map(type, obs)} == {float}:
            return False
        levels = 0
        while isinstance(obs, list) and obs and levels <= list_levels(self.leaves):
            obs, levels = obs[0], levels + 1
        return levels > list_levels(self.leaves)

    def _is_vector(self, obs: Any) -> bool:
        return isinstance(obs, list) and len(obs) == self.row_dim and {*map(type, obs)} == {float}

    def _rows(self, rows: Sequence[Any], first: int) -> NDArray[Any]:
        if all(map(self._is_vector, rows)):
            return np.array(rows, np.float64)
        if float in map(type, rows) and not list_levels(self.leaves) and not self.leaves[0]["path"]:
            raise ValueError(
                f"obs is a list of numbers; {self._expected()}"
            )  # which may be cut between two digits
        return np.stack([self._row(row, f"obs[{first + place}]") for place, row in enumerate(rows)])

    def _row(self, obs: Any, name: str) -> NDArray[np.float32]:
        """(row_dim,) of an observation."""
        return flat_row(obs, [vector_leaf(self.row_dim)] if self._is_vector(obs) else self.leaves, name)

    def _expected(self) -> str:
        is_vector = [*self.leaves] == [vector_leaf(self.row_dim)]
        form = "" if is_vector else "an observation as obs_leaves in /info describe it, or "
        return f'expected JSON like {{"obs": ...}} with {form}{counted(self.row_dim, "number")}, or a list of these'


def _parsed_rows(window: str, before: re.Pattern[str], most: int) -> tuple[list[Any], int, str]:
    """At most so many complete values of a window, the first one after ``before``; the end of the last one, and why it is
    the last."""
    rows: list[Any] = []
    position = 0
    while len(rows) < most and (opening := before.match(window, position)):
        try:
            row, position = _DECODER.raw_decode(window, opening.end())
        except RecursionError:
            return rows, position, "it is nested too deeply"
        except json.JSONDecodeError as error:
            return rows, position, error.msg
        rows.append(row)
        before = _COMMA
    missing = "a comma or the end" if rows or before is _COMMA else 'the beginning {"obs": ['
    return rows, position, f"{missing} is missing"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError if a key comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the body has an object with the key {twice[:40]!r} twice; expected each key once")
    return found


def _text(body: bytes | bytearray) -> str:
    """The text of UTF-8; other bytes, and a letter that is cut at the end, become what ``_bytes`` returns to them."""
    return body.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=float)
"""Whole numbers of any length are read as fast as others."""
