import io
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from rich.console import Console

from actors import roles
from actors.protocols import ObsPart
from actors.roles import Agent
from rayagi.algorithms.normalisers import ObservationNormaliser
from rayagi.cli import evaluate, main
from rayagi.cli.evaluate import film
from rayagi.config.convert import run_spec_to_dict
from rayagi.config.presets import preset
from rayagi.envs import RenderingError, env_info
from rayagi.models.networks import ActorCritic
from rayagi.models.policy import load_policy
from rayagi.run.errors import DiskError
from rayagi.run.folder import create_run, open_run
from rayagi.run.trained_env import env_to_dict


def saved_run(task):
    """A run folder with an untrained policy; returns it, its spec and the policy's shared state."""
    spec = preset(task)
    info = env_info(task)
    torch.manual_seed(0)
    model = ActorCritic(info, spec.network)
    normaliser = ObservationNormaliser(info.obs_dim, spec.learning.obs_clip, torch.device("cpu"))
    shared = {"learner": {"model": model.state_dict()}, "obs_normaliser": normaliser.state_dict()}
    folder = create_run(Path("runs"), task, seed=0, rayagi_version="0.1", name="a")
    folder.write_config(run_spec_to_dict(spec))
    folder.checkpoints.save(
        {"shared": shared, "local": [], "num_gmis": 1}, {"iteration": 4, "env_steps": 4096}
    )
    folder.unlock()
    return spec, shared


