"""The peers' settings as a RunSpec: 64 environments x 32 steps, 4 epochs x 4 minibatches of 512."""

from __future__ import annotations

from experiments.peers import PIXELS
from experiments.peers.common import HIDDEN, IMAGE_HIDDEN
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec

TOTAL_ENVS, ROLLOUT_LENGTH = 64, 32


def run_spec(num_gmis: int, threads_per_gmi: int, seed: int = 1, task: str = "Ant-v5") -> RunSpec:
    """64 environments spread over ``num_gmis``; everything else as in every peer."""
    if task == PIXELS:
        env, hidden = EnvSpec(id=task, engine="envpool"), IMAGE_HIDDEN
    else:
        env, hidden = EnvSpec(id=task), HIDDEN
    return RunSpec(
        env=env,
        gmi=GmiSpec(
            backend="cpu", num_gmis=num_gmis, num_envs=TOTAL_ENVS // num_gmis, threads_per_gmi=threads_per_gmi
        ),
        network=NetworkSpec(hidden=hidden, activation="elu", initial_log_std=0.0),
        learning=PPOSpec(
            rollout_length=ROLLOUT_LENGTH,
            num_epochs=4,
            num_minibatches=4,
            gamma=0.99,
            gae_lambda=0.95,
            clip_ratio=0.2,
            value_coef=0.5,
            entropy_coef=0.0,
            learning_rate=3e-4,
            max_grad_norm=0.5,
            normalize_obs=False,
            normalize_rewards=False,
        ),
        seed=seed,
    )
