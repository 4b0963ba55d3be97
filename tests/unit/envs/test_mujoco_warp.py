"""MuJoCo Warp on its CPU device, compared with mujoco_cpu."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rayagi.envs import make_env_factory
from rayagi.envs.errors import EnvironmentOptionError, ModelError
from rayagi.envs.tasks.provider import TASKS
from rayagi.envs.tasks.task import MODELS

wp = pytest.importorskip("warp", reason="the extra 'gpu' is not installed: nothing of mujoco_warp was tested")
pytest.importorskip(
    "mujoco_warp", reason="the extra 'gpu' is not installed: nothing of mujoco_warp was tested"
)

from warp_beside_cpu import make_env, same_state  # noqa: E402

# Warp compiles each model's kernels for the CPU at first use, up to a minute for a task.
pytestmark = pytest.mark.timeout(900)
ANT = "rayagi/Ant-v0"


def actions_for(env, generator):
    return 2.0 * torch.rand((env.num_envs, env.info.action.dim), generator=generator) - 1.0


def assert_near(found, expected, tolerance, what):
    """Within ``tolerance``, of one or of the value where that is more."""
    error = ((found - expected).abs() / expected.abs().clamp(min=1.0)).max()
    assert error < tolerance, f"{what}: {error:.1e}"


# qpos, observation, reward; of a value, or of one where that is more. An observation may hold forces: of contacts, loads.
ONE_STEP = (1e-5, 3e-3, 3e-5)
TWENTY = {
    "rayagi/Ant-v0": (3e-5, 1e-3, 1e-4),
    "rayagi/Anymal-v0": (3e-5, 1e-4, 1e-4),
    "rayagi/BallBalance-v0": (1e-5, 1e-3, 1e-5),
    "rayagi/FrankaCabinet-v0": (1e-6, 2e-6, 2e-6),  # touches nothing with random actions
    "rayagi/Humanoid-v0": (5e-5, 5e-3, 3e-4),
    "rayagi/ShadowHand-v0": (3e-4, 5e-3, 2e-4),  # the cube lies on many contacts at once
}


@pytest.mark.parametrize(
    "env_id",
    [pytest.param(task, marks=() if task == "rayagi/Ant-v0" else pytest.mark.slow) for task in TASKS],
)
def test_both_engines_have_the_same_dynamics(env_id):
    """20 steps of two substeps or more from 12 random states: new episodes, and 15 and 55 steps later, on the ground. First
    each step from the same state, then all on their own.
    """
    here, there = (make_env(env_id, engine, 4) for engine in ("mujoco_warp", "mujoco_cpu"))
    generator = torch.Generator().manual_seed(5)
    assert_near(here.reset(), there.reset(), 1e-4, "first observation")
    for led, tolerances in ((True, ONE_STEP), (False, TWENTY[env_id])):
        for warm_up in (0, 15, 40):
            for _ in range(warm_up):
                there.step(actions_for(there, generator))
            same_state(there, here)
            for step in range(20):
                if led:
                    same_state(there, here)
                actions = actions_for(there, generator)
                found, expected = here.step(actions), there.step(actions)
                for what, one, other, tolerance in (
                    ("qpos", here.fields["qpos"], there.fields["qpos"], tolerances[0]),
                    ("obs", found.obs, expected.obs, tolerances[1]),
                    ("rewards", found.rewards, expected.rewards, tolerances[2]),
                ):
                    assert_near(one, other, tolerance, f"{env_id}, led {led}, {warm_up} + {step}, {what}")
                assert torch.equal(found.terminated, expected.terminated)
    assert set(here.sim_errors.values()) == set(there.sim_errors.values()) == {0}


def test_fields_are_the_engines_own_memory_in_mujocos_shapes():
    here, there = (make_env(ANT, engine, 3)._worlds for engine in ("mujoco_warp", "mujoco_cpu"))
    for name, values in there.fields.items():
        assert here.fields[name].shape == values.shape, name
        assert here.fields[name].data_ptr() == getattr(here._data, name).ptr


def masked_and_indexed(num_envs=3):
    """Two like environments in which one episode of each ends after 2, 4 and 6 steps."""
    envs = [make_env(ANT, "mujoco_warp", num_envs) for _ in range(2)]
    for env in envs:
        env._limit = 6
        env.reset()
        env._elapsed += torch.tensor([4, 2, 0])
    return envs


def test_steps_by_masks_are_those_by_indices_to_the_last_bit():
    masked, indexed = masked_and_indexed()
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        actions = actions_for(indexed, generator)
        found, expected = masked.advance(actions), indexed.step(actions)
        assert torch.equal(masked.current_obs, expected.obs), step
        assert torch.equal(found.rewards, expected.rewards)
        assert torch.equal(found.truncated, expected.truncated)
        assert torch.equal(found.final_obs[expected.final_ids], expected.final_obs)
    assert indexed._episode.tolist() == masked._episode.tolist() == [2, 1, 1]


def test_masked_steps_update_tensors_in_place():
    env = masked_and_indexed()[0]
    tensors = [env._actions, env._obs, env._elapsed, env._episode, *env._memory.values()]
    places = [tensor.data_ptr() for tensor in tensors]
    saved = env.state_dict()
    for _ in range(3):
        env.advance(torch.ones(3, 8))
    env.load_state_dict(saved)
    now = [env._actions, env._obs, env._elapsed, env._episode, *env._memory.values()]
    assert [tensor.data_ptr() for tensor in now] == places
    assert torch.equal(env._elapsed, torch.tensor([4, 2, 0]))


def test_a_restart_leaves_the_other_worlds_as_they_are():
    env = make_env(ANT, "mujoco_warp", 3)
    env.reset()
    env.step(torch.ones(3, 8))
    worlds = env._worlds
    before = {name: worlds.fields[name].clone() for name in ("qpos", "qvel")}
    warm = wp.to_torch(worlds._data.qacc_warmstart).clone()
    worlds.restart(
        torch.tensor([1]), before["qpos"][:1] + 1.0, torch.zeros(1, worlds.fields["qvel"].shape[1])
    )
    others = torch.tensor([0, 2])
    for name, values in before.items():
        assert torch.equal(worlds.fields[name][others], values[others])
    assert torch.equal(wp.to_torch(worlds._data.qacc_warmstart)[others], warm[others])
    assert torch.equal(worlds.fields["qpos"][1], before["qpos"][0] + 1.0)


def small_capacity(tmp_path, size):
    """Ant's model with the capacity of ``size``."""
    path = tmp_path / "ant.xml"
    text = (MODELS / "ant.xml").read_text()
    path.write_text(text.replace("<option", f"<size {size}/>\n  <option", 1))
    return str(path)


