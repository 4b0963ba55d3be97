"""Experience schema of rollouts: the fields that collectors send to learners, and rollouts as views of them.

A row is one environment's T steps, so rows can be sliced, stacked and routed independently; a rollout is time first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from actors.protocols import EnvInfo
from actors.rollout import Rollout, obs_type
from collectives.experience.packer import ROW_FIELD, ChannelPlan, pack
from collectives.experience.schema import ExperienceSchema, Field
from rayagi.config.learning import LearningSpec

TRAJECTORIES, FINALS = "trajectory", "finals"
"""Names of the schemas: dense fields of every row; and final observations of ended episodes, as ragged rows."""

_FLAGS = ("terminated", "truncated")


def channel_plan(info: EnvInfo, learning: LearningSpec, state_dim: int = 0) -> ChannelPlan:
    """Channels of rollouts, grouped by eq. 5-8. Observations are sent raw, not normalised."""
    num_steps = learning.rollout_length
    steps = (num_steps,)
    dtype = torch.int64 if info.action.is_discrete else torch.float32
    actions = Field(name="actions", dtype=dtype, shape=(*steps, *info.action.shape))
    trajectories = ExperienceSchema(
        TRAJECTORIES,
        (
            Field(name="raw_obs", dtype=obs_type(info), shape=(num_steps, info.obs_dim)),
            actions,
            Field(name="log_probs", shape=steps),
            Field(name="rewards", shape=steps),
            *(Field(name=name, dtype=torch.bool, shape=steps) for name in _FLAGS),
            Field(name="running_returns", shape=steps),
            Field(name="last_obs", dtype=obs_type(info), shape=(info.obs_dim,)),
            *([Field(name="states", shape=(learning.sequences, state_dim))] if state_dim else []),
        ),
    )
    finals = ExperienceSchema(
        FINALS,
        (
            Field(name=ROW_FIELD, dtype=torch.int64),
            Field(name="step", dtype=torch.int64),
            Field(name="obs", dtype=obs_type(info), shape=(info.obs_dim,)),
        ),
    )
    return pack(trajectories, finals, ragged={FINALS})


def rollout_over(rows: Mapping[str, Tensor], obs: Tensor, outputs: Tensor) -> Rollout:
    """A rollout whose storage is these rows in channel memory: consumers read it without a copy.

    Args:
        rows: fields of ``channel_plan``, (N, ...)
        obs: normalised observations; not sent      (T, N, obs_dim)
        outputs: distribution parameters; not sent  (T, N, output_dim)
    """
    return Rollout(
        raw_obs=rows["raw_obs"].transpose(0, 1),
        obs=obs,
        outputs=outputs,
        actions=rows["actions"].transpose(0, 1),
        rewards=rows["rewards"].transpose(0, 1),
        terminated=rows["terminated"].transpose(0, 1),
        truncated=rows["truncated"].transpose(0, 1),
        last_obs=rows["last_obs"],
        log_probs=rows["log_probs"].transpose(0, 1),
        running_returns=rows["running_returns"].transpose(0, 1),
        states=rows["states"].transpose(0, 1) if "states" in rows else None,
    )


def finals_of(rollout: Rollout) -> dict[str, dict[str, Tensor]]:
    """The final observations of ended episodes as ragged rows."""
    if not rollout.finals:
        return {}
    steps = [torch.full((len(ids),), step) for step, ids, _ in rollout.finals]
    return {
        FINALS: {
            ROW_FIELD: torch.cat([ids for _, ids, _ in rollout.finals]),
            "step": torch.cat(steps),
            "obs": torch.cat([obs for _, _, obs in rollout.finals]),
        }
    }


def rollout_of(rows: Mapping[str, Tensor], ragged: Mapping[str, Mapping[str, Tensor]]) -> Rollout:
    """A learner's rollout: views of rows (N, ...) in channel memory, and their ragged rows."""
    raw_obs = rows["raw_obs"].transpose(0, 1)
    rollout = rollout_over(rows, obs=raw_obs, outputs=torch.empty(0))
    finals = ragged.get(FINALS)
    if finals is not None:
        for step in finals["step"].unique().tolist():
            here = finals["step"] == step
            rollout.finals.append((step, finals[ROW_FIELD][here], finals["obs"][here]))
    return rollout
