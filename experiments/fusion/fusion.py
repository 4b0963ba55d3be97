"""Figure 8: simulation alone, K = 1 to 1000 steps per call, in every form, against the number of environments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.fusion.figure import Case, Measure, Size
from experiments.fusion.plots import draw_rates, form_and_steps, rate_table
from experiments.fusion.records import Records
from experiments.fusion.timing import cost
from experiments.fusion.variants.catalogue import variant
from experiments.fusion.variants.variant import BenchmarkConfig, random_actions
from rayagi.envs.fused.simulators import CartPole

MOST_STEPS = {
    "gymnasium": 2e4, "gymnasium-vector": 2e6, "envpool": 1e6, "torch": 5e6, "torch.compile": 1e7, "xla": 7e7, "warp": 3e7,
    "c": 3e8,
}  # fmt: skip
"""Environment steps of one call: about a second on a small machine. Longer calls are not measured."""
STEPS = {
    "gymnasium": (1,),
    "gymnasium-vector": (1,),
    "envpool": (1,),
    "torch": (1, 1000),
    "torch.compile": (1, 1000),
}
"""K of forms that take steps one at a time whatever a call asks for."""


def groups(size: Size) -> Iterator[Sequence[Case]]:
    """One per N."""
    for num_envs in (16, 4096) if size.quick else (1, 16, 256, 4096, 65536):
        yield cases(num_envs, MOST_STEPS, STEPS, size)


def cases(
    num_envs: int, most_steps: Mapping[str, float], steps_of: Mapping[str, tuple[int, ...]], size: Size
) -> list[Case]:
    """Every form with each K whose call has at most so many environment steps."""
    return [
        Case(
            {"form": form, "num_envs": num_envs, "steps": steps},
            lambda w=work, f=form: simulation(f, w, size.seconds),
        )
        for form, most in most_steps.items()
        for steps in steps_of.get(form, (1, 10, 100, 1000))
        if num_envs * steps <= most
        for work in [
            BenchmarkConfig(
                simulator=CartPole(), num_envs=num_envs, steps_per_call=steps, num_threads=size.threads
            )
        ]
    ]


def simulation(form: str, work: BenchmarkConfig, seconds: float) -> Measure:
    """Environment steps per second of a variant. Raises KernelError where it cannot run."""
    stepper = variant(form).make(work)
    prepared = stepper.prepare(random_actions(work))

    def once() -> dict[str, float]:
        each = cost(lambda: stepper.step(prepared), stepper.wait, seconds)
        return each.rates(work.num_envs * work.steps_per_call)

    return once


def draw(records: Records, path: Path) -> None:
    """A line per form and K."""
    draw_rates(
        records.of("8"), form_and_steps, "Figure 8: K steps of CartPole in a call, simulation alone", path
    )


def findings(records: Records) -> str:
    """Every median."""
    return rate_table(records.of("8"), 1e6, "Million")
