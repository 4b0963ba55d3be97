"""What is compared: every template of one kind of work, with one and with two simulators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from placement.role_layout import SERVING_WORKER_TYPES, make_role_layout
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.presets import preset
from rayagi.config.rules import checked
from rayagi.config.spec import RunSpec

KINDS = ("serving", "ppo", "appo")
"""Kinds of work: serving with an untrained policy, or an algorithm's training."""
BASELINE = "dp_only"
"""What the others are compared with, as in the paper."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One template at one size."""

    task: str
    kind: str
    template: str
    num_envs: int
    """Of each GMI with a simulator."""
    simulators: int
    """GMIs with a simulator."""

    @property
    def group(self) -> str:
        """Cases of a group are alternatives."""
        return f"{self.task} {self.kind}"

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.template} {self.simulators} x {self.num_envs}"

    @property
    def num_gmis(self) -> int:
        """All GMIs of the plan."""
        layout = make_role_layout(self.template, serving=self.kind == "serving")
        return sum(layout.counts_for_simulators(self.simulators))

    @property
    def spec(self) -> RunSpec:
        """The task's preset on this template; a plan for serving is made apart."""
        template = BASELINE if self.kind == "serving" else self.template
        spec = spec_of(self.task, self.kind, self.num_envs)
        return checked(replace(spec, gmi=replace(spec.gmi, template=template, num_gmis=self.num_gmis)))


def spec_of(task: str, kind: str, num_envs: int) -> RunSpec:
    """A task's preset with so many environments per simulator, on ``dp_only``."""
    spec = preset(task, "ppo" if kind == "serving" else kind)
    return checked(replace(spec, gmi=replace(spec.gmi, backend="cpu", num_envs=num_envs, template=BASELINE)))


def cases(tasks: Sequence[str], kinds: Sequence[str], sizes: Sequence[int]) -> list[Case]:
    """Every template of each kind of work, by task and size."""
    return [
        Case(task=task, kind=kind, template=template, num_envs=num_envs, simulators=simulators)
        for task in tasks
        for kind in kinds
        for num_envs in sizes
        for template in (SERVING_WORKER_TYPES if kind == "serving" else DEFINITIONS[kind].templates)
        for simulators in (1, 2)
    ]
