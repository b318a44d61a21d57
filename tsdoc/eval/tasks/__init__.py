"""The tasks: after the published definitions of RULER and InfiniteBench, in our own words."""

from tsdoc.eval.tasks.registry import TASKS, Task, find_task

__all__ = ["TASKS", "Task", "find_task"]
