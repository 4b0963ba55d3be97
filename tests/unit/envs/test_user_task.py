"""A user's own task, ``module:Class``: imported, run and rendered; mistakes are reported with a reason."""

from __future__ import annotations

import importlib
import pickle
import re
import sys

import numpy as np
import pytest
import torch

import rayagi.envs as envs
from rayagi.algorithms.ppo import PPOSpec
from rayagi.cli import main
from rayagi.config.presets import PRESETS, preset
from rayagi.envs.errors import EnvironmentFailedError, EnvironmentOptionError, ModelError, TaskError
from rayagi.envs.mujoco_cpu.batched_sim import CpuBatchedSim
from rayagi.envs.tasks import provider
from rayagi.envs.tasks.compiled.vec_env import CompiledTaskVecEnv
from rayagi.envs.tasks.vec_env import TaskVecEnv

MODEL = """<mujoco><option timestep="0.01"/><worldbody><body name="cart">
  <joint name="slide" type="slide" axis="1 0 0"/><geom size="0.1" mass="1"/></body></worldbody>
<actuator><motor name="push" joint="slide" gear="10"/></actuator></mujoco>"""
TASK = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from rayagi.envs.tasks import Start, StepOutcome, Task, TaskFunctions


@dataclass(frozen=True, kw_only=True)
class Cart(Task):
    goal: float = 1.0

    description: ClassVar[str] = "a cart goes to a place"
    model_file: ClassVar[str] = "cart.xml"
    max_episode_steps: ClassVar[int] = 20
    obs_dim: ClassVar[int] = 2
    action_dim: ClassVar[int] = 1
    num_start_draws: ClassVar[int] = 1
    needs: ClassVar[dict] = {"joint": ("slide",), "actuator": ("push",)}

    def rules(self, model, *, device, dtype):
        return CartRules(self, model, device=device, dtype=dtype)


class CartRules(TaskFunctions):
    def start(self, draws):
        return Start(draws - 0.5, torch.zeros_like(draws))

    def control(self, state):
        return state.actions, {}

    def reward_and_done(self, state):
        off = (state.fields["qpos"][:, 0] - self.task.goal).abs()
        return StepOutcome(1.0 - off, off > 5.0)

    def observe(self, state):
        return torch.cat((state.fields["qpos"], state.fields["qvel"]), -1)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with the task's module and model in it."""
    (tmp_path / "cart_task.py").write_text(TASK)
    (tmp_path / "cart.xml").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def rewritten(folder, old, new):
    """The task with a change, as ``cart_task:Cart``."""
    assert old in TASK
    (folder / "cart_task.py").write_text(TASK.replace(old, new))
    importlib.invalidate_caches()
    return "cart_task:Cart"


def test_it_is_made_from_any_folder_with_its_options(folder, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))  # the model is found beside the module
    factory = pickle.loads(pickle.dumps(envs.make_env_factory("cart_task:Cart", kwargs={"goal": 0.25})))
    assert factory.engine == "mujoco_cpu"
    env = factory(num_envs=4, first_env_index=0, seed=1, num_threads=1)
    assert (env.info.obs_dim, env.info.action.dim, env.info.max_episode_steps) == (2, 1, 20)
    obs = env.reset()
    step = env.step(torch.ones(4, 1))
    assert (step.obs[:, 1] > obs[:, 1]).all()  # it is pushed ahead
    torch.testing.assert_close(step.rewards, 1.0 - (step.obs[:, 0] - 0.25).abs())


def test_the_list_shows_it(folder, capsys):
    assert main(["envs", "cart_task:Cart"]) == 0
    assert re.split(r"\s{2,}", capsys.readouterr().out.splitlines()[-1]) == [
        "cart_task:Cart", "mujoco_cpu, mujoco_warp", "2", "1 real", "20", "a cart goes to a place"
    ]  # fmt: skip


def test_its_settings_are_those_of_robots(folder):
    spec, robots = preset("cart_task:Cart"), PRESETS["Hopper-v5"]
    assert (spec.network.hidden, spec.learning) == ((256, 128, 64), PPOSpec(**robots.learning))


