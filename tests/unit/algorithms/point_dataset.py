"""Datasets of the point (tests.fakes.point), as ``rayagi serve`` writes them."""

import numpy as np
import torch

from rayagi.serving.column_layout import ColumnBlock, ColumnLayout
from rayagi.serving.manifest import DatasetFolder, Description
from rayagi.serving.program import Recording
from rayagi.serving.writer_process import Writer, WriterJob
from tests.fakes.point import make_point


def teacher(obs):
    """Pushes towards the origin: the best action."""
    return (-9 * obs[:, :2]).clamp(-1, 1)


def record_point(path, num_envs=8, num_steps=40, policy=teacher, edit=None, make_env=make_point):
    """Record ``num_steps`` steps of each environment; ``edit`` may change the block before it is written."""
    env = make_env(num_envs=num_envs, first_env_index=0, seed=5, num_threads=1)
    obs, steps = env.reset(), []
    final = np.zeros((num_envs, num_steps, env.info.obs_dim), np.float32)
    for t in range(num_steps):
        action = policy(obs)
        step = env.step(action)
        steps.append((obs, action, step.rewards, step.terminated, step.truncated))
        final[step.final_ids.numpy(), t] = step.final_obs.numpy()
        obs = step.obs
    columns = [torch.stack(column, 1).numpy() for column in zip(*steps, strict=True)]
    obs_, action_, reward, terminated, truncated = columns
    block = ColumnBlock(
        obs=obs_, action=action_, log_prob=np.zeros_like(reward), reward=reward, terminated=terminated,
        truncated=truncated, final_obs=final, last_obs=obs.numpy(), version=3,
    )  # fmt: skip
    if edit is not None:
        edit(block)
    write_block(path, block, ColumnLayout.for_env(env.info))
    return path


def write_block(path, block, layout):
    """A dataset of one block."""
    DatasetFolder.create(path, Description(task="Point", format="parquet", layout=layout))
    recording = Recording(
        folder=str(path), format="parquet", session=0, first_episode=0, rows_per_file=1000,
        bytes_per_file=10**9, about={"task": "Point"},
    )  # fmt: skip
    num_envs, num_steps = block.reward.shape
    job = WriterJob(
        recording=recording, layout=layout, num_envs=num_envs, num_steps=num_steps, gmi=0,
        first_env_index=0, total_envs=num_envs,
    )  # fmt: skip
    writer = Writer(job)
    writer.take(block)
    writer.close()
