"""Table 8's four ways carry the same experience, and its trainer's update is what it says."""

import pytest
import torch

from experiments.channels_table8.members import GAMMA, update
from experiments.channels_table8.run import summarise
from experiments.channels_table8.shapes import TASKS, Size
from experiments.channels_table8.ways import WAYS, grouped, make_receiver, make_sender, one_per_type
from rayagi.config.spec import NetworkSpec
from rayagi.models.networks import ActorCritic

SIZE = Size(TASKS["FC"], steps=3, envs=4)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_brings_the_rollouts_of_each_agent_whole(way):
    receiver = make_receiver(way, SIZE)
    senders = [make_sender(way, SIZE, producer, receiver.endpoints) for producer in range(2)]
    sent = []
    for sender in senders:
        for _ in range(2):
            rollout = {
                field.name: torch.rand(SIZE.envs, *field.shape).mul(10).to(field.dtype)
                for field in SIZE.schema().fields
            }
            sent.append(rollout)
            sender.begin()
            for step in range(SIZE.steps):
                steps = {name: tensor[:, step] for name, tensor in rollout.items() if name != "last_obs"}
                sender.step(step, steps)
            sender.end(rollout["last_obs"])
    for _ in range(4):
        came = receiver.next()
        (place,) = [place for place, rollout in enumerate(sent) if torch.equal(rollout["obs"], came["obs"])]
        rollout = sent.pop(place)
        assert came.keys() == rollout.keys()
        assert all(torch.equal(came[name], rollout[name]) for name in rollout)
        came = None
        receiver.release()
    assert sent == []


def test_the_plan_is_one_group_and_the_baseline_one_per_type():
    assert [len(group.fields) for group in grouped(SIZE).groups] == [6]
    assert [len(group.fields) for group in one_per_type(SIZE).groups] == [1] * 6


def test_an_update_moves_values_towards_returns(one_torch_thread):
    torch.manual_seed(0)
    network = ActorCritic(SIZE.task.info(), NetworkSpec(hidden=(16,)))
    optimizer = torch.optim.RMSprop(network.parameters(), lr=2e-2)
    rollout = {
        field.name: torch.zeros(SIZE.envs, *field.shape, dtype=field.dtype) for field in SIZE.schema().fields
    }
    rollout["obs"].fill_(0.5)
    rollout["rewards"].fill_(1.0)
    rollout["dones"][:, -1] = True  # returns 1 + 0.99 + 0.9801, 1.99, 1
    wanted = torch.tensor([1 + GAMMA + GAMMA**2, 1 + GAMMA, 1.0]).mean()
    for _ in range(60):
        update(network, optimizer, rollout)
    assert network.values(rollout["obs"]).mean().item() == pytest.approx(wanted.item(), abs=0.1)


def test_the_summary_compares_within_a_repeat():
    case = {"task": "AY", "steps": 16, "envs": 64, "agents": 2, "trainers": 1, "work": "A3C"}
    rows = [
        {**case, "way": way, "repeat": repeat, "pps": 10.0, "ttp": ttp, "per_cpu_s": 5.0, "bound": 1.25}
        for repeat, found in enumerate([(50.0, 100.0), (40.0, 60.0), (50.0, 90.0)])
        for way, ttp in zip(("uni, per step", "multi"), found, strict=True)
    ]
    # gains in TTP 2, 1.5, 1.8
    ttp = "50 | 1.80 | 1.50 - 2.00"
    assert (
        f"| uni, per step | 10 | 1.00 | 1.00 - 1.00 | {ttp} | 5 | 1.00 | 1.00 - 1.00 | 1.25 |"
        in summarise(rows)
    )
