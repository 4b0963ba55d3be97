"""Gymnasium's environments through the adapter."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from actors.gmi import GmiContext
from actors.roles import LocalSimulator
from rayagi.algorithms.factory import training_factory
from rayagi.cli import main
from rayagi.config.presets import preset
from rayagi.envs import (
    EnvironmentFailedError,
    EnvironmentOptionError,
    RenderingError,
    SimulationError,
    UnsupportedSpaceError,
    env_info,
    gymnasium_adapter,
    has_pictures,
    make_env_factory,
    render_env,
)
from rayagi.envs.errors import failure_text
from rayagi.envs.gymnasium_adapter import action_spec
from rayagi.serving.column_layout import ColumnLayout
from rayagi.serving.policy_server.served_policy import policy_info


class Scripted(gymnasium.Env):
    """Observes a sample of any space; its reward is the action that it was given."""

    def __init__(self, observation_space, action_space, nan_at=None, render_mode=None):
        self.observation_space, self.action_space = observation_space, action_space
        self.nan_at, self.render_mode = nan_at, None
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        reward = float("nan") if self.steps == self.nan_at else float(np.sum(action))
        return self.observation_space.sample(), reward, False, False, {}


REAL = spaces.Box(-1, 1, (2,), np.float32)
PAIR = spaces.Dict({"a": spaces.Box(-1, 1, (2, 3), np.float32), "b": spaces.Discrete(4)})
IMAGE = spaces.Box(0, 255, (12, 12, 3), np.uint8)


@pytest.fixture(scope="module", autouse=True)
def _registered():
    cases = {
        "Dict": (PAIR, REAL),
        "Tuple": (spaces.Tuple((REAL, spaces.Discrete(3))), REAL),
        "Image": (IMAGE, REAL),
        "ImageInDict": (spaces.Dict({"camera": IMAGE}), REAL),
        "Sequence": (spaces.Sequence(REAL), REAL),
        "Empty": (spaces.Box(-1.0, 1.0, (0,)), REAL),
        "MultiDiscrete": (REAL, spaces.MultiDiscrete([2, 3])),
        "FromFive": (REAL, spaces.Discrete(3, start=5)),
        "Real": (REAL, spaces.Box(-2, 3, (2,), np.float32)),
    }
    for name, (observation, action) in cases.items():
        gymnasium.register(
            f"Scripted{name}-v0",
            Scripted,
            max_episode_steps=5,
            kwargs={"observation_space": observation, "action_space": action},
        )
    yield
    for name in cases:
        del gymnasium.registry[f"Scripted{name}-v0"]


def make(env_id, num_envs=2, first=0, seed=1, **kwargs):
    factory = make_env_factory(env_id, engine="gymnasium", kwargs=kwargs)
    return factory(num_envs=num_envs, first_env_index=first, seed=seed, num_threads=1)


def test_cart_pole_ends_resets_in_the_same_step_and_keeps_the_final_observation():
    env = make("CartPole-v1", 3)
    obs = env.reset()
    assert (obs.shape, obs.dtype) == ((3, 4), torch.float32)
    for _ in range(60):
        step = env.step(torch.ones(3, dtype=torch.int64))
        if len(step.final_ids):
            break
    ended = step.final_ids
    assert step.terminated[ended].all()
    assert not step.truncated.any()
    assert (step.final_obs[:, 2].abs() > 0.2095).all()
    assert (step.obs[ended].abs() <= 0.05).all()


FAULTS = {
    "another size": (np.zeros(5), 0.0, "the observation is of type ndarray and shape (5,); {flat}"),
    "one number": (np.zeros(1), 0.0, "the observation is of type ndarray and shape (1,); {flat}"),
    "another dimension": (
        np.zeros((2, 1)),
        0.0,
        "the observation is of type ndarray and shape (2, 1); {flat}",
    ),
    "no observation": (None, 0.0, "the observation is None; {flat}"),
    "no key": (
        {"a": np.zeros((2, 3))},
        0.0,
        "the observation has the keys a; observation_space has the keys a, b",
    ),
    "no dictionary": (
        [0],
        0.0,
        "the observation is of type list and shape (1,); observation_space has the keys a, b",
    ),
    "a member": (
        {"a": np.zeros((3, 2)), "b": 1},
        0.0,
        "the observation['a'] is of type ndarray and shape (3, 2); observation_space has the shape (2, 3)",
    ),
    "two rewards": (
        np.zeros(2),
        np.zeros(2),
        "the reward is of type ndarray and shape (2,); it must be one number",
    ),
    "no reward": (np.zeros(2), None, "the reward is None; it must be one number"),
    "text": (np.array(["a", "b"]), 0.0, "the observation has the dtype <U1; observation_space has float32"),
    "reals": (
        np.array([0.5, 1.5]),
        0.0,
        "the observation has the dtype float64; observation_space has int64",
    ),
    "a choice": (-1, 0.0, "the observation is -1; observation_space is Discrete(3)"),
    "several choices": (
        [3, 0],
        0.0,
        "the observation is [3, 0]; observation_space is MultiDiscrete([3 3])",
    ),
    "one choice of two": (
        np.zeros(1, np.int64),
        0.0,
        "the observation is of type ndarray and shape (1,); {flat}",
    ),
    "bits": (np.array([0, 2]), 0.0, "the observation is [0, 2]; observation_space is MultiBinary(2)"),
    "bytes": (
        np.array([0, 256]),
        0.0,
        "the observation has values from 0 to 256; observation_space has uint8",
    ),
    "no flag": (np.zeros(2), 0.0, None, False, "terminated is None; it must be one bool"),
    "a word": (np.zeros(2), 0.0, False, "no", "truncated is of type str and shape (); it must be one bool"),
    "two flags": (
        np.zeros(2),
        0.0,
        np.zeros(2, bool),
        False,
        "terminated is of type ndarray and shape (2,); it must be one bool",
    ),
}
SPACES = {
    "reals": spaces.Box(-9, 9, (2,), np.int64),
    "a choice": spaces.Discrete(3),
    "several choices": spaces.MultiDiscrete([3, 3]),
    "one choice of two": spaces.MultiDiscrete([3, 3]),
    "bits": spaces.MultiBinary(2),
    "bytes": spaces.Box(0, 255, (2,), np.uint8),
}


class Faulty(Scripted):
    """Returns ``fault`` in place of observation, reward and flags from the third step on, or raises it."""

    def __init__(self, fault, observation_space):
        super().__init__(observation_space, REAL)
        self.fault = fault

    def step(self, action):
        result = super().step(action)
        if self.steps < 3:
            return result
        if isinstance(self.fault, Exception):
            raise self.fault
        return (*self.fault, *result[max(2, len(self.fault)) :])


@pytest.fixture
def faulty():
    """Makes environments 4 and 5 of a run, which fail as told in their third step."""
    gymnasium.register("Faulty-v0", Faulty)
    yield lambda fault, space=REAL: make("Faulty-v0", first=4, fault=fault, observation_space=space)
    del gymnasium.registry["Faulty-v0"]


def failure_of(env):
    env.reset()
    for _ in range(2):
        env.step(torch.zeros(2, 2))
    with pytest.raises(EnvironmentFailedError) as caught:
        env.step(torch.zeros(2, 2))
    return str(caught.value)


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_observation_or_reward_is_named_with_environment_step_and_both_shapes(faulty, name):
    *fault, complaint = FAULTS[name]
    space = SPACES.get(name, PAIR if "key" in complaint or "member" in name else REAL)
    expected = complaint.format(flat="observation_space has the shape (2,)")
    where = "Faulty-v0, environment 4, step 3 of its episode"
    assert failure_of(faulty(fault, space)) == f"{where}: {expected}"


def test_an_exception_of_an_environment_is_named_with_its_step_and_line(faulty):
    line = Faulty.step.__code__.co_firstlineno + 5
    where = "Faulty-v0, environment 4, step 3 of its episode"
    assert failure_of(faulty(KeyError("goal"))) == f"{where}: KeyError at {__file__}:{line}: 'goal'"


def test_a_package_whose_name_begins_like_a_librarys_is_the_users():
    """Such as mujoco_playground: an exception of its code is named with its line."""
    for name, is_users in (
        ("mujoco_robots", True),
        ("torchtasks", True),
        ("mujoco", False),
        ("torch", False),
    ):
        file = f"/venv/lib/site-packages/{name}/env.py"
        scope = {}
        exec(compile("def fail(*given):\n    raise KeyError('goal')\n", file, "exec"), scope)
        with pytest.raises(KeyError) as caught:
            scope["fail"]()
        caught.value.__traceback__ = caught.tb.tb_next  # without this test's own frame
        at = f" at {file}:2" if is_users else ""
        assert failure_text(caught.value) == f"KeyError{at}: 'goal'"


FIVE = "step must return (observation, reward, terminated, truncated, info); it returned "
TWO = "reset must return (observation, info); it returned "


class Old(gymnasium.Env):
    """Returns ``values`` from ``method``."""

    observation_space, action_space = REAL, spaces.Discrete(2)

    def __init__(self, method, values):
        self.method, self.values = method, values

    def reset(self, *, seed=None, options=None):
        return self.values if self.method == "reset" else (np.zeros(2, np.float32), {})

    def step(self, action):
        return self.values if self.method == "step" else (np.zeros(2, np.float32), 0.0, False, False, {})


@pytest.mark.parametrize("limit", [None, 9])  # with one, a wrapper of Gymnasium's gets the values first
@pytest.mark.parametrize(
    ("method", "values", "complaint"),
    [
        ("step", (np.zeros(2), 1.0, False, {}), FIVE + "4 values"),
        ("step", None, FIVE + "None"),
        ("reset", np.zeros(2, np.float32), TWO + "a value of type ndarray"),
        ("reset", None, TWO + "None"),
        ("reset", (np.zeros(2, np.float32),), TWO + "1 value"),
    ],
)
def test_missing_values_are_named(method, values, complaint, limit, monkeypatch):
    monkeypatch.setitem(
        gymnasium.registry, "Old-v0", EnvSpec("Old-v0", entry_point=Old, max_episode_steps=limit)
    )
    env = make("Old-v0", method=method, values=values)
    if method == "step":
        env.reset()
    with pytest.raises(EnvironmentFailedError) as caught:
        env.reset() if method == "reset" else env.step(torch.zeros(2))
    assert str(caught.value).endswith(f": {complaint}")


def test_an_environment_that_raises_while_it_is_made_is_refused_with_the_line():
    with pytest.raises(
        EnvironmentOptionError, match=r"cannot make it with .*AssertionError at .*\.py:\d+: no"
    ):
        env_info("Refusing-v0", engine="gymnasium")


def test_an_environment_that_only_a_vector_entry_point_makes_is_refused(monkeypatch):
    only = EnvSpec("OnlyVector-v0", vector_entry_point=gymnasium.vector.SyncVectorEnv)
    monkeypatch.setitem(gymnasium.registry, "OnlyVector-v0", only)
    with pytest.raises(EnvironmentOptionError, match="OnlyVector-v0: it has only a vector_entry_point"):
        env_info("OnlyVector-v0")


NAMED = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Mine(gymnasium.Env):
    pass

class Other(gymnasium.Env):
    pass

for version in (1, 2):
    gymnasium.register(f"Mine-v{version}", entry_point=Mine)
gymnasium.register("ns/Pole-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "Mine",
            "Mine is a Gymnasium environment, which is named by a registered id: {0}Mine-v1 or {0}Mine-v2$",
        ),
        (
            "Mine-v0",
            "registers no Gymnasium environment of that name; it registers {0}Mine-v1, {0}Mine-v2, {0}ns/Pole-v0; ",
        ),
        (
            "Other",
            r"which is named by a registered id; it registers {0}Mine-v1, .*; put gymnasium\.register\('Other-v0'",
        ),
    ],
)
def test_a_wrong_id_is_answered_with_those_of_the_module(name, words, tmp_path, monkeypatch):
    before = dict(gymnasium.registry)
    (tmp_path / "named_ids.py").write_text(NAMED)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):  # also when the module is imported already
        with pytest.raises(EnvironmentOptionError, match=words.format("named_ids:")):
            make_env_factory(f"named_ids:{name}")
    for env_id in {*gymnasium.registry} - {*before}:
        del gymnasium.registry[env_id]
    del sys.modules["named_ids"]


class Slow(Scripted):
    """Its constructor returns when the log has a line, or a user ends it."""

    said, is_ended = threading.Event(), False

    def __init__(self):
        super().__init__(REAL, REAL)
        assert self.said.wait(60)
        if self.is_ended:
            raise KeyboardInterrupt


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Slow-v0", EnvSpec("Slow-v0", entry_point=Slow))
    monkeypatch.setattr(gymnasium_adapter, "_SLOW_S", 0.0)
    handler = logging.Handler()
    lines = []
    handler.emit = lambda record: (lines.append(record.getMessage()), Slow.said.set())
    logger = logging.getLogger("rayagi.envs")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    Slow.said.clear()


def test_an_environment_that_is_slow_to_make_is_named_meanwhile(slow):
    assert env_info("Slow-v0").obs_dim == 2
    assert slow == ["still making one Slow-v0, to learn its spaces; Ctrl-C shows where its code is"]


def test_ctrl_c_tells_where_a_constructor_was(slow, monkeypatch, capsys):
    monkeypatch.setattr(Slow, "is_ended", True)
    assert main(["plan", "Slow-v0", "--gmis", "1"]) == 130
    line = Slow.__init__.__code__.co_firstlineno + 4
    assert f"rayagi: stopped: while one Slow-v0 was made at {__file__}:{line}" in capsys.readouterr().err


class Spaceless(gymnasium.Env):
    """Forgets what it observes."""

    action_space = REAL


def test_an_environment_without_spaces_is_refused(monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Spaceless-v0", EnvSpec("Spaceless-v0", entry_point=Spaceless))
    reason = "Spaceless-v0: its observation_space is None; it must be one of gymnasium.spaces"
    with pytest.raises(EnvironmentOptionError, match=reason):
        env_info("Spaceless-v0")


class Refusing(gymnasium.Env):
    def __init__(self):
        raise AssertionError("no port is free")


gymnasium.register("Refusing-v0", Refusing)


def test_environments_whose_spaces_differ_are_refused_in_one_sentence():
    sizes = iter((2, 3, 4))
    gymnasium.register("Growing-v0", lambda: Scripted(spaces.Box(-1, 1, (next(sizes),)), REAL))
    reason = (
        r"Growing-v0: the observation_space of environment 0 is Box\(-1.0, 1.0, \(2,\), float32\), and that of "
        r"environment 1 is Box\(-1.0, 1.0, \(3,\), float32\)"
    )
    with pytest.raises(EnvironmentOptionError, match=reason):
        make("Growing-v0")
    del gymnasium.registry["Growing-v0"]


class Wandering(Scripted):
    """Changes the folder to its own, and has nothing to close."""

    def __init__(self, folder):
        super().__init__(REAL, REAL)
        os.chdir(folder)
        self.files = os.listdir()

    def close(self):
        self.viewer.close()


def test_an_environment_s_folder_and_its_failing_close_do_not_concern_the_run(tmp_path, monkeypatch, caplog):
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "robot.xml").touch()
    monkeypatch.chdir(tmp_path)
    gymnasium.register("Wandering-v0", Wandering, kwargs={"folder": "assets"})
    assert env_info("Wandering-v0", engine="gymnasium").obs_dim == 2
    assert Path.cwd() == tmp_path
    env = make("Wandering-v0", 1)
    assert env._envs.envs[0].unwrapped.files == ["robot.xml"]
    env.close()
    reason = f"AttributeError at {__file__}:{Wandering.close.__code__.co_firstlineno + 1}: "
    assert [
        each.getMessage().startswith(f"Wandering-v0: its close() failed: {reason}") for each in caplog.records
    ] == [
        True,
        True,
    ]
    del gymnasium.registry["Wandering-v0"]


@pytest.fixture
def torch_as_before():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_default_device(None)


@pytest.mark.usefixtures("torch_as_before")
@pytest.mark.parametrize("call", ["set_default_dtype(torch.float64)", "set_grad_enabled(False)"])
def test_an_environment_that_changes_torch_for_all_networks_is_refused(call, tmp_path, monkeypatch):
    refused = rf"its code calls torch\.{re.escape(call)}, which holds for rayagi's networks and learners too"

    class Changing(Scripted):
        def __init__(self):
            super().__init__(REAL, REAL)
            exec(f"import torch; torch.{call}")

    monkeypatch.setitem(gymnasium.registry, "Changing-v0", EnvSpec("Changing-v0", entry_point=Changing))
    with pytest.raises(EnvironmentOptionError, match=refused):
        env_info("Changing-v0", engine="gymnasium")
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    name = f"changing_{len(call)}"
    (tmp_path / f"{name}.py").write_text(f"import torch\n\ntorch.{call}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentOptionError, match=f"{name}:CartPole-v1: {refused}"):
        env_info(f"{name}:CartPole-v1")


class ChangingLater(Scripted):
    """Calls a function of torch in ``method``."""

    def __init__(self, method, call):
        super().__init__(REAL, REAL)
        self.method, self.call = method, call

    def reset(self, **options):
        self.change("reset")
        return super().reset(**options)

    def step(self, action):
        self.change("step")
        return super().step(action)

    def change(self, method):
        if method == self.method:
            self.call()


@pytest.mark.usefixtures("torch_as_before")
@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("reset", "set_default_dtype", torch.float64),
        ("reset", "set_grad_enabled", False),
        ("reset", "set_default_device", "meta"),
        ("step", "set_default_dtype", torch.float64),
        ("step", "set_grad_enabled", False),
    ],
)
def test_torch_is_not_changed_later_either(method, name, value, monkeypatch):
    later = EnvSpec("Later-v0", entry_point=ChangingLater)
    monkeypatch.setitem(gymnasium.registry, "Later-v0", later)
    env = make("Later-v0", method=method, call=lambda: getattr(torch, name)(value))
    if method == "step":
        env.reset()
    with pytest.raises(EnvironmentFailedError, match=rf"Later-v0, {method}: its code calls torch\.{name}\("):
        env.reset() if method == "reset" else env.step(torch.zeros(2, 2))


def test_steps_without_gradients_are_taken():
    """What the caller has set is not the environment's doing."""
    env = make("CartPole-v1")
    with torch.inference_mode():
        env.reset()
        env.step(torch.zeros(2, dtype=torch.int64))


