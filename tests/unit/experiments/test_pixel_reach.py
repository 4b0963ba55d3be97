"""The pixel task of experiments/pixels: its image shows the state, and its baselines are far apart."""

import numpy as np
import pytest

import rayagi.envs as envs
from experiments.pixels.env import Reach
from experiments.pixels.run import play, straight, uniform


@pytest.fixture
def pixels():
    """The task with images; skipped where this machine cannot draw."""
    try:
        env = envs.render_env("experiments.pixels.env:PixelReach-v0")
    except envs.RenderingError as error:
        pytest.skip(str(error))
    yield env.unwrapped
    env.close()


def centre(channel):
    """Mean row and column of the lit pixels."""
    return np.argwhere(channel > 128).mean(0)


def test_the_image_shows_ball_and_target_where_they_are(pixels):
    vector = Reach(pixels=False)
    for seed in range(5):
        image = pixels.reset(seed=seed)[0]
        x, y, _, _, target_x, target_y = vector.reset(seed=seed)[0]
        assert image.shape == (84, 84, 3)
        assert image[..., 2].max() == 0
        # 84 pixels are 2.2 m; the first row is the largest y.
        for channel, (px, py) in ((1, (x, y)), (0, (target_x, target_y))):
            expected = 42 * (1 - py / 1.1) - 0.5, 42 * (1 + px / 1.1) - 0.5
            if channel == 1 or np.hypot(x - target_x, y - target_y) > 0.25:  # else the ball covers the target
                np.testing.assert_allclose(centre(image[..., channel]), expected, atol=1)


def test_the_image_after_a_step_shows_the_ball_moved(pixels):
    before = pixels.reset(seed=1)[0]
    after = pixels.step(np.array([-1.0, 0.0], np.float32))[0]
    # The velocity approaches 1.5 m/s with a time constant of 0.05 s: 0.15 - 1.5 * 0.05 * (1 - exp(-2)) = 0.085 m in 0.1 s.
    moved = centre(after[..., 1]) - centre(before[..., 1])
    np.testing.assert_allclose(moved, (0, -0.085 * 42 / 1.1), atol=1)


def test_the_reward_is_minus_the_distance_after_the_step():
    env = Reach(pixels=False)
    env.reset(seed=2)
    obs, reward, terminated, truncated, _ = env.step(np.zeros(2, np.float32))
    assert reward == pytest.approx(-np.hypot(obs[0] - obs[4], obs[1] - obs[5]), abs=1e-6)
    assert (terminated, truncated) == (False, False)


def test_going_straight_ends_on_the_target_and_chance_does_not():
    # A point of the plane lies on the target with a probability of about pi 0.12^2 / 1.8^2 = 0.014.
    best, chance = play(straight, 50), play(uniform, 50)
    assert best["on_target"] == 1
    assert best["return"] > -5
    assert chance["on_target"] < 0.1
    # At most sqrt(0.2) * 20 = 9 m of standard deviation in one episode: 1.3 in the mean of 50.
    assert chance["return"] < -15
