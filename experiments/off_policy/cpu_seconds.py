"""Return against CPU seconds of one process: of an algorithm's preset, or with other settings.

CPU seconds, since they depend less on what else runs than seconds do. One GMI, one thread; evaluations are not counted.

    python -m experiments.off_policy.cpu_seconds HalfCheetah-v5 fast_td3 --seconds 30 --set fast_td3.n_step=1

With ``--init`` and ``--dataset`` it begins with an offline run, as ``rayagi train`` does.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from actors.gmi import GmiContext
from rayagi.algorithms.factory import training_factory
from rayagi.algorithms.program import DpOnlyProgram
from rayagi.cli.settings import initial_state_from
from rayagi.config.convert import with_settings
from rayagi.config.presets import preset
from rayagi.config.rules import checked
from rayagi.config.spec import RunSpec

EPISODES, EVALUATION_SEED = 4, 1000


def main() -> None:
    """Train, and print a line of JSON after each evaluation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("algorithm")
    parser.add_argument("--seconds", type=float, default=30.0, help="CPU seconds of training")
    parser.add_argument("--evaluations", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--init", type=Path, metavar="RUN")
    parser.add_argument("--dataset", metavar="DIR")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spec = with_settings(preset(arguments.task, arguments.algorithm), arguments.settings)
    spec = checked(replace(spec, seed=arguments.seed, data=replace(spec.data, path=arguments.dataset)))
    train(spec, arguments.seconds, arguments.evaluations, arguments.init)


def train(spec: RunSpec, seconds: float, evaluations: int, run: Path | None) -> None:
    """Iterate until ``seconds`` of CPU time are used, and evaluate in between. ``run``: whose networks it begins with."""
    program = _program(spec)
    if run is not None:
        program.load_state_dict({"shared": initial_state_from(run, spec, trust_modules=False)})
    used, steps, gradient_steps, evaluated = 0.0, 0.0, 0.0, 0
    while used < seconds:
        before = time.process_time()
        metrics = program.iterate().metrics
        used += time.process_time() - before
        steps += metrics["env_steps"]
        gradient_steps += metrics.get("gradient_steps", 0.0)
        if used >= (evaluated + 1) * seconds / evaluations:
            evaluated += 1
            found = program.evaluate(EPISODES, EVALUATION_SEED).mean_return()
            row = {"cpu_s": round(used, 1), "env_steps": steps, "gradient_steps": gradient_steps}
            print(json.dumps({**row, "return": round(found, 1)}), flush=True)
    program.close()


def _program(spec: RunSpec) -> DpOnlyProgram:
    program = training_factory(spec)(GmiContext.local(spec.env.id))
    assert isinstance(program, DpOnlyProgram)
    return program


if __name__ == "__main__":
    main()