def test_one_reward_in_an_array_is_taken_as_the_number():
    gymnasium.register("OneInArray-v0", lambda: Faulty((np.zeros(2), np.array([7.0])), REAL))
    env = make("OneInArray-v0")
    env.reset()
    assert [env.step(torch.zeros(2, 2)).rewards.tolist() for _ in range(3)][-1] == [7.0, 7.0]
    del gymnasium.registry["OneInArray-v0"]


def test_the_time_limit_truncates_as_registered():
    env = make("Pendulum-v1", 2)
    env.reset()
    steps = [env.step(torch.zeros(2, 1)) for _ in range(200)]
    assert [s.truncated.tolist() for s in steps] == [[False, False]] * 199 + [[True, True]]
    assert steps[-1].final_ids.tolist() == [0, 1]


def test_a_mujoco_task_steps_as_on_our_own_engine_until_float32_rounding():
    env = make("InvertedPendulum-v5", 2)
    start = env.reset()
    assert (start.abs() <= 0.01).all()
    assert env.step(torch.zeros(2, 1)).rewards.tolist() == [1.0, 1.0]
    assert env.info.engine == "gymnasium"


def test_a_batch_of_four_equals_two_of_two():
    whole, halves = make("CartPole-v1", 4), [make("CartPole-v1", 2, first=first) for first in (0, 2)]
    assert torch.equal(whole.reset(), torch.cat([h.reset() for h in halves]))
    generator = torch.Generator().manual_seed(0)
    for _ in range(80):
        actions = torch.randint(0, 2, (4,), generator=generator)
        step = whole.step(actions)
        parts = [h.step(a) for h, a in zip(halves, actions.split(2), strict=True)]
        assert torch.equal(step.obs, torch.cat([p.obs for p in parts]))