def test_the_rendered_task_steps_as_the_batched_one(folder):
    from rayagi.envs.tasks.rendered import RenderedTask

    try:
        drawn = envs.render_env("cart_task:Cart")
    except envs.RenderingError:
        drawn = RenderedTask("cart_task:Cart", {})  # this machine cannot render; the rest is tested
    batched = envs.make_env_factory("cart_task:Cart")(num_envs=1, first_env_index=0, seed=7, num_threads=1)
    np.testing.assert_array_equal(drawn.reset(seed=7)[0], batched.reset()[0])
    drawn.close()


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("no_such_module:Cart", r"there is no no_such_module in .*PYTHONPATH"),
        ("cart_task.py:Cart", r"there is no .*give the module's name, 'cart_task'"),
        (
            "cart_task:Kart",
            r"cart_task\.py has no class 'Kart', and registers no Gymnasium .*; its classes: Cart, CartRules$",
        ),
        (
            "cart_task:CartRules",
            r"CartRules must derive from rayagi\.envs\.tasks\.Task or .*; its bases: TaskFunctions",
        ),
        (
            "gym_task:Walk",
            r"Walk is a Gymnasium .*register\('Walk-v0', .* below it, and name gym_task:Walk-v0$",
        ),
        ("cart_task:TASK", r"TASK is a str; it must be a class derived from"),
        (
            "broken:Cart",
            r"'broken' cannot be imported: ZeroDivisionError at .*broken\.py:2: division by zero",
        ),
        (
            "needs_more:Cart",
            r"'needs_more' cannot be imported: ModuleNotFoundError at .*needs_more\.py:1: .*'nothing_here'",
        ),
        ("quits:Cart", r"'quits' cannot be imported: SystemExit at .*quits\.py:2: 3"),
        ("half:Cart", r"'half' cannot be imported: SyntaxError"),
    ],
)
def test_a_missing_module_or_class_is_explained(folder, env_id, words):
    (folder / "cart_task.py").write_text(TASK + "\nTASK = 'x'\n")
    (folder / "broken.py").write_text("\n1 / 0\n")
    (folder / "needs_more.py").write_text("import nothing_here\n")
    (folder / "quits.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "half.py").write_text("class Cart(\n")
    (folder / "gym_task.py").write_text("import gymnasium\nclass Walk(gymnasium.Env):\n    pass\n")
    for ask in (envs.make_env_factory, envs.env_info, envs.named_env):
        with pytest.raises(EnvironmentOptionError, match=words):
            ask(env_id)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("    def rules(self, model", "    def bind(self, model", "the class Cart lacks the method rules"),
        (
            "    def observe(",
            "    def look(",
            r"rules, TypeError at .*cart_task\.py:23: .*abstract method '?observe",
        ),
        (
            "obs_dim: ClassVar[int] = 2",
            "obs_dim: ClassVar[int] = 3",
            r"observe's result has the shape \(N, 2\); it must be \(N, 3\)",
        ),
        ("obs_dim: ClassVar[int] = 2", "", r"Cart\.obs_dim is 0; it must be a positive integer"),
        (
            "max_episode_steps: ClassVar[int] = 20",
            "max_episode_steps: ClassVar[int] = 0",
            r"Cart\.max_episode_steps is 0; it must be a positive integer, or None for no limit",
        ),
        (
            "action_dim: ClassVar[int] = 1",
            "action_dim: ClassVar[int] = 2",
            r"controls has the shape \(N, 2\); it must be \(N, 1\)",
        ),
        ('model_file: ClassVar[str] = "cart.xml"', "", r"Cart\.model_file is empty"),
        (
            "Start(draws - 0.5,",
            "Start(draws[:, 0],",
            r"start's qpos has the shape \(N,\); it must be \(N, 1\)",
        ),
        (
            "Start(draws - 0.5, torch",
            "(draws - 0.5, torch",
            r"CartRules\.start returns a tuple; it must return Start",
        ),
        ("off > 5.0)", "off)", r"reward_and_done's terminated is torch.float64; it must be torch.bool"),
        (
            "StepOutcome(1.0 - off,",
            "StepOutcome(1.0 - off.mean(),",
            r"reward_and_done's rewards has the shape \(\); it must be \(N,\)",
        ),
        (
            "StepOutcome(1.0 - off,",
            "StepOutcome(1.0,",
            r"reward_and_done's rewards is a float; it must be a tensor",
        ),
        (
            "return state.actions, {}",
            "return state.actions",
            r"control returns a Tensor; it must return \(controls, memory\)",
        ),
        (
            "return state.actions, {}",
            "return state.actions, {'a': state.actions}",
            "control changes the memory 'a', which start does not set",
        ),
        (
            'state.fields["qpos"][:, 0]',
            'state.fields["qacc"][:, 0]',
            r"reward_and_done, KeyError at .*cart_task\.py:34: 'qacc'",
        ),
        (
            "num_start_draws: ClassVar[int] = 1",
            'fields: ClassVar[tuple] = ("qaccc",)',
            r"Cart\.fields: qaccc is not an MjData .*'qacc'",
        ),
        (
            "StepOutcome(1.0 - off, off > 5.0)",
            "StepOutcome(1.0 - off, off > 5.0, terms={'off': off})",
            "terms off; Cart.reward_terms has none",
        ),
        (
            "    goal: float",
            "    reward_terms: ClassVar[tuple] = ('off',)\n    goal: float",
            r"has the reward terms none; Cart\.reward_terms has off",
        ),
        (
            "    goal: float",
            "    reward_terms: ClassVar[tuple] = ('a b',)\n    goal: float",
            r"reward_terms is \('a b',\); it must be a tuple of names",
        ),
        ("torch.cat((", "torch.catt((", r"observe, AttributeError at .*cart_task\.py:38: "),
    ],
)
def test_a_mistake_in_a_task_is_reported_before_anything_starts(folder, old, new, words):
    with pytest.raises(TaskError, match=words):
        envs.make_env_factory(rewritten(folder, old, new))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "cart.xml").unlink(), r"cart\.xml: there is no such file"),
        (
            lambda folder: (folder / "cart.xml").write_text("<mujoco><x/></mujoco>"),
            r"(?s)cart\.xml.*Schema violation",
        ),
        (
            lambda folder: (folder / "cart.xml").write_text(
                MODEL.replace('"slide" t', '"rail" t').replace('joint="slide"', 'joint="rail"')
            ),
            r"it lacks the joint slide \(it has rail\)",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_named(folder, change, words):
    change(folder)
    with pytest.raises(ModelError, match=words):
        envs.make_env_factory("cart_task:Cart")


def test_an_option_that_it_lacks_is_refused(folder):
    with pytest.raises(EnvironmentOptionError, match=r"there is no option gaol; it has .*goal"):
        envs.make_env_factory("cart_task:Cart", kwargs={"gaol": 1.0})


def made(env_id, **options):
    place = {"num_envs": 6, "first_env_index": 0, "seed": 3, "num_threads": 1}
    return envs.make_env_factory(env_id, kwargs=options)(**place)


UNCOMPILED = {
    "a branch": (
        "off = (",
        "if state.actions.sum() < -2.0:\n            pass\n        off = (",
        34,
        "a value that Python asks for",
    ),
    "what the tracer does not know": (
        "        return torch.cat(",
        "        torch.sort(state.actions)\n        return torch.cat(",
        38,
        "torch's sort",
    ),
    "worlds that depend on each other": (
        "StepOutcome(1.0 - off,",
        "StepOutcome(off.mean() - off,",
        None,
        r"results that depend on qpos\[0\] of other worlds",
    ),
    "the number of worlds": (
        "StepOutcome(1.0 - off,",
        "StepOutcome(len(off) - off,",
        None,
        "results that depend on the number of worlds",
    ),
    "memory outside the memory": (
        "off = (",
        "self.last = state.actions\n        off = (",
        None,
        "its functions change its attribute last",
    ),
    "whole numbers in memory": (
        "torch.zeros_like(draws))",
        "torch.zeros_like(draws), {'n': torch.zeros(len(draws))})",
        None,
        "memory 'n': it is torch.float32; .*new_zeros",
    ),
    "a NumPy function": (
        "        return torch.cat(",
        "        state.actions.numpy()\n        return torch.cat(",
        38,
        "numpy",
    ),
}


@pytest.mark.parametrize("case", UNCOMPILED)
def test_an_untraceable_task_runs_on_torch_with_one_warning(folder, caplog, case):
    old, new, line, reason = UNCOMPILED[case]
    env_id = rewritten(folder, old, new)
    provider._warn_once.cache_clear()
    first, second = made(env_id), made(env_id)
    assert [type(env) for env in (first, second)] == [TaskVecEnv, TaskVecEnv]
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    place = rf"cart_task\.py:{line}: " if line else ""
    assert re.search(
        rf"cart_task:Cart: on mujoco_cpu its rules run on torch, .*: .*{place}.*{reason}", warning
    )
    first.reset()
    step = first.step(torch.ones(6, 1))
    own = torch.tensor([1.0 if case != "the number of worlds" else 6.0])
    off = (step.obs[:, 0] - 1.0).abs()
    own = off.mean() if case == "worlds that depend on each other" else own
    torch.testing.assert_close(step.rewards, own - off)


def test_a_compilable_task_is_compiled_without_a_warning(folder, caplog):
    compiled = made("cart_task:Cart", goal=0.25)
    assert isinstance(compiled, CompiledTaskVecEnv)
    assert not caplog.records
    worlds = CpuBatchedSim(compiled._rules.model, 6, 1, ())
    torches = TaskVecEnv(compiled.info, compiled._rules, worlds, seed=3)
    torch.testing.assert_close(compiled.reset(), torches.reset())
    for number in range(25):
        actions = torch.full((6, 1), float(number % 3 - 1))
        got, want = compiled.step(actions), torches.step(actions)
        torch.testing.assert_close(got.obs, want.obs)
        torch.testing.assert_close(got.rewards, want.rewards)


def test_fields_of_any_shape_are_traced(folder):
    """As xpos, a place for every body, and time, one number."""
    rewritten(
        folder,
        'state.fields["qpos"][:, 0] - self.task.goal',
        'state.fields["xpos"][:, 1, 0] + 0 * state.fields["time"]',
    )
    text = (folder / "cart_task.py").read_text()
    (folder / "cart_task.py").write_text(
        text.replace("    obs_dim", '    fields: ClassVar[tuple] = ("xpos", "time")\n    obs_dim')
    )
    env = made("cart_task:Cart")
    assert isinstance(env, CompiledTaskVecEnv)
    env.reset()
    step = env.step(torch.ones(6, 1))
    # Derived fields describe the state before the last substep.
    torch.testing.assert_close(step.rewards, 1.0 - env.fields["xpos"][:, 1, 0].abs().float())


def test_a_gymnasium_id_of_a_module_is_listed_and_made(folder, capsys):
    (folder / "registers.py").write_text(
        "import gymnasium\ngymnasium.register('Mine-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    assert envs.env_info("registers:Mine-v0").obs_dim == 4
    assert main(["envs", "registers:Mine-v0"]) == 0
    assert "registers:Mine-v0" in capsys.readouterr().out


def test_what_a_function_of_a_task_raises_during_training_is_named_with_step_and_line(folder):
    failing = "if state.actions.sum() > 5.5:\n            raise LookupError('no goal')\n        off = ("
    env = made(rewritten(folder, "off = (", failing))
    env.reset()
    env.step(torch.zeros(6, 1))
    with pytest.raises(EnvironmentFailedError) as caught:
        env.step(torch.ones(6, 1))
    place = folder / "cart_task.py"
    words = f"step 2 of the longest episode here: LookupError at {place}:35: no goal"
    assert str(caught.value) == f"cart_task:Cart, {words}"