@pytest.mark.parametrize(
    ("size", "fault"),
    [
        ('nconmax="1"', "contact overflow"),
        pytest.param('njmax="2"', "constraint overflow", marks=pytest.mark.slow),
    ],
)
def test_an_overflow_of_the_capacity_is_counted_and_the_world_reset(tmp_path, size, fault):
    env = make_env(ANT, "mujoco_warp", 2, xml_file=small_capacity(tmp_path, size))
    env.reset()
    ended = sum(env.step(torch.zeros(2, 8)).terminated.sum() for _ in range(40))
    assert env.sim_errors[fault] > 0
    assert ended == sum(env.sim_errors.values())


def test_the_capacity_is_measured_with_a_margin_or_given_by_the_model(tmp_path):
    from rayagi.envs.mujoco_warp.capacity import measured

    found = measured(TASKS[ANT](), TASKS[ANT]().load())
    # An ant on its four feet and its belly has 5 contacts of 4 rows, and 8 joint limits.
    assert 8 <= found.contacts <= 32
    assert 4 * found.contacts < found.constraints <= 160
    small = TASKS[ANT](xml_file=small_capacity(tmp_path, 'nconmax="7" njmax="70"'))
    given = measured(small, small.load())
    assert (given.contacts, given.constraints) == (7, 70)


def test_memory_is_estimated_before_allocation():
    from rayagi.envs.mujoco_warp.capacity import _bytes, bytes_per_world, measured

    worlds = make_env(ANT, "mujoco_warp", 64)._worlds
    model = TASKS[ANT]().load()
    estimated, used = bytes_per_world(model, measured(TASKS[ANT](), model)), _bytes(worlds._data) / 64
    assert used <= estimated <= 2 * used


def test_a_restored_state_continues_bit_identically():
    env, resumed = make_env(ANT, "mujoco_warp", 2), make_env(ANT, "mujoco_warp", 2)
    env.reset(), resumed.reset()
    for _ in range(3):
        env.step(torch.ones(2, 8))
    resumed.load_state_dict(env.state_dict())
    for _ in range(3):
        assert torch.equal(env.step(-torch.ones(2, 8)).obs, resumed.step(-torch.ones(2, 8)).obs)


def test_randomised_worlds_are_equal_on_both_engines():
    ranges = {"mass": [0.5, 2.0], "friction": [0.5, 1.5], "gain": [0.9, 1.1], "damping": [0.5, 2.0]}
    here, there = (make_env(ANT, engine, 3, randomize=ranges) for engine in ("mujoco_warp", "mujoco_cpu"))
    here.reset(), there.reset()
    for _ in range(20):
        found, expected = here.step(torch.ones(3, 8)), there.step(torch.ones(3, 8))
        assert_near(here._worlds.fields["qpos"], there._worlds.fields["qpos"], 1e-3, "qpos")
        assert_near(found.obs, expected.obs, 2e-2, "obs")
    plain = make_env(ANT, "mujoco_warp", 3)
    plain.reset()
    for _ in range(20):
        other = plain.step(torch.ones(3, 8))
    assert (other.obs - found.obs).abs().max() > 1e-2


def test_a_model_that_warp_does_not_support_is_rejected(tmp_path):
    path = tmp_path / "ant.xml"
    path.write_text((MODELS / "ant.xml").read_text().replace('solver="Newton"', 'solver="PGS"'))
    with pytest.raises(ModelError, match=r"model ant: mujoco_warp: .*PGS.*unsupported"):
        make_env(ANT, "mujoco_warp", 1, xml_file=str(path))


def test_without_the_extra_the_message_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "rayagi.envs.providers.find_spec", lambda name: None if name == "mujoco_warp" else real(name)
    )
    with pytest.raises(
        EnvironmentOptionError, match=r"needs the package mujoco_warp: pip install 'rayagi\[gpu\]'"
    ):
        make_env_factory(ANT, engine="mujoco_warp")


def test_random_numbers_are_equal_on_both_engines():
    here, there = (make_env(ANT, engine, 2, first=5) for engine in ("mujoco_warp", "mujoco_cpu"))
    here.reset(), there.reset()
    np.testing.assert_allclose(
        here._worlds.fields["qpos"].numpy(), there._worlds.fields["qpos"].numpy(), atol=1e-6
    )


def test_kernels_compiled_beforehand_are_taken_with_any_driver():
    """Without a GPU they are compiled to cubins; one whose driver is as new as Warp's toolkit would look for PTX."""
    make_env(ANT, "mujoco_warp", 1)
    versions = SimpleNamespace(driver_version=(14, 0), toolkit_version=(13, 4))
    hopper = SimpleNamespace(is_cpu=False, is_cubin_supported=True, runtime=versions)
    assert type(wp.get_device("cpu")).get_cuda_output_format(hopper) == "cubin"
