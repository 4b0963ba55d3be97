"""Agents and trainers as processes: real networks and updates, a made-up simulator."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from experiments.channels_table8.shapes import Size
from experiments.channels_table8.ways import make_receiver, make_sender
from rayagi.config.spec import NetworkSpec
from rayagi.models.networks import ActorCritic

GAMMA, LEARNING_RATE, ENTROPY_WEIGHT = 0.99, 7e-4, 0.01
DONE_SHARE = 0.01


def run_agent(size: Size, way: str, number: int, endpoints: tuple[str, ...], counts: Any, stop: Any) -> None:
    """Acts until stopped. ``counts``: per agent its predictions, one per environment and step, and its CPU seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    network = ActorCritic(size.task.info(), NetworkSpec())
    sender = make_sender(way, size, number, endpoints)
    bank = torch.randn(64, size.envs, size.task.obs_dim)
    noises = torch.randn(64, size.envs, size.task.act_dim)
    dones = torch.rand(64, size.envs) < DONE_SHARE
    obs, turn = bank[0].clone(), 0
    with torch.inference_mode():
        while not stop.is_set():
            sender.begin()
            for step in range(size.steps):
                turn = (turn + 1) % len(bank)
                outputs = network.policy(obs)
                actions = network.head.sample(outputs, noises[turn])
                packages = {
                    "obs": obs,
                    "actions": actions,
                    "log_probs": network.head.log_prob(outputs, actions),
                    "rewards": obs[:, 0],
                    "dones": dones[turn],
                }
                sender.step(step, packages)
                obs = torch.lerp(obs, bank[turn], 0.1)
                counts[2 * number] += size.envs
            sender.end(obs)
            counts[2 * number + 1] = time.process_time()


def run_trainer(
    size: Size,
    way: str,
    learn: bool,
    window: tuple[float, float],
    connection: Any,
    counts: Any,
    producers: list[int],
) -> None:
    """Says where its inboxes are; then trains, and tells what was done within the window.

    Args:
        size: of a rollout
        way: of ``WAYS``
        learn: whether each rollout is an update; else it is only read
        window: seconds of warming up, and of measuring
        connection: to the parent
        counts: see ``run_agent``
        producers: the agents whose experience comes here
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = ActorCritic(size.task.info(), NetworkSpec())
    optimizer = torch.optim.RMSprop(network.parameters(), lr=LEARNING_RATE)
    receiver = make_receiver(way, size)
    connection.send(receiver.endpoints)
    samples = 0

    def train_until(end_s: float) -> None:
        nonlocal samples
        while time.perf_counter() < end_s:
            rollout = receiver.next()
            if learn:
                update(network, optimizer, rollout)
            else:
                for tensor in rollout.values():
                    tensor.sum()
                del tensor
            del rollout
            receiver.release()
            samples += size.envs * size.steps

    rollout = receiver.next()  # everyone is here
    del rollout
    receiver.release()
    train_until(time.perf_counter() + window[0])

    def counted() -> tuple[float, float, float]:
        predicted, cpu_s = (sum(counts[2 * agent + which] for agent in producers) for which in (0, 1))
        return time.perf_counter(), predicted, cpu_s + time.process_time()

    before, samples = counted(), 0
    train_until(before[0] + window[1])
    taken_s, predicted, cpu_s = (now - then for now, then in zip(counted(), before, strict=True))
    connection.send(
        {"ttp": samples / taken_s, "pps": predicted / taken_s, "samples": samples, "cpu_s": cpu_s}
    )
    connection.recv()  # until the agents have stopped
    connection.close()


def measure_compute(size: Size, learn: bool, seconds: float) -> float:
    """CPU seconds that a rollout takes of an agent and a trainer between whom nothing is moved: the median of several.

    What a way adds to it is all that another way can save.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = ActorCritic(size.task.info(), NetworkSpec())
    optimizer = torch.optim.RMSprop(network.parameters(), lr=LEARNING_RATE)
    obs, noises = torch.randn(size.envs, size.task.obs_dim), torch.randn(size.envs, size.task.act_dim)
    rollout = {
        field.name: torch.zeros((size.envs, *field.shape), dtype=field.dtype)
        for field in size.schema().fields
    }
    rollout["obs"].normal_()
    taken: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        started = time.process_time()
        with torch.inference_mode():
            for _ in range(size.steps):
                outputs = network.policy(obs)
                network.head.log_prob(outputs, network.head.sample(outputs, noises))
        if learn:
            update(network, optimizer, rollout)
        else:
            for tensor in rollout.values():
                tensor.sum()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


def update(network: ActorCritic, optimizer: torch.optim.Optimizer, rollout: dict[str, Tensor]) -> None:
    """One step of advantage actor-critic with n-step returns (Mnih et al. 2016), n = the rollout's length."""
    obs, dones = rollout["obs"], rollout["dones"]
    with torch.no_grad():
        running = network.values(rollout["last_obs"])
        returns = torch.empty(rollout["rewards"].shape)
        for step in reversed(range(obs.shape[1])):
            running = rollout["rewards"][:, step] + GAMMA * running * ~dones[:, step]
            returns[:, step] = running
    outputs, values = network.policy(obs), network.values(obs)
    advantages = returns - values
    log_probs = network.head.log_prob(outputs, rollout["actions"])
    loss = (
        -(log_probs * advantages.detach()).mean()
        + 0.5 * advantages.square().mean()
        - ENTROPY_WEIGHT * network.head.entropy(outputs)
    )
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
