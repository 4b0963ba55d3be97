"""UniLab's task in rayagi, on a robot of the same names, and the table beside UniLab."""

import math

import pytest
import torch

from experiments.peers.go2 import LEGS, STANDING, Go2
from experiments.peers.unilab import table
from rayagi.envs.tasks.task import State

LEG = """
<body name="{leg}" pos="0 0 0">
  <joint name="{leg}_hip_joint" axis="1 0 0"/><geom size=".02"/>
  <body><joint name="{leg}_thigh_joint"/><geom size=".02"/>
    <body pos="0 0 -.2"><joint name="{leg}_calf_joint"/><geom name="{leg}" pos="0 0 -.2" size=".022"/></body>
  </body>
</body>"""
ACTUATOR = '<position name="{leg}_{part}" joint="{leg}_{part}_joint" kp="35"/>'
SENSORS = (
    '<contact name="{leg}_foot_contact" geom1="floor" geom2="{leg}" data="found" num="1" reduce="mindist"/>'
    '<framepos name="{leg}_pos" objtype="geom" objname="{leg}"/>'
)
MODEL = f"""
<mujoco>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 .1"/>
    <body name="base"><freejoint/><geom size=".1" mass="5"/><site name="imu"/>
      {"".join(LEG.format(leg=leg) for leg in LEGS)}
    </body>
  </worldbody>
  <actuator>{"".join(ACTUATOR.format(leg=leg, part=part) for leg in LEGS for part in ("hip", "thigh", "calf"))}</actuator>
  <sensor>
    <gyro name="gyro" site="imu"/><velocimeter name="local_linvel" site="imu"/>
    <framezaxis name="upvector" objtype="site" objname="imu"/>{"".join(SENSORS.format(leg=leg) for leg in LEGS)}
  </sensor>
  <keyframe><key qpos="0 0 .3 1 0 0 0 {" ".join(map(str, STANDING))}"/></keyframe>
</mujoco>"""


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "robot.xml"
    path.write_text(MODEL)
    task = Go2(xml_file=str(path))
    return task.rules(task.load(), device=torch.device("cpu"), dtype=torch.float64)


def state_of(rules, *, upright=1.0, velocity=(0.0, 0.0, 0.0), time=0.0):
    """Two worlds in the keyframe's pose; the command is 0.5 m/s ahead, in the first one."""
    model = rules.model
    sensed = torch.zeros(2, model.nsensordata, dtype=torch.float64)
    sensed[:, rules.up] = torch.tensor([0.0, 0.0, upright], dtype=torch.float64)
    sensed[:, rules.velocity] = torch.tensor(velocity, dtype=torch.float64)
    fields = {
        "qpos": torch.tensor(model.key_qpos[0]).repeat(2, 1),
        "qvel": torch.zeros(2, model.nv, dtype=torch.float64),
        "sensordata": sensed,
    }
    memory = {
        "command": torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64),
        "time": torch.full((2, 1), time, dtype=torch.float64),
        "before": torch.zeros(2, 12, dtype=torch.float64),
    }
    return State(fields, memory, torch.zeros(2, 12, dtype=torch.float64), torch.zeros(2, 0))


def test_observations_have_unilabs_parts(rules):
    observed = rules.observe(state_of(rules))
    assert observed.shape == (2, 49)
    assert observed[0, 3:6].tolist() == [0, 0, -1]  # gravity
    assert observed[0, 6:42].abs().max() == 0  # joints in the pose, at rest, without actions
    assert observed[0, 42:45].tolist() == [0.5, 0, 0]
    assert observed[0, 45:].tolist() == pytest.approx([1, -1, -1, 1])  # a trot: diagonal legs together


def test_the_reward_is_the_sum_of_unilabs_terms_by_hand(rules):
    outcome = rules.reward_and_done(state_of(rules, velocity=(0.5, 0.0, 0.1)))
    # In the first world both commands are met, in the second one the speed is 0.5 m/s off. Vertical velocity -5 * 0.01.
    # No foot touches: right for none of the four, which all should stand (phases 0 and 0.5, stance to 0.6).
    met, off = 1 + 0.2 - 0.05, math.exp(-0.25 / 0.5) + 0.2 - 0.05
    assert outcome.rewards.tolist() == pytest.approx([0.02 * met, 0.02 * off])
    # A quarter of a second later the legs have changed places.
    later = rules.reward_and_done(state_of(rules, velocity=(0.5, 0.0, 0.1), time=0.35))
    # Phases 0.7 and 0.2: two legs swing, right as they do not touch; their height is 0, and 0.1 is wanted: 2 exp(-1) of 4.
    assert later.rewards[0].item() == pytest.approx(0.02 * (met + 2 * 0.24 + 4 * 2 * math.exp(-1)))


@pytest.mark.parametrize(("upright", "fallen"), [(0.51, False), (0.49, True)])
def test_an_episode_ends_at_60_degrees(rules, upright, fallen):
    assert rules.reward_and_done(state_of(rules, upright=upright)).terminated.tolist() == [fallen, fallen]


def test_the_table_is_of_ratios_within_a_repeat():
    rates = {"unilab": (100.0, 200.0), "rayagi-1x2": (300.0, 400.0), "rayagi-2x1": (150.0, 100.0)}
    rows = [
        {"case": case, "repeat": repeat, "steps_per_s": rate}
        for case, both in rates.items()
        for repeat, rate in enumerate(both)
    ]
    assert table(rows).splitlines()[3:] == [
        "| rayagi-1x2 | 350 (300 - 400) | 2.50 (2.00 - 3.00) |",
        "| rayagi-2x1 | 125 (100 - 150) | 1.00 (0.50 - 1.50) |",
    ]
