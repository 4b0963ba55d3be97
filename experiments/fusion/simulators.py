"""Figure 2: throughput of simulators against the number of environments: rayagi's fused ones, Brax's Ant, and MuJoCo's.

The paper compares XLA's CartPole with Brax. Here are four simulators of the dialect in XLA and C; Brax's Ant on two of its
engines; and the task Ant on MuJoCo's own engine on all cores. Observation, reward and reset are included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.fusion.figure import Case, Measure, Size
from experiments.fusion.fusion import simulation
from experiments.fusion.plots import draw_rates, middle
from experiments.fusion.records import Records
from experiments.fusion.timing import cost
from experiments.fusion.variants.variant import BenchmarkConfig
from rayagi.envs.errors import EnvError
from rayagi.envs.fused.simulator import Simulator
from rayagi.envs.fused.simulators import Acrobot, CartPole, Pendulum, Quadrotor
from rayagi.envs.registry import make_env_factory

STEPS = 100
SIMULATORS: tuple[Simulator, ...] = (CartPole(), Pendulum(), Acrobot(), Quadrotor())
COLOURS = {
    "CartPole": "#1f77b4",
    "Pendulum": "#ff7f0e",
    "Acrobot": "#2ca02c",
    "Quadrotor": "#9467bd",
    "Ant": "#8c564b",
}
BRAX = ("generalized", "spring")
"""Brax's most exact engine, and its fastest."""
MOST_ANTS = 256


def groups(size: Size) -> Iterator[Sequence[Case]]:
    """One per N."""
    for num_envs in (16, 1024) if size.quick else (1, 16, 256, 4096, 65536):
        cases = []
        for simulator in SIMULATORS:
            work = BenchmarkConfig(
                simulator=simulator, num_envs=num_envs, steps_per_call=STEPS, num_threads=size.threads
            )
            for form in ("xla", "c"):
                labels = {"simulator": simulator.name, "form": form, "num_envs": num_envs}
                cases.append(Case(labels, lambda w=work, f=form: simulation(f, w, size.seconds)))
        if num_envs <= MOST_ANTS:
            labels = {"simulator": "Ant", "form": "mujoco_cpu", "num_envs": num_envs}
            cases.append(Case(labels, lambda n=num_envs: ants(n, size)))
            for engine in BRAX:
                labels = {"simulator": "Ant", "form": f"brax_{engine}", "num_envs": num_envs}
                cases.append(Case(labels, lambda n=num_envs, e=engine: brax_ants(n, e, size)))
        yield cases


def ants(num_envs: int, size: Size) -> Measure:
    """The task Ant with random actions."""
    factory = make_env_factory("rayagi/Ant-v0", engine="mujoco_cpu")
    env = factory(num_envs=num_envs, first_env_index=0, seed=0, num_threads=size.threads)
    env.reset()
    actions = 2 * torch.rand((num_envs, env.info.action.dim), generator=torch.Generator().manual_seed(0)) - 1

    def once() -> dict[str, float]:
        return cost(lambda: env.step(actions), lambda: None, size.seconds).rates(num_envs)

    return once


def brax_ants(num_envs: int, engine: str, size: Size) -> Measure:
    """Brax's Ant with random actions, STEPS steps a call. Raises EnvError where Brax is not installed."""
    try:
        import jax
        from brax import envs
    except ImportError as error:
        raise EnvError("brax is not installed: pip install brax") from error
    env = envs.create("ant", backend=engine, batch_size=num_envs)
    actions = jax.random.uniform(jax.random.key(0), (num_envs, env.action_size), minval=-1.0, maxval=1.0)
    several = jax.jit(
        lambda start: jax.lax.fori_loop(0, STEPS, lambda _, state: env.step(state, actions), start)
    )
    state = [jax.jit(env.reset)(jax.random.PRNGKey(0))]

    def call() -> None:
        state[0] = several(state[0])

    for _ in range(2):  # what it returns has other types than what reset returns, so it is compiled twice
        call()

    def once() -> dict[str, float]:
        each = cost(call, lambda: jax.block_until_ready(state[0]), size.seconds)
        return each.rates(num_envs * STEPS)

    return once


def draw(records: Records, path: Path) -> None:
    """A line per simulator and form."""
    title = f"Figure 2: simulators, simulation alone, {STEPS} steps per call"
    draw_rates(records.of("2"), _line, title, path)


def _line(labels: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    simulator, form = labels["simulator"], labels["form"]
    styles = {"xla": "--", "brax_generalized": "--", "brax_spring": ":"}
    return f"{simulator}, {form}", {"color": COLOURS[simulator], "linestyle": styles.get(form, "-")}


def findings(records: Records) -> str:
    """The highest rate of each."""
    best: dict[tuple[str, str], tuple[float, int]] = {}
    for labels, values in records.of("2"):
        key = (labels["simulator"], labels["form"])
        best[key] = max(best.get(key, (0.0, 0)), (middle(values, "steps_per_s"), labels["num_envs"]))
    lines = [
        "| simulator | form | highest median, million steps/s | at N |",
        "|---|---|---|---|",
    ]
    lines += [f"| {sim} | {form} | {rate / 1e6:.3g} | {n} |" for (sim, form), (rate, n) in best.items()]
    return "\n".join(lines)
