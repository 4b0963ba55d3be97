"""Ant-v5 with RLlib's own builder, alone or as a Ray job.

    python experiments/train_ant.py --iterations 50
    ray job submit --working-dir . -- python experiments/train_ant.py --iterations 50

The same file runs on a laptop, where a GMI is a set of cores, and on a cluster.
"""

from __future__ import annotations

import argparse
import time

from rayagi import PPOConfig


def main() -> None:
    """Train and print one line an iteration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="Ant-v5", help="any id of `rayagi envs`")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--gmis", type=int, default=None, help="default: one per core, at most 8")
    parser.add_argument("--num-envs", type=int, default=32, help="environments of one GMI")
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    given = parser.parse_args()
    config = PPOConfig().environment(given.env).gmi(num_envs=given.num_envs).debugging(seed=0)
    if given.gmis is not None:
        config = config.gmi(num_gmis=given.gmis)
    algo = config.build_algo()
    try:
        started = time.perf_counter()
        for _ in range(given.iterations):
            result = algo.train()
            steps = result["num_env_steps_sampled_lifetime"]
            mean = result["env_runners"].get("episode_return_mean", float("nan"))
            rate = steps / (time.perf_counter() - started)
            print(
                f"iteration {result['training_iteration']}: return {mean:.1f}, {steps} steps, {rate:.0f} steps/s",
                flush=True,
            )
        if given.save:
            print(f"saved {algo.save_to_path(given.save)}")
    finally:
        algo.stop()


if __name__ == "__main__":
    main()
