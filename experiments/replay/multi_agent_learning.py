"""Trains a Multi-Agent Transformer (Wen et al. 2022) on line, with trajectories that pass through replay shards.

One update, in order:

1. Act for T steps in this trainer's environments. Each piece of an episode becomes a row of one of its shards.
2. Select all rows of all shards, oldest first (``Fifo``). A row may be sampled once, so it is removed by that.
3. Copy the rows of the own shards. Joint advantages by GAE, from the mean of the agents' values.
4. Several epochs of minibatches: which timesteps form one depends on their places in the list, not on the shards. Each
   trainer computes the losses of those that it has, and gradients are summed, as in ``sequence_learning``.
5. Merge the statistics of observations, for the next update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.errors import NonFiniteError
from actors.protocols import EnvFactory, StepResult
from actors.replay import Column, Fifo, ReplaySchema, ReplayStore, Selection, Subscription, select
from actors.roles import LocalSimulator
from actors.rollout import exploration_noise
from collectives.communicator import Communicator
from collectives.objects import all_gather_objects
from experiments.replay.multi_agent_transformer import MultiAgentTransformer, TeamSizes
from experiments.replay.sequence_learning import SummedAdam
from rayagi.algorithms import losses
from rayagi.algorithms.normalisers import Moments, ObservationNormaliser, RewardScaler, all_merge
from rayagi.algorithms.offline_data import OwnRows
from rayagi.algorithms.returns import gae

METRICS = ("policy_loss", "value_loss", "approx_kl", "grad_norm")
"""Of a gradient step, in the order of its row."""
Rows = dict[str, NDArray[np.generic]]
"""Trajectories by column, (rows, steps + extra, ...)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """Which parts of an environment's observations and actions are whose. All agents have equally many of each.

    Attributes:
        obs: columns of the observation that each agent observes, (n, obs_dim)
        actions: columns of the action that each agent chooses, (n, action_dim); each column is one agent's
    """

    obs: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[int, ...], ...]

    def observe(self, obs: Tensor) -> Tensor:
        """(..., obs_dim of the environment) -> (..., n, obs_dim)."""
        return obs[..., torch.tensor(self.obs)]

    def split(self, actions: Tensor) -> Tensor:
        """(..., action_dim of the environment) -> (..., n, action_dim)."""
        return actions[..., torch.tensor(self.actions)]

    def join(self, actions: Tensor) -> Tensor:
        """Inverse of ``split``."""
        return actions.flatten(-2)[..., torch.tensor(self.actions).flatten().argsort()]


