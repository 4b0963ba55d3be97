"""The whole pipeline, rollout and update, in environment steps per second: rayagi's fused rollout with its PPO against a
PureJaxRL-style loop and an EnvPool-style loop, one after another, interleaved over several repeats.

    python -m experiments.fusion.pipeline --repeats 5 --seconds 5 --num-envs 256 1024 4096

Every loop trains CartPole with the sizes of settings.py, on all cores. Compilation does not count. Writes
results/pipeline.json (every repeat, and origin) and results/pipeline.md.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.fusion.run import header
from experiments.fusion.settings import Settings
from experiments.scripts import bullets, command_line, spread, write_results
from experiments.throughput.run import wait_until_quiet
from experiments.throughput.watch import run_watched
from rayagi.run.versions import usable_cores

HERE = Path(__file__).parent
LOOPS = ("rayagi-fused", "rayagi-gymnasium", "purejax", "envpool")
TIMEOUT_S = 300.0
ITERATIONS_PER_CALL = 10
"""Of the loop in JAX: all of them are one call."""


def rayagi_loop(settings: Settings, threads: int, engine: str) -> tuple[Callable[[], float], int]:
    """rayagi's own program of one GMI in this process: what each GMI runs."""
    import torch

    from actors.gmi import GmiContext
    from placement.types import Slice
    from rayagi.algorithms.ppo import PPOSpec
    from rayagi.algorithms.program import DpOnlyProgram
    from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
    from rayagi.envs import make_env_factory

    torch.set_num_threads(threads)
    names = (
        "rollout_length", "num_epochs", "num_minibatches", "gamma", "gae_lambda", "clip_ratio", "value_coef", "entropy_coef",
        "learning_rate", "adam_eps", "max_grad_norm",
    )  # fmt: skip
    same = {name: getattr(settings, name) for name in names}
    env_id = "fused/CartPole-v1" if engine == "fused" else "CartPole-v1"
    spec = RunSpec(
        env=EnvSpec(id=env_id, engine=engine),
        gmi=GmiSpec(backend="cpu", num_gmis=1, num_envs=settings.num_envs, threads_per_gmi=threads),
        network=NetworkSpec(hidden=settings.hidden, activation="tanh"),
        learning=PPOSpec(**same, normalize_obs=False, normalize_rewards=False),
        seed=settings.seed,
    )
    context = GmiContext.local(
        env_id, gmi_slice=Slice(node="here", backend="cpu", cores=tuple(range(threads)))
    )
    program = DpOnlyProgram(spec, make_env_factory(env_id, engine=engine), context)

    def iterate() -> float:
        lengths = program.iterate().episode_lengths
        return statistics.fmean(lengths) if lengths else float("nan")

    return iterate, 1


def purejax_loop(settings: Settings) -> tuple[Callable[[], float], int]:
    """Several iterations in one call."""
    from experiments.fusion.collectors import SIMULATOR
    from experiments.fusion.purejax import make_training
    from experiments.fusion.variants.jax_world import JaxWorld

    start, train = make_training(JaxWorld(SIMULATOR, settings.seed), settings, ITERATIONS_PER_CALL)
    carry = start()

    def iterate() -> float:
        nonlocal carry
        carry, (_, ended) = train(carry)
        return settings.num_envs * settings.rollout_length / max(1.0, float(ended[-1]))

    return iterate, ITERATIONS_PER_CALL


def loop(name: str, settings: Settings, threads: int) -> tuple[Callable[[], float], int]:
    """What iterates (and tells the mean length of episodes), and how many iterations a call is."""
    if name == "purejax":
        return purejax_loop(settings)
    if name == "envpool":
        from experiments.fusion.envpool_ppo import EnvPoolTraining

        return EnvPoolTraining(settings, threads).iterate, 1
    return rayagi_loop(settings, threads, name.removeprefix("rayagi-"))


def one(name: str, settings: Settings, threads: int, seconds: float) -> dict[str, Any]:
    """Train for at least ``seconds``, after two calls that do not count."""
    iterate, iterations = loop(name, settings, threads)
    iterate()
    iterate()
    began, used, calls, length = time.perf_counter(), time.process_time(), 0, 0.0
    while time.perf_counter() - began < seconds:
        length = iterate()
        calls += 1
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    steps = calls * iterations * settings.num_envs * settings.rollout_length
    rates = {"steps_per_s": steps / wall, "steps_per_cpu_s": steps / cpu}
    return {**rates, "iterations": calls * iterations, "episode_length": length}


def measure(name: str, num_envs: int, seconds: float) -> dict[str, Any]:
    """One loop in a process of its own, on a machine as quiet as it gets. Returns its numbers, or what went wrong."""
    wait_until_quiet(limit_s=5.0)
    command = [sys.executable, "-m", "experiments.fusion.pipeline", "--one", name]
    command += ["--num-envs", str(num_envs), "--seconds", str(seconds)]
    # The loop with EnvPool is twice as fast with threads that spin, rayagi's 0.6 times.
    watched = run_watched(command, TIMEOUT_S, waiting="ACTIVE" if name == "envpool" else "PASSIVE")
    lines = [line for line in watched.output.splitlines() if line.startswith("{")]
    if not lines:
        return {"failed": (watched.error or watched.output).strip()[-500:]}
    return {**json.loads(lines[-1]), "own_cores": watched.own_cores, "other_cores": watched.other_cores}


def table(rows: list[dict[str, Any]]) -> str:
    """Medians and spread, by the clock and by CPU time, and the fused loop over each in the same repeat."""
    lines = [
        "| N | loop | steps/s | rayagi-fused / this | steps per CPU second | rayagi-fused / this |",
        "|---|---|---|---|---|---|",
    ]
    whole = [row for row in rows if "steps_per_s" in row]
    for num_envs, name in dict.fromkeys((row["num_envs"], row["loop"]) for row in whole):
        cells = [str(num_envs), name]
        for rate in ("steps_per_s", "steps_per_cpu_s"):
            found, ours = (
                {
                    row["repeat"]: row[rate]
                    for row in whole
                    if (row["num_envs"], row["loop"]) == (num_envs, one)
                }
                for one in (name, "rayagi-fused")
            )
            ratios = [ours[repeat] / value for repeat, value in found.items() if repeat in ours]
            cells += [spread(list(found.values()), ",.0f"), spread(ratios, ".2f")]
        lines.append(f"| {' | '.join(cells)} |")
    failed = [
        f"- {row['loop']}, N = {row['num_envs']}, failed: {row['failed']}" for row in rows if "failed" in row
    ]
    return "\n".join([*lines, "", "Medians (lowest - highest).", *failed])


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--one", choices=LOOPS, help="measure this loop in this process and print a line")
    parser.add_argument("--loops", nargs="+", default=list(LOOPS), choices=LOOPS)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    if given.one:
        settings = replace(Settings(), num_envs=given.num_envs[0])
        print(json.dumps(one(given.one, settings, usable_cores(), given.seconds)), flush=True)
        return
    rows: list[dict[str, Any]] = []
    for repeat in range(given.repeats):
        for num_envs in given.num_envs:
            for name in given.loops:
                row = {
                    "repeat": repeat,
                    "num_envs": num_envs,
                    "loop": name,
                    **measure(name, num_envs, given.seconds),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
        content = {"origin": header(), "settings": str(Settings()), "rows": rows}
        write_results(HERE / "results" / "pipeline.json", content)
    text = f"# Rollout and update\n\n{bullets(header())}\n\n{table(rows)}\n"
    (HERE / "results" / "pipeline.md").write_text(text)
    print(table(rows))


if __name__ == "__main__":
    main()
