"""Columns of a dataset: one row per environment step, readable by pyarrow without this code.

| column | type | what |
|---|---|---|
| episode | int64 | number of the episode, unique in the dataset |
| step | int32 | place of the row in its episode, from 0 |
| env | int32 | environment, counted over all GMIs |
| gmi | int32 | GMI that simulated it |
| session | int32 | number of the session, from 0 |
| policy_version | int64 | number of updates of the policy |
| obs | fixed-size list of float32 | the observation that the action is for |
| action | fixed-size list of float32 or int64, or int64 | the action, clipped to its range |
| log_prob | float32 | log probability, or density, of the action under the policy's distribution |
| reward | float32 | |
| terminated | bool | the task ended on this step |
| truncated | bool | the time limit ended the episode on this step |
| final_obs | list of float32, or null | the observation after this step, where no row of the episode follows |

Files of before log_prob have none: readers see nulls, ``Episode`` NaN.

So the observation after a row is the ``obs`` of the row (episode, step + 1), or the row's own ``final_obs``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from actors.protocols import ActionSpec, EnvInfo
from collectives.experience.schema import ExperienceSchema, Field

LAYOUT_VERSION = 1
STEP_FIELDS = ("obs", "action", "log_prob", "reward", "terminated", "truncated", "final_obs")
"""Of a block: those with one entry for each step."""
_METADATA_KEY = b"rayagi.dataset"


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnLayout:
    """Sizes of the columns."""

    obs_dim: int
    action: ActionSpec

    @classmethod
    def for_env(cls, info: EnvInfo) -> ColumnLayout:
        """The layout of a task's experience."""
        return cls(obs_dim=info.obs_dim, action=info.action)

    @property
    def action_type(self) -> pa.DataType:
        """Of the column of actions."""
        kind = pa.int64() if self.action.is_discrete else pa.float32()
        return pa.list_(kind, self.action.dim) if self.action.shape else kind

    def arrow(self, about: Mapping[str, Any]) -> pa.Schema:
        """The Arrow schema, with ``about`` (the origin) in its metadata."""
        columns = [
            ("episode", pa.int64()),
            ("step", pa.int32()),
            ("env", pa.int32()),
            ("gmi", pa.int32()),
            ("session", pa.int32()),
            ("policy_version", pa.int64()),
            ("obs", pa.list_(pa.float32(), self.obs_dim)),
            ("action", self.action_type),
            ("reward", pa.float32()),
            ("terminated", pa.bool_()),
            ("truncated", pa.bool_()),
        ]
        fields = [pa.field(name, kind, nullable=False) for name, kind in columns]
        fields.append(pa.field("log_prob", pa.float32(), nullable=True))
        fields.append(pa.field("final_obs", pa.list_(pa.float32()), nullable=True))
        metadata = {"layout": LAYOUT_VERSION, **self.to_dict(), **about}
        return pa.schema(fields, metadata={_METADATA_KEY: json.dumps(metadata).encode()})

    def channel(self, num_steps: int) -> ExperienceSchema:
        """Schema of the channel from a GMI to its writer: a row is one environment's ``num_steps`` steps."""
        dtype = torch.int64 if self.action.is_discrete else torch.float32
        shape = (num_steps, *self.action.shape)
        fields = (
            Field(name="obs", shape=(num_steps, self.obs_dim)),
            Field(name="action", dtype=dtype, shape=shape),
            Field(name="log_prob", shape=(num_steps,)),
            Field(name="reward", shape=(num_steps,)),
            Field(name="terminated", dtype=torch.bool, shape=(num_steps,)),
            Field(name="truncated", dtype=torch.bool, shape=(num_steps,)),
            Field(name="final_obs", shape=(num_steps, self.obs_dim)),
            Field(name="last_obs", shape=(self.obs_dim,)),
            Field(name="length", dtype=torch.int64),
        )
        return ExperienceSchema("serving", fields)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-compatible values."""
        return {"obs_dim": self.obs_dim, "action": asdict(self.action)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> ColumnLayout:
        """Inverse of ``to_dict``."""
        action = dict(stored["action"])
        for name in ("low", "high", "choices", "starts"):
            action[name] = tuple(action.get(name, ()))  # older files lack some
        return cls(obs_dim=int(stored["obs_dim"]), action=ActionSpec(**action))


class ColumnBlock(NamedTuple):
    """L steps of one GMI's N environments, environment first."""

    obs: NDArray[np.float32]
    """(N, L, obs_dim)"""
    action: NDArray[Any]
    """(N, L, dim) float32 or int64, or (N, L) int64"""
    log_prob: NDArray[np.float32]
    """(N, L)"""
    reward: NDArray[np.float32]
    """(N, L)"""
    terminated: NDArray[np.bool_]
    """(N, L)"""
    truncated: NDArray[np.bool_]
    """(N, L)"""
    final_obs: NDArray[np.float32]
    """(N, L, obs_dim), valid where an episode ended"""
    last_obs: NDArray[np.float32]
    """(N, obs_dim), the observation after the block, valid where no episode ended on the last step"""
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedEpisode:
    """An episode whose last row is in the current block."""

    number: int
    total: float
    """Undiscounted return."""
    length: int


