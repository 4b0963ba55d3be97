"""``rayagi evaluate``: run episodes with a saved policy, in this process, without Ray."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from actors.protocols import EnvInfo
from actors.roles import LONGEST_EPISODE_STEPS, Agent, Progress, evaluate_in_new_envs
from placement.errors import counted
from rayagi.cli.failures import UsageError
from rayagi.cli.output import say, throttled
from rayagi.config.spec import RunSpec
from rayagi.envs import RenderingError, has_pictures, render_env
from rayagi.envs.gymnasium_adapter import to_space
from rayagi.envs.isaac.provider import OPTIONS as ISAAC
from rayagi.envs.rendering import picture
from rayagi.monitoring.progress import return_text
from rayagi.run.errors import DiskError, disk_errors
from rayagi.run.versions import usable_cores
from rayagi.serving.source import SavedPolicy, saved_policy

_VIDEO_SUFFIXES = (".mp4", ".gif", ".mkv")
_MOST_FRAMES = 10_000
"""Limit of a video, for tasks whose episodes may not end."""
_REFRESH_S = 0.2
"""Between two updates of the progress."""
_HINT = "free space there, or write the video to another folder"


def run(arguments: argparse.Namespace) -> int:
    """Evaluate; returns the exit code."""
    video: Path | None = arguments.video
    if video is not None:
        _check_video(video)
        video = video.absolute()  # an environment may change the working folder
    saved = saved_policy(arguments.run, arguments.checkpoint, trust_modules=arguments.trust_modules)
    for reason in saved.damaged:
        say(f"{reason}; using {saved.checkpoint}.")
    spec, agent = saved.spec, Agent(saved.policy)
    isaac = spec.env.id.partition("/")[0] in ISAAC
    if video is not None and (isaac or not has_pictures(spec.env.id)):
        raise RenderingError(spec.env.id, "its simulator cannot render; leave --video out")
    with _threads_for(saved.info):
        _evaluate(saved, arguments.episodes, arguments.seed)
        if video is not None:
            _film(saved, agent, video, arguments.seed)
    return 0


def _evaluate(saved: SavedPolicy, num_episodes: int, seed: int) -> None:
    """Run the episodes, and print their returns."""
    env = saved.spec.env
    with _shown_progress(num_episodes) as progress:
        result = evaluate_in_new_envs(
            env.factory(),
            saved.policy,
            num_episodes,
            seed=seed,
            num_threads=usable_cores(),
            progress=progress,
        )
    returns = torch.tensor(result.episode_returns, dtype=torch.float64)
    lengths = torch.tensor(result.episode_lengths, dtype=torch.float64)
    say(f"{env.id}, {saved.checkpoint} ({counted(saved.env_steps, 'environment step')}), seed {seed}")
    spread = f"least {float(returns.min()):,.1f}, most {float(returns.max()):,.1f}"
    mean = f"{return_text(result.mean_return())} +- {float(returns.std(correction=0)):,.1f}"
    say(
        f"return {mean} over {counted(len(returns), 'episode')} ({spread}); mean length {float(lengths.mean()):,.1f} steps"
    )
    if result.num_cut:
        say(
            f"{result.num_cut} of them cut after {LONGEST_EPISODE_STEPS:,} steps: {env.id} has no time limit; "
            "train with one by --set env.kwargs.max_episode_steps=N"
        )


def _film(saved: SavedPolicy, agent: Agent, path: Path, seed: int) -> None:
    say("Rendering an episode. Without a GPU this takes a minute or more for 1,000 frames.")
    num_frames, film_return = film(saved.spec, agent, path, seed=seed)
    say(f"{path}: {counted(num_frames, 'frame')} of an episode with return {film_return:,.1f}")


@contextmanager
def _threads_for(info: EnvInfo) -> Iterator[None]:
    """One thread of torch, unless there are images: for a small network more threads only wait for each other."""
    before = torch.get_num_threads()
    if not any(part.is_image for part in info.obs_parts):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _shown_progress(num_episodes: int) -> Iterator[Progress]:
    """Shows the episodes that are done in one line of a terminal; elsewhere nothing."""
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda episodes, steps: None
        return
    with console.status("making the environments") as status:

        def show(episodes: int, steps: int) -> None:
            status.update(
                f"{episodes} of {counted(num_episodes, 'episode')}, {steps:,} steps of each environment"
            )

        yield throttled(show, _REFRESH_S, at_once=False)


def film(spec: RunSpec, agent: Agent, path: Path, *, seed: int) -> tuple[int, float]:
    """Record a video of one episode; returns the number of frames and the return.

    Raises:
        RenderingError: the task or this machine cannot render, or a frame is none or of another size.
        DiskError: the file cannot be written.
    """
    import imageio.v2 as imageio  # takes 0.3 s, and only --video needs it

    env = render_env(spec.env.id, spec.env.kwargs)
    fps = env.metadata.get("render_fps", 30)
    total, frames, done = 0.0, 0, False
    shape: tuple[int, ...] = ()
    try:
        obs, _ = env.reset(seed=seed)
        with _written(path), imageio.get_writer(path, fps=fps) as opened:
            writer: Any = opened  # imageio types every writer as its common base
            while not done and frames < _MOST_FRAMES:
                frame = picture(spec.env.id, env)
                if frames and frame.shape != shape:
                    reason = f"frame {frames + 1} has the shape {frame.shape}, and those before {shape}"
                    raise RenderingError(spec.env.id, reason)
                shape = frame.shape
                writer.append_data(frame)
                frames += 1
                actions = agent.act_greedily(torch.as_tensor(obs, dtype=torch.float32).reshape(1, -1))
                obs, reward, terminated, truncated, _ = env.step(
                    to_space(env.action_space, actions.numpy())[0]
                )
                total += float(reward)
                done = terminated or truncated
    finally:
        env.close()
    return frames, total


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Check that the video written in this block is complete; else raise ``DiskError`` with the reason."""
    try:
        with disk_errors(path, _HINT):
            yield
    except OSError as error:  # ffmpeg exited: a broken pipe, or an error without errno
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DiskError(str(path), f"the video writer failed ({reason})", _HINT) from error
    if not path.exists() or path.stat().st_size == 0:
        raise DiskError(str(path), "the video writer left it empty", _HINT)


def _check_video(path: Path) -> None:
    if path.suffix.lower() not in _VIDEO_SUFFIXES:
        raise UsageError(f"--video {path}: write one of {', '.join(_VIDEO_SUFFIXES)}, e.g. out.mp4")
    if path.is_dir():
        raise UsageError(f"--video {path}: it is a folder; name a file, e.g. {path / 'out.mp4'}")
    if not path.parent.is_dir():
        raise UsageError(f"--video {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise DiskError(str(path), "the folder is read-only", _HINT)
