"""PufferLib's PuffeRL with EnvPool as a native PufferEnv."""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pufferlib
import pufferlib.vector
import torch
from pufferlib import pufferl
from torch import nn

from experiments.peers.common import (
    BATCH,
    ENVS,
    EPOCHS,
    MINIBATCH,
    STEPS,
    Meter,
    Pool,
    TimeUpError,
    flags,
    network,
)


class PoolEnv(pufferlib.PufferEnv):
    """EnvPool. PuffeRL looks at terminals only."""

    def __init__(self, pool: Pool, buf: Any = None, seed: int = 0) -> None:
        self._pool = pool
        self.single_observation_space, self.single_action_space = pool.observations, pool.actions
        self.num_agents = ENVS
        super().__init__(buf)

    def reset(self, seed=None):
        """All of them."""
        self.observations[:] = self._pool.reset()
        return self.observations, []

    def step(self, actions):
        """Into PufferLib's buffers."""
        obs, rewards, terminated, truncated, _ = self._pool.step(actions)
        self.observations[:], self.rewards[:] = obs, rewards
        self.terminals[:], self.truncations[:] = terminated | truncated, truncated
        return self.observations, self.rewards, self.terminals, self.truncations, []

    def close(self):
        """Nothing to close."""


class Policy(nn.Module):
    """Separate policy and value networks."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.actor, self.critic = network(pool.obs_shape, pool.outputs), network(pool.obs_shape, 1)
        self.log_std = None if pool.is_discrete else nn.Parameter(torch.zeros(1, pool.outputs))

    def forward_eval(self, obs, state=None):
        """Distribution and values."""
        mean = self.actor(obs)
        if self.log_std is None:
            return mean, self.critic(obs)
        return torch.distributions.Normal(mean, self.log_std.expand_as(mean).exp()), self.critic(obs)

    forward = forward_eval


def settings(seed: int, folder: str) -> dict[str, Any]:
    """PuffeRL's."""
    return {
        "env": "pool", "seed": seed, "torch_deterministic": True, "cpu_offload": False, "device": "cpu",
        "optimizer": "adam", "anneal_lr": False, "precision": "float32", "total_timesteps": 10**9,
        "learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95, "update_epochs": EPOCHS, "clip_coef": 0.2,
        "vf_coef": 1.0, "vf_clip_coef": 1e9, "max_grad_norm": 0.5, "ent_coef": 0.0, "adam_beta1": 0.9,
        "adam_beta2": 0.999, "adam_eps": 1e-8, "data_dir": folder, "checkpoint_interval": 10**9,
        "batch_size": BATCH, "minibatch_size": MINIBATCH, "max_minibatch_size": MINIBATCH, "bptt_horizon": STEPS,
        "compile": False, "compile_mode": "default", "compile_fullgraph": True, "vtrace_rho_clip": 1.0,
        "vtrace_c_clip": 1.0, "prio_alpha": 0.0, "prio_beta0": 0.0, "use_rnn": False,
    }  # fmt: skip


def main() -> None:
    """Command line."""
    given = flags("PufferLib")
    made = Path("resources")  # a link to its files, which PufferLib puts wherever it is imported
    if made.is_symlink() and made.readlink() == Path(pufferlib.__path__[0], "resources"):
        made.unlink()
    meter = Meter("pufferlib", given)
    pool = Pool(given, meter)
    env = pufferlib.vector.make(
        PoolEnv, env_kwargs={"pool": pool}, num_envs=1, backend=pufferlib.vector.Serial, seed=given.seed
    )
    pufferl.PuffeRL.print_dashboard = lambda *_, **__: None
    with tempfile.TemporaryDirectory() as folder:
        trainer = pufferl.PuffeRL(settings(given.seed, folder), env, Policy(pool))
        try:
            while True:
                trainer.evaluate()
                trainer.train()
                meter.iteration(trainer.global_step)
        except TimeUpError:
            pass
    meter.report(
        version("pufferlib"),
        "rewards clamped to [-1, 1] in its code; truncation is termination; advantages recomputed in each minibatch; "
        "a minibatch is 16 segments of 32",
    )
    os._exit(0)  # its thread that watches the machine never ends


if __name__ == "__main__":
    main()
