"""Trains one Decision Transformer on several tasks' datasets, from replay shards of one or several trainers.

Every gradient step takes the same number of sequences from each task's table. A sequence is the window of the K timesteps
up to one that is drawn uniformly; what is before the episode's first one is padding, and masked. Each trainer computes the
losses of the sequences in its own shards, and gradients are summed, as in rayagi.algorithms.offline_learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from actors.protocols import EnvInfo, VecEnv
from actors.replay import Column, ReplaySchema, Subscription
from collectives.communicator import Communicator
from experiments.replay.decision_transformer import (
    Context,
    DecisionTransformer,
    TaskSizes,
    TransformerSizes,
    action_loss,
)
from rayagi.algorithms.action_range import clipped
from rayagi.algorithms.gradient_updater import FlatAdam
from rayagi.algorithms.offline_data import DataStatistics, OfflineData, scan, source_of
from rayagi.models.networks import FlatParameters
from rayagi.replay.trajectories import Source, Trajectory, packed

LONGEST_EPISODE_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """Of Chen et al. 2021, appendix A, but without dropout and weight decay, so that all layouts make the same steps."""

    sizes: TransformerSizes = field(default_factory=TransformerSizes)
    batch_size: int = 64
    """Sequences of each task in a gradient step, of all trainers together."""
    learning_rate: float = 1e-3
    warmup: int = 100
    """Steps over which the learning rate rises from 0."""
    max_grad_norm: float = 0.25
    seed: int = 0


@dataclass(frozen=True)
class Task:
    """A task with its dataset's statistics."""

    info: EnvInfo
    statistics: DataStatistics

    @property
    def target_return(self) -> float:
        """The best return of the dataset."""
        return max(self.statistics.returns)

    @property
    def return_scale(self) -> float:
        """Factor that brings returns-to-go to the order of 1."""
        return 1.0 / max(1e-6, *map(abs, self.statistics.returns))

    def normalised(self, obs: Tensor) -> Tensor:
        """Observations with the dataset's mean 0 and standard deviation 1."""
        moments = self.statistics.observations
        return ((obs - moments.mean) / (moments.variance() + 1e-8).sqrt()).float().clamp(-10.0, 10.0)

    def unit_actions(self, actions: Tensor) -> Tensor:
        """Actions of the box as in [-1, 1]."""
        low, high = (torch.tensor(bound) for bound in (self.info.action.low, self.info.action.high))
        return 2 * (actions - low) / (high - low) - 1

    def box_actions(self, actions: Tensor) -> Tensor:
        """Inverse of ``unit_actions``."""
        low, high = (torch.tensor(bound) for bound in (self.info.action.low, self.info.action.high))
        return low + (actions + 1) / 2 * (high - low)


class SummedAdam:
    """Steps a network, equal on all trainers, by the sum of their gradients.

    Attributes:
        flat: parameters and gradients
    """

    def __init__(
        self, network: nn.Module, communicator: Communicator, *, eps: float, max_grad_norm: float
    ) -> None:
        """Collective. ``eps``: of Adam; ``max_grad_norm``: of the summed gradient; 0: no clipping."""
        self.flat = FlatParameters(network, communicator.buffer)
        self._communicator, self._max_grad_norm = communicator, max_grad_norm
        self._adam = FlatAdam(self.flat, learning_rate=0.0, eps=eps)

    def step(self, loss: Tensor | None, learning_rate: float) -> Tensor:
        """One step. Collective.

        Args:
            loss: this trainer's part of a sum; None: nothing of it is here
            learning_rate: of this step

        Returns:
            norm of the summed gradient before clipping, ().
        """
        # g = sum over trainers of grad(loss_k); then g *= min(1, max_grad_norm / |g|); then Adam.
        self.flat.gradients.zero_()
        if loss is not None:
            loss.backward()
        self._communicator.all_reduce(self.flat.gradients, "sum")
        norm = self.flat.norm()
        self.flat.clip(norm, self._max_grad_norm)
        self._adam.set_learning_rate(learning_rate)
        self._adam.step()
        return norm


