"""Measures one way of training: predictions and training samples per second, and how old experience was.

    python -m experiments.asynchronous.one Ant-v5 appo --template decoupled --seconds 20 --set appo.on_stale=drop

Prints one JSON line.
"""

from __future__ import annotations

import json
import time

from experiments.scripts import command_line
from rayagi.config.convert import with_settings
from rayagi.config.presets import preset
from rayagi.config.rules import checked
from rayagi.config.spec import RunSpec
from rayagi.coordinator.decoupled import DecoupledSession, session_of

WARM_UP_ITERATIONS = 2


def measured(spec: RunSpec, seconds: float) -> dict[str, object]:
    """Train for about so long after a warm-up. PPS and TTP as GMI-DRL §4.1 has them, by the driver's clock."""
    with session_of(spec) as session:
        session.train(WARM_UP_ITERATIONS)
        began = time.perf_counter()
        results = session.train(WARM_UP_ITERATIONS)
        while time.perf_counter() - began < seconds:
            results += session.train(4)
        wall_s = time.perf_counter() - began
        steps = sum(result.metrics["env_steps"] for result in results)
        samples = sum(result.metrics.get("train_samples", result.metrics["env_steps"]) for result in results)
        found: dict[str, object] = {
            "steps_per_s": steps / wall_s,
            "samples_per_s": samples / wall_s,
            "updates_per_s": len(results) / wall_s,
            "num_gmis": session.plan.num_gmis,
            "seconds": wall_s,
        }
        if isinstance(session, DecoupledSession):
            found |= session.experience()
        return found


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("task")
    parser.add_argument("algorithm", choices=["ppo", "appo"])
    parser.add_argument("--template", default="dp_only")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    settings = [f"gmi.template={given.template}", *given.set]
    spec = checked(with_settings(preset(given.task, given.algorithm), settings))
    print(json.dumps(measured(spec, given.seconds)), flush=True)


if __name__ == "__main__":
    main()
