"""Iterations in parts: each operation is the same as in training, and memory is that of whole rollouts."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch

from actors.gmi import GmiContext
from actors.host_memory import peak_bytes, release_free_memory, reset_peak, resident_bytes
from actors.rollout import Rollout
from rayagi.algorithms import gradient_updater
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import GmiSpec, NetworkSpec, RunSpec
from rayagi.coordinator.probe_program import ProbeProgram, _repeated, parts_of
from tests.fakes.point import make_point

MIB = 2**20
SPEC = RunSpec(
    gmi=GmiSpec(num_envs=4),
    network=NetworkSpec(hidden=(16, 8)),
    learning=PPOSpec(rollout_length=32, num_minibatches=4, num_epochs=2),
    seed=3,
)


def build(spec, parts):
    context = GmiContext.local("Point", roles=("trainer",))
    return ProbeProgram(spec, make_point, parts, context)


@pytest.mark.parametrize(
    ("steps", "minibatches", "iteration_s", "parts"),
    [
        (64, 8, 0.2, 1),  # short enough
        (64, 8, 0.9, 4),  # 0.45, 0.225
        (64, 8, 13.0, 8),  # no more than there are minibatches
        (64, 64, 13.0, 8),  # nor so many that fewer than eight steps remain
        (64, 1, 13.0, 1),
        (60, 8, 13.0, 4),  # 60 = 4 * 15
        (64, 6, 13.0, 2),
    ],
)
def test_into_how_many_parts(steps, minibatches, iteration_s, parts):
    spec = replace(SPEC, learning=replace(SPEC.learning, rollout_length=steps, num_minibatches=minibatches))
    assert parts_of(spec, iteration_s, wanted_s=0.25) == parts


@pytest.mark.parametrize("network", [{"core": "gru"}, {"module": "my_net.py:Net"}])
def test_iterations_of_a_network_that_may_have_a_state_are_whole(network):
    spec = replace(SPEC, network=replace(SPEC.network, **network))
    assert parts_of(SPEC, 13.0, wanted_s=0.25) == 4
    assert parts_of(spec, 13.0, wanted_s=0.25) == 1


def test_a_part_has_fewer_minibatches_of_the_same_size(monkeypatch):
    # whole: 32 steps of 4 environments in 4 minibatches of 32; a quarter: 8 steps in one minibatch of 32
    program = build(SPEC, parts=4)
    sizes = []
    update = program.learner.updater.update

    def watched(batch, orders, *rest):
        sizes.append(tuple(orders.shape))
        return update(batch, orders, *rest)

    monkeypatch.setattr(program.learner.updater, "update", watched)
    result = program.iterate()
    assert sizes == [(2, 1, 32)]
    assert result.metrics["env_steps"] == 8 * 4
    program.close()


def test_with_the_first_part_a_whole_rollout_is_prepared(monkeypatch):
    program = build(SPEC, parts=4)
    shapes = []
    prepare = program.learner.prepare

    def watched(rollout):
        shapes.append((rollout.num_steps, rollout.num_envs, [t for t, _, _ in rollout.finals]))
        return prepare(rollout)

    monkeypatch.setattr(program.learner, "prepare", watched)
    program.iterate()
    program.iterate()
    finals = shapes[0][2]
    assert [shape[:2] for shape in shapes] == [(8, 4), (32, 4), (8, 4)]
    assert shapes[1][2] == [part * 8 + t for part in range(4) for t in finals]
    program.close()


def test_a_whole_rollout_of_a_device_has_the_observations_after_every_step():
    program = build(SPEC, parts=4)
    part = Rollout.allocate(8, 4, program.simulator.info, torch.device("cpu"), all_there=True)
    part.final_obs += torch.arange(8.0).view(8, 1, 1)
    whole = _repeated(part, 4)
    assert whole.final_obs[:, 0, 0].tolist() == [*range(8)] * 4
    assert whole.final_obs.shape[1:] == whole.raw_obs.shape[1:]
    program.close()


def test_whole_iterations_are_those_of_training():
    program = build(SPEC, parts=1)
    assert program.iterate().metrics["env_steps"] == 32 * 4
    assert program._whole is None
    program.close()


def memory_held():
    """Bytes that a program of whole iterations and one of quarters hold at most, in this process, which learns by torch."""
    gradient_updater.library = lambda: None  # whose activations do not need much memory
    spec = replace(
        SPEC,
        gmi=GmiSpec(num_envs=1024),
        network=NetworkSpec(hidden=(256, 128)),
        learning=replace(SPEC.learning, num_epochs=1),
    )

    def held(parts):
        release_free_memory()
        before = resident_bytes()
        program = build(spec, parts)
        program.iterate()
        most = program.iterate().metrics["resident_bytes"]
        program.close()
        return most - before

    held(1)  # libraries take what they keep
    return held(1), held(4)


@pytest.mark.slow
def test_parts_hold_at_least_as_much_memory_as_whole_iterations(monkeypatch):
    # The C library raises this limit as it goes, and then keeps what was freed, more or less by chance.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(MIB // 8))
    if not reset_peak() or not peak_bytes():
        pytest.skip("this system does not tell a process's peak")
    # In a process of its own: what other tests left free in this one would be used without showing.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        whole, part = apart.submit(memory_held).result(timeout=120)
    # values of 32,768 states pass through 256 + 128 numbers each: 48 MiB at once
    assert whole > 32 * MIB
    # A part's update takes less than a whole one's, and its own rollout is held beside the whole one.
    assert 0.9 * whole < part < 1.2 * whole
