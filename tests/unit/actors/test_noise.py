"""Noise and minibatch order belong to environments, not to GMIs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rollout import (
    environment_generator,
    environment_generators,
    epsilon_greedy_noise,
    exploration_noise,
    minibatch_orders,
)


def noise(first, count, **change):
    arguments = {"seed": 7, "iteration": 3, "num_steps": 5, "dim": 2, "gumbel": False} | change
    return exploration_noise(first_env_index=first, num_envs=count, **arguments)


def test_four_environments_draw_the_same_noise_on_one_gmi_or_two():
    assert torch.equal(noise(0, 4), torch.cat([noise(0, 2), noise(2, 2)], dim=1))


def test_an_environment_s_generator_is_philox_at_its_own_key_and_counter():
    """Whoever came before: two draw normal numbers, which leaves half a block, and single floats."""
    for index, generator in zip((4, 9, 4), environment_generators(7, (4, 9, 4), "order", 3), strict=True):
        philox = np.random.Philox(
            key=np.array([7, index], dtype=np.uint64), counter=np.array([0, 0, 2, 3], dtype=np.uint64)
        )
        expected = np.random.Generator(philox)
        assert generator.standard_normal(3).tolist() == expected.standard_normal(3).tolist()
        assert generator.random(5, dtype=np.float32).tolist() == expected.random(5, dtype=np.float32).tolist()


def test_noise_differs_between_iterations_seeds_and_environments():
    base = noise(0, 2)
    assert not torch.equal(base, noise(0, 2, iteration=4))
    assert not torch.equal(base, noise(0, 2, seed=8))
    assert not torch.equal(base[:, 0], base[:, 1])


def test_noise_is_standard_normal_or_gumbel():
    normal = noise(0, 8, num_steps=4000)
    assert normal.mean().item() == pytest.approx(0.0, abs=0.02)
    assert normal.std().item() == pytest.approx(1.0, abs=0.02)
    gumbel = noise(0, 8, num_steps=4000, gumbel=True)
    assert gumbel.mean().item() == pytest.approx(0.5772, abs=0.03)  # Euler's constant


@given(
    envs=st.integers(1, 5), share=st.integers(1, 4), minibatches=st.integers(1, 4), epochs=st.integers(1, 3)
)
@settings(max_examples=40, deadline=None)
def test_every_sample_is_in_exactly_one_minibatch_of_each_epoch(envs, share, minibatches, epochs):
    orders = minibatch_orders(
        seed=1, first_env_index=0, num_envs=envs, iteration=0, num_steps=share * minibatches,
        num_epochs=epochs, num_minibatches=minibatches,
    )  # fmt: skip
    assert orders.shape == (epochs, minibatches, share * envs)
    for epoch in orders:
        assert sorted(epoch.flatten().tolist()) == list(range(share * minibatches * envs))


def test_minibatches_hold_the_same_samples_for_every_layout():
    common = {"seed": 5, "iteration": 2, "num_steps": 6, "num_epochs": 2, "num_minibatches": 3}
    whole = minibatch_orders(first_env_index=0, num_envs=4, **common)
    halves = [minibatch_orders(first_env_index=first, num_envs=2, **common) for first in (0, 2)]
    for epoch in range(2):
        for m in range(3):
            expected = {(int(i) // 4, int(i) % 4) for i in whole[epoch, m]}
            found = {(int(i) // 2, int(i) % 2 + 2 * g) for g in range(2) for i in halves[g][epoch, m]}
            assert found == expected


def test_minibatches_that_do_not_divide_the_rollout_are_refused():
    with pytest.raises(
        ValueError,
        match="need a multiple of 2 environments, not 1 from 0",
    ):
        minibatch_orders(
            seed=0, first_env_index=0, num_envs=1, iteration=0, num_steps=6, num_epochs=1, num_minibatches=4
        )


def test_streams_positions_environments_and_seeds_are_apart():
    drawn = {
        float(environment_generator(seed, env, stream, position).random())
        for seed in (0, 1)
        for env in (0, 1)
        for stream in ("reset", "exploration", "order")
        for position in (0, 1)
    }
    assert len(drawn) == 24


def greedy_noise(first=0, envs=4, steps=500, epsilon=0.3, iteration=2):
    return epsilon_greedy_noise(
        seed=7, first_env_index=first, num_envs=envs, iteration=iteration, num_steps=steps, num_choices=3, epsilon=epsilon
    )  # fmt: skip


def test_epsilon_greedy_noise_is_zero_or_decides_for_one_action():
    noise = greedy_noise()
    explores = noise.isinf().any(-1)
    assert noise.isinf().sum(-1).max() == 1
    assert not noise[~explores].any()
    # 2000 draws of probability 0.3, and 600 of a third: within four standard deviations
    assert explores.float().mean().item() == pytest.approx(0.3, abs=0.041)
    chosen = torch.bincount(noise[explores].argmax(-1), minlength=3) / explores.sum()
    assert chosen.tolist() == pytest.approx([1 / 3] * 3, abs=0.078)


def test_epsilon_greedy_noise_belongs_to_the_environment_and_its_ends_are_exact():
    assert torch.equal(greedy_noise(first=2, envs=2), greedy_noise()[:, 2:])
    assert not torch.equal(greedy_noise(iteration=3), greedy_noise())
    assert not greedy_noise(epsilon=0.0).any()
    assert greedy_noise(epsilon=1.0).isinf().any(-1).all()