def test_earlier_observations_are_not_overwritten():
    env = make("CartPole-v1")
    first = env.reset()
    kept = first.clone()
    env.step(torch.ones(2, dtype=torch.int64))
    assert torch.equal(first, kept)


def test_dict_and_tuple_observations_are_flattened():
    assert env_info("ScriptedDict-v0").obs_dim == 6 + 4
    assert env_info("ScriptedTuple-v0").obs_dim == 2 + 3
    assert make("ScriptedDict-v0").reset().shape == (2, 10)
    assert env_info("FrozenLake-v1").obs_dim == 16
    assert make("Blackjack-v1").reset().sum(dim=1).tolist() == [3.0, 3.0]


def test_choices_count_from_zero_whatever_the_space_starts_at():
    env = make("ScriptedFromFive-v0")
    env.reset()
    assert env.step(torch.tensor([0, 2])).rewards.tolist() == [5.0, 7.0]


@pytest.mark.parametrize(
    ("space", "starts"),
    [
        (spaces.Discrete(3, start=-1), [-1]),
        (spaces.MultiDiscrete([3, 2], start=[-1, 4]), [-1, 4]),
        (spaces.Box(-2, 5, (2,), np.int64), [-2, -2]),
        (spaces.MultiBinary(2), [0, 0]),
        (REAL, []),
    ],
)
def test_who_serves_a_policy_knows_where_choices_start(space, starts):
    info = replace(env_info("CartPole-v1"), action=action_spec("A", space))
    policy = SimpleNamespace(state_dim=0)
    served = policy_info(SimpleNamespace(info=info, policy=policy, checkpoint="c", version=1))
    assert served["action"]["starts"] == starts
    layout = ColumnLayout(obs_dim=4, action=info.action)
    stored = ColumnLayout.from_dict(json.loads(json.dumps(layout.to_dict())))
    assert list(stored.action.starts) == starts
    assert stored == replace(layout, action=replace(info.action, starts=()))  # datasets count from 0


