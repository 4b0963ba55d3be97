"""TorchRL's PPO, put together as its examples do: Collector, GAE, ClipPPOLoss and a replay buffer, on EnvPool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
import torchrl
from tensordict import TensorDict
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import (
    Bounded,
    Categorical,
    Composite,
    LazyTensorStorage,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import EnvBase, ExplorationType
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from experiments.peers.common import (
    BATCH,
    ENVS,
    EPOCHS,
    MINIBATCH,
    MINIBATCHES,
    Meter,
    Pool,
    TimeUpError,
    flags,
    network,
)

SIZE = torch.Size([ENVS])


class PoolEnv(EnvBase):
    """EnvPool. A step ends with the episode's last observation, and TorchRL then asks for a reset, which has been made."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(device="cpu", batch_size=SIZE)
        self.pool, self._next = pool, np.zeros((0, 0), np.float32)
        dtype = torch.uint8 if pool.is_image else torch.float32
        self.observation_spec = Composite(
            observation=Unbounded((ENVS, *pool.obs_shape), dtype=dtype), shape=SIZE
        )
        self.action_spec = (
            Categorical(pool.outputs, shape=(ENVS,))
            if pool.is_discrete
            else Bounded(-1, 1, shape=(ENVS, pool.outputs), dtype=torch.float32)
        )
        self.reward_spec = Unbounded((ENVS, 1))
        flag = {
            name: Categorical(2, shape=(ENVS, 1), dtype=torch.bool)
            for name in ("done", "terminated", "truncated")
        }
        self.full_done_spec = Composite(**flag, shape=SIZE)

    def _reset(self, tensordict=None, **_):
        if not len(self._next):
            self._next = self.pool.reset()
        no = torch.zeros(ENVS, 1, dtype=torch.bool)
        found = {"observation": torch.as_tensor(self._next), "done": no}
        return TensorDict({**found, "terminated": no.clone(), "truncated": no.clone()}, SIZE)

    def _step(self, tensordict):
        self._next, rewards, *ends, final = self.pool.step(tensordict["action"].numpy())
        terminated, truncated = (torch.as_tensor(end)[:, None] for end in ends)
        found = {
            "observation": torch.as_tensor(self._next if final is None else final),
            "reward": torch.as_tensor(rewards)[:, None],
            "done": terminated | truncated,
        }
        return TensorDict({**found, "terminated": terminated, "truncated": truncated}, SIZE)

    def _set_seed(self, seed):
        pass


class Loop:
    """Rollout and update."""

    def __init__(self, pool: Pool) -> None:
        env = PoolEnv(pool)
        policy, keys = network(pool.obs_shape, pool.outputs), ["logits"]
        if not pool.is_discrete:
            scale = AddStateIndependentNormalScale(pool.outputs, scale_lb=1e-8)
            policy, keys = nn.Sequential(policy, scale), ["loc", "scale"]
        self.actor = ProbabilisticActor(
            TensorDictModule(policy, ["observation"], keys),
            in_keys=keys,
            spec=env.action_spec_unbatched,
            distribution_class=torch.distributions.Categorical if pool.is_discrete else IndependentNormal,
            return_log_prob=True,
            default_interaction_type=ExplorationType.RANDOM,
        )
        critic = ValueOperator(network(pool.obs_shape, 1), in_keys=["observation"])
        self.collector = Collector(env, self.actor, frames_per_batch=BATCH, total_frames=-1)
        self.advantages = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=False)
        self.loss = ClipPPOLoss(
            self.actor,
            critic,
            clip_epsilon=0.2,
            loss_critic_type="l2",
            entropy_coeff=0.0,
            critic_coeff=0.5,
            normalize_advantage=True,
        )
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(BATCH), sampler=SamplerWithoutReplacement(), batch_size=MINIBATCH
        )
        self.optimiser = torch.optim.Adam(self.loss.parameters(), lr=3e-4)

    def minibatches(self, rollout: TensorDict) -> Iterator[TensorDict]:
        """Of all epochs."""
        with torch.no_grad():
            self.advantages(rollout)
        for _ in range(EPOCHS):
            self.buffer.empty()
            self.buffer.extend(rollout.reshape(-1))
            yield from (self.buffer.sample() for _ in range(MINIBATCHES))

    def update(self, rollout: TensorDict) -> None:
        """A step on each minibatch."""
        for minibatch in self.minibatches(rollout):
            found = self.loss(minibatch)
            (found["loss_objective"] + found["loss_critic"]).backward()
            nn.utils.clip_grad_norm_(self.loss.parameters(), 0.5)
            self.optimiser.step()
            self.optimiser.zero_grad()


def main() -> None:
    """Command line."""
    given = flags("TorchRL")
    meter = Meter("torchrl", given)
    pool = Pool(given, meter)
    loop = Loop(pool)
    with contextlib.suppress(TimeUpError):
        for rollout in loop.collector:
            loop.update(rollout)
            meter.iteration(pool.steps)
    meter.report(torchrl.__version__, "")


if __name__ == "__main__":
    main()
