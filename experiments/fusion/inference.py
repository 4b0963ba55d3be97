"""Simulation and inference fused (§7 of the paper, its future work), on one core: a rollout in one call against the loop of
simulator and agent in torch, at every N up to 4096.

Beside them: torch's inference alone, which no loop around torch can beat; and the loop with the simulator compiled, so that
what is left to gain is the loop's and the network's. Rollouts of 32 steps, observations normalised, actions sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from actors.roles import Agent, LocalSimulator, collect
from actors.rollout import Rollout
from experiments.fusion.figure import Case, Measure, Size
from experiments.fusion.parity import exploration_noise
from experiments.fusion.plots import draw_rates, middle
from experiments.fusion.records import Records
from experiments.fusion.timing import cost
from rayagi.config.presets import preset
from rayagi.config.spec import Activation, NetworkSpec
from rayagi.envs import make_env_factory
from rayagi.models.policy import NetworkPolicy, new_policy

STEPS = 32
NETWORKS: dict[str, tuple[str, tuple[int, ...], Activation]] = {
    "CartPole, 64-64 tanh": ("fused/CartPole-v1", (64, 64), "tanh"),
    "Quadrotor, 256-128-64 elu": ("fused/Quadrotor-v0", (256, 128, 64), "elu"),
}
FUSED, LOOP, STEPPED, BOUND = (
    "fused: one call",
    "torch loop",
    "torch loop, compiled simulator",
    "torch inference alone",
)
COLOURS = {FUSED: "#4b0082", LOOP: "#d62728", STEPPED: "#ff7f0e", BOUND: "#7f7f7f"}


def groups(size: Size) -> Iterator[Sequence[Case]]:
    """One per network and N."""
    for network in NETWORKS:
        for num_envs in (16, 4096) if size.quick else (1, 4, 16, 64, 256, 1024, 4096):
            yield [
                Case(
                    {"network": network, "form": form, "num_envs": num_envs},
                    lambda f=form, w=network, n=num_envs: rollouts(f, w, n, size.seconds),
                )
                for form in COLOURS
            ]


def rollouts(form: str, network: str, num_envs: int, seconds: float) -> Measure:
    """Environment steps per second of rollouts, on one thread."""
    call = _caller(form, network, num_envs)

    def once() -> dict[str, float]:
        usual = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return cost(call, lambda: None, seconds).rates(num_envs * STEPS)
        finally:
            torch.set_num_threads(usual)

    return once


def _caller(form: str, network: str, num_envs: int) -> Callable[[], object]:
    env_id, hidden, activation = NETWORKS[network]
    engine = "fused_torch" if form == LOOP else "fused"
    env = make_env_factory(env_id, engine=engine)(num_envs=num_envs, first_env_index=0, seed=0, num_threads=1)
    spec = replace(preset(env_id), network=NetworkSpec(hidden=hidden, activation=activation))
    device = torch.device("cpu")
    policy = new_policy(spec, env.info, device)
    simulator, rollout = LocalSimulator(env), Rollout.allocate(STEPS, num_envs, env.info, device)
    if form == FUSED:
        return lambda: simulator.collect_rollout(rollout, policy.tensors(), 0)
    if form == BOUND:
        return lambda: _infer(policy, rollout.raw_obs)
    noise = exploration_noise(
        seed=0,
        first_env_index=0,
        num_envs=num_envs,
        iteration=0,
        num_steps=STEPS,
        dim=rollout.outputs.shape[-1],
        gumbel=policy.model.head.gumbel_noise,
    )
    agent = Agent(policy)
    return lambda: collect(simulator, agent, rollout, noise)


@torch.inference_mode()
def _infer(policy: NetworkPolicy, obs: torch.Tensor) -> None:
    for step in obs:
        policy.outputs(step)


def draw(records: Records, path: Path) -> None:
    """A line per form, for the small network."""
    (small, *_) = NETWORKS
    cases = [case for case in records.of("inference") if case[0]["network"] == small]
    draw_rates(
        cases,
        lambda labels: (labels["form"], {"color": COLOURS[labels["form"]]}),
        f"Rollouts with a policy on one core: {small}",
        path,
    )


def findings(records: Records) -> str:
    """Medians by CPU time, which neighbours change little, and the ratios that matter."""
    rates = {
        (labels["network"], labels["num_envs"], labels["form"]): middle(values, "steps_per_cpu_s") / 1e6
        for labels, values in records.of("inference")
    }
    head = [*COLOURS, "fused over loop", "fused over inference alone"]
    parts = []
    for network in NETWORKS:
        lines = [f"| N | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
        for num_envs in sorted({n for name, n, _ in rates if name == network}):
            found = [rates.get((network, num_envs, form), float("nan")) for form in COLOURS]
            fused, loop, _, bound = found
            cells = [*(f"{rate:.3g}" for rate in found), f"{fused / loop:.1f}", f"{fused / bound:.2f}"]
            lines.append(f"| {num_envs} | {' | '.join(cells)} |")
        parts.append(f"{network}, million environment steps per CPU second:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)