def test_real_actions_are_clipped_to_the_action_range():
    env = make("ScriptedReal-v0")
    env.reset()
    assert env.step(torch.tensor([[9.0, 0.0], [-9.0, 1.0]])).rewards.tolist() == [3.0, -1.0]


@pytest.mark.parametrize("env_id", ["ScriptedImage-v0", "ScriptedImageInDict-v0"])
def test_images_are_parts_of_the_flat_observation(env_id):
    info = env_info(env_id)
    assert info.obs_dim == 12 * 12 * 3
    assert [(part.shape, part.is_image) for part in info.obs_parts] == [((12, 12, 3), True)]
    assert (info.obs_dtype, info.obs_bytes) == (np.uint8, 12 * 12 * 3)


def test_spaces_that_no_policy_of_ours_serves_are_refused():
    with pytest.raises(UnsupportedSpaceError, match=r"Sequence.*fixed length"):
        env_info("ScriptedSequence-v0")
    with pytest.raises(UnsupportedSpaceError, match=r"Box.* of observations.*empty"):
        env_info("ScriptedEmpty-v0")


def test_an_option_that_the_environment_rejects_is_named():
    with pytest.raises(
        EnvironmentOptionError, match=r"CartPole-v1: Gymnasium cannot make it with .*gravitas"
    ):
        env_info("CartPole-v1", kwargs={"gravitas": 3})


