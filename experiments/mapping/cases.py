"""What is compared: every template of one kind of work, on the same cores and with the same environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from placement.templates import SERVING, SYNCHRONOUS, Mode, Template
from rayagi.config.presets import preset
from rayagi.config.rules import checked
from rayagi.config.spec import RunSpec

TEMPLATES: dict[Mode, tuple[Template, ...]] = {"serving": SERVING, "synchronous": SYNCHRONOUS}
BASELINE = "dp_only"
"""What the others are compared with, as the paper does."""


@dataclass(frozen=True, kw_only=True, slots=True)
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
        return f"{self.task} {self.mode} {self.template.name} {self.num_envs}"

    @property
    def spec(self) -> RunSpec:
        """The run: the task's preset on this template. Serving is planned with its own flag, and trains nothing."""
        spec = preset(self.task)
        template = self.template.name if self.mode == "synchronous" else BASELINE
        return checked(
            replace(
                spec,
                gmi=replace(spec.gmi, backend="cpu", num_envs=self.num_envs, template=template),  # type: ignore[arg-type]
            )
        )


def cases(tasks: Sequence[str], modes: Sequence[Mode], sizes: Sequence[int]) -> list[Case]:
    """Every template of each kind of work, by task and size."""
    return [
        Case(task=task, mode=mode, template=template, num_envs=num_envs)
        for task in tasks
        for num_envs in sizes
        for mode in modes
        for template in TEMPLATES[mode]
    ]
