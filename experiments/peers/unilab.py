"""UniLab's PPO on its task Go2JoystickFlat, and rayagi's on the same (go2.py), by turns.

    experiments/peers/setup.sh PEERS unilab      # PEERS/unilab
    python -m experiments.peers.unilab --peers PEERS --repeats 3 --seconds 40

Both have UniLab's settings of the task: 1024 environments x 24 steps, 5 epochs x 4 minibatches, networks of 512-256-128 ELU,
normalised observations, a step size adapted to the KL divergence. A rate is of the iterations after the first.
Writes results/unilab.json after each run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.scripts import command_line, origin, spread, write_results
from experiments.throughput.ours import measure
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec

HERE = Path(__file__).parent
ENVS, STEPS = 1024, 24
CASES = {"unilab": (0, 0), "rayagi-1x2": (1, 2), "rayagi-2x1": (2, 1)}
"""GMIs, and threads of each."""
SCENE = "src/unilab/assets/robots/go2/scene_flat.xml"


def spec_of(scene: Path, gmis: int, threads: int) -> RunSpec:
    """UniLab's settings."""
    return RunSpec(
        env=EnvSpec(id="experiments.peers.go2:Go2", kwargs={"xml_file": str(scene)}),
        gmi=GmiSpec(backend="cpu", num_gmis=gmis, num_envs=ENVS // gmis, threads_per_gmi=threads),
        network=NetworkSpec(hidden=(512, 256, 128), activation="elu", initial_log_std=-0.693),
        learning=PPOSpec(
            rollout_length=STEPS,
            num_epochs=5,
            num_minibatches=4,
            gamma=0.99,
            gae_lambda=0.95,
            clip_ratio=0.2,
            value_coef=1.0,
            entropy_coef=1e-3,
            learning_rate=3e-4,
            lr_schedule="kl_adaptive",
            target_kl=0.01,
            max_grad_norm=1.0,
            normalize_obs=True,
            normalize_rewards=False,
        ),
        seed=1,
    )


def unilab(folder: Path, seconds: float) -> dict[str, Any]:
    """Train until ``seconds`` after the first iteration.

    Raises:
        RuntimeError: it ended by itself; with the end of what it wrote.
    """
    overrides = [f"algo.num_envs={ENVS}", "algo.max_iterations=1000000", "training.device=cpu"]
    command = [
        str(folder / "bin" / "train"),
        "--algo",
        "ppo",
        "--task",
        "go2_joystick_flat",
        "--sim",
        "mujoco",
    ]
    process = subprocess.Popen(
        [*command, "--render-mode", "none", *overrides],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    started, ends, written = time.time(), list[float](), list[str]()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            written.append(line)
            # Of the report after each iteration.
            if re.search(r"Iteration time:", line):
                ends.append(time.time())
                if ends[-1] - ends[0] >= seconds and len(ends) > 1:
                    break
        else:
            raise RuntimeError("".join(written)[-500:])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    rate = ENVS * STEPS * (len(ends) - 1) / (ends[-1] - ends[0])
    return {"steps_per_s": rate, "iterations": len(ends) - 1, "startup_s": ends[0] - started}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: medians with ranges, and ratios to UniLab of the same repeat."""
    rates = {(row["case"], row["repeat"]): row["steps_per_s"] for row in rows}
    lines = ["| case | steps/s | over UniLab |", "|---|---|---|"]
    for case in CASES:
        own = {repeat: rate for (name, repeat), rate in rates.items() if name == case}
        ratios = [
            rate / rates["unilab", repeat] for repeat, rate in own.items() if ("unilab", repeat) in rates
        ]
        cells = (spread(list(own.values()), ",.0f"), spread(ratios))
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="folder of setup.sh")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    folder = given.peers.resolve() / "unilab"
    if not (folder / SCENE).is_file():
        parser.error(f"{folder} has no UniLab: experiments/peers/setup.sh {given.peers} unilab")
    rows: list[dict[str, Any]] = []
    for repeat in range(given.repeats):
        for case, (gmis, threads) in CASES.items():
            if gmis:
                found = measure(spec_of(folder / SCENE, gmis, threads), given.seconds, time.time())
            else:
                found = unilab(folder, given.seconds)
            rows.append({"case": case, "repeat": repeat, **found})
            print(case, repeat, found["steps_per_s"], file=sys.stderr, flush=True)
            write_results(given.out / "unilab.json", {"origin": origin(), "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