def test_a_non_finite_environment_is_counted_and_reset():
    env = make("ScriptedReal-v0", first=4, nan_at=3)
    env.reset()
    for _ in range(2):
        last = env.step(torch.zeros(2, 2))
    found = env.step(torch.zeros(2, 2))
    assert found.terminated.tolist() == [True, True]
    assert found.rewards.tolist() == [0.0, 0.0]
    assert torch.equal(found.final_obs, last.obs)
    assert not torch.equal(found.obs, last.obs)
    assert env.sim_errors == {"unstable": 2}
    assert not env.step(torch.zeros(2, 2)).terminated.any()


class BadStart(Scripted):
    """Its second episode begins with NaN; each has two steps."""

    def __init__(self):
        super().__init__(REAL, REAL)
        self.resets = 0

    def reset(self, **options):
        obs, info = super().reset(**options)
        self.resets += 1
        return obs * np.float32(np.nan if self.resets == 2 else 1.0), info

    def step(self, action):
        obs, reward, *_, info = super().step(action)
        return obs, reward, self.steps == 2, False, info


def test_an_episode_that_begins_with_nan_is_named_as_such(monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "BadStart-v0", EnvSpec("BadStart-v0", entry_point=BadStart))
    env = make("BadStart-v0", first=4)
    env.reset()
    env.step(torch.zeros(2, 2))
    reason = "BadStart-v0, environment 4, reset: the first observation of an episode is NaN"
    with pytest.raises(EnvironmentFailedError, match=reason):
        env.step(torch.zeros(2, 2))
    env = make("BadStart-v0", first=4)
    env.reset()
    with pytest.raises(EnvironmentFailedError, match=reason):
        env.reset()


