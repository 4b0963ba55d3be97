"""Tasks on rayagi's own engines: six of GMI-DRL Table 4, and what a user's own is made of (docs/tutorial-own-task.md)."""

from rayagi.envs.tasks.task import Memory, Start, State, StepOutcome, Task, TaskFunctions

Outcome, Rules = StepOutcome, TaskFunctions
"""The names of these before."""

__all__ = ["Memory", "Outcome", "Rules", "Start", "State", "StepOutcome", "Task", "TaskFunctions"]
