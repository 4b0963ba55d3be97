"""Domain randomisation: options, factors, and the resulting simulations."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch

from rayagi.envs import make_env_factory
from rayagi.envs.errors import EnvironmentOptionError
from rayagi.envs.mujoco_cpu.batched_sim import CpuBatchedSim
from rayagi.envs.tasks.provider import TASKS, make_task
from rayagi.envs.tasks.randomisation import QUANTITIES, drawn_factors, varied_fields

RANGES = {"mass": (0.5, 2.0), "friction": (0.5, 1.5), "gain": (0.9, 1.1), "damping": (0.5, 2.0)}


def single_model(factors: dict[str, np.ndarray], world: int) -> mujoco.MjModel:
    """Ant's model with one world's factors, by hand."""
    model = TASKS["rayagi/Ant-v0"]().load()
    model.body_mass *= factors["mass"][world]
    model.body_inertia *= factors["mass"][world]
    model.geom_friction *= factors["friction"][world]
    model.actuator_gainprm *= factors["gain"][world]
    model.actuator_biasprm *= factors["gain"][world]
    model.dof_damping *= factors["damping"][world]
    mujoco.mj_setConst(model, mujoco.MjData(model))
    return model


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([0.8, 1.2], r"randomize is \[0.8, 1.2\]; it must map quantities to ranges"),
        ({"weight": [0.8, 1.2]}, r"no quantity 'weight'; it has mass, friction, gain, damping"),
        ({"mass": [1.2, 0.8]}, r"randomize.mass is \[1.2, 0.8\]; it must be \[low, high\] with 0 < low <= high"),
        ({"mass": [0.0, 1.0]}, "0 < low"),
        ({"mass": 1.5}, "must be"),
        ({"mass": [1.0, float("inf")]}, "both finite"),
        ({"mass": ["a", "b"]}, "must be"),
    ],
)  # fmt: skip
def test_an_invalid_range_is_rejected_by_name(given, reason):
    with pytest.raises(EnvironmentOptionError, match=reason):
        make_env_factory("rayagi/Ant-v0", kwargs={"randomize": given})


def test_factors_lie_in_their_range_and_do_not_depend_on_the_layout():
    whole = drawn_factors(RANGES, seed=7, first=0, num_worlds=1000)
    for name, (low, high) in RANGES.items():
        assert low <= whole[name].min() < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < whole[name].max() <= high
    later = drawn_factors(RANGES, seed=7, first=600, num_worlds=400)
    alone = drawn_factors({"gain": RANGES["gain"]}, seed=7, first=0, num_worlds=1000)
    for name in RANGES:
        assert np.array_equal(later[name], whole[name][600:])
    assert np.array_equal(alone["gain"], whole["gain"])
    assert not np.array_equal(drawn_factors(RANGES, 8, 0, 1000)["mass"], whole["mass"])


def test_every_world_is_simulated_with_its_own_model():
    factors = drawn_factors(RANGES, seed=1, first=0, num_worlds=3)
    task = make_task("rayagi/Ant-v0", {})
    model = task.load()
    worlds = CpuBatchedSim(model, 3, 1, task.fields, factors)
    controls = torch.linspace(-1.0, 1.0, 3 * model.nu, dtype=torch.float64).view(3, -1)
    qpos = torch.from_numpy(model.qpos0).repeat(3, 1)
    worlds.restart(torch.arange(3), qpos, torch.zeros(3, model.nv, dtype=torch.float64))
    for _ in range(50):
        worlds.step(controls, 2)
    for world in range(3):
        own = single_model(factors, world)
        data = mujoco.MjData(own)
        mujoco.mj_forward(own, data)
        data.ctrl[:] = controls[world]
        mujoco.mj_step(own, data, 100)
        np.testing.assert_array_equal(worlds.fields["qpos"][world].numpy(), data.qpos)


def test_varied_fields_are_those_that_differ_with_the_constants_that_follow():
    model = TASKS["rayagi/Ant-v0"]().load()
    fields = varied_fields(model, {"mass": np.array([1.0, 2.0])})
    assert np.allclose(fields["body_mass"], [model.body_mass, 2 * model.body_mass])
    assert np.allclose(fields["body_subtreemass"][1], 2 * model.body_subtreemass)
    # Twice the mass is half the inverse weight, but for the armature of joints, which does not change.
    assert np.allclose(fields["body_invweight0"][1, 1, 0], model.body_invweight0[1, 0] / 2, rtol=0.05)
    assert not {"geom_friction", "dof_damping", "qpos0"} & set(fields)
    assert set(varied_fields(model, {"friction": np.array([2.0])})) == {"geom_friction"}
    assert varied_fields(model, {}) == {}


def test_a_randomised_environment_behaves_alike_in_every_layout():
    factory = make_env_factory("rayagi/Ant-v0", kwargs={"randomize": RANGES})
    whole, part = (
        factory(num_envs=n, first_env_index=first, seed=3, num_threads=1) for n, first in ((4, 0), (2, 2))
    )
    plain = make_env_factory("rayagi/Ant-v0")(num_envs=4, first_env_index=0, seed=3, num_threads=1)
    assert torch.equal(whole.reset()[2:], part.reset())
    plain.reset()
    actions = torch.linspace(-1.0, 1.0, 32).view(4, 8)
    for _ in range(5):
        a, b, c = whole.step(actions), part.step(actions[2:]), plain.step(actions)
        assert torch.equal(a.obs[2:], b.obs)
    assert not torch.allclose(a.obs, c.obs, atol=1e-3)
    for env in (whole, part, plain):
        env.close()


def test_every_quantity_changes_how_a_world_moves():
    for quantity in QUANTITIES:
        factory = make_env_factory("rayagi/Ant-v0", kwargs={"randomize": {quantity: [0.5, 2.0]}})
        varied = factory(num_envs=1, first_env_index=0, seed=3, num_threads=1)
        plain = make_env_factory("rayagi/Ant-v0")(num_envs=1, first_env_index=0, seed=3, num_threads=1)
        varied.reset(), plain.reset()
        for _ in range(30):
            a, b = varied.step(torch.ones(1, 8)), plain.step(torch.ones(1, 8))
        assert not torch.equal(a.obs, b.obs), quantity