class Numbering:
    """Numbers the episodes of one GMI's environments, and sums their returns.

    The k-th episode of environment ``env`` of ``total_envs`` has the number ``first_episode + k * total_envs + env``, so
    that GMIs need no communication.
    """

    def __init__(self, *, num_envs: int, first_env_index: int, total_envs: int, first_episode: int) -> None:
        self.envs = np.arange(first_env_index, first_env_index + num_envs, dtype=np.int32)
        self._total_envs = total_envs
        self._episode = first_episode + self.envs.astype(np.int64)
        """Number of each environment's running episode."""
        self._step = np.zeros(num_envs, dtype=np.int64)
        self._returns = np.zeros(num_envs)

    def enter(self, block: ColumnBlock) -> tuple[NDArray[np.int64], NDArray[np.int32], list[EndedEpisode]]:
        """Episode and step of each row, (N, L), and the episodes that ended in the block."""
        num_envs, length = block.reward.shape
        episode = np.empty((num_envs, length), dtype=np.int64)
        step = np.empty((num_envs, length), dtype=np.int32)
        ended: list[EndedEpisode] = []
        done = block.terminated | block.truncated
        for env in range(num_envs):
            # Split the block at the ends of episodes: rows [begin, end) belong to one episode.
            begin = 0
            for last in [*np.flatnonzero(done[env]).tolist(), None]:
                end = length if last is None else last + 1
                episode[env, begin:end] = self._episode[env]
                step[env, begin:end] = np.arange(self._step[env], self._step[env] + end - begin)
                self._step[env] += end - begin
                self._returns[env] += block.reward[env, begin:end].sum(dtype=np.float64)
                # ``None`` stands for the rest of the block, whose episode continues in the next one.
                if last is not None:
                    ended.append(self._end(env))
                begin = end
        return episode, step, ended

    def _end(self, env: int) -> EndedEpisode:
        number, total = int(self._episode[env]), float(self._returns[env])
        ended = EndedEpisode(number=number, total=total, length=int(self._step[env]))
        # The environment's next episode: k -> k + 1 in first_episode + k * total_envs + env.
        self._episode[env] += self._total_envs
        self._step[env], self._returns[env] = 0, 0.0
        return ended


def record_batch(
    block: ColumnBlock,
    schema: pa.Schema,
    *,
    episode: NDArray[np.int64],
    step: NDArray[np.int32],
    envs: NDArray[np.int32],
    gmi: int,
    session: int,
    is_last: bool,
) -> pa.RecordBatch:
    """Convert a block to rows, environment by environment.

    Args:
        block: steps to convert
        schema: of ``ColumnLayout.arrow``
        episode, step: of each row (N, L), by ``Numbering.enter``
        envs: (N,)
        gmi, session: of all rows
        is_last: whether no block of these environments follows: then the last rows of running episodes get ``final_obs``
    """
    num_envs, length = block.reward.shape
    rows = num_envs * length
    shown = block.terminated | block.truncated
    final = block.final_obs
    # No next row will hold the observation after the last step of running episodes: store it here.
    if is_last and length:
        cut = ~shown[:, -1]
        final = final.copy()
        final[cut, -1] = block.last_obs[cut]
        shown = shown.copy()
        shown[:, -1] = True

    def same(value: int, kind: Any) -> pa.Array:
        return pa.array(np.full(rows, value, dtype=kind.to_pandas_dtype()), type=kind)

    columns = [
        pa.array(episode.reshape(-1)),
        pa.array(step.reshape(-1)),
        pa.array(np.repeat(envs, length)),
        same(gmi, pa.int32()),
        same(session, pa.int32()),
        same(block.version, pa.int64()),
        _vectors(block.obs),
        pa.array(block.action.reshape(-1)) if block.action.ndim == 2 else _vectors(block.action),
        pa.array(block.reward.reshape(-1)),
        pa.array(block.terminated.reshape(-1)),
        pa.array(block.truncated.reshape(-1)),
        pa.array(block.log_prob.reshape(-1)),
        _some_vectors(final.reshape(rows, -1), shown.reshape(-1)),
    ]
    return pa.record_batch(columns, schema=schema)


def _vectors(values: NDArray[Any]) -> pa.Array:
    """(..., dim) as a column of fixed-size lists."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[-1])


def _some_vectors(values: NDArray[np.float32], shown: NDArray[np.bool_]) -> pa.Array:
    """Rows of ``values`` (rows, dim) as lists where ``shown``, null elsewhere; nulls take no memory."""
    dim = values.shape[1]
    offsets = np.concatenate([[0], np.cumsum(shown)]).astype(np.int32) * np.int32(dim)
    flat = pa.array(values[shown].reshape(-1))
    return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=pa.array(~shown))
