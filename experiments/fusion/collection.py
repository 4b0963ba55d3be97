"""Figure 4: the data collection loop (simulation and inference), forms against the number of environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from experiments.fusion import collectors
from experiments.fusion.collectors import Collector
from experiments.fusion.figure import Case, Measure, Size
from experiments.fusion.plots import draw_rates, form_and_steps, rate_table
from experiments.fusion.records import Records
from experiments.fusion.timing import cost
from experiments.fusion.variants.catalogue import package_missing
from rayagi.envs.errors import KernelError

MOST_STEPS = {
    "gymnasium": 1e4, "gymnasium-vector": 3e5, "envpool": 3e5, "c": 3e6, "torch": 3e5, "torch.compile": 2e6, "xla": 5e6,
    "c, fused policy": 5e6,
}  # fmt: skip
"""Environment steps of one call: about a second on a small machine. Longer calls are not measured."""
STEPS = {
    "gymnasium": (1,),
    "gymnasium-vector": (1,),
    "envpool": (1,),
    "c": (1,),
    "torch": (1, 100),
    "torch.compile": (1, 100),
}
"""K of forms that take steps one at a time whatever a call asks for; the others have 1, 10, 100 and 1000."""


def collector(form: str, num_envs: int, steps: int, threads: int) -> Collector:
    """A collector by its form's name. Raises KernelError where it cannot run here."""
    makers: dict[str, Callable[[], Collector]] = {
        "gymnasium": lambda: collectors.gymnasium_loop(num_envs, steps),
        "gymnasium-vector": lambda: collectors.gymnasium_vector(num_envs, steps),
        "envpool": lambda: collectors.envpool_loop(num_envs, steps, threads),
        "c": lambda: collectors.c_unfused(num_envs, steps, threads),
        "torch": lambda: collectors.TorchCollector(num_envs, steps, threads, compiled=False),
        "torch.compile": lambda: collectors.TorchCollector(num_envs, steps, threads, compiled=True),
        "xla": lambda: _xla(num_envs, steps),
        "c, fused policy": lambda: collectors.FusedCollector(num_envs, steps, threads),
    }
    return makers[form]()


def _xla(num_envs: int, steps: int) -> Collector:
    reason = package_missing("xla")
    if reason:
        raise KernelError("xla", reason)
    from experiments.fusion.xla_collector import XlaCollector

    return XlaCollector(num_envs, steps)


def groups(size: Size) -> Iterator[Sequence[Case]]:
    """One per N."""
    for num_envs in (16, 1024) if size.quick else (1, 16, 256, 4096, 32768):
        yield [
            Case(
                {"form": form, "num_envs": num_envs, "steps": steps},
                lambda f=form, n=num_envs, k=steps: collection(f, n, k, size),
            )
            for form, most in MOST_STEPS.items()
            for steps in STEPS.get(form, (1, 10, 100, 1000))
            if num_envs * steps <= most
        ]


def collection(form: str, num_envs: int, steps: int, size: Size) -> Measure:
    """Environment steps collected per second."""
    loop = collector(form, num_envs, steps, size.threads)

    def once() -> dict[str, float]:
        return cost(loop.collect, loop.wait, size.seconds).rates(num_envs * steps)

    return once


def draw(records: Records, path: Path) -> None:
    """A line per form and K."""
    draw_rates(
        records.of("4"),
        form_and_steps,
        "Figure 4: data collection of CartPole, simulation and inference",
        path,
    )


def findings(records: Records) -> str:
    """Every median."""
    return rate_table(records.of("4"), 1e3, "Thousand")