def test_an_action_that_is_not_finite_stops():
    env = make("Pendulum-v1", first=4)
    env.reset()
    with pytest.raises(SimulationError, match=r"environment 5 .*action"):
        env.step(torch.tensor([[0.0], [float("nan")]]))


def test_a_restored_adapter_starts_new_episodes():
    env = make("CartPole-v1")
    first = env.reset()
    state = env.state_dict()
    restored = make("CartPole-v1").load_state_dict(state)
    assert restored.shape == first.shape
    assert not torch.equal(restored, first)
    assert torch.equal(make("CartPole-v1").load_state_dict(state), restored)
    with pytest.raises(EnvironmentOptionError, match="holds 2 environments, not 3"):
        make("CartPole-v1", 3).load_state_dict(state)


def test_episodes_after_a_resume_count_from_their_own_start():
    """Episodes that cannot be resumed were once added to those after them: lengths beyond the limit of 500."""
    simulator = LocalSimulator(make("CartPole-v1"))
    balance(simulator, 300)
    assert not simulator.finished_lengths  # all are still running
    resumed = LocalSimulator(make("CartPole-v1"))
    resumed.load_state_dict(simulator.state_dict())
    balance(resumed, 500)
    assert resumed.finished_lengths == [500, 500]
    assert resumed.finished_returns == [500.0, 500.0]