class SequenceTrainer:
    """One of the trainers: its shards of every task's table, and the network, equal on all of them."""

    def __init__(
        self,
        datasets: Sequence[tuple[str, EnvInfo]],
        settings: LearningSettings,
        communicator: Communicator,
        *,
        local_shards: int = 1,
    ) -> None:
        """Collective. ``datasets``: folder and environment of each task; ``local_shards``: as of OfflineData."""
        self.settings, self.communicator = settings, communicator
        length = settings.sizes.context
        subscriptions = [
            Subscription(column=name, offset=1 - length, length=length)
            for name in ("obs", "action", "return_to_go")
        ]
        self.tasks, self.tables = [], []
        for path, info in datasets:
            source = source_of(path, info)
            self.tasks.append(Task(info, scan(source, info)))
            self.tables.append(
                OfflineData(
                    with_returns_to_go(clipped(source, info)),
                    communicator,
                    subscriptions=subscriptions,
                    seed=settings.seed,
                    row_steps=None,
                    local_shards=local_shards,
                )
            )
        sizes = [TaskSizes(obs_dim=task.info.obs_dim, action_dim=task.info.action.dim) for task in self.tasks]
        self.network = DecisionTransformer(sizes, settings.sizes, settings.seed)
        self.optimiser = SummedAdam(
            self.network, communicator, eps=1e-8, max_grad_norm=settings.max_grad_norm
        )
        self.steps = 0

    def step(self) -> list[float]:
        """One gradient step. Returns each task's loss over the sequences of all trainers."""
        settings = self.settings
        contexts = {number: self._context(number) for number in range(len(self.tasks))}
        predicted = self.network(contexts)
        share = 1.0 / settings.batch_size
        losses = torch.stack(
            [share * action_loss(predicted[number], contexts[number]).sum() for number in contexts]
        )
        # Each trainer's share of the mean loss over tasks and sequences; the sum over trainers is the whole.
        self.steps += 1
        self.optimiser.step(losses.mean(), settings.learning_rate * min(1.0, self.steps / settings.warmup))
        whole = losses.detach().double()
        self.communicator.all_reduce(whole, "sum")
        return whole.tolist()

    def _context(self, number: int) -> Context:
        """This trainer's sequences of a task."""
        task, length = self.tasks[number], self.settings.sizes.context
        batch = self.tables[number].batch(self.settings.batch_size, self.steps)
        mask = batch["obs mask"].clone()
        before = torch.arange(1 - length, 1)
        keep = mask.unsqueeze(-1)
        return Context(
            obs=task.normalised(batch["obs"]) * keep,
            actions=task.unit_actions(batch["action"]) * keep,
            returns=batch["return_to_go"] * task.return_scale,
            steps=batch["step"].unsqueeze(1) + before,
            mask=mask,
        )

    @torch.inference_mode()
    def evaluate(self, number: int, env: VecEnv, target_return: float) -> list[float]:
        """Returns of one episode in each environment, acting for a target return (Chen et al. 2021, algorithm 1)."""
        task, length, count = self.tasks[number], self.settings.sizes.context, env.num_envs
        history = _History(count, length, task.info)
        totals, running = np.zeros(count), np.ones(count, bool)
        obs, wanted = env.reset(), torch.full((count,), float(target_return))
        for t in range(task.info.max_episode_steps or LONGEST_EPISODE_STEPS):
            history.append(task.normalised(obs), wanted * task.return_scale, t)
            actions = self.network({number: history.context()})[number][:, -1]
            history.act(actions)
            result = env.step(task.box_actions(actions))
            totals[running] += result.rewards.numpy()[running]
            running[result.final_ids.numpy()] = False
            if not running.any():
                break
            obs, wanted = result.obs, wanted - result.rewards
        return totals.tolist()

    def close(self) -> None:
        """Release the shards."""
        for table in self.tables:
            table.close()


class _History:
    """The last K timesteps of each environment's episode."""

    def __init__(self, count: int, length: int, info: EnvInfo) -> None:
        self._obs = torch.zeros((count, length, info.obs_dim))
        self._actions = torch.zeros((count, length, info.action.dim))
        self._returns = torch.zeros((count, length))
        self._steps = torch.zeros((count, length), dtype=torch.int64)
        self._mask = torch.zeros((count, length), dtype=torch.bool)

    def append(self, obs: Tensor, returns: Tensor, step: int) -> None:
        """Begin a timestep, whose action is not known yet."""
        for column, newest in (
            (self._obs, obs),
            (self._actions, torch.zeros_like(self._actions[:, 0])),
            (self._returns, returns),
            (self._steps, torch.full_like(self._steps[:, 0], step)),
            (self._mask, torch.ones_like(self._mask[:, 0])),
        ):
            column.copy_(column.roll(-1, 1))
            column[:, -1] = newest

    def act(self, actions: Tensor) -> None:
        """Add the action of the newest timestep."""
        self._actions[:, -1] = actions

    def context(self) -> Context:
        """As the network reads it."""
        return Context(
            obs=self._obs, actions=self._actions, returns=self._returns, steps=self._steps, mask=self._mask
        )


def with_returns_to_go(source: Source) -> Source:
    """The same with a column ``return_to_go``: the undiscounted sum of an episode's rewards from each step on."""

    def added(trajectory: Trajectory) -> Trajectory:
        sums = np.cumsum(trajectory["reward"][::-1], dtype=np.float64)[::-1]
        return {**trajectory, "return_to_go": sums.astype(np.float32)}

    column = Column(name="return_to_go", dtype=np.float32)
    return replace(
        source,
        schema=ReplaySchema((*source.schema.columns, column), source.schema.max_length),
        begin=lambda: packed(map(added, source.read())),
    )
