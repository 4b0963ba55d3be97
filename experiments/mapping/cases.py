"""What is compared: every template of one kind of work, with the same environments on the same cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from placement.templates import SERVING, SYNCHRONOUS, Mode, Template
from rayagi.config.presets import preset
from rayagi.config.rules import checked
from rayagi.config.spec import RunSpec

TEMPLATES: dict[Mode, tuple[Template, ...]] = {"serving": SERVING, "synchronous": SYNCHRONOUS}
BASELINE = "dp_only"
"""What the others are compared with, as in the paper."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One template at one size."""

    task: str
    mode: Mode
    template: Template
    num_envs: int
    """Of each GMI with a simulator; there is one of these per core, whatever the template."""

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.task}, {self.num_envs} environments, {self.mode} {self.template.name}"

    @property
    def spec(self) -> RunSpec:
        """The task's preset on this template; a plan for serving is made apart."""
        return spec_of(
            self.task, self.num_envs, self.template.name if self.mode == "synchronous" else BASELINE
        )

    def to_dict(self) -> dict[str, object]:
        """For a result file."""
        return {
            "task": self.task,
            "mode": self.mode,
            "template": self.template.name,
            "num_envs": self.num_envs,
        }


def spec_of(task: str, num_envs: int, template: str = BASELINE) -> RunSpec:
    """A task's preset with so many environments per simulator."""
    spec = preset(task)
    return checked(replace(spec, gmi=replace(spec.gmi, backend="cpu", num_envs=num_envs, template=template)))


def cases(tasks: Sequence[str], modes: Sequence[Mode], sizes: Sequence[int]) -> list[Case]:
    """Every template of each kind of work, by task and size."""
    return [
        Case(task=task, mode=mode, template=template, num_envs=num_envs)
        for task in tasks
        for num_envs in sizes
        for mode in modes
        for template in TEMPLATES[mode]
    ]


def template_of(mode: Mode, name: str) -> Template:
    """A template by its name."""
    return next(template for template in TEMPLATES[mode] if template.name == name)