def balance(simulator, steps):
    """A controller that holds the pole for a whole episode."""
    for _ in range(steps):
        cart, speed, angle, turning = simulator.obs.unbind(1)
        simulator.step((angle + 0.5 * turning + 0.05 * cart + 0.1 * speed > 0).long())


def test_a_resumed_program_scales_rewards_by_returns_of_its_new_episodes():
    spec = preset("CartPole-v1")
    spec = replace(spec, learning=replace(spec.learning, normalize_rewards=True, rollout_length=8))
    context = GmiContext.local("CartPole-v1")
    program, resumed = training_factory(spec)(context), training_factory(spec)(context)
    program.iterate()
    assert program.learner.reward_scaler.running.any()
    resumed.load_state_dict(program.state_dict())
    scaler = resumed.learner.reward_scaler
    assert not scaler.running.any()
    assert scaler.moments.count == program.learner.reward_scaler.moments.count


def test_an_environment_that_the_user_registered_travels_to_another_process(tmp_path):
    class Own(gymnasium.Env):
        observation_space, action_space = REAL, spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.full(2, 0.25, np.float32), {}

        def step(self, action):
            return np.full(2, 0.5, np.float32), 1.0, False, False, {}

    gymnasium.register("Travelling-v0", Own, max_episode_steps=5)
    try:
        pickled = cloudpickle.dumps(make_env_factory("Travelling-v0"))
    finally:
        del gymnasium.registry["Travelling-v0"]
    (tmp_path / "factory.pkl").write_bytes(pickled)
    program = (
        "import pickle, sys; factory = pickle.load(open(sys.argv[1], 'rb')); "
        "env = factory(num_envs=2, first_env_index=0, seed=0, num_threads=1); "
        "print(env.reset().tolist(), env.info.max_episode_steps)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "factory.pkl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[[0.25, 0.25], [0.25, 0.25]] 5\n", done.stderr


def test_gymnasiums_own_registrations_stay_at_home():
    assert make_env_factory("CartPole-v1").registered is None
    assert make_env_factory("ScriptedReal-v0").registered.id == "ScriptedReal-v0"


def test_the_console_script_finds_a_module_of_the_working_folder(tmp_path):
    (tmp_path / "beside.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import PendulumEnv\n"
        "gymnasium.register('Mine-v0', PendulumEnv, max_episode_steps=9)\n"
    )
    script = Path(sys.executable).with_name("rayagi")
    command = [sys.executable, str(script), "plan", "beside:Mine-v0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "dp_only on" in done.stdout


def test_frames_are_what_the_class_declares():
    assert not has_pictures("ScriptedReal-v0")
    assert has_pictures("Ant-v5")
    assert has_pictures("CartPole-v1")


def test_an_environment_without_frames_cannot_be_rendered():
    with pytest.raises(RenderingError, match="no rgb_array frames"):
        render_env("ScriptedReal-v0")
