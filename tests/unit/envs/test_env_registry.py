"""Names, options, sizes and the errors about them."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

import rayagi.envs as envs
from rayagi.envs import registry
from rayagi.envs.mujoco_cpu.provider import TASKS, MujocoProvider
from rayagi.envs.providers import ProviderDefinition


def test_our_own_tasks_run_on_our_engine_and_others_on_gymnasiums():
    assert envs.make_env_factory("Ant-v5").engine == "mujoco_cpu"
    assert envs.make_env_factory("Ant-v5", engine="gymnasium").engine == "gymnasium"
    assert envs.make_env_factory("CartPole-v1").engine == "gymnasium"


@pytest.mark.parametrize("definition", registry.PROVIDERS, ids=lambda each: each.implementation)
def test_every_provider_lists_its_ids_or_describes_them_and_its_engines_can_be_named(definition):
    assert bool(definition.provider.catalogue) != bool(
        definition.unlisted_ids or definition.engines == ("gymnasium",)
    )
    assert all(map(definition.knows, definition.provider.catalogue))
    with pytest.raises(envs.EnvironmentOptionError) as caught:
        envs.make_env_factory("Ant-v5", engine="warp9")
    offered = str(caught.value).partition("choose from ")[2].split(", ")
    assert {*definition.engines} <= {*offered}
    for engine in definition.engines:
        reason = definition.unsupported_reason(engine)
        assert reason is None or f"engine {engine} needs the package" in reason


NINE = {"Ant-v9": TASKS["Ant-v5"]}


class NineProvider(MujocoProvider):
    """Ids end in -v9; the tasks are those of -v5."""

    catalogue = NINE

    def info(self, env_id, engine, kwargs):
        return replace(super().info("Ant-v5", engine, kwargs), env_id=env_id, engine=engine)

    def check(self, env_id, kwargs):
        super().check("Ant-v5", kwargs)


@pytest.mark.parametrize("only_by_engine", [False, True])
def test_a_definition_is_all_that_a_new_provider_needs(monkeypatch, only_by_engine):
    definition = ProviderDefinition(
        ("nine", "ten"),
        f"{__name__}:NineProvider",
        extras={"ten": ("ten", ("a_package_that_is_not_here",))},
        only_by_engine=only_by_engine,
    )
    monkeypatch.setattr(registry, "PROVIDERS", (*registry.PROVIDERS, definition))
    assert envs.env_info("Ant-v9", engine="nine").engine == "nine"
    if only_by_engine:
        with pytest.raises(envs.EnvironmentOptionError, match="Ant-v9: use engine nine, which alone has it"):
            envs.env_info("Ant-v9")
    else:
        assert envs.env_info("Ant-v9").engine == "nine"
    with pytest.raises(
        envs.EnvironmentOptionError, match=r"not_here: pip install 'rayagi\[ten\]', or take nine"
    ):
        envs.make_env_factory("Ant-v9", engine="ten")
    with pytest.raises(envs.EnvironmentOptionError, match=r"nine does not have it \(it has Ant-v9\)"):
        envs.make_env_factory("Ant-v5", engine="nine")


def test_a_factory_survives_pickling_with_its_options():
    factory = envs.make_env_factory("Hopper-v5", kwargs={"max_episode_steps": 7})
    again = pickle.loads(pickle.dumps(factory))
    assert again == factory
    env = again(num_envs=2, first_env_index=0, seed=0, num_threads=1)
    assert env.info.max_episode_steps == 7


def test_env_info_of_ant_is_the_registered_one():
    info = envs.env_info("Ant-v5")
    assert (info.env_id, info.engine, info.obs_dim, info.max_episode_steps) == (
        "Ant-v5",
        "mujoco_cpu",
        105,
        1000,
    )
    assert (info.action.kind, info.action.dim) == ("continuous", 8)
    assert info.action.low == (-1.0,) * 8
    assert info.action.high == (1.0,) * 8


def test_env_info_of_a_discrete_task_counts_its_choices():
    info = envs.env_info("CartPole-v1")
    assert (info.engine, info.obs_dim, info.max_episode_steps) == ("gymnasium", 4, 500)
    assert (info.action.kind, info.action.dim, info.action.num_choices) == ("discrete", 1, 2)


def test_the_list_has_every_task_of_ours_with_its_sizes():
    listing = {line.env_id: line for line in envs.list_envs()}
    assert set(listing) >= set(TASKS)
    humanoid = listing["Humanoid-v5"]
    assert (humanoid.obs_dim, humanoid.action, humanoid.max_episode_steps) == (348, "17 reals", 1000)
    assert listing["Reacher-v5"].max_episode_steps == 50
    assert all(line.description for line in listing.values())


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("Antt-v5", "Ant-v5"),
        ("ant", "Ant-v5"),
        ("Cartpole-v1", "CartPole-v1"),
        ("HalfCheeta-v5", "HalfCheetah-v5"),
        ("walker", "Walker2d-v5"),
        ("gym/FrozenLak-v0", "FrozenLake-v1"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(given, nearest):
    with pytest.raises(envs.UnknownEnvironmentError) as caught:
        envs.make_env_factory(given)
    assert caught.value.nearest[0] == nearest
    assert f"{given!r}" in str(caught.value)
    assert "rayagi envs" in str(caught.value)


def test_retired_names_are_not_offered():
    with pytest.raises(envs.UnknownEnvironmentError) as caught:
        envs.make_env_factory("Ant")
    assert not {"Ant-v2", "Ant-v3"} & set(caught.value.nearest)


@pytest.mark.parametrize("given", ["nosuch/Task-v0", "my/Car-v5", "Reach2d-v1"])
def test_names_that_only_have_a_version_in_common_are_not_near(given):
    with pytest.raises(envs.UnknownEnvironmentError) as caught:
        envs.make_env_factory(given)
    assert not {name for name in caught.value.nearest if not name.startswith("Reacher")}


def test_a_name_like_no_other_says_how_to_list_them():
    with pytest.raises(envs.UnknownEnvironmentError, match=r"called 'xqzw'\. `rayagi envs` lists"):
        envs.make_env_factory("xqzw")


@pytest.mark.parametrize(
    ("env_id", "engine", "kwargs", "message"),
    [
        ("Ant-v5", "auto", {"ctrl_cost": 1}, "no option ctrl_cost; it has .*ctrl_cost_weight"),
        ("Ant-v5", "auto", {"frame_skip": 0}, "frame_skip is 0; it must be a positive integer"),
        ("Ant-v5", "auto", {"frame_skip": True}, "frame_skip is True; it must be a positive integer"),
        ("Ant-v5", "auto", {"terminate_when_unhealthy": "maybe"}, "is 'maybe'; it must be true or false"),
        ("Ant-v5", "auto", {"terminate_when_unhealthy": 1}, "is 1; it must be true or false"),
        ("Humanoid-v5", "auto", {"include_cvel_in_observation": "no"}, "'no'; it must be true or false"),
        ("Ant-v5", "auto", {"healthy_reward": "much"}, "is 'much'; it must be a number"),
        ("Ant-v5", "auto", {"healthy_reward": True}, "is True; it must be a number"),
        ("Ant-v5", "auto", {"healthy_z_range": [0.2]}, r"is \[0.2\]; it must be a list of 2 numbers"),
        ("Ant-v5", "auto", {"xml_file": 3}, "xml_file is 3; it must be text"),
        ("Ant-v5", "auto", {"max_episode_steps": 0}, "max_episode_steps is 0; it must be a positive"),
        ("Ant-v5", "warp9", {}, "no engine 'warp9'; choose from auto, mujoco_cpu, .*gymnasium"),
        ("CartPole-v1", "mujoco_cpu", {}, "mujoco_cpu does not have it .*use engine gymnasium"),
        ("no_such_module:Foo-v0", "auto", {}, "module 'no_such_module' cannot be imported"),
    ],
)
def test_a_wrong_option_is_refused_by_name(env_id, engine, kwargs, message):
    with pytest.raises(envs.EnvironmentOptionError, match=message):
        envs.make_env_factory(env_id, engine=engine, kwargs=kwargs)


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [("Ant-v5", {"terminate_when_unhealthy": "no"}), ("CartPole-v1", {"sutton_barto_reward": "no"})],
)
def test_gymnasiums_constructors_get_booleans_for_booleans(env_id, kwargs):
    with pytest.raises(envs.EnvironmentOptionError, match="is 'no'; it must be true or false"):
        envs.env_info(env_id, engine="gymnasium", kwargs=kwargs)
    assert envs.env_info(env_id, engine="gymnasium", kwargs=dict.fromkeys(kwargs, False)).env_id == env_id


def test_a_missing_model_file_is_named():
    with pytest.raises(envs.EnvironmentOptionError, match=r"there is no model file .*nowhere\.xml"):
        envs.env_info("Ant-v5", kwargs={"xml_file": "nowhere.xml"})


def test_a_model_file_that_mujoco_refuses_is_named(tmp_path):
    broken = tmp_path / "broken.xml"
    broken.write_text("<mujoco><nonsense/></mujoco>")
    with pytest.raises(envs.EnvironmentOptionError, match=r"(?s)broken\.xml.*nonsense"):
        envs.env_info("Ant-v5", kwargs={"xml_file": str(broken)})


def test_a_model_without_actuators_is_refused(tmp_path):
    file = tmp_path / "limp.xml"
    file.write_text("<mujoco><worldbody><body><freejoint/><geom size='.1'/></body></worldbody></mujoco>")
    with pytest.raises(envs.EnvironmentOptionError, match=r"limp\.xml.*its model has no actuators"):
        envs.env_info("Ant-v5", kwargs={"xml_file": str(file)})


SLIDER = """<mujoco><worldbody><body name="cart"><joint name="x" type="slide"/><geom size=".1"/></body></worldbody>
<actuator><motor name="push" joint="x" {}/></actuator></mujoco>"""


def test_an_actuator_without_a_range_is_refused(tmp_path):
    """Every action would be clipped to 0."""
    file = tmp_path / "slider.xml"
    file.write_text(SLIDER.format(""))
    reason = r"slider\.xml': its actuator 'push' has no ctrlrange, to which actions are clipped: give it one"
    with pytest.raises(envs.EnvironmentOptionError, match=reason):
        envs.env_info("HalfCheetah-v5", kwargs={"xml_file": str(file)})
    file.write_text(SLIDER.format('ctrlrange="-2 1"'))
    info = envs.env_info("HalfCheetah-v5", kwargs={"xml_file": str(file)})
    assert (info.action.low, info.action.high) == ((-2.0,), (1.0,))


@pytest.mark.parametrize(
    ("task", "missing"), [("Ant-v5", "index 2 is out of bounds"), ("Reacher-v5", "Invalid name 'fingertip'")]
)
def test_a_model_of_another_robot_is_refused_before_anything_starts(tmp_path, task, missing):
    file = tmp_path / "slider.xml"
    file.write_text(SLIDER.format('ctrlrange="-1 1"'))
    with pytest.raises(
        envs.EnvironmentOptionError, match=rf"slider\.xml' has not the parts .*{missing}"
    ) as caught:
        envs.env_info(task, kwargs={"xml_file": str(file)})
    assert "\n" not in str(caught.value)


def test_lists_from_configuration_files_serve_as_ranges():
    factory = envs.make_env_factory("Ant-v5", kwargs={"healthy_z_range": [5.0, 6.0]})
    env = factory(num_envs=1, first_env_index=0, seed=0, num_threads=1)
    env.reset()
    assert env.step(torch.zeros(1, 8)).terminated.all()


@pytest.mark.parametrize(("num_envs", "num_threads"), [(0, 1), (-1, 1), (1, 0)])
def test_zero_or_negative_counts_are_refused(num_envs, num_threads):
    with pytest.raises(envs.EnvironmentOptionError, match="must be at least 1"):
        envs.make_env_factory("Ant-v5")(num_envs=num_envs, first_env_index=0, seed=0, num_threads=num_threads)


@pytest.mark.parametrize(
    ("env_id", "hidden"),
    [
        ("Ant-v5", (256, 128, 64)),
        ("Humanoid-v5", (200, 400, 100)),
        ("ShadowHand", (512, 512, 512, 256)),
        ("Anymal", (256, 128, 64)),
        ("BallBalance", (256, 128, 64)),
        ("FrankaCabinet", (256, 128, 64)),
        ("HalfCheetah-v5", (256, 128, 64)),
        ("HalfCheetah-v4", (256, 128, 64)),
        ("CartPole-v1", (64, 64)),
    ],
)
def test_default_networks_are_those_of_table_4(env_id, hidden):
    assert envs.default_hidden(env_id) == hidden


@pytest.mark.parametrize(
    "error",
    [
        envs.UnknownEnvironmentError("Antt-v5", ("Ant-v5",)),
        envs.EnvironmentOptionError("Ant-v5", "why"),
        envs.UnsupportedSpaceError("Ant-v5", "Box", "do this"),
        envs.SimulationError(3, 17, "qacc"),
        envs.RenderingError("Ant-v5", "no GL"),
    ],
)
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_a_machine_that_cannot_render_reports_what_to_install(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "crayons")
    with pytest.raises(envs.RenderingError, match=r"MUJOCO_GL is 'crayons', not one of egl.*MUJOCO_GL=egl"):
        envs.render_env("Ant-v5")


def test_a_frame_is_rendered_or_the_error_names_opengl():
    try:
        env = envs.render_env("Ant-v5", {"max_episode_steps": 5})
    except envs.RenderingError as error:
        assert "MuJoCo draws with OpenGL" in str(error)  # noqa: PT017 - which of the two depends on the machine
        return
    env.reset(seed=0)
    assert env.render().shape == (480, 480, 3)
    assert env.spec.max_episode_steps == 5
    env.close()