@pytest.mark.parametrize("task", ["InvertedPendulum-v5", "CartPole-v1"])
def test_a_saved_policy_is_evaluated_alike_each_time(task, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved_run(task)
    assert main(["evaluate", "runs/a", "--episodes", "6", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert f"{task}, iteration_000004 (4,096 environment steps), seed 3" in first
    assert re.search(r"return [\d.,]+ \+- [\d.,]+ over 6 episodes", first)
    assert main(["evaluate", "runs/a", "--episodes", "6", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first


def test_a_policy_is_not_used_where_its_actions_mean_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved_run("InvertedPendulum-v5")
    info = env_info("InvertedPendulum-v5")
    folder = open_run(Path("runs/a"))
    folder.update(environment=env_to_dict(info))
    assert main(["evaluate", "runs/a", "--episodes", "1"]) == 0
    folder.update(environment=env_to_dict(replace(info, action=replace(info.action, low=(-9.0,)))))
    capsys.readouterr()
    assert main(["evaluate", "runs/a", "--episodes", "1"]) == 2
    assert "actions were 1 real in [-9, 3] and are 1 real in [-3, 3]" in capsys.readouterr().err


class Counting(gymnasium.Env):
    """Discrete actions from 5 on; records its actions."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(3, start=5)
    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}
    render_mode = "rgb_array"
    taken: ClassVar[list[int]] = []

    def __init__(self, **options):
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.taken.append(action)
        self.steps += 1
        return np.zeros(2, dtype=np.float32), 1.0, self.steps == 3, False, {}

    def render(self):
        return np.zeros((16, 16, 3), dtype=np.uint8)


def test_discrete_actions_of_a_video_count_from_the_spaces_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(gymnasium.registry, "Counting-v0", EnvSpec("Counting-v0", entry_point=Counting))
    spec, shared = saved_run("Counting-v0")
    for name, values in shared["learner"]["model"].items():
        values.zero_()
        if name == "policy.4.bias":
            values[2] = 1.0  # the policy's third action
    Counting.taken.clear()
    agent = Agent(load_policy(shared, spec, env_info("Counting-v0")))
    assert film(spec, agent, tmp_path / "out.gif", seed=0) == (3, 3.0)
    assert Counting.taken == [7, 7, 7]


class Threads(Counting):
    """Its reward is the number of torch's threads; its episodes do not end."""

    def step(self, action):
        obs, _, _, _, info = super().step(action)
        return obs, float(torch.get_num_threads()), False, False, info


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_small_network_acts_on_one_thread(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    threads = EnvSpec("Threads-v0", entry_point=Threads, max_episode_steps=4)
    monkeypatch.setitem(gymnasium.registry, "Threads-v0", threads)
    saved_run("Threads-v0")
    assert main(["evaluate", "runs/a", "--episodes", "2"]) == 0
    assert "return 4.0 +- 0.0 over 2 episodes" in capsys.readouterr().out
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_images_take_all_threads():
    info = env_info("CartPole-v1")
    image = ObsPart(size=12 * 12 * 3, shape=(12, 12, 3))
    for parts, num_threads in (((), 1), ((image,), 2)):
        with evaluate._threads_for(replace(info, obs_parts=parts)):
            assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_alone(is_terminal, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(evaluate, "_REFRESH_S", 0.0)
    monkeypatch.setattr(evaluate, "Console", lambda stderr: Console(file=screen, force_terminal=is_terminal))
    monkeypatch.setenv("TERM", "xterm")
    with evaluate._shown_progress(3) as progress:
        progress(2, 1234)
    assert ("2 of 3 episodes, 1,234 steps of each environment" in screen.getvalue()) == is_terminal
    assert (screen.getvalue() != "") == is_terminal


def test_episodes_that_were_cut_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(roles, "LONGEST_EPISODE_STEPS", 6)
    monkeypatch.setattr(evaluate, "LONGEST_EPISODE_STEPS", 6)
    monkeypatch.setitem(gymnasium.registry, "Threads-v0", EnvSpec("Threads-v0", entry_point=Threads))
    saved_run("Threads-v0")
    assert main(["evaluate", "runs/a", "--episodes", "2"]) == 0
    output = capsys.readouterr().out
    assert "2 of them cut after 6 steps: Threads-v0 has no time limit" in output
    assert "env.kwargs.max_episode_steps=N" in output


class Moving(Counting):
    """Changes the working folder."""

    def reset(self, **options):
        os.chdir("/")
        return super().reset(**options)


def test_a_video_is_written_where_the_command_was_started(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(gymnasium.registry, "Moving-v0", EnvSpec("Moving-v0", entry_point=Moving))
    saved_run("Moving-v0")
    assert main(["evaluate", "runs/a", "--episodes", "1", "--video", "out.gif"]) == 0
    assert (tmp_path / "out.gif").stat().st_size
    assert f"{tmp_path / 'out.gif'}: 3 frames" in capsys.readouterr().out


class Drawing(Counting):
    """Draws two frames, then ``third``."""

    def __init__(self, third=None, **options):
        super().__init__()
        self.third, self.drawn = third, 0

    def render(self):
        self.drawn += 1
        if self.drawn < 4:  # one of them is the check's
            return super().render()
        if isinstance(self.third, Exception):
            raise self.third
        return self.third


@pytest.mark.parametrize(
    ("third", "reason"),
    [
        (ValueError("no context"), r"ValueError at .*test_evaluate_command\.py:\d+: no context"),
        (None, r"it returned no frame, where rgb_array is \(height, width, 3\)"),
        ([0, 1], r"it returned a list of shape \(2,\), where rgb_array is"),
        (np.zeros((16, 8, 3), np.uint8), r"frame 3 has the shape \(16, 8, 3\), and those before \(16, 16, 3\)"),
    ],
)  # fmt: skip
def test_a_picture_that_fails_within_an_episode_is_one_sentence(third, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    drawing = EnvSpec("Drawing-v0", entry_point=Drawing, kwargs={"third": third})
    monkeypatch.setitem(gymnasium.registry, "Drawing-v0", drawing)
    saved_run("Drawing-v0")
    assert main(["evaluate", "runs/a", "--episodes", "1", "--video", "out.gif"]) == 2
    error = capsys.readouterr().err
    assert re.search(rf"Drawing-v0 cannot be rendered here: {reason}", error)
    assert "Traceback" not in error


def test_a_checkpoint_that_is_not_there_says_which_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved_run("CartPole-v1")
    assert main(["evaluate", "runs/a", "--checkpoint", "iteration_000009"]) == 2
    assert "usable ones: iteration_000004" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["evaluate", "runs/a"], ["serve", "runs/a", "--time", "1s", "--out", "d"]]
)
def test_a_policy_of_nan_chooses_no_actions(command, tmp_path, monkeypatch, capsys):
    """Without a word, an index of discrete actions would come of it: another one in compiled code than in torch."""
    monkeypatch.chdir(tmp_path)
    _, shared = saved_run("CartPole-v1")
    shared["learner"]["model"]["policy.0.bias"][1] = float("nan")
    open_run(Path("runs/a")).checkpoints.save(
        {"shared": shared, "local": [], "num_gmis": 1}, {"iteration": 5, "env_steps": 5120}
    )
    assert main([*command, "--checkpoint", "last"]) == 1
    assert capsys.readouterr().err == (
        "rayagi: checkpoint runs/a/checkpoints/iteration_000005 is damaged: model.policy.0.bias has nan, of which no "
        "action comes; choose another one with --checkpoint\n"
    )
    assert not Path("d").exists()


def test_a_folder_is_no_video_and_that_is_said_before_any_episode(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out.mp4").mkdir()
    assert main(["evaluate", "runs/a", "--video", "out.mp4"]) == 2
    assert "--video out.mp4: it is a folder; name a file" in capsys.readouterr().err


def test_a_task_without_frames_is_refused_before_any_episode(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved_run("fused/CartPole-v1")
    assert main(["evaluate", "runs/a", "--video", "out.mp4"]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert "its simulator cannot render; leave --video out" in error


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_a_video_is_requested_on_the_command_line(suffix, tmp_path, monkeypatch, capsys):
    import imageio.v3 as imageio

    monkeypatch.chdir(tmp_path)
    saved_run("InvertedPendulum-v5")
    code = main(["evaluate", "runs/a", "--episodes", "1", "--video", f"out{suffix}"])
    output, error = capsys.readouterr()
    if "cannot be rendered here" in error:
        pytest.skip(f"this machine cannot draw: {error}")
    assert code == 0, error
    (num_frames,) = re.findall(rf"out\{suffix}: (\d+) frames", output)
    assert len(imageio.imread(tmp_path / f"out{suffix}", plugin="FFMPEG")) == int(num_frames)


@pytest.mark.parametrize("task", ["InvertedPendulum-v5", "CartPole-v1"])
def test_an_episode_is_recorded_as_video(task, tmp_path, monkeypatch):
    from PIL import Image, ImageSequence

    monkeypatch.chdir(tmp_path)
    spec, shared = saved_run(task)
    agent = Agent(load_policy(shared, spec, env_info(task)))
    try:
        num_frames, film_return = film(spec, agent, tmp_path / "out.gif", seed=0)
    except RenderingError as error:
        pytest.skip(f"this machine cannot draw: {error}")
    # Both tasks reward each step with the pole upright; CartPole also the step in which it falls.
    assert num_frames - 1 <= film_return <= num_frames
    # A frame that looks like the last one is the last one, shown longer.
    with Image.open(tmp_path / "out.gif") as found:
        shown_ms = [frame.info["duration"] for frame in ImageSequence.Iterator(found)]
    assert sum(shown_ms) == num_frames * min(shown_ms)


def test_an_episode_of_our_own_task_is_recorded_as_video(tmp_path, monkeypatch):
    import imageio.v3 as imageio

    monkeypatch.chdir(tmp_path)
    spec, shared = saved_run("rayagi/Ant-v0")
    spec = replace(spec, env=replace(spec.env, kwargs={"max_episode_steps": 6}))
    agent = Agent(load_policy(shared, spec, env_info("rayagi/Ant-v0")))
    try:
        num_frames, _ = film(spec, agent, tmp_path / "out.mp4", seed=0)
    except RenderingError as error:
        pytest.skip(f"this machine cannot draw: {error}")
    frames = imageio.imread(tmp_path / "out.mp4", plugin="FFMPEG")
    assert (num_frames, frames.shape) == (6, (6, 480, 640, 3))


def test_a_video_that_was_not_written_is_a_failure(tmp_path, monkeypatch):
    import contextlib

    import imageio.v2

    monkeypatch.chdir(tmp_path)
    spec, shared = saved_run("InvertedPendulum-v5")
    agent = Agent(load_policy(shared, spec, env_info("InvertedPendulum-v5")))

    class Writer:
        def append_data(self, frame):
            pass

    monkeypatch.setattr(imageio.v2, "get_writer", lambda path, fps: contextlib.nullcontext(Writer()))
    try:
        with pytest.raises(DiskError, match=r"cannot write out\.mp4: the video writer left it empty"):
            film(spec, agent, Path("out.mp4"), seed=0)
    except RenderingError as error:
        pytest.skip(f"this machine cannot draw: {error}")
