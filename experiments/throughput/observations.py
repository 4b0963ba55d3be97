"""What an update and a rollout's acting cost with observations that are far from normal, beside normal ones by turns.

    python -m experiments.throughput.observations
    python -m experiments.throughput.observations --rounds 20 --activations elu

Every case takes its turn in every round, in one process and one thread, so that ratios hold where its speed varies.
The sizes are those of Humanoid-v5 with the peers' networks and minibatches. Each turn begins with the same parameters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from actors.protocols import ActionSpec, EnvInfo
from actors.roles import ActingByOperations, Agent
from actors.rollout import Rollout
from collectives.solo import SoloCommunicator
from experiments.scripts import command_line
from experiments.throughput.settings import ROLLOUT_LENGTH, TOTAL_ENVS, run_spec
from rayagi.algorithms.ppo.learner import PPOUpdater
from rayagi.algorithms.rollout_learner import OnPolicyBatch
from rayagi.config.spec import NetworkSpec
from rayagi.models.policy import NetworkPolicy, new_policy
from rayagi.native.acting import compiled_acting
from rayagi.native.denormals import flushed_denormals

INFO = EnvInfo(
    env_id="Humanoid-v5",
    engine="none",
    obs_dim=348,
    action=ActionSpec(kind="continuous", dim=17),
    max_episode_steps=1000,
)
SAMPLES, MINIBATCH = TOTAL_ENVS * ROLLOUT_LENGTH, 512


def observations() -> dict[str, Tensor]:
    """(SAMPLES, obs_dim) of each case; the first is what the others are compared with."""
    normal = torch.randn((SAMPLES, INFO.obs_dim), generator=torch.Generator().manual_seed(0))
    one_nan, raw = normal.clone(), normal.clone()
    one_nan[:, 7] = torch.nan
    raw[:, ::3] *= 300.0  # forces beside angles, as Humanoid's raw observations are
    return {
        "normal": normal,
        "raw": raw,
        "1e6": 1e6 * normal,
        "1e30": 1e30 * normal,
        "1e-20": 1e-20 * normal,
        "1e-30": 1e-30 * normal,
        "1e-40": 1e-40 * normal.double(),
        "0": torch.zeros_like(normal),
        "1": torch.ones_like(normal),
        "NaN in a column": one_nan,
    }


class Course:
    """A policy and a learner, whose parameters are put back after each turn."""

    def __init__(self, activation: str) -> None:
        spec = run_spec(1, 1)
        network = NetworkSpec(hidden=spec.network.hidden, activation=activation)
        self._policy = new_policy(replace(spec, network=network), INFO, torch.device("cpu"))
        self._learner = PPOUpdater(self._policy.model, spec.learning, SoloCommunicator())
        self._start = self._learner.state_dict()
        self._orders = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1)).view(-1, MINIBATCH)

    def works(self, obs: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
        """What takes turns."""
        obs = obs.float()
        batch, rollout = (
            self._batch(obs),
            Rollout.allocate(ROLLOUT_LENGTH, TOTAL_ENVS, INFO, torch.device("cpu")),
        )
        steps = obs.view(ROLLOUT_LENGTH, TOTAL_ENVS, -1)
        noise = torch.zeros((ROLLOUT_LENGTH, TOTAL_ENVS, INFO.action.dim))
        learner, agent = self._learner, Agent(self._policy)
        assert learner._compiled is not None, "no compiler"
        yield "update", lambda: learner.update(batch, self._orders.unsqueeze(0), 1)
        yield "update, torch", lambda: self._by_torch(batch)
        yield "values", lambda: learner.values(obs)
        acting = compiled_acting(self._policy.tensors(), rollout, noise)
        assert acting is not None
        yield "acting", lambda: [acting(t, step) for t, step in enumerate(steps)]
        by_torch = ActingByOperations(agent, rollout, noise)
        yield "acting, torch", lambda: [by_torch(t, step) for t, step in enumerate(steps)]

    def put_back(self) -> None:
        """The parameters and moments of the start."""
        self._learner.load_state_dict(self._start)

    def _by_torch(self, batch: OnPolicyBatch) -> None:
        with flushed_denormals():
            for order in self._orders:
                self._learner.minibatch_step(batch, order)

    @torch.no_grad()
    def _batch(self, obs: Tensor) -> OnPolicyBatch:
        policy: NetworkPolicy = self._policy
        outputs, values = policy.outputs(obs), self._learner.values(obs)
        actions = policy.sample(outputs, torch.ones_like(outputs))
        log_probs = policy.model.head.log_prob(outputs, actions)
        advantages = torch.randn(len(obs), generator=torch.Generator().manual_seed(2))
        return OnPolicyBatch(obs, actions, log_probs, values, advantages, values + advantages)


def measure(activation: str, rounds: int) -> dict[str, dict[str, float]]:
    """Of each work and case: its time by that of the first case in the same round, the median of all rounds."""
    course = Course(activation)
    works = {name: dict(course.works(obs)) for name, obs in observations().items()}
    first, ratios = next(iter(works)), dict[str, dict[str, list[float]]]()
    for number in range(-1, rounds):  # one to warm up
        for work in works[first]:
            times = {}
            for name in works:
                course.put_back()
                began = time.process_time()
                works[name][work]()
                times[name] = time.process_time() - began
            for name, took in times.items() if number >= 0 else ():
                ratios.setdefault(work, {}).setdefault(name, []).append(took / times[first])
    return {
        work: {name: statistics.median(found) for name, found in of_work.items()}
        for work, of_work in ratios.items()
    }


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--activations", nargs="+", default=["elu", "relu", "tanh", "silu"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = list(observations())
    print(f"| activation | work | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for activation in given.activations:
        for work, found in measure(activation, given.rounds).items():
            print(f"| {activation} | {work} | {' | '.join(f'{found[n]:.2f}' for n in names)} |", flush=True)


if __name__ == "__main__":
    main()
