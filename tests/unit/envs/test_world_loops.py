"""The Python and the compiled WorldLoop."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch

from collectives import compiler, kernels
from collectives.compiler import CompilerError
from rayagi.envs import make_env_factory
from rayagi.envs.mujoco_cpu import contact_physics
from rayagi.envs.mujoco_cpu.contact_physics import ContactPhysics
from rayagi.envs.mujoco_cpu.physics import PythonLoop, WorldBatch, WorldError
from rayagi.native import worlds as compiled
from rayagi.native.worlds import CompiledLoop

NUM_ENVS = 5
BALL = """
<mujoco>
  <size memory="{memory}"/>
  <worldbody>
    <geom type="plane" size="1 1 1"/>
    <body pos="0 0 1"><freejoint/><geom size=".1" mass="1"/></body>
  </worldbody>
</mujoco>
"""


def use(monkeypatch, kind):
    if kind is PythonLoop:
        monkeypatch.setattr(contact_physics, "compiled_loop", lambda worlds: None)


def balls(memory="1M", height=1.0):
    """Three balls; in the second world the ball is at ``height``."""
    model = mujoco.MjModel.from_xml_string(BALL.format(memory=memory))
    physics = ContactPhysics(model, 3, 1, ["qpos", "qvel", "xpos", "cfrc_ext"])
    physics.fields["qpos"][1, 2] = height
    return physics


@pytest.mark.parametrize("env_id", ["Ant-v5", "Humanoid-v5", "HumanoidStandup-v5"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_both_loops_have_the_same_bits(monkeypatch, env_id, num_threads):
    trajectories = []
    for kind in (CompiledLoop, PythonLoop):
        use(monkeypatch, kind)
        env = make_env_factory(env_id)(
            num_envs=NUM_ENVS,
            first_env_index=0,
            seed=3,
            num_threads=num_threads if kind is CompiledLoop else 1,
        )
        assert isinstance(env._physics.loop, kind)
        generator = torch.Generator().manual_seed(5)
        env.reset()
        size = len(env.info.action.low)
        trajectories.append(
            [env.step(2 * torch.rand(NUM_ENVS, size, generator=generator) - 1) for _ in range(60)]
        )
        env.close()
    for one, other in zip(*trajectories, strict=True):
        assert torch.equal(one.obs, other.obs)
        assert torch.equal(one.rewards, other.rewards)
        assert torch.equal(one.final_obs, other.final_obs)


@pytest.mark.parametrize("kind", [CompiledLoop, PythonLoop])
def test_at_most_max_worlds_are_stepped(kind):
    model = mujoco.MjModel.from_xml_string(BALL.format(memory="1M"))
    physics = ContactPhysics(model, 3, 1, ["qpos", "cfrc_ext"])
    worlds = WorldBatch(model, physics.rows, physics._derived, np.zeros(3, dtype=bool))
    loop = PythonLoop(worlds) if kind is PythonLoop else compiled.compiled_loop(worlds)
    data = mujoco.MjData(model)
    for _ in range(2):
        before = physics.fields["qpos"][:, 2].copy()
        loop.begin()
        assert loop.run(data, 1, 2)
        assert (physics.fields["qpos"][:, 2] < before).tolist() == [True, True, False]
        assert not loop.run(data, 1, 2)
        assert (physics.fields["qpos"][:, 2] < before).tolist() == [True, True, True]
        assert not loop.run(data, 1, 2)


@pytest.mark.parametrize("kind", [CompiledLoop, PythonLoop])
def test_a_mujoco_error_names_its_world_and_does_not_end_the_process(monkeypatch, kind):
    use(monkeypatch, kind)
    physics = balls(memory="2000", height=0.05)  # too small for a contact
    with pytest.raises(WorldError, match="out of memory, stack overflow") as caught:
        physics.step(np.zeros((3, 0)), 5)
    assert caught.value.world == 1
    # Errors in the mujoco package's own calls are still exceptions.
    with pytest.raises(mujoco.FatalError, match="out of memory"):
        physics.restart(np.array([1]), np.array([[0, 0, 0.05, 1, 0, 0, 0]]), np.zeros((1, 6)))


@pytest.mark.parametrize("kind", [CompiledLoop, PythonLoop])
def test_worlds_are_stepped_again_after_a_mujoco_error(monkeypatch, kind):
    """Whatever the error left: MuJoCo's own stack, and instabilities of other worlds in the same step."""
    use(monkeypatch, kind)
    physics = balls(memory="2000")
    start = physics.state_dict()
    for _ in range(20):
        physics.fields["qvel"][0, 0] = 1e12
        physics.fields["qpos"][1, 2] = 0.05
        with pytest.raises(WorldError, match="out of memory, stack overflow"):
            physics.step(np.zeros((3, 0)), 5)
        physics.load_state_dict(start)
        assert physics.step(np.zeros((3, 0)), 5) is None


@pytest.mark.parametrize("kind", [CompiledLoop, PythonLoop])
def test_each_instability_is_reported_and_the_other_worlds_continue(monkeypatch, kind):
    """With and without restarts in between: MuJoCo zeroes its warning counts when it resets a world."""
    use(monkeypatch, kind)
    physics = balls()
    for restarts in (True, True, False, False):
        height = physics.fields["qpos"][:, 2].copy()
        physics.fields["qvel"][1, 0] = 1e12
        assert physics.step(np.zeros((3, 0)), 1).tolist() == [False, True, False]
        assert (physics.fields["qpos"][[0, 2], 2] < height[[0, 2]]).all()
        if restarts:
            physics.restart(np.arange(3), np.tile([0, 0, 1.0, 1, 0, 0, 0], (3, 1)), np.zeros((3, 6)))
            assert physics.step(np.zeros((3, 0)), 1) is None


def test_without_a_compiler_python_steps_them(monkeypatch, caplog):
    def refuse(program, flags):
        raise CompilerError("no C compiler")

    monkeypatch.setattr(compiler, "_load", refuse)
    compiled._program.cache_clear()
    kernels._log_once.cache_clear()
    caplog.set_level("INFO", logger="rayagi")
    try:
        assert isinstance(balls().loop, PythonLoop)
    finally:
        compiled._program.cache_clear()
    assert "worlds are stepped by Python: no C compiler" in caplog.text
