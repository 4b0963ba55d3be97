"""Tasks on rayagi's own engines: the six of GMI-DRL Table 4, and the base classes of a user's own task.

docs/tutorials/own-task.md shows how to write one.
"""

from rayagi.envs.tasks.task import Memory, Start, State, StepOutcome, Task, TaskFunctions

__all__ = ["Memory", "Start", "State", "StepOutcome", "Task", "TaskFunctions"]
