"""skrl's PPO with EnvPool behind its wrapper."""

from __future__ import annotations

import contextlib

import gymnasium
import skrl
import torch
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import Wrapper
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
from skrl.trainers.torch import SequentialTrainer
from torch import nn

from experiments.peers.common import (
    ENVS,
    EPOCHS,
    MINIBATCHES,
    STEPS,
    Meter,
    Pool,
    TimeUpError,
    flags,
    network,
)


class PoolWrapper(Wrapper):
    """EnvPool."""

    num_envs, num_agents, state_space = ENVS, 1, None
    device = torch.device("cpu")
    observation_space, action_space = gymnasium.spaces.Space(), gymnasium.spaces.Space()

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.observation_space, self.action_space = pool.observations, pool.actions

    def reset(self):
        """All of them."""
        return torch.as_tensor(self.pool.reset()).flatten(1).float(), {}

    def step(self, actions):
        """Columns, as skrl wants them."""
        obs, *columns = (torch.as_tensor(each) for each in self.pool.step(actions.numpy())[:4])
        return obs.flatten(1).float(), *(column[:, None] for column in columns), {}

    def state(self):
        """None."""

    def render(self, *_, **__):
        """Nothing to render."""

    def close(self):
        """Nothing to close."""


class PoolModel(Model):
    """A network of the pool's observations."""

    def __init__(self, env: PoolWrapper) -> None:
        spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
        super().__init__(**spaces, device=env.device)


class Normals(GaussianMixin, PoolModel):
    """A normal distribution with a learned deviation."""

    def __init__(self, env: PoolWrapper) -> None:
        PoolModel.__init__(self, env)
        GaussianMixin.__init__(self, clip_actions=False, reduction="sum", role="policy")
        self.net = network(env.pool.obs_shape, env.pool.outputs)
        self.log_std = nn.Parameter(torch.zeros(env.pool.outputs))

    def compute(self, inputs, role=""):
        """Mean and log of the deviation."""
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Choices(CategoricalMixin, PoolModel):
    """One of several actions."""

    def __init__(self, env: PoolWrapper) -> None:
        PoolModel.__init__(self, env)
        CategoricalMixin.__init__(self, role="policy")
        self.net = network(env.pool.obs_shape, env.pool.outputs)

    def compute(self, inputs, role=""):
        """Logits."""
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, PoolModel):
    """The value network."""

    def __init__(self, env: PoolWrapper) -> None:
        PoolModel.__init__(self, env)
        DeterministicMixin.__init__(self, clip_actions=False, role="value")
        self.net = network(env.pool.obs_shape, 1)

    def compute(self, inputs, role=""):
        """Values."""
        return self.net(inputs["observations"]), {}


class Clocked(PPO):
    """Ends training when the time is up."""

    def __init__(self, meter: Meter, pool: Pool, **kwargs) -> None:
        super().__init__(**kwargs)
        self._meter, self._pool = meter, pool

    def update(self, **kwargs):
        """An iteration's."""
        super().update(**kwargs)
        self._meter.iteration(self._pool.steps)


def settings() -> PPO_CFG:
    """skrl's."""
    found = PPO_CFG(
        rollouts=STEPS,
        learning_epochs=EPOCHS,
        mini_batches=MINIBATCHES,
        discount_factor=0.99,
        gae_lambda=0.95,
        learning_rate=3e-4,
        grad_norm_clip=0.5,
        ratio_clip=0.2,
        value_clip=0.0,
        entropy_loss_scale=0.0,
        value_loss_scale=0.5,
        time_limit_bootstrap=True,
    )
    found.experiment.write_interval = found.experiment.checkpoint_interval = 0
    return found


def main() -> None:
    """Command line."""
    given = flags("skrl")
    meter = Meter("skrl", given)
    env = PoolWrapper(Pool(given, meter))
    policy = Choices(env) if env.pool.is_discrete else Normals(env)
    agent = Clocked(
        meter,
        env.pool,
        models={"policy": policy, "value": Value(env)},
        memory=RandomMemory(memory_size=STEPS, num_envs=ENVS, device=env.device),
        cfg=settings(),
        observation_space=env.observation_space,
        state_space=None,
        action_space=env.action_space,
        device=env.device,
    )
    trainer = SequentialTrainer(
        cfg={"timesteps": 10**8, "headless": True, "disable_progressbar": True}, env=env, agents=agent
    )
    with contextlib.suppress(TimeUpError):
        trainer.train()
    meter.report(
        skrl.__version__,
        "time limits are bootstrapped from the observation after the reset; advantages normalised over the iteration",
    )


if __name__ == "__main__":
    main()
