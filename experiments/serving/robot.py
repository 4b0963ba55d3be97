"""A control loop that asks a policy server: here a Gymnasium environment stands where a robot would.

rayagi policy-server runs/NAME --port 8000
python -m experiments.serving.robot --task InvertedPendulum-v5 --address http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import time

import gymnasium
import numpy as np

from rayagi.serving.client import PolicyClient


def main() -> None:
    """Run some episodes, and say what they were worth and how long the answers took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="InvertedPendulum-v5")
    parser.add_argument("--address", default="http://127.0.0.1:8000")
    parser.add_argument("--token")
    parser.add_argument("--episodes", type=int, default=3)
    arguments = parser.parse_args()
    robot = gymnasium.make(arguments.task)
    waits = []
    with PolicyClient(arguments.address, token=arguments.token) as policy:
        for episode in range(arguments.episodes):
            obs, _ = robot.reset(seed=episode)
            total, done = 0.0, False
            while not done:
                began = time.perf_counter()
                action = policy.act(obs)
                waits.append(time.perf_counter() - began)
                obs, reward, terminated, truncated, _ = robot.step(action)
                total += float(reward)
                done = terminated or truncated
            print(f"episode {episode}: return {total:.1f}")
    p50, p99 = np.percentile(1e3 * np.array(waits), [50, 99])
    print(f"{len(waits)} answers: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    robot.close()


if __name__ == "__main__":
    main()