_TORSO = (0, 1, 8, 9, 10)
"""Height and angle, and the velocities of x, height and angle."""
HALF_CHEETAH = Team(
    obs=((*_TORSO, 2, 3, 4, 11, 12, 13), (*_TORSO, 5, 6, 7, 14, 15, 16)), actions=((0, 1, 2), (3, 4, 5))
)
"""The back leg and the front leg of Gymnasium's HalfCheetah: each has three joints, and observes them and the torso."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamSettings:
    """Settings of the algorithm, and sizes of the network."""

    num_envs: int = 32
    """Of all trainers together; each has an equal part."""
    rollout_length: int = 64
    """T: steps of every environment in an update."""
    num_epochs: int = 5
    num_minibatches: int = 8
    learning_rate: float = 5e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_ratio: float = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    max_grad_norm: float = 0.5
    initial_log_std: float = -1.0
    obs_clip: float = 10.0
    units: int = 64
    blocks: int = 1
    seed: int = 0


class _Batch(NamedTuple):
    """Timesteps of this trainer's rows, flattened: B of them.

    Attributes:
        number: of each timestep in the list of all trainers' timesteps   (B,) int64
        obs: normalised, of each agent                                    (B, n, obs_dim)
        actions: of each agent                                            (B, n, action_dim)
        log_probs: of each agent's action when it was chosen              (B, n)
        advantages: of the joint action, normalised                       (B,)
        targets: lambda-return                                            (B,)
    """

    number: Tensor
    obs: Tensor
    actions: Tensor
    log_probs: Tensor
    advantages: Tensor
    targets: Tensor


class TeamTrainer:
    """One of the trainers: its environments, its shards, and the network, equal on all of them."""

    def __init__(
        self,
        make_env: EnvFactory,
        team: Team,
        settings: TeamSettings,
        communicator: Communicator,
        *,
        local_shards: int = 1,
    ) -> None:
        """Collective.

        Args:
            make_env: makes the environments
            team: how they are split
            settings: equal on all trainers
            communicator: of all trainers
            local_shards: shards of this trainer; more than 1 only if it is alone

        Raises:
            ValueError: the environments cannot be divided equally by trainers and shards, or there are fewer timesteps than
                minibatches.
        """
        self.team, self.settings, self.communicator = team, settings, communicator
        num_shards = communicator.world_size * local_shards
        if settings.num_envs % num_shards or (local_shards > 1 and communicator.world_size > 1):
            raise ValueError(
                f"{settings.num_envs} environments, {communicator.world_size} trainers with {local_shards} shards each: "
                "shards must divide environments, and several shards of a trainer need it to be alone"
            )
        if settings.num_minibatches > settings.num_envs * settings.rollout_length:
            raise ValueError(f"{settings}: there must be at least one timestep for each minibatch")
        own_envs = settings.num_envs // communicator.world_size
        self._first_env = communicator.rank * own_envs
        self.simulator = LocalSimulator(
            make_env(num_envs=own_envs, first_env_index=self._first_env, seed=settings.seed, num_threads=1)
        )
        info = self.simulator.info
        sizes = TeamSizes(
            agents=len(team.obs), obs_dim=len(team.obs[0]), action_dim=len(team.actions[0]),
            units=settings.units, blocks=settings.blocks,
        )  # fmt: skip
        self.network = MultiAgentTransformer(
            sizes, initial_log_std=settings.initial_log_std, seed=settings.seed
        )
        self.optimiser = SummedAdam(
            self.network, communicator, eps=1e-5, max_grad_norm=settings.max_grad_norm
        )
        self.normaliser = ObservationNormaliser(info.obs_dim, settings.obs_clip, torch.device("cpu"))
        self._scaler = RewardScaler(own_envs, settings.gamma)
        self.updates = 0
        schema = row_schema(info.obs_dim, info.action.dim, sizes.agents, settings.rollout_length)
        per_shard = settings.num_envs // num_shards
        self.stores = [
            # At worst every step ends an episode, and is a row of its own.
            ReplayStore.create(
                schema, per_shard * settings.rollout_length, max_times_sampled=1,
                shard=communicator.rank * local_shards + shard, num_shards=num_shards,
            )
            for shard in range(local_shards)
        ]  # fmt: skip
        length = settings.rollout_length
        windows = [Subscription(column=each.name, length=length + each.extra) for each in schema.columns]
        self._own_rows = OwnRows(self.stores, windows)
        self._exchange = (
            partial(all_gather_objects, group=communicator) if communicator.world_size > 1 else None
        )

    @property
    def env_steps(self) -> int:
        """Steps of all environments so far."""
        return self.updates * self.settings.num_envs * self.settings.rollout_length

    def update(self) -> list[list[float]]:
        """Collect, and learn from it. Collective.

        Returns:
            ``METRICS`` of each gradient step, over the timesteps of all trainers.

        Raises:
            NonFiniteError: a loss or gradient became NaN or infinite; the parameters must not be used.
        """
        rows, lengths, timestamps = self.collect()
        self._insert(rows, lengths, timestamps)
        chosen = self._select()
        own = self._own_rows(chosen)
        observed = Moments.from_batch(own["obs"][:, :-1][own["reward mask"]])
        found = self._learn(self._prepare(own, chosen))
        self.normaliser.update(all_merge(observed, self.communicator))
        self.updates += 1
        return found

    # ---- 1. acting

    @torch.inference_mode()
    def collect(self) -> tuple[Rows, list[int], list[int]]:
        """T steps of this trainer's environments.

        Returns:
            rows, the length of each, and its timestamp, which no other row of any trainer has.
        """
        settings, simulator = self.settings, self.simulator
        noise = exploration_noise(
            seed=settings.seed, first_env_index=self._first_env, num_envs=simulator.env.num_envs,
            iteration=self.updates, num_steps=settings.rollout_length, dim=simulator.info.action.dim, gumbel=False,
        )  # fmt: skip
        steps = []
        for each in noise:
            obs = simulator.obs.clone()
            chosen, log_probs = self.network.act(
                self.team.observe(self.normaliser(obs)), self.team.split(each)
            )
            actions = self.team.join(chosen)
            steps.append((obs, actions, log_probs, simulator.step(actions)))
        rewards = torch.stack([step[-1].rewards for step in steps])
        done = torch.stack([step[-1].terminated | step[-1].truncated for step in steps])
        self._scaler.update(all_merge(self._scaler.observe(rewards, done), self.communicator))
        rows, lengths, places = cut(steps, simulator.obs)
        first = (self.updates * settings.num_envs + self._first_env) * settings.rollout_length
        return rows, lengths, [first + env * settings.rollout_length + start for env, start in places]

    # ---- 2. through the replay

    def _insert(self, rows: Rows, lengths: Sequence[int], timestamps: Sequence[int]) -> None:
        """Write rows into this trainer's shards, the environments of each beside one another."""
        first = self._first_env + self.updates * self.settings.num_envs
        envs = np.asarray(timestamps) // self.settings.rollout_length - first
        owners = envs * len(self.stores) // self.simulator.env.num_envs
        for shard, store in enumerate(self.stores):
            mine = owners == shard
            store.insert(
                {name: values[mine] for name, values in rows.items()},
                np.asarray(lengths)[mine],
                timestamps=np.asarray(timestamps)[mine],
            )

    def _select(self) -> Selection:
        """All rows of all shards, by their timestamps: the same list whatever the shards."""
        count = torch.tensor([sum(map(len, self.stores))])
        self.communicator.all_reduce(count, "sum")
        stores = self.stores if self._exchange is None else self.stores[0]
        return select(
            stores, Fifo(), int(count), seed=self.settings.seed, draw=self.updates, exchange=self._exchange
        )

    # ---- 3. advantages

    @torch.no_grad()
    def _prepare(self, own: dict[str, Tensor], chosen: Selection) -> _Batch:
        """Advantages of this trainer's rows, (n, T) padded, and their timesteps, flattened."""
        exists, settings = own["reward mask"], self.settings
        obs = self.team.observe(self.normaliser(own["obs"]))
        # V_t = mean over agents of V(o_t^m): a robust estimate of the joint value.
        values = self.network.encode(obs.flatten(0, 1))[1].mean(-1).unflatten(0, obs.shape[:2])
        last = exists & ~torch.nn.functional.pad(exists, (0, 1))[:, 1:]
        advantages, targets = (
            each.T[exists]
            for each in gae(
                rewards=self._scaler(own["reward"]).T,
                values=values[:, :-1].T,
                next_values=values[:, 1:].T,
                terminated=own["terminated"].T,
                done=last.T,
                gamma=settings.gamma,
                gae_lambda=settings.gae_lambda,
            )
        )
        moments = all_merge(Moments.from_batch(advantages), self.communicator)
        advantages = ((advantages - moments.mean) / (moments.variance().sqrt() + 1e-8)).float()
        assert chosen.lengths is not None
        starts = torch.from_numpy(np.cumsum(chosen.lengths) - chosen.lengths)[own["position"]]
        numbers = starts.unsqueeze(1) + torch.arange(settings.rollout_length)
        return _Batch(
            number=numbers[exists],
            obs=obs[:, :-1][exists],
            actions=self.team.split(own["action"])[exists],
            log_probs=own["log_prob"][exists],
            advantages=advantages,
            targets=targets,
        )

    # ---- 4. gradient steps

    def _learn(self, batch: _Batch) -> list[list[float]]:
        """All epochs. Returns ``METRICS`` of each step."""
        settings = self.settings
        total = settings.num_envs * settings.rollout_length
        # Where a timestep of the whole list is in this trainer's batch; -1: another trainer has it.
        place = torch.full((total,), -1)
        place[batch.number] = torch.arange(len(batch.number))
        random = np.random.Generator(np.random.Philox(key=[settings.seed, self.updates]))
        parts, norms = [], []
        for _ in range(settings.num_epochs):
            order = torch.from_numpy(random.permutation(total))
            for minibatch in order.tensor_split(settings.num_minibatches):
                own = place[minibatch]
                own = own[own >= 0]
                part, loss = torch.zeros(len(METRICS) - 1), None
                if len(own):
                    # This trainer's share of the mean over the minibatch; the sum over trainers is the whole.
                    share = len(own) / len(minibatch)
                    loss, part = (share * each for each in self.loss(_Batch(*(each[own] for each in batch))))
                norms.append(self.optimiser.step(loss, settings.learning_rate))
                parts.append(part)
        whole = torch.stack(parts).double()
        self.communicator.all_reduce(whole, "sum")
        rows = torch.cat((whole, torch.stack(norms).double().unsqueeze(1)), 1)
        for name, values in zip(METRICS, rows.T, strict=True):
            if not values.isfinite().all():
                raise NonFiniteError(name, self.updates + 1, "update of the Multi-Agent Transformer")
        return rows.tolist()

    def loss(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        """Mean loss over timesteps and agents, and the metrics but the norm, (3,)."""
        settings, head = self.settings, self.network.head
        means, values = self.network(batch.obs, batch.actions)
        # r^m = pi(a^m | o, a^1..m-1) / pi_old(a^m | o, a^1..m-1) of each agent, with the team's advantage (eq. 5).
        log_ratio = head.log_prob(means, batch.actions) - batch.log_probs
        advantages = batch.advantages.unsqueeze(1).expand_as(log_ratio)
        policy_loss = losses.clipped_policy_loss(log_ratio, advantages, settings.clip_ratio)
        # (V(o^m) - R)^2 of every agent (eq. 4), with the lambda-return as R.
        value_loss = (values - batch.targets.unsqueeze(1)).square().mean()
        total = policy_loss + settings.value_coef * value_loss - settings.entropy_coef * head.entropy(means)
        with torch.no_grad():
            metrics = torch.stack((policy_loss, value_loss, losses.approx_kl(log_ratio)))
        return total, metrics

    # ---- evaluation, and the end

    @torch.inference_mode()
    def act_greedily(self, obs: Tensor) -> Tensor:
        """The mode of each agent's action, given those before it: (N, obs_dim) -> (N, action_dim) of the environment."""
        observed = self.team.observe(self.normaliser(obs))
        noise = torch.zeros((len(obs), len(self.team.actions), len(self.team.actions[0])))
        return self.team.join(self.network.act(observed, noise)[0])

    def reset(self, ids: Tensor) -> None:
        """No-op: the policy remembers nothing."""

    def close(self) -> None:
        """Release environments and shards."""
        self.simulator.close()
        for store in self.stores:
            store.close()


def row_schema(obs_dim: int, action_dim: int, agents: int, length: int) -> ReplaySchema:
    """A row is a piece of an episode, with the observation after its last action."""
    return ReplaySchema(
        (
            Column(name="obs", dtype=np.float32, shape=(obs_dim,), extra=1),
            Column(name="action", dtype=np.float32, shape=(action_dim,)),
            Column(name="log_prob", dtype=np.float32, shape=(agents,)),
            Column(name="reward", dtype=np.float32),
            Column(name="terminated", dtype=np.bool_),
        ),
        length,
    )


def cut(
    steps: Sequence[tuple[Tensor, Tensor, Tensor, StepResult]], last_obs: Tensor
) -> tuple[Rows, list[int], list[tuple[int, int]]]:
    """Pieces of episodes, by environment and time.

    Args:
        steps: T times observations, actions, log probabilities and the result of N environments
        last_obs: after the last step, of the episodes that then run   (N, obs_dim)

    Returns:
        rows of ``row_schema``, zero beyond their lengths; lengths; environment and first step of each.
    """
    length, (count, obs_dim) = len(steps), last_obs.shape
    obs = torch.stack([*(step[0] for step in steps), last_obs])
    columns = {
        "action": torch.stack([step[1] for step in steps]),
        "log_prob": torch.stack([step[2] for step in steps]),
        "reward": torch.stack([step[3].rewards for step in steps]),
        "terminated": torch.stack([step[3].terminated for step in steps]),
    }
    pieces, begun = [], [0] * count
    for t, (*_, result) in enumerate(steps):
        for env, final in zip(result.final_ids.tolist(), result.final_obs, strict=True):
            pieces.append((env, begun[env], t + 1, final))
            begun[env] = t + 1
    pieces += [(env, start, length, last_obs[env]) for env, start in enumerate(begun) if start < length]
    pieces.sort(key=lambda piece: piece[:2])
    rows = {
        name: torch.zeros((len(pieces), length, *column.shape[2:]), dtype=column.dtype)
        for name, column in columns.items()
    }
    rows["obs"] = torch.zeros((len(pieces), length + 1, obs_dim))
    for row, (env, start, end, final) in enumerate(pieces):
        for name, column in columns.items():
            rows[name][row, : end - start] = column[start:end, env]
        rows["obs"][row, : end - start] = obs[start:end, env]
        rows["obs"][row, end - start] = final  # the next episode's first is not of this one
    lengths = [end - start for _, start, end, _ in pieces]
    return (
        {name: values.numpy() for name, values in rows.items()},
        lengths,
        [(env, start) for env, start, *_ in pieces],
    )
