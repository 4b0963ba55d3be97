"""What is moved: experience of the shapes of GMI-DRL's tasks (Table 4), as A3C wants it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actors.protocols import ActionSpec, EnvInfo
from collectives.experience.schema import ExperienceSchema, Field


@dataclass(frozen=True)
class Task:
    """Sizes of a task's vectors."""

    name: str
    obs_dim: int
    act_dim: int

    def info(self) -> EnvInfo:
        """For networks."""
        action = ActionSpec(kind="continuous", dim=self.act_dim)
        return EnvInfo(
            env_id=self.name, engine="made up", obs_dim=self.obs_dim, action=action, max_episode_steps=None
        )


TASKS = {"AY": Task("Anymal", 48, 12), "FC": Task("FrankaCabinet", 23, 9)}


@dataclass(frozen=True)
class Size:
    """Of one rollout."""

    task: Task
    steps: int
    envs: int

    def schema(self) -> ExperienceSchema:
        """All packages of a rollout; a row is one environment's steps."""
        steps = self.steps
        return ExperienceSchema(
            "experience",
            (
                Field(name="obs", shape=(steps, self.task.obs_dim)),
                Field(name="actions", shape=(steps, self.task.act_dim)),
                Field(name="log_probs", shape=(steps,)),
                Field(name="rewards", shape=(steps,)),
                Field(name="dones", dtype=torch.bool, shape=(steps,)),
                Field(name="last_obs", shape=(self.task.obs_dim,)),
            ),
        )

    @property
    def bytes(self) -> int:
        """Of one rollout."""
        return self.envs * self.schema().row_bytes
