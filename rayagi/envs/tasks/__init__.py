"""Tasks on rayagi's own engines: the six of GMI-DRL Table 4, and the base classes of a user's own task.

docs/tutorials/own-task.md shows how to write one.
"""

from rayagi.envs.tasks.task import Memory, Start, State, StepOutcome, Task, TaskFunctions

Outcome, Rules = StepOutcome, TaskFunctions
"""Former names, still importable."""

__all__ = ["Memory", "Outcome", "Rules", "Start", "State", "StepOutcome", "Task", "TaskFunctions"]
